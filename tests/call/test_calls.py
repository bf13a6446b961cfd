"""What a call may leave out, turn round or overwrite: q=None, read, state, layout, optional arrays."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state.types import Readout
from linattn_np.testing import check_vjp, relative_error
from tests.cases import (
    CASES,
    FORMS,
    PLAIN,
    Case,
    call,
    cases_of,
    cotangents,
    covered,
    draw,
    of_matrices,
    pairwise,
    parts,
    parts_like,
    with_gradients,
)

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_variant = pytest.mark.parametrize("case", PLAIN, ids=str)


def copies(x):
    return parts_like(x, [S.copy() for S in parts(x)])


# write without reading, read without writing


@pytest.mark.parametrize("form", FORMS, ids=lambda f: str(f.get("chunk_size")))
@pytest.mark.parametrize("case", of_matrices(CASES), ids=str)
def test_write_without_reading(case, form):
    arrays, state = draw(case, T=19)
    expected = call(case, arrays, state=state, **form)[1]
    silent = arrays | {case.spec.change.query: None}
    out, end = case.fn(**silent, **case.options, state=state, **form)  # no return_state: there is nothing else
    assert out is None
    for a, b in zip(parts(end), parts(expected), strict=True):
        assert relative_error(a, b) <= 1e-14
    if form not in ({}, {"chunk_size": 16}):
        return
    given = {n: x for n, x in silent.items() if x is not None and not isinstance(x, str)}
    check_vjp(case.fn, **{case.spec.change.query: None}, **given, **case.named, **case.options, **form, state=state)


@pytest.mark.parametrize("case", of_matrices(PLAIN), ids=str)
def test_queries_get_no_gradient_when_there_are_none(case):
    arrays, state = draw(case, T=5)
    (_, end), pullback = la.vjp(case.fn, **(arrays | {case.spec.change.query: None}), **case.options, state=state)
    grads = pullback(dstate=end)
    assert getattr(grads, case.spec.change.query) is None
    assert getattr(grads, case.spec.change.key).shape == arrays[case.spec.change.key].shape


@pytest.mark.parametrize(("Hq", "H"), [(2, 2), (1, 3), (4, 2)])
@pytest.mark.parametrize("Tq", [0, 1, 9])
@pytest.mark.parametrize("B", [(), (2,), (2, 3)], ids=str)
def test_read(B, Tq, Hq, H):
    rng = np.random.default_rng(0)
    q, S, z = rng.standard_normal((*B, Tq, Hq, 5)), rng.standard_normal((*B, H, 5, 3)), rng.random((*B, H, 5)) + 1
    heads = np.arange(max(Hq, H))
    wide = q[..., heads // (max(Hq, H) // Hq), :]
    share = heads // (max(Hq, H) // H)
    expected = 0.5 * np.einsum("...thk,...hkv->...thv", wide, S[..., share, :, :])
    np.testing.assert_allclose(la.read(q, S, scale=0.5), expected, rtol=1e-12, atol=1e-12)
    check_vjp(la.read, q, S, scale=0.5)
    q = np.abs(q)
    below = np.einsum("...thk,...hk->...th", np.abs(wide), z[..., share, :])[..., None]
    averaged = np.einsum("...thk,...hkv->...thv", np.abs(wide), S[..., share, :, :]) / below
    state = la.NormalisedState(S, z)
    np.testing.assert_allclose(la.read(q, state), averaged, rtol=1e-12, atol=1e-12)
    check_vjp(la.read, q, state)


@pytest.mark.parametrize("case", of_matrices(PLAIN), ids=str)
def test_read_equals_the_output_of_the_last_query(case):
    """For every variant that reads after its write and returns the plain read-out."""
    case = case.required
    arrays, state = draw(case, T=9)
    out, end = call(case, arrays, state=state)
    q = arrays[case.spec.change.query][:, -1:]
    if not case.is_readable(arrays, end):
        pytest.skip("it reads another state, with mapped queries or in another way")
    scale = 5**-0.5 if case.spec.scaled else 1.0
    found = la.read(q, end, scale=scale)
    np.testing.assert_allclose(found, out[:, -1:], rtol=1e-12, atol=1e-13)


def test_read_of_nothing_is_zero():
    state = la.NormalisedState(np.ones((2, 3, 4)), np.zeros((2, 3)))
    q = np.ones((1, 2, 3))
    (out, pullback) = la.vjp(la.read, q, state)
    np.testing.assert_array_equal(out, np.zeros((1, 2, 4)))
    for d in parts(tuple(pullback(np.ones_like(out)))):
        assert np.isfinite(d).all()


def test_read_heads_first():
    rng = np.random.default_rng(0)
    q, S = rng.standard_normal((2, 7, 3, 5)), rng.standard_normal((2, 3, 5, 4))
    out, pullback = la.vjp(la.read, q, S)
    moved, pull_moved = la.vjp(la.read, np.moveaxis(q, 1, 2), S, layout="heads_first")
    np.testing.assert_array_equal(np.moveaxis(moved, 1, 2), out)
    d = rng.standard_normal(out.shape)
    np.testing.assert_array_equal(np.moveaxis(pull_moved(np.moveaxis(d, 1, 2)).q, 1, 2), pullback(d).q)
    np.testing.assert_array_equal(pull_moved(np.moveaxis(d, 1, 2)).state, pullback(d).state)


# the state, overwritten


@pytest.mark.parametrize(
    ("case", "form", "T"), pairwise(CASES, [{}, {"chunk_size": 4}, {"chunk_size": "parallel"}], [0, 1, 9]), ids=str
)
def test_overwritten_state(case, form, T):
    arrays, state = draw(case, T=T)
    expected_out, expected = call(case, arrays, state=state, **form)
    overwritten = copies(state)
    out, end = call(case, arrays, state=overwritten, overwrite_state=True, **form)
    np.testing.assert_array_equal(out, expected_out)
    for a, b, c in zip(parts(end), parts(overwritten), parts(expected), strict=True):
        assert a is b
        np.testing.assert_array_equal(a, c)
    overwritten = copies(state)
    alone = case.fn(**arrays, **case.options, state=overwritten, overwrite_state=True, **form)  # without return_state
    np.testing.assert_array_equal(alone, expected_out)
    for a, b in zip(parts(overwritten), parts(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@every_variant
def test_overwritten_state_of_a_ragged_batch_and_of_a_view(case):
    arrays, state = draw(case, T=9, B=(1,), N=3)
    options = {"cu_seqlens": [0, 4, 4, 9]}
    expected = call(case, arrays, state=state, **options)[1]
    buffers = [np.zeros((6, *S.shape[1:]), S.dtype) for S in parts(state)]
    for buffer, S in zip(buffers, parts(state), strict=True):
        buffer[::2] = S
    call(case, arrays, state=parts_like(state, [buffer[::2] for buffer in buffers]), overwrite_state=True, **options)
    for buffer, S in zip(buffers, parts(expected), strict=True):
        np.testing.assert_array_equal(buffer[::2], S)
        np.testing.assert_array_equal(buffer[1::2], 0)


@pytest.mark.parametrize("T", [0, 1, 9])
@every_case
def test_the_final_state_is_nobody_elses_memory(case, T):
    arrays, state = draw(case, T=T)
    out, end = call(case, arrays, state=state)
    inputs = [x for x in arrays.values() if isinstance(x, np.ndarray)] + parts(state)
    for result in (out, *parts(end)):
        assert not any(np.shares_memory(result, x) for x in inputs)


# the layout


def transposed(case: Case, arrays):
    """(..., T, H, D) as (..., H, T, D), views."""

    def turn(name, x):
        if name not in case.given or not case.on_tokens(name) or case.spec.row_axes == 1:
            return x
        return np.moveaxis(x, case.heads(name), x.ndim - len(case.given[name].split()))

    return {n: turn(n, x) for n, x in arrays.items()}


@pytest.mark.parametrize(
    ("case", "form", "B"), pairwise(CASES, [{}, {"chunk_size": 1}, {"chunk_size": 4}], [(), (2,)]), ids=str
)
def test_heads_first_is_the_same_call_on_moved_axes(case, B, form):
    arrays, state = draw(case, T=11, H=3, B=B)
    result, pullback = la.vjp(case.fn, **arrays, **case.options, state=state, return_state=True, **form)
    dout, dstate = cotangents(result)
    grads = pullback(dout, dstate)
    moved, pull_moved = la.vjp(
        case.fn,
        **transposed(case, arrays),
        **case.options,
        state=state,
        return_state=True,
        layout="heads_first",
        **form,
    )
    swap = (lambda x: np.moveaxis(x, -3, -2)) if case.spec.row_axes == 2 else (lambda x: x)
    np.testing.assert_array_equal(swap(moved.out), result.out)
    moved_grads = pull_moved(swap(dout), dstate)
    states = parts(moved.state) + parts(moved_grads.state)
    for a, b in zip(states, parts(result.state) + parts(grads.state), strict=True):
        np.testing.assert_array_equal(a, b)
    back = transposed(case, {n: getattr(grads, n) for n in case.given})
    for name, d in back.items():
        np.testing.assert_array_equal(getattr(moved_grads, name), d, name)
        assert getattr(moved_grads, name).shape == transposed(case, arrays)[name].shape


def test_the_usual_mistake_of_layout_is_named():
    q = np.ones((1, 4, 32, 3))
    with pytest.warns(UserWarning, match=r"linear_attention: 4 tokens of 32 heads .* layout='heads_first'") as seen:
        la.linear_attention(q, q, q)
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match="heads_first") as seen:
        la.vjp(la.linear_attention, q, q, q)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.linear_attention(q, q, q, layout="heads_first")
        la.linear_attention(q, q, q, state=np.zeros((1, 32, 3, 3)))
        la.linear_attention(q[:, :1], q[:, :1], q[:, :1])  # one token is decoding
        la.linear_attention(q[:, :, :31], q[:, :, :31], q[:, :, :31])


@pytest.mark.parametrize(
    "call",
    [
        lambda fn, *given: fn(*given, reverse=True),
        lambda fn, *given: la.vjp(fn, *given, reverse=True),
        la.explain,
        la.influence_matrix,
        lambda fn, *given: la.vjp(fn, *given)[1](given[0]),
        la.check,
    ],
    ids=["reverse", "vjp in reverse", "explain", "influence matrix", "pullback", "check"],
)
def test_the_warning_names_the_line_of_the_caller(call):
    """Whatever the call goes through."""
    q = np.ones((1, 4, 32, 3))
    with pytest.warns(UserWarning, match="heads_first") as seen:
        call(la.linear_attention, q, q, q)
    assert {one.filename for one in seen} == {__file__}


# arrays that may be left out


def test_optional_arrays_by_keyword_and_none_for_what_was_not_given():
    case = next(c for c in CASES if c.fn is la.mamba2 and "D" in c.given)
    arrays, _ = draw(case, T=6)
    positional = [arrays[n] for n in ("x", "dt", "A", "B", "C")]
    out, pullback = la.vjp(la.mamba2, *positional, D=arrays["D"])
    grads = pullback(np.ones_like(out))
    assert grads._fields == ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state")
    assert grads.z is None
    assert grads.dt_bias is None
    assert grads.state is None
    np.testing.assert_allclose(grads.D, arrays["x"].sum(axis=(0, 1, 3)), rtol=1e-12)
    by_keyword = la.mamba2(**{n: arrays[n] for n in ("C", "D", "x", "B", "dt", "A")})
    np.testing.assert_array_equal(by_keyword, out)


@pytest.mark.parametrize("case", [c for c in CASES if any(a.optional for a in c.spec.arrays.values())], ids=str)
def test_gradients_of_exactly_what_was_given(case):
    arrays, state = draw(case, T=6)
    result, pullback = la.vjp(case.fn, **arrays, **case.options, state=state, return_state=True)
    grads = pullback(*cotangents(result))
    assert grads._fields == (*case.spec.arrays, "state")
    for name in case.spec.arrays:
        d = getattr(grads, name)
        assert (d is None) == (name not in case.given)
        if d is not None:
            assert d.shape == arrays[name].shape
            assert d.dtype == arrays[name].dtype


def test_none_is_the_published_choice():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 9, 4, 5))
    g = np.log1p(-(2.0 ** (-5.0 - np.arange(4))))
    np.testing.assert_array_equal(la.retention(q, k, v), la.retention(q, k, v, g))
    slopes = np.array([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]) * (1 + 1e-5)
    np.testing.assert_allclose(la.lightning_attention(q, k, v), la.lightning_attention(q, k, v, slopes), rtol=1e-13)


@pytest.mark.parametrize("scale", [0.25, -2, np.float32(0.5)])
@pytest.mark.parametrize("case", [c for c in PLAIN if c.fn is not la.rwkv4], ids=str)  # whose scale weighs the past
def test_scale(case, scale):
    """out is linear in the scale, except for a skip and for variants that are not linear in q."""
    if "D" in case.given:
        case = case.required
    arrays, _ = draw(case, T=9, K=5)

    def expected(scale):
        if case.spec.readout is not Readout.SLOTS and case.spec.state.parts is not la.StabilisedState:
            return scale * case.fn(**arrays, **case.options, scale=1.0)
        return case.fn(**arrays | {"q": scale * arrays["q"]}, **case.options, scale=1.0)

    assert relative_error(case.fn(**arrays, **case.options, scale=scale), expected(float(scale))) <= 1e-14
    default = case.fn(**arrays, **case.options)
    assert relative_error(default, expected(5**-0.5 if case.spec.scaled else 1.0)) <= 1e-14
    check_vjp(case.fn, **arrays, **case.options, scale=float(scale))


def test_two_maps_of_the_callers_own():
    """A pair (f, f_vjp); one for q and one for k, of another width than the head."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 9, 2, 4))
    double = (lambda x: np.concatenate([x, x * x], -1), lambda x, d: d[..., :4] + 2 * x * d[..., 4:])
    wide_q, wide_k = double[0](q), double[0](k)
    S = rng.standard_normal((2, 2, 8, 4))
    out, end = la.linear_attention(q, k, v, feature_map=double, state=S, return_state=True)
    expected, expected_end = la.linear_attention(wide_q, wide_k, v, state=S, return_state=True)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(end, expected_end)
    check_vjp(la.linear_attention, q, k, v, feature_map=double, state=S)
    cube = (lambda x: x**3, lambda x, d: 3 * x**2 * d)
    check_vjp(la.linear_attention, wide_q[..., 4:], k, v, feature_map=("relu", cube))


