"""Every piece of linattn_np.nn: its definition, its gradients, all libraries and dtypes, odd inputs, errors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.foreign import leaves
from linattn_np.runtime import threads
from tests.cases import peak_memory
from tests.nn.table import CASES, CUTS, PARAMETERS, SMALL, normal

BACKENDS = ["numba", "reference"]
backends = pytest.mark.parametrize("backend", BACKENDS)
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


def cases(which=SMALL, **only):
    return pytest.mark.parametrize("case", which, ids=lambda c: f"{c.name} {c.label}".strip())


def parts(result):
    return [y for y in leaves((tuple(result) if isinstance(result, list) else result,)) if y is not None]


def cotangents(result):
    return [normal(*y.shape) for y in parts(result)]


def near(found, expected, eps):
    for a, b in zip(parts(found), parts(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        assert np.all(np.abs(a - b) <= eps * (1 + np.abs(b))), np.abs(a - b).max()


def test_every_piece_has_a_case():
    assert {case.name for case in CASES} == set(la.nn.__all__)


@backends
@cases(CASES)
def test_a_piece_is_its_definition(case, backend):
    near(case(backend=backend), case.expected(), 1e-12)


@backends
@cases(CASES)
def test_gradients_are_central_differences(case, backend):
    result, pullback = case.vjp(backend=backend)
    d, step = cotangents(result), 1e-5
    grads = pullback(*d)
    assert set(grads._fields) == set(case.fn.piece.names)
    for name, x in case.arrays.items():
        along = normal(*x.shape)
        ends = [parts(case({name: x + s * along}, backend=backend)) for s in (step, -step)]
        numeric = sum(np.sum((a - b) * y) for a, b, y in zip(*ends, d, strict=True)) / (2 * step)
        size = 1 + np.sqrt(np.sum(getattr(grads, name) ** 2) * np.sum(along**2))
        assert abs(np.sum(getattr(grads, name) * along) - numeric) <= 1e-7 * size, name


@cases()
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_narrow_numbers_are_computed_in_float32_and_rounded_once(case, dtype):
    kind = np.dtype(dtype) if dtype != "bfloat16" else np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    narrow = {n: x.astype(kind) for n, x in case.arrays.items()}
    wide = {n: x.astype(np.float32) for n, x in narrow.items()}
    found, exact = case(narrow), case(wide)
    for a, b in zip(parts(found), parts(exact), strict=True):
        assert a.dtype == (b.dtype if case.fn.piece.kind.wide else kind)
        np.testing.assert_array_equal(a.astype(np.float32), b.astype(a.dtype).astype(np.float32))
    near(exact, case.expected(**{n: np.asarray(x, np.float64) for n, x in narrow.items()}), 64 * EPS["float32"])
    result, pullback = case.vjp(narrow)
    given = [d.astype(y.dtype) for d, y in zip(cotangents(result), parts(result), strict=True)]
    for name, d in pullback(*given)._asdict().items():
        assert d is None or (d.dtype == kind and d.shape == case.arrays[name].shape)


@cases()
def test_every_library(case, library):
    for dtype in library.dtypes:
        bring = lambda x: library.bring(x.astype(dtype)) if x.dtype.kind == "f" else library.bring(x)  # noqa: B023,E731
        given = {n: bring(x) for n, x in (case.arrays | dict(case.whole)).items()}
        result, pullback = case.vjp(given)
        d = cotangents(case())
        for y, expected in zip(parts(result), parts(case.expected()), strict=True):
            assert isinstance(y, library.kind)
            near(library.see(y), expected, 256 * EPS[dtype])
        grads, wanted = pullback(*map(bring, d)), case.vjp(backend="reference")[1](*d)
        for name in case.arrays:
            near(library.see(getattr(grads, name)), getattr(wanted, name), 2048 * EPS[dtype])
        near(library.see(parts(case(given))[0]), parts(case.expected())[0], 256 * EPS[dtype])


@backends
@cases()
def test_strided_and_read_only_inputs_stay_as_they_are(case, backend):
    odd = {}
    for name, x in case.arrays.items():
        odd[name] = np.repeat(x, 2, axis=-1)[..., ::2]
        odd[name].flags.writeable = False
    near(case(odd, backend=backend), case.expected(), 1e-12)
    result, pullback = case.vjp(odd, backend=backend)
    _plain, expected = case.vjp(backend=backend)
    d = cotangents(result)
    wanted = expected(*d)
    for y in parts(result):
        y[...] = np.nan  # the caller may write to a result
    near([x for x in pullback(*d) if x is not None], [x for x in wanted if x is not None], 1e-12)
    for name, x in case.arrays.items():
        np.testing.assert_array_equal(odd[name], x)


@cases(CASES)
def test_threads_do_not_change_a_bit(case):
    found = []
    for count in (1, 2):
        with threads.limited(count):
            result, pullback = case.vjp()
            found.append([*parts(result), *[d for d in pullback(*cotangents(result)) if d is not None]])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


@cases()
def test_a_batch_row_has_the_bits_of_a_call_of_its_own(case):
    if "cu_seqlens" in case.options or case.name == "dropout" or not parts(case())[0].ndim:
        pytest.skip("a packed row, a drawn mask, a sum over all")
    whole = case()
    one = case({n: x[1:] for n, x in (case.arrays | dict(case.whole)).items() if n not in PARAMETERS})
    for a, b in zip(parts(whole), parts(one), strict=True):
        np.testing.assert_array_equal(a[1:], b)


@pytest.mark.parametrize("name", ["short_conv", "token_shift"])
def test_ragged_sequences_are_calls_of_their_own(name):
    case = next(c for c in CASES if c.name == name and c.label == "ragged")
    options = {n: x for n, x in case.options.items() if n != "cu_seqlens"}
    (y, end), pullback = case.vjp()
    dy, dend = normal(*y.shape), normal(*end.shape)
    grads, sums = pullback(dy, dend), {}
    for n, (a, b) in enumerate(itertools.pairwise(CUTS)):
        own = case.arrays | {"x": case.arrays["x"][:, a:b], "state": case.arrays["state"][n : n + 1]}
        (own_y, own_end), own_pullback = la.vjp(case.fn, **own, **options)
        d = own_pullback(dy[:, a:b], dend[n : n + 1])
        np.testing.assert_array_equal(own_y, y[:, a:b])
        np.testing.assert_array_equal(own_end, end[n : n + 1])
        near([d.x, d.state], [grads.x[:, a:b], grads.state[n : n + 1]], 1e-13)
        for weight in d._fields:
            if weight not in ("x", "state") and getattr(d, weight) is not None:
                sums[weight] = sums.get(weight, 0) + getattr(d, weight)
    for weight, total in sums.items():
        near(getattr(grads, weight), total, 1e-13)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_columns_of_logits_without_a_share_change_no_loss(backend, dtype):
    """-inf in columns that are no label, also in the first one, which stands for ignored labels in a traced call."""
    x, few = normal(5, 7).astype(dtype), [1, 3, 4, 6]
    x[:, [0, 2, 5]] = -np.inf
    labels = np.array([1, 6, -100, 3, 4])
    how = {"z_loss": 0.01, "backend": backend}
    loss, pullback = la.vjp(la.nn.cross_entropy, x, labels, **how)
    expected, wanted = la.vjp(la.nn.cross_entropy, x[:, few], np.array([0, 3, -100, 1, 2]), **how)
    eps = 8 * np.finfo(dtype).eps
    near([loss, pullback(1.0).x[:, few]], [expected, wanted(1.0).x], eps)
    assert not pullback(1.0).x[:, [0, 2, 5]].any()
    if backend is None:
        jax = pytest.importorskip("jax")
        with jax.enable_x64(True):
            found = jax.jit(jax.value_and_grad(lambda x, labels: la.nn.cross_entropy(x, labels, z_loss=0.01)))(
                jax.numpy.asarray(x), jax.numpy.asarray(labels))  # fmt: skip
        near([np.asarray(found[0]), np.asarray(found[1])[:, few]], [expected, wanted(1.0).x], eps)


@pytest.mark.parametrize("name", ["short_conv", "token_shift"])
def test_tokens_one_by_one_in_the_rows_of_a_pool_are_the_whole(name):
    case = next(c for c in CASES if c.name == name and c.label in ("all", "mix"))
    whole, end = case()
    pool = np.full((5, *case.arrays["state"].shape[1:]), np.nan)
    rows = [3, 0]
    pool[rows] = case.arrays["state"]
    for t in range(whole.shape[1]):
        y, returned = case({"x": case.arrays["x"][:, t : t + 1], "state": pool}, state_rows=rows, overwrite_state=True)
        assert returned is pool
        np.testing.assert_array_equal(y, whole[:, t : t + 1])
    np.testing.assert_array_equal(pool[rows], end)
    assert np.isnan(pool[[1, 2, 4]]).all()


@pytest.mark.parametrize("name", ["short_conv", "token_shift"])
def test_a_step_is_a_call_on_one_token_without_a_time_axis(name, library):
    case = next(c for c in CASES if c.name == name and c.label in ("all", "mix"))
    token = case.arrays["x"][:, 4]
    one = {n: library.bring(x.astype("float32")) for n, x in (case.arrays | {"x": token}).items()}
    (out, end), pullback = la.vjp(la.step, case.fn, **one, **case.options)
    wide = {n: library.see(x) for n, x in one.items()}
    (wanted, state), expected = la.vjp(case.fn, **(wide | {"x": wide["x"][:, None]}), **case.options)
    near([library.see(out), library.see(end)], [wanted[:, 0], state], 1e-6)
    d, dend = normal(*token.shape).astype("float32"), normal(*end.shape).astype("float32")
    found, exact = pullback(library.bring(d), library.bring(dend)), expected(d[:, None], dend)
    near([library.see(found.x), library.see(found.state)], [exact.x[:, 0], exact.state], 1e-5)
    plain = la.step(case.fn, **one, **case.options)
    near(library.see(plain.out), wanted[:, 0], 1e-6)


@backends
@cases()
def test_no_tokens(case, backend):
    if "cu_seqlens" in case.options:
        pytest.skip("offsets say how many")
    arrays = {n: x if n in PARAMETERS else x[:0] for n, x in case.arrays.items()}
    result, pullback = case.vjp(arrays | {n: x[:0] for n, x in case.whole.items()}, backend=backend)
    grads = pullback(*cotangents(result))
    for name, x in arrays.items():
        assert getattr(grads, name).shape == x.shape
        assert not np.any(getattr(grads, name))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 6), (3, 1700, 4, 6), (1, 40, 2, 1102)])
def test_loops_over_several_tasks_are_array_calls(shape, dtype):
    """Rows in several blocks, tokens in several segments, channels in several blocks, numbers in several tasks."""
    x, gate = normal(*shape).astype(dtype), (normal(*shape[::-1]).T + 1).astype(dtype)
    weight, bias, D = normal(shape[-1]).astype(dtype), normal(1, shape[-1])[0].astype(dtype), shape[-1]
    rows, taps = x.reshape(shape[0], -1, D), normal(D, 4).astype(dtype)
    calls = [(la.nn.silu, (x,), {}), (la.nn.swiglu, (x, gate), {}), (la.nn.softmax, (x,), {}),
             (la.nn.layer_norm, (x, weight, bias), {"eps": 0.1}),
             (la.nn.group_norm, (x, weight), {"groups": 2, "eps": 0.1}),
             (la.nn.gated_norm, (x, gate, weight), {"group": D // 2}),
             (la.nn.gated_norm, (x, gate, weight), {"gate_first": True, "activation": "sigmoid"}),
             (la.nn.short_conv, (rows, taps, bias), {"activation": "silu", "residual": True})]  # fmt: skip
    for fn, arrays, options in calls:
        (found, pullback), (wanted, expected) = (
            la.vjp(fn, *given, **options, backend=backend)
            for backend, given in (("numba", arrays), ("reference", [y.astype(np.float64) for y in arrays]))
        )
        near(found, wanted, 64 * EPS[dtype])
        dy = normal(*found.shape).astype(dtype)
        count = found.size // D
        for d, e in zip(pullback(dy), expected(dy.astype(np.float64)), strict=True):
            if d is not None:
                near(d, e, (64 if d.size == found.size else 16 * count**0.5 + 64) * EPS[dtype])


def test_gradients_of_a_long_row_are_sums_over_segments():
    x, dy, weight = normal(70_001, 5), normal(5, 70_001).T, normal(5, 4)
    found, expected = (
        la.vjp(la.nn.short_conv, x, weight, activation="silu", backend=backend)[1](dy) for backend in BACKENDS
    )
    near(found.x, expected.x, 1e-13)
    np.testing.assert_allclose(found.weight, expected.weight, rtol=1e-11)


def test_the_logits_of_all_positions_do_not_exist_at_once():
    V, labels = 20_000, np.arange(3000) % 5
    x, weight = normal(3000, 4).astype(np.float32), normal(4, V).astype(np.float32)
    la.vjp(la.nn.cross_entropy, x[:2], labels[:2], weight)[1](1.0)  # compiles
    la.clear_cache()
    assert peak_memory(lambda: la.vjp(la.nn.cross_entropy, x, labels, weight)[1](1.0)) < 3000 * V * 4 / 8


@pytest.mark.parametrize(("N", "D", "V"), [(500, 4, 20_000), (300, 200, 20_000), (9000, 40, 256)])
@pytest.mark.parametrize("labelled", [1.0, 0.6])
def test_parts_of_the_logits_have_the_loss_and_gradients_of_all(N, D, V, labelled):
    """Many parts, parts as large as the weight, logits that are kept."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((N, D)), rng.standard_normal((D, V)) / D**0.5
    labels = np.where(rng.random(N) < labelled, rng.integers(0, V, N), -100)
    loss, pull = la.vjp(la.nn.cross_entropy, x, labels, weight)
    grads = pull(2.0)
    logits, back = la.vjp(la.nn.linear, x, weight)
    expected, down = la.vjp(la.nn.cross_entropy, logits, labels)
    near(loss, expected, 1e-13)
    others = back(down(2.0).x)
    near(grads.x, others.x, 1e-13)
    near(grads.weight, others.weight, 1e-13)


