"""Caches: handed over, packed, in place, in pools, in 16 bits; which tokens are forgotten."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.softmax import states
from tests.cases import GROWING, call, cases_of, cotangents, draw, parts, peak_memory, tokens

CASES = [cases_of(fn)[0] for fn in GROWING]
SOFTMAX = next(case for case in CASES if case.fn is la.softmax_attention)
WINDOWS = [c for fn in GROWING for c in cases_of(fn) if c.options.get("window")]
BACKENDS = ("chunks", "numba")
OFFSETS = [0, 0, 1, 1, 18, 20, 37, 37]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def slots(state, L):
    """The cache with L slots, as long as no token was forgotten."""

    def cut(y):
        rows = y[:, :L]
        return np.concatenate([rows, np.zeros((len(y), L - rows.shape[1], *y.shape[2:]), y.dtype)], axis=1)

    return type(state)(*(cut(y) if n in ("k", "v", "b") else y for n, y in state._asdict().items()))


@every_backend
@pytest.mark.parametrize("case", CASES + WINDOWS, ids=str)
def test_packed_sequences_are_one_by_one_to_the_bit(case, backend):
    arrays, states = draw(case, T=OFFSETS[-1], B=(1,), N=len(OFFSETS) - 1)
    result, pullback = la.vjp(case.fn, **arrays, **case.options, state=states, return_state=True, backend=backend,
                              cu_seqlens=np.array(OFFSETS))  # fmt: skip
    (dout, dstate), (out, end), L = cotangents(result), result, result.state.v.shape[1]
    grads = pullback(dout, dstate)
    for n, (a, b) in enumerate(itertools.pairwise(OFFSETS)):
        row = type(states)(*(y[n : n + 1] for y in states))
        one, back = la.vjp(case.fn, **tokens(case, arrays, a, b), **case.options, state=row, return_state=True,
                           backend=backend)  # fmt: skip
        np.testing.assert_array_equal(out[:, a:b], one.out)
        if "window" not in case.options:
            for x, y in zip(parts(slots(one.state, L)), parts(end), strict=True):
                np.testing.assert_array_equal(x[0], y[n])
            mine = slots(type(dstate)(*(y[n : n + 1] for y in dstate)), one.state.v.shape[1])
            d = back(dout[:, a:b], mine)
            for name in case.given:
                if case.on_tokens(name):
                    np.testing.assert_array_equal(getattr(grads, name)[:, a:b], getattr(d, name), name)


@every_backend
@every_case
def test_in_place_it_keeps_its_slots(case, backend):
    """Prompt, then tokens one by one in a buffer: the whole; more than fit are forgotten, the oldest first."""
    arrays, _ = draw(case, T=20)
    whole = case.fn(**arrays, **case.options)
    start = call(case, tokens(case, arrays, 0, 12))[1]
    buffer = slots(start, 20)
    for t in range(12, 20):
        out = case.fn(**tokens(case, arrays, t, t + 1), state=buffer, overwrite_state=True, backend=backend)
        assert la.testing.relative_error(out, whole[:, t : t + 1]) <= 1e-13
    _, end = call(case, arrays)
    for x, y in zip(parts(buffer), parts(end), strict=True):
        assert la.testing.relative_error(x, y) <= 1e-13
    small = slots(call(case, tokens(case, arrays, 0, 5))[1], 6)
    case.fn(**tokens(case, arrays, 5, 20), state=small, overwrite_state=True, backend=backend)
    for p in range(14, 20):
        np.testing.assert_array_equal(small.k[:, p % 6] if not case.maps else small.v[:, p % 6],
                                      arrays["k" if not case.maps else "v"][:, p])  # fmt: skip
    assert (small.length == 20).all()


@every_backend
def test_rows_of_a_pool_and_16_bits(backend):
    case = SOFTMAX
    arrays, _ = draw(case, T=9, dtype=np.float32)
    start = slots(call(case, tokens(case, arrays, 0, 8))[1], 16)
    pool = type(start)(*(np.zeros((5, *y.shape[1:]), ml_dtypes.bfloat16 if n != "length" else np.float32)
                         for n, y in start._asdict().items()))  # fmt: skip
    for y, x in zip(pool, start, strict=True):
        y[[3, 1]] = x
    last = tokens(case, arrays, 8, 9)
    out = case.fn(**last, state=pool, state_rows=[3, 1], overwrite_state=True, backend=backend)
    narrow = type(start)(*(y[[3, 1]].astype(np.float32) for y in pool))
    narrow = narrow._replace(length=narrow.length - 1)
    assert la.testing.relative_error(out, case.fn(**last, state=narrow, backend=backend)) <= 1e-6
    np.testing.assert_array_equal(pool.length, [0, 9, 0, 9, 0])
    np.testing.assert_array_equal(pool.k[3, 8], arrays["k"][0, 8].astype(ml_dtypes.bfloat16))


@every_backend
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_a_window_needs_no_more_slots_than_it_reads(case, backend):
    arrays, _ = draw(case, T=40)
    whole, state = case.fn(**arrays, **case.options, backend=backend), None
    for a, b in itertools.pairwise([0, 3, 4, 20, 21, 22, 40]):
        out, state = call(case, tokens(case, arrays, a, b), state=state, backend=backend)
        assert la.testing.relative_error(out, whole[:, a:b]) <= 1e-13
    assert state.v.shape[1] == case.options["window"] - 1


@every_backend
@pytest.mark.parametrize("form", [{}, {"chunk_size": 16}, {"chunk_size": 1}], ids=str)
def test_a_reset_separates_what_is_before_it(backend, form):
    """Gates of -inf: later outputs equal a call that begins there, gradients are finite, the gate's gradient is 0."""
    case = next(c for c in CASES if "g" in c.given)
    arrays, state = draw(case, T=40)
    arrays["g"][:, [0, 7, 21]] = -np.inf
    out, pullback = la.vjp(case.fn, **arrays, state=state, backend=backend, **form)
    grads = pullback(cotangents((out, state))[0])
    for a, b in itertools.pairwise([0, 7, 21, 40]):
        assert la.testing.relative_error(out[:, a:b], case.fn(**tokens(case, arrays, a, b), backend=backend)) <= 1e-13
    assert all(np.isfinite(d).all() for d in parts(grads))
    assert (grads.g[:, [0, 7, 21]] == 0).all()
    assert all((d == 0).all() for d in grads.state)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_a_query_without_keys_reads_0(backend):
    q, k, v = np.ones((1, 3, 1, 2)), np.ones((1, 0, 1, 2)), np.ones((1, 0, 1, 4))
    out = la.softmax_attention(q, k, v, causal=False, backend=backend)
    np.testing.assert_array_equal(out, np.zeros((1, 3, 1, 4)))
    empty = la.KeyValueCache(np.full((1, 5, 1, 2), 9.0), np.full((1, 5, 1, 4), 9.0), np.zeros(1))
    found = la.softmax_attention(q, k, v, causal=False, state=empty, backend=backend)
    np.testing.assert_array_equal(found, out)