# nothing is written to, nothing is read before it is written


@pytest.mark.parametrize("form", [{}, {"chunk_size": 1}, {"chunk_size": "parallel"}], ids=str)
@every_case
def test_inputs_are_left_as_they_were(case, form):
    arrays, state = draw(case, T=9)
    before = {n: x.copy() for n, x in arrays.items() if isinstance(x, np.ndarray)}
    original = copies(state)
    result, pullback = la.vjp(case.fn, **arrays, **case.options, state=state, return_state=True, **form)
    dout, dstate = cotangents(result)
    dout_before, dstate_before, out_before = dout.copy(), copies(dstate), result.out.copy()
    pullback(dout, dstate)
    for name, x in before.items():
        np.testing.assert_array_equal(arrays[name], x, name)
    pairs = [*zip(parts(state), parts(original), strict=True), *zip(parts(dstate), parts(dstate_before), strict=True)]
    for a, b in [*pairs, (dout, dout_before), (result.out, out_before)]:
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: str(f.get("chunk_size")))
@every_case
def test_fresh_memory_is_written_before_it_is_read(case, form, monkeypatch):
    arrays, state = draw(case, T=21)
    expected = with_gradients(case, arrays, state=state, **form)
    poison_empty(monkeypatch)
    found = with_gradients(case, arrays, state=state, **form)
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, name)