ERRORS = [
    (lambda x: la.nn.short_conv(x, normal(5, 4)), ValueError,
     r"short_conv: weight has shape \(5, 4\), expected \(D, W\) = \(6, W\)"),
    (lambda x: la.nn.short_conv(x, normal(6, 4), state=normal(2, 2, 6)), ValueError, "short_conv: state .*S >= 3"),
    (lambda x: la.nn.short_conv(x, normal(6, 4), state=normal(3, 3, 6)), ValueError, "short_conv: state has shape"),
    (lambda x: la.nn.short_conv(x, normal(6, 0)), ValueError, "short_conv: weight has shape"),
    (lambda x: la.nn.short_conv(x, normal(6, 4), activation="relu"), ValueError, "short_conv: activation is 'relu'"),
    (lambda x: la.nn.short_conv(x, normal(6, 4), cu_seqlens=[0, 11]), ValueError, "short_conv: cu_seqlens needs one"),
    (lambda x: la.nn.short_conv(x, normal(6, 4), state_rows=[0, 1]), ValueError, "short_conv: state_rows was given"),
    (lambda x: la.nn.short_conv(x), TypeError, "short_conv: weight is missing"),
    (lambda x: la.nn.silu(x, x), TypeError, "silu: 2 arrays were given by position"),
    (lambda x: la.nn.silu(x, slope=1), TypeError, "silu: unknown option 'slope'"),
    (lambda x: la.nn.silu(x.astype(int)), TypeError, "silu: x has dtype int64"),
    (lambda x: la.nn.silu([1.0]), TypeError, "silu: x is a list"),
    (lambda x: la.nn.silu(x, backend="cuda"), ValueError, "silu: backend is 'cuda'"),
    (lambda x: la.nn.silu(x, num_threads=0), ValueError, "silu: num_threads is 0"),
    (lambda x: la.nn.rms_norm(x, normal(5)), ValueError, r"rms_norm: weight has shape \(5,\)"),
    (lambda x: la.nn.rms_norm(x, eps=-1), ValueError, "rms_norm: eps is -1"),
    (lambda x: la.nn.group_norm(x, groups=4), ValueError, "group_norm: groups is 4, expected a divisor of D = 6"),
    (lambda x: la.nn.gated_norm(x, x[:1]), ValueError, "gated_norm: gate has shape"),
    (lambda x: la.nn.gelu(x, approximate="erf"), ValueError, "gelu: approximate is 'erf'"),
    (lambda x: la.nn.rotary(x[0]), ValueError, r"rotary: x has shape \(11, 6\)"),
    (lambda x: la.nn.rotary(x[:, :, None], dims=8), ValueError, "rotary: dims is 8, expected an even number"),
    (lambda x: la.nn.rotary(x[:, :, None], x), ValueError, r"rotary: angle has shape \(2, 11, 6\)"),
    (lambda x: la.nn.rotary(x[:, :, None], cumulative=True), ValueError, "rotary: cumulative=True was given without"),
    (lambda x: la.nn.rotary(x[:, :, None], x[..., :3], offset=4), ValueError, "rotary: offset is 4, expected none"),
    (lambda x: la.nn.rotary(x[:, :, None], x[..., :3], base=4.0), ValueError, "rotary: base is 4.0, expected none"),
    (lambda x: la.nn.rotary(x[:, :, None], x[..., :3], dims=np.ones(2)), ValueError, "rotary: dims is array"),
    (lambda x: la.nn.rotary(x[:, :, None], offset=1 << 64), ValueError, "rotary: offset is 18446744073709551616"),
    (lambda x: la.nn.gated_norm(x, x, activation=np.ones(2)), ValueError, "gated_norm: activation is array"),
    (lambda x: la.nn.cross_entropy(x, np.zeros((2, 11), int), ignore_index=1 << 64), ValueError, "cross_entropy: igno"),
    (lambda x: la.nn.xpos(x[:, :, None], gamma=0), ValueError, "xpos: gamma is 0"),
    (lambda x: la.nn.log_decay(x, normal(5)), ValueError, r"log_decay: A_log has shape \(5,\)"),
    (lambda x: la.nn.log_decay(x, formula="tanh"), ValueError, "log_decay: formula is 'tanh'"),
    (lambda x: la.nn.log_decay(x, formula="bounded", bound=1), ValueError, "log_decay: bound is 1"),
    (lambda x: la.nn.linear(x, normal(5, 3)), ValueError, r"linear: weight has shape \(5, 3\), expected \(K, M\)"),
    (lambda x: la.nn.embedding(x, normal(5, 3)), TypeError, "embedding: ids has dtype float64"),
    (lambda x: la.nn.embedding(np.array([5]), normal(5, 3)), ValueError, "embedding: ids has the number 5"),
    (lambda x: la.nn.cross_entropy(x, np.full((2, 11), 6)), ValueError, "cross_entropy: labels has the number 6"),
    (lambda x: la.nn.cross_entropy(x, np.zeros((2, 9), int)), ValueError, "cross_entropy: labels has shape"),
    (lambda x: la.nn.cross_entropy(x, np.zeros((2, 11), int), reduction="max"), ValueError, "cross_entropy: reduction"),
    (lambda x: la.nn.cross_entropy(x, np.zeros((2, 11), int), bias=normal(6)), ValueError, "cross_entropy: bias was"),
    (lambda x: la.nn.dropout(x), TypeError, "dropout: rng is missing, expected it by keyword"),
    (lambda x: la.nn.dropout(x, rng=0.5), TypeError, "dropout: rng is 0.5"),
    (lambda x: la.nn.dropout(x, rng=0, p=1), ValueError, "dropout: p is 1"),
    (lambda x: la.vjp(la.nn.silu, x)[1](), TypeError, "silu: the pullback got no cotangent, expected dout"),
    (lambda x: la.vjp(la.nn.silu, x)[1](x[:1]), ValueError, r"silu: dout has shape \(1, 11, 6\), expected"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS, ids=[text for _, _, text in ERRORS])
def test_errors(call, kind, text):
    with pytest.raises(kind, match=text):
        call(normal(2, 11, 6))


def test_a_changed_input_is_an_error():
    x = normal(2, 11, 6)
    _, pullback = la.vjp(la.nn.silu, x)
    x[0] = 0
    with pytest.raises(RuntimeError, match="silu: x was changed in place"):
        pullback(x)