@every_backend
@pytest.mark.parametrize("threads", [1, 2])
def test_no_bit_depends_on_threads_or_the_batch(backend, threads):
    """Long enough for several tasks."""
    case = CASES[-1]
    arrays, _ = draw(case, T=600, B=(2,), dtype=np.float32)
    one = {n: y[1:] if case.on_tokens(n) else y for n, y in arrays.items()}
    found, pullback = la.vjp(case.fn, **arrays, backend=backend, num_threads=threads)
    alone, back = la.vjp(case.fn, **one, backend=backend, num_threads=1)
    np.testing.assert_array_equal(found[1:], alone)
    grads, own = pullback(found), back(alone)
    np.testing.assert_array_equal(grads.k[1:], own.k)
    np.testing.assert_array_equal(grads.q[1:], own.q)


def test_memory_grows_with_the_tokens():
    """No array of T x T: the largest allocation of array calls is a tile of all heads."""
    peaks = []
    for T in (512, 1024):
        arrays, _ = draw(SOFTMAX, T=T, B=(1,), H=1, K=4, V=4)
        la.softmax_attention(**arrays, backend="chunks", chunk_size=32)  # imports what it needs
        peaks.append(peak_memory(lambda: la.softmax_attention(**arrays, backend="chunks", chunk_size=32)))  # noqa: B023
    assert peaks[1] < 2.5 * peaks[0]
    assert peaks[1] < 1024 * 1024 * 8 / 4