def poison_empty(monkeypatch):
    """numpy.empty and empty_like give NaN or the least number, in the namespace that the library sees too."""
    import array_api_compat.numpy as xp

    def empty(shape, dtype=float, **_):
        whole = np.dtype(dtype).kind == "i" and np.iinfo(dtype).min
        return np.full(shape, 0xFF if np.dtype(dtype) == np.uint8 else whole or np.nan, dtype=dtype)  # bytes of NaN

    def empty_like(x, dtype=None, **_):
        return np.full(x.shape, np.nan, dtype=dtype or x.dtype)

    for module in (np, xp):
        monkeypatch.setattr(module, "empty", empty)
        monkeypatch.setattr(module, "empty_like", empty_like)
    assert np.isnan(xp.empty(3)).all()


def test_explain_tells_of_slots_and_of_decays_on_the_value_axis():
    arrays, state = draw(next(c for c in PLAIN if c.fn is la.gsa), T=40)
    explained = la.explain(la.gsa, **arrays, state=state)
    assert explained.operations > la.explain(la.gsa, **(arrays | {"q": None}), state=state).operations
    assert explained.form == "chunk form"  # of the values
    for case in PLAIN:
        if "gv" not in case.given and case.spec.readout.name != "SLOTS":
            continue
        explained = la.explain(case.fn, **draw(case, T=40)[0])
        if explained.backend == "numba":
            assert "a decay on the value axis takes the recurrent form forward" in explained.reason


