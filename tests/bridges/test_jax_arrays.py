"""Concrete JAX arrays: the bits of the NumPy call and its recorded plans."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from tests.bridges.small import FEW, RULE, SIZES
from tests.cases import PLAIN, cotangents, draw, one_per, parts, parts_like

jax = pytest.importorskip("jax")


def brought(x):
    """Arrays by name, a state or an array as JAX arrays."""
    if isinstance(x, dict):
        return {n: brought(y) for n, y in x.items()}
    if x is None or isinstance(x, str):
        return x
    return parts_like(x, [brought(S) for S in x]) if isinstance(x, tuple) else jax.numpy.asarray(x)


def small(T=5):
    case = next(c for c in PLAIN if c.fn is RULE)
    return draw(case, **(SIZES | {"T": T}), dtype=np.float32)[0]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert isinstance(x, jax.Array)
        assert x.dtype == y.dtype or y.dtype.kind == "i"  # JAX may have no int64
        np.testing.assert_array_equal(np.asarray(x), y)


@pytest.mark.parametrize("case", FEW, ids=str)
@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_jax_arrays_have_the_bits_of_the_numpy_call(case, dtype):
    arrays, state = draw(case, **SIZES, dtype=np.dtype(dtype))
    state = parts_like(state, [S.astype(np.float32) for S in parts(state)])
    expected, pullback = la.vjp(case.fn, **arrays, **case.options, state=state, return_state=True)
    d = cotangents(expected)
    theirs = {**brought(arrays), **case.options, "state": brought(state), "return_state": True}
    mine, pull = la.vjp(case.fn, **theirs)
    assert_same(parts(mine), parts(expected))
    assert_same(parts(case.fn(**theirs)), parts(case.fn(**arrays, **case.options, state=state, return_state=True)))
    assert_same(parts(tuple(pull(*map(brought, d)))), parts(tuple(pullback(*d))))


@pytest.mark.parametrize(
    ("case", "dtype"),
    list(zip(one_per(lambda spec: spec.name, PLAIN), itertools.cycle(["float32", ml_dtypes.bfloat16]), strict=False)),
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_what_looks_at_a_call_asks_jax_for_no_wider_numbers(case, dtype):
    """Without its option x64 JAX warns of float64 and int64; a warning fails a test. Findings are as with NumPy."""
    arrays, _ = draw(case, **SIZES, dtype=np.dtype(dtype))
    for wrong in (np.nan, np.inf, None):
        given = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in arrays.items()}
        if wrong is not None:
            given[case.spec.change.value].flat[3] = wrong
        found = la.check(case.fn, **brought(given), **case.options)
        assert list(map(str, found)) == list(map(str, la.check(case.fn, **given, **case.options)))
        assert any("at 1 of" in str(one) for one in found) == (wrong is not None)
    assert la.explain(case.fn, **brought(arrays), **case.options).function == case.spec.name
    if case.is_linear:
        assert isinstance(la.influence_matrix(case.fn, **brought(arrays), **case.options), jax.Array)
    _, end = case.fn(**brought(arrays), **case.options, return_state=True)
    again = case.fn(**brought(arrays), **case.options, state=end, return_state=True)
    assert all(isinstance(S, jax.Array) for S in parts(again))


def test_a_step_and_a_read_ask_jax_for_no_wider_numbers():
    x = {n: y[:, 0] for n, y in brought(small(T=1)).items()}
    _, state = la.step(RULE, **x, return_state=True)
    result, pullback = la.vjp(la.step, RULE, **x, state=state)
    assert pullback(result).state.dtype == "float32"
    out, pullback = la.vjp(la.read, x["q"][:, None], state)
    assert pullback(out).q.dtype == "float32"


def test_a_repeated_call_is_replayed():
    x = brought(small())
    RULE(**x)
    assert la.explain(RULE, **x).replay == "replayed"
    assert la.explain(RULE, **x).arrays == "NumPy views of JAX arrays, differentiable by la.vjp"
    replay.clear()
    for _ in range(2):
        RULE(**x)
        assert replay.count() == 1


def test_a_state_cannot_be_overwritten():
    """JAX arrays do not change: the final state is a new one."""
    x, state = brought(small(T=1)), jax.numpy.zeros((2, 2, 4, 3))
    end = RULE(**x, state=state, return_state=True, overwrite_state=True).state
    assert not np.asarray(state).any()
    np.testing.assert_array_equal(np.asarray(end), np.asarray(RULE(**x, state=state, return_state=True).state))


def test_other_libraries_beside_jax_arrays():
    x = brought(small())
    with pytest.raises(TypeError, match="gated_delta_rule: k is an array of numpy and q of jax, expected all"):
        RULE(**x | {"k": np.asarray(x["k"])})
    _, pullback = la.vjp(RULE, **x)
    with pytest.raises(TypeError, match=r"gated_delta_rule: dout is an array of numpy and .* of jax"):
        pullback(np.asarray(x["v"]))


def test_tracers_have_no_view():
    """They are traced through array-API calls."""
    x = brought(small(T=1))
    out = jax.jit(lambda v: la.linear_attention(x["q"], x["k"], v))(x["v"])
    expected = la.linear_attention(x["q"], x["k"], x["v"])
    np.testing.assert_allclose(np.asarray(out), np.asarray(expected), rtol=0, atol=1e-5)


def test_results_are_not_copied(monkeypatch):
    """JAX takes memory of NumPy that is aligned to 64 bytes: out, computed and replayed, and most gradients."""
    from linattn_np.bridges import jax_arrays

    x = brought(draw(next(c for c in PLAIN if c.fn is RULE), T=256, B=(1,), H=4, K=64, V=64, dtype=np.float32)[0])
    places, own = [], jax_arrays.JaxViews._leave

    def leave(views, y):
        places.append(None if y is None else y.__array_interface__["data"][0] % 64)
        return own(views, y)

    monkeypatch.setattr(jax_arrays.JaxViews, "_leave", leave)
    for _ in range(3):
        RULE(**x)
    assert places == [0, 0, 0]
    _, pullback = la.vjp(RULE, **x)
    grads = pullback(x["v"])
    assert places[3:5] == [0, 0]
    assert grads._fields[2] == "v"
    assert places[6] == 0