def test_fewer_queries_are_those_of_the_last_tokens():
    arrays, _ = draw(SOFTMAX, T=30)
    out = la.softmax_attention(**arrays)
    few = la.softmax_attention(**arrays | {"q": arrays["q"][:, 25:]})
    assert la.testing.relative_error(few, out[:, 25:]) <= 1e-13
    la.testing.check_vjp(la.softmax_attention, **arrays | {"q": arrays["q"][:, 25:]})


@pytest.mark.parametrize("queries", [0, 1, 3])
@pytest.mark.parametrize("fn", [fn for fn in la.VARIANTS if fn.spec.grows], ids=lambda fn: fn.__name__)
def test_fewer_queries_with_a_cache_that_is_overwritten(fn, queries):
    """The last outputs and the cache of a call with all queries."""
    rng, T = np.random.default_rng(0), 5
    arrays = la.testing.sample(fn, rng, B=(2,), T=T, H=2, K=8, V=6, optional=False)
    state = la.testing.sample_state(fn, rng, (2,), {}, H=2, K=8, V=6)
    whole, few = (type(state)(*(S.copy() for S in state)) for _ in range(2))
    expected = fn(**arrays, state=whole, overwrite_state=True, return_state=True)
    name = fn.spec.change.query
    found = fn(**arrays | {name: arrays[name][:, T - queries :]}, state=few, overwrite_state=True, return_state=True)
    np.testing.assert_allclose(found.out, expected.out[:, T - queries :], rtol=0, atol=1e-12)
    for mine, given, other in zip(found.state, few, expected.state, strict=True):
        assert mine is given
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-12)


def test_explain_says_from_when_linear_attention_takes_fewer_operations():
    q, k, v = np.ones((3, 1, 10, 2, 64))
    found = la.explain(la.softmax_attention, q, k, v)
    assert found.operations == 2 * 2 * (64 + 64) * 55
    assert "from T = 128 on more operations than linear attention's 4 K V a token" in found.reason
    assert found.form == "tiles"


@pytest.mark.parametrize("backend", ["chunks", "numba", "reference"])
@pytest.mark.parametrize("case", [c for c in CASES + WINDOWS if not c.maps], ids=str)
def test_explain_counts_the_keys_of_a_cache(case, backend):
    """Both halves have the operations of the whole."""
    arrays, _ = draw(case, T=30)
    first, cache = call(case, tokens(case, arrays, 0, 20))
    whole, *halves = (la.explain(case.fn, **given, **case.options, state=state, backend=backend).operations
                      for given, state in ((arrays, None), (tokens(case, arrays, 0, 20), None),
                                           (tokens(case, arrays, 20, 30), cache)))  # fmt: skip
    assert first.shape[1] == 20
    assert sum(halves) == whole


def test_explain_counts_the_maps_of_cached_keys():
    case = next(c for c in CASES if c.maps and "g" in c.given)
    arrays, state = draw(case, T=1, H=2, K=5, V=3)
    found = la.explain(case.fn, **arrays, state=state)
    L, own = state.v.shape[1], la.explain(case.fn, **arrays).operations
    assert found.operations - own == 2 * 2 * L * (2 * (5 + 3) + 4 * 5)


def test_check_of_a_cache():
    """Resets are meant, in the cache too."""
    case = next(c for c in CASES if "g" in c.given and not c.maps)
    arrays, _ = draw(case, T=6)
    arrays["g"][:, 4] = -np.inf
    _, cache = call(case, arrays)
    assert np.isinf(cache.b).any()
    assert la.check(case.fn, **arrays, state=cache) == []
    (found,) = la.check(case.fn, **arrays, state=cache._replace(length=-cache.length))
    assert (str(found), found.is_error) == ("state.length is -6 at (0,), expected >= 0", True)
    (found,) = la.check(case.fn, **arrays, state=cache._replace(b=np.full_like(cache.b, 0.5)))
    assert found.message.startswith("is 0.5 at (0, 0, 0), expected <= 0")