@pytest.mark.parametrize("backend", ["numba", "chunks", None])
def test_num_threads_changes_no_bit(backend):
    rng = np.random.default_rng(0)
    x = la.testing.sample(la.gated_delta_rule, rng, B=(2,), T=300, H=3, K=40, V=64)
    (one, pull_one), (three, pull_three) = (
        la.vjp(la.gated_delta_rule, **x, backend=backend, num_threads=count) for count in (1, 3)
    )
    assert (one == three).all()
    for a, b in zip(pull_one(one), pull_three(one), strict=True):
        assert a is b is None or (a == b).all()
    assert (la.gated_delta_rule(**x, backend=backend, num_threads=2) == one).all()


@pytest.mark.parametrize("backend", ["reference", "chunks", None])
def test_precision_is_of_gpu_products_alone(backend):
    x = la.testing.sample(la.simple_gla, np.random.default_rng(0), B=(), T=40, H=1, K=4, V=3)
    x = {n: y.astype(np.float32) for n, y in x.items()}
    assert (la.simple_gla(**x, precision="tf32", backend=backend) == la.simple_gla(**x, backend=backend)).all()
    for other in ("bfloat16", 32, True):
        with pytest.raises(ValueError, match=r"simple_gla: precision is .*, expected None or 'tf32'"):
            la.simple_gla(**x, precision=other, backend=backend)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_num_threads_is_a_whole_number(count):
    x = la.testing.sample(la.simple_gla, np.random.default_rng(0), B=(), T=3, H=1, K=2, V=2)
    wanted = r"simple_gla: num_threads is .*, expected None or a whole number from 1"
    with pytest.raises(ValueError, match=wanted):
        la.simple_gla(**x, num_threads=count)
    with pytest.raises(ValueError, match=wanted):
        la.vjp(la.simple_gla, **x, num_threads=count)


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_outputs_without_tokens_have_the_dtype_of_others(fn):
    """Complex ones too: pieces of a call without tokens get cotangents of the whole output."""
    case, *_ = cases_of(fn)
    for how in covered(case, [{"backend": "chunks"}, {"backend": "reference"}]):
        given = (la.testing.sample(fn, np.random.default_rng(0), T=T, H=2, K=4, V=3) for T in (0, 2))
        assert len({fn(**x, **how).dtype for x in given}) == 1, how
