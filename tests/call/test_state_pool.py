"""state_rows: the states of a call are rows of a pool, on every library."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la

SIZES = {"T": 3, "H": 2, "K": 5, "V": 4}
ROWS = [4, 0, 2]


def drawn(fn, B=(3,), seed=0):
    rng = np.random.default_rng(seed)
    arrays = {n: x.astype(np.float32) for n, x in la.testing.sample(fn, rng, B=B, **SIZES, optional=False).items()}
    return arrays, rng.standard_normal((6, 2, 5, 4)).astype(np.float32)


@pytest.mark.parametrize("given", ["list", "array"])
def test_rows_of_a_pool(library, given):
    arrays, pool = drawn(la.kda)
    expected = la.kda(**arrays, state=pool[ROWS], return_state=True)
    rows = ROWS if given == "list" else library.bring(np.array(ROWS))
    out, end = la.kda(**{n: library.bring(x) for n, x in arrays.items()}, state=library.bring(pool), state_rows=rows,
                      return_state=True)
    assert np.abs(library.see(out) - expected.out).max() < 1e-5
    assert library.see(end).shape == (3, 2, 5, 4)
    assert np.abs(library.see(end) - expected.state).max() < 1e-5


def test_rows_are_overwritten_and_the_others_are_not(library):
    if library.name in ("numpy, read-only", "jax", "dask"):
        pytest.skip("its arrays are not written into")
    arrays, pool = drawn(la.gated_delta_rule)
    expected = la.gated_delta_rule(**arrays, state=pool[ROWS], return_state=True)
    buffer = library.bring(pool.copy())
    _, same = la.gated_delta_rule(**{n: library.bring(x) for n, x in arrays.items()}, state=buffer, state_rows=ROWS,
                                  return_state=True, overwrite_state=True)
    assert same is buffer
    assert np.abs(library.see(buffer)[ROWS] - expected.state).max() < 1e-5
    assert (library.see(buffer)[[1, 3, 5]] == pool[[1, 3, 5]]).all()


def test_immutable_pools_return_the_states():
    jnp = pytest.importorskip("jax.numpy")
    arrays, pool = drawn(la.simple_gla)
    expected = la.simple_gla(**arrays, state=pool[ROWS], return_state=True).state
    _, end = la.simple_gla(**{n: jnp.asarray(x) for n, x in arrays.items()}, state=jnp.asarray(pool), state_rows=ROWS,
                           return_state=True, overwrite_state=True)
    assert np.abs(np.asarray(end) - expected).max() < 1e-5


def test_ragged_and_normalised_pools():
    arrays, pool = drawn(la.kda, B=(1,))
    offsets = [0, 1, 1, 3]
    expected = la.kda(**arrays, state=pool[ROWS], cu_seqlens=offsets, return_state=True)
    buffer = pool.copy()
    out = la.kda(**arrays, state=buffer, state_rows=ROWS, cu_seqlens=offsets, overwrite_state=True)
    assert np.array_equal(out, expected.out)
    assert np.array_equal(buffer[ROWS], expected.state)
    options = {"feature_map": "elu+1", "normalize": True}
    arrays, _ = drawn(la.linear_attention)
    z = np.random.default_rng(1).random((6, 2, 5)).astype(np.float32)
    expected = la.linear_attention(**arrays, **options, state=(pool[ROWS], z[ROWS]), return_state=True)
    S, sums = pool.copy(), z.copy()
    out = la.linear_attention(**arrays, **options, state=(S, sums), state_rows=ROWS, overwrite_state=True)
    assert np.array_equal(out, expected.out)
    assert np.array_equal(S[ROWS], expected.state.S)
    assert np.array_equal(sums[ROWS], expected.state.z)
    assert np.array_equal(sums[[1, 3, 5]], z[[1, 3, 5]])


@pytest.mark.parametrize(("options", "kind", "words"), [
    ({"state_rows": [0, 1]}, ValueError, r"state_rows has shape \(2,\), expected one row per sequence: \(3,\)"),
    ({"state_rows": [0, 1, 6]}, ValueError, "expected rows of a pool of 6: from 0 to 5"),
    ({"state_rows": [0, -1, 2]}, ValueError, "expected rows of a pool of 6"),
    ({"state_rows": [0, 1, 1]}, ValueError, "expected no row twice"),
    ({"state_rows": [0.0, 1.0, 2.0]}, TypeError, "expected integers"),
    ({"state_rows": np.zeros(3)}, TypeError, "state_rows has dtype float64, expected integers"),
    ({"state_rows": [[0], [1], [2]]}, TypeError, "expected integers"),
    ({"state_rows": 1}, ValueError, "expected one row per sequence"),
    ({"state_rows": ROWS, "state": None}, ValueError, "state_rows without a state"),
    ({"state_rows": ROWS, "state": np.zeros((2, 5, 4))}, ValueError, r"expected a pool \(P, H, K, V\)"),
    ({"state_rows": ROWS, "state": np.zeros((6, 2, 5, 3))}, ValueError, r"expected \(P, H, K, V\) = \(6, 2, 5, 4\)"),
])
def test_bad_rows(options, kind, words):
    arrays, pool = drawn(la.kda)
    with pytest.raises(kind, match=words):
        la.kda(**arrays, **{"state": pool, **options})


def test_not_with_gradients():
    arrays, pool = drawn(la.kda)
    with pytest.raises(ValueError, match="state_rows was given to vjp, expected None"):
        la.vjp(la.kda, **arrays, state=pool, state_rows=ROWS)


@pytest.mark.parametrize("fn", [fn for fn in la.VARIANTS if fn.spec.state.parts and not fn.spec.state.wide],
                         ids=lambda fn: fn.__name__)
def test_pools_of_states_with_parts(library, fn):
    arrays, _ = drawn(fn)
    pool = la.testing.sample_state(fn, np.random.default_rng(1), (6,), {}, H=2, K=5, V=4)
    pool = type(pool)(*(S.astype(np.float32) for S in pool))
    expected = fn(**arrays, state=type(pool)(*(S[ROWS] for S in pool)), return_state=True)
    buffer = type(pool)(*(library.bring(S) for S in pool))
    out, end = fn(**{n: library.bring(x) for n, x in arrays.items()}, state=buffer, state_rows=ROWS, return_state=True)
    for x, y in zip((out, *end), (expected.out, *expected.state), strict=True):
        assert np.abs(library.see(x) - y).max() < 1e-4
    with pytest.raises(ValueError, match=r"state.S has shape .*expected a pool \(P, H, K, V\)"):
        fn(**arrays, state=type(pool)(*(S[0] for S in pool)), state_rows=ROWS)