BAD = {
    "window is 0, expected None or a whole number from 1": {"window": 0},
    "window with causal=False, expected causal=True": {"window": 3, "causal": False},
    "state is a ndarray, expected (k, v, length) as a KeyValueCache": {"state": np.ones((2, 3))},
    "backend 'reference' does not cover this call: the definition goes token by token; chunk_size='parallel' needs "
    "tiles": {"backend": "reference", "chunk_size": "parallel"},
}


@pytest.mark.parametrize(("message", "options"), BAD.items(), ids=BAD)
def test_bad_input(message, options):
    q = np.ones((2, 4, 1, 3))
    with pytest.raises((TypeError, ValueError)) as error:
        la.softmax_attention(q, q, q, **options)
    assert str(error.value) == f"softmax_attention: {message}"


def test_slots_of_different_numbers():
    q = np.ones((2, 4, 1, 3))
    state = la.KeyValueCache(np.ones((2, 5, 1, 3)), np.ones((2, 6, 1, 3)), np.ones(2))
    with pytest.raises(ValueError, match=r"state.v has shape \(2, 6, 1, 3\), expected \(B, L, H, V\) = \(2, 5, 1, 3\)"):
        la.softmax_attention(q, q, q, state=state)


def test_published_formulas():
    """Attention of the whole matrix; ALiBi as a bias; FoX with sums of gates; the numerator."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 12, 1, 4))
    g = -rng.uniform(0, 1, (12, 1))
    Z, i = q[:, 0] @ k[:, 0].T / 2, np.arange(12)
    past = np.where(i[:, None] >= i, 0, -np.inf)

    def rows(Z):
        P = np.exp(Z - Z.max(1, keepdims=True))
        return (P / P.sum(1, keepdims=True))[None]

    b = np.cumsum(g[:, 0])
    matrix = la.influence_matrix
    np.testing.assert_allclose(matrix(la.softmax_attention, q, k, v), rows(Z + past), atol=1e-14)
    np.testing.assert_allclose(matrix(la.softmax_attention, q, k, v, causal=False), rows(Z), atol=1e-14)
    np.testing.assert_allclose(matrix(la.softmax_attention, q, k, v, normalize=False), np.exp(Z + past)[None],
                               atol=1e-13)  # fmt: skip
    biased = rows(Z - 0.3 * (i[:, None] - i) + past)
    np.testing.assert_allclose(matrix(la.alibi, q, k, v, np.array([0.3])), biased, atol=1e-14)
    np.testing.assert_allclose(matrix(la.forgetting_attention, q, k, v, g), rows(Z + b[:, None] - b + past), atol=1e-14)


@pytest.mark.parametrize(("T", "L"), [(1, 5), (3, 5), (5, 5), (12, 5), (70, 150)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 2, 2), (2, 2, 4), (1, 1, 3)], ids=str)
def test_a_ring_is_written_and_read_by_replayed_kernels(T, L, dtype, heads):
    """Rows of different lengths, empty ones too: outputs of the definition, token p in slot p mod L, nothing else."""
    pytest.importorskip("numba")
    rng, (Hq, Hk, H), own = np.random.default_rng(0), heads, np.promote_types(dtype, np.float32)
    shapes = (3, L, Hk, 4), (3, L, H, 6)
    cache = la.KeyValueCache(*(rng.standard_normal(s).astype(own) for s in shapes), np.array([0, 3, L + 2]))
    options = {"overwrite_state": True, "return_state": True, "num_threads": 1}
    for _ in range(4):
        q, k, v = (rng.standard_normal((3, T, n, d)).astype(dtype) for n, d in ((Hq, 4), (Hk, 4), (H, 6)))
        exact = la.KeyValueCache(*(x.astype(np.float64) for x in cache[:2]), cache.length.copy())
        expected = la.softmax_attention(*(x.astype(np.float64) for x in (q, k, v)), state=exact, backend="reference")
        keys, values = (x.copy() for x in cache[:2])
        for b, n in enumerate(cache.length):
            for t in range(T):
                keys[b, (n + t) % L], values[b, (n + t) % L] = k[b, t], v[b, t]
        out, end = la.softmax_attention(q, k, v, state=cache, **options)
        assert end.k is cache.k
        assert end.length is cache.length
        la.testing.assert_close(out, expected, eps=50)
        np.testing.assert_array_equal(cache.k, keys)
        np.testing.assert_array_equal(cache.v, values)
        np.testing.assert_array_equal(cache.length, exact.length + T)
    assert la.explain(la.softmax_attention, q, k, v, state=cache, **options).replay == "replayed"


def steps_of_a_cache(fn, heads, dtype, is_replayed):
    """Outputs and caches of calls of several lengths, each made twice: a cache that grows, then keeps its slots."""
    rng, (Hq, Hk, H), state, found = np.random.default_rng(0), heads, None, []
    for in_place, T in [(0, 7), (0, 1), (0, 0), (0, 70), (1, 1), (1, 3), (1, 90), (1, 1)]:
        shapes = {"q": (2, T, Hq, 4), "k": (2, T, Hk, 4), "v": (2, T, H, 6)}
        x = {n: rng.standard_normal(shape).astype(dtype) for n, shape in shapes.items()}
        if fn is la.forgetting_attention:
            x["g"] = -rng.exponential(size=(2, T, Hq)).astype(dtype)
            x["g"][0, T // 2 : T // 2 + T // 3] = -np.inf
        if fn is la.alibi:
            x["slopes"] = np.linspace(0.1, 1, Hq).astype(np.float32)
        for _ in range(2):
            given = None if state is None else type(state)(*(y.copy() for y in state))
            options = {"state": given, "return_state": True, "overwrite_state": bool(in_place)}
            out, end = fn(**x, **options)
            found.append((out, *(y.copy() for y in end)))
        assert not is_replayed or not T or la.explain(fn, **x, **options).replay == "replayed"
        state = end
    return found


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 2, 2), (2, 2, 4)], ids=str)
@pytest.mark.parametrize("fn", [la.softmax_attention, la.forgetting_attention, la.alibi], ids=lambda fn: fn.__name__)
def test_replayed_kernels_write_the_caches_of_array_calls(fn, heads, dtype, monkeypatch):
    """Keys and values to the bit, log decays but for the order of a sum; a repeated call to the bit."""
    pytest.importorskip("numba")
    found = steps_of_a_cache(fn, heads, dtype, True)
    monkeypatch.setattr(states, "has_compiler", lambda: False)
    la.clear_cache()
    for n, (one, other) in enumerate(zip(found, steps_of_a_cache(fn, heads, dtype, False), strict=True)):
        for m, (x, again, y) in enumerate(zip(one, found[n ^ 1], other, strict=True)):
            np.testing.assert_array_equal(x, again)
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            bound = 8 * la.testing.eps_of(x) if m in (0, 3) and x.dtype != np.int64 else 0
            np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), rtol=bound, atol=bound)


def test_slots_of_other_storage_are_written_too():
    """In 16 bits, of a length in float64, with slots apart: by array calls."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 3, 2, 4)).astype(np.float32)
    given = la.KeyValueCache(*rng.standard_normal((2, 2, 5, 2, 4)).astype(np.float32), np.array([1, 4]))

    def apart(x):
        return np.repeat(x, 2, axis=1)[:, ::2]

    wanted = la.KeyValueCache(*(x.copy() for x in given))
    out = la.softmax_attention(q, k, v, state=wanted, overwrite_state=True)
    for kind in ("length", "slots"):
        own = la.KeyValueCache(*(x.copy() for x in given))
        own = own._replace(length=own.length.astype(np.float64)) if kind == "length" else own._replace(v=apart(own.v))
        for x, y in zip((la.softmax_attention(q, k, v, state=own, overwrite_state=True), *own), (out, *wanted),
                        strict=True):  # fmt: skip
            np.testing.assert_allclose(x, y, rtol=1e-6)
