"""state_rows: the states of a call are rows of a pool, on every library."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import replay
from linattn_np.call.binding import prepare
from tests.cases import cell, one_per

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
    out, end = la.kda(
        **{n: library.bring(x) for n, x in arrays.items()},
        state=library.bring(pool),
        state_rows=rows,
        return_state=True,
    )
    assert np.abs(library.see(out) - expected.out).max() < 1e-5
    assert library.see(end).shape == (3, 2, 5, 4)
    assert np.abs(library.see(end) - expected.state).max() < 1e-5


def test_rows_are_overwritten_and_the_others_are_not(library):
    if library.name in ("numpy, read-only", "jax", "dask"):
        pytest.skip("its arrays are not written into")
    arrays, pool = drawn(la.gated_delta_rule)
    expected = la.gated_delta_rule(**arrays, state=pool[ROWS], return_state=True)
    buffer = library.bring(pool.copy())
    _, same = la.gated_delta_rule(
        **{n: library.bring(x) for n, x in arrays.items()},
        state=buffer,
        state_rows=ROWS,
        return_state=True,
        overwrite_state=True,
    )
    assert same is buffer
    assert np.abs(library.see(buffer)[ROWS] - expected.state).max() < 1e-5
    assert (library.see(buffer)[[1, 3, 5]] == pool[[1, 3, 5]]).all()


def test_immutable_pools_return_the_states():
    jnp = pytest.importorskip("jax.numpy")
    arrays, pool = drawn(la.simple_gla)
    expected = la.simple_gla(**arrays, state=pool[ROWS], return_state=True).state
    _, end = la.simple_gla(
        **{n: jnp.asarray(x) for n, x in arrays.items()},
        state=jnp.asarray(pool),
        state_rows=ROWS,
        return_state=True,
        overwrite_state=True,
    )
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


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"state_rows": [0, 1]}, ValueError, r"state_rows has shape \(2,\), expected one row per sequence: \(3,\)"),
        ({"state_rows": [0, 1, 6]}, ValueError, "expected rows of a pool of 6: from 0 to 5"),
        ({"state_rows": [0, -2, 2]}, ValueError, "expected rows of a pool of 6"),
        ({"state_rows": [0, 1, 1]}, ValueError, "expected no row twice"),
        ({"state_rows": [0.0, 1.0, 2.0]}, TypeError, "expected integers"),
        ({"state_rows": np.zeros(3)}, TypeError, "state_rows has dtype float64, expected integers"),
        ({"state_rows": [[0], [1], [2]]}, TypeError, "expected integers"),
        ({"state_rows": 1}, ValueError, "expected one row per sequence"),
        ({"state_rows": ROWS, "state": None}, ValueError, "state_rows without a state"),
        ({"state_rows": ROWS, "state": np.zeros((2, 5, 4))}, ValueError, r"expected a pool \(P, H, K, V\)"),
        (
            {"state_rows": ROWS, "state": np.zeros((6, 2, 5, 3))},
            ValueError,
            r"expected \(P, H, K, V\) = \(6, 2, 5, 4\)",
        ),
    ],
)
def test_bad_rows(options, kind, words):
    arrays, pool = drawn(la.kda)
    with pytest.raises(kind, match=words):
        la.kda(**arrays, **{"state": pool, **options})


def test_not_with_gradients():
    arrays, pool = drawn(la.kda)
    with pytest.raises(ValueError, match="state_rows was given to vjp, expected None"):
        la.vjp(la.kda, **arrays, state=pool, state_rows=ROWS)


@pytest.mark.parametrize(
    "fn", [fn for fn in la.VARIANTS if fn.spec.state.parts and not fn.spec.state.wide], ids=lambda fn: fn.__name__
)
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


@pytest.fixture
def no_copies(monkeypatch):
    """Rows are neither gathered nor scattered."""

    def fails(*arguments):
        raise AssertionError("the rows of a pool were copied")

    pytest.importorskip("numba")
    for name in ("linattn_np.matrix_state.preprocess.take_rows", "linattn_np.call.binding.take_rows",
                 "linattn_np.runtime.pools.put_rows"):  # fmt: skip
        monkeypatch.setattr(name, fails)


@pytest.mark.parametrize("fn", one_per(cell), ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("T", [1, 5, 70])
def test_compiled_loops_read_and_write_the_rows_where_they_lie(fn, T, no_copies):
    rng = np.random.default_rng(0)
    sample = la.testing.sample(fn, rng, B=(3,), **SIZES | {"T": T}, optional=False)
    arrays = {n: x.astype(np.float32) for n, x in sample.items()}
    pool = rng.standard_normal((6, 2, 5, 4)).astype(np.float32)
    expected = fn(**arrays, state=pool[ROWS], return_state=True)
    wide = np.zeros((12, 2, 5, 4), np.float32)
    for buffer in (pool.copy(), wide[1::2]):
        buffer[...] = pool
        out, end = fn(**arrays, state=buffer, state_rows=np.array(ROWS), return_state=True)
        assert (out == expected.out).all()
        assert (end == expected.state).all()
        assert (buffer == pool).all()
        out = fn(**arrays, state=buffer, state_rows=ROWS, overwrite_state=True)
        assert (out == expected.out).all()
        assert (buffer[ROWS] == expected.state).all()
        assert (buffer[[1, 3, 5]] == pool[[1, 3, 5]]).all()
    assert not wide[::2].any()


@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_repeated_calls_with_the_same_rows_are_replayed(T, dtype, monkeypatch):
    """Each set of rows has its plan; arrays and pool are those of the call. 16-bit pools are scattered at the end."""
    rng, sets = np.random.default_rng(0), ([4, 0, 2], np.array([1, 5, 3]), (0, 1, 2))
    replay.clear()
    for n in range(6):
        sample = la.testing.sample(la.gated_delta_rule, rng, B=(3,), **SIZES | {"T": T}, optional=False)
        arrays = {n: x.astype(np.float32) for n, x in sample.items()}
        pool, rows = rng.standard_normal((6, 2, 5, 4)).astype(dtype), sets[n % 3]
        expected = la.gated_delta_rule(**arrays, state=pool[list(rows)], return_state=True)
        out, end = la.gated_delta_rule(**arrays, state=pool, state_rows=rows, return_state=True)
        assert (out == expected.out).all()
        assert (end == expected.state).all()
        buffer = pool.copy()
        out = la.gated_delta_rule(**arrays, state=buffer, state_rows=rows, overwrite_state=True)
        assert (out == expected.out).all()
        assert (buffer[list(rows)] == expected.state.astype(dtype)).all()
        others = [n for n in range(6) if n not in rows]
        assert (buffer[others] == pool[others]).all()
        if n == 2:
            count = replay.count()
            monkeypatch.setattr("linattn_np.call.dispatch.prepare", lambda spec, arrays, keywords: (
                prepare(spec, arrays, keywords) if "state_rows" not in keywords else None))  # fmt: skip
    assert replay.count() == count


def test_rows_of_a_ragged_batch_in_both_forms(no_copies):
    """Long and short sequences, an empty one: each by its own form, from its own row."""
    rng, offsets = np.random.default_rng(0), [0, 3, 3, 80]
    sample = la.testing.sample(la.gated_delta_rule, rng, B=(1,), **SIZES | {"T": 80}, optional=False)
    arrays = {n: x.astype(np.float32) for n, x in sample.items()}
    pool = rng.standard_normal((6, 2, 5, 4)).astype(np.float32)
    expected = la.gated_delta_rule(**arrays, state=pool[ROWS], cu_seqlens=offsets, return_state=True)
    out, end = la.gated_delta_rule(**arrays, state=pool, state_rows=ROWS, cu_seqlens=offsets, return_state=True)
    assert (out == expected.out).all()
    assert (end == expected.state).all()
    buffer = pool.copy()
    out = la.gated_delta_rule(**arrays, state=buffer, state_rows=ROWS, cu_seqlens=offsets, overwrite_state=True)
    assert (out == expected.out).all()
    assert (buffer[ROWS] == expected.state).all()
    assert (buffer[[1, 3, 5]] == pool[[1, 3, 5]]).all()


@pytest.mark.parametrize("T", [1, 70])
def test_a_pool_of_16_bits_and_one_that_an_input_is_part_of(T):
    """Read in place, written at the end: rounded once, or after everything that lies there has been read."""
    rng = np.random.default_rng(0)
    sample = la.testing.sample(la.simple_gla, rng, B=(3,), T=T, H=2, K=4, V=4)
    arrays = {n: x.astype(np.float32) for n, x in sample.items()}
    narrow = rng.standard_normal((6, 2, 4, 4)).astype(np.float16)
    expected = la.simple_gla(**arrays, state=narrow[ROWS], return_state=True)
    buffer = narrow.copy()
    assert (la.simple_gla(**arrays, state=buffer, state_rows=ROWS, overwrite_state=True) == expected.out).all()
    assert (buffer[ROWS] == expected.state.astype(np.float16)).all()
    memory = rng.standard_normal(max(6 * 32, 24 * T)).astype(np.float32)
    pool, arrays["q"] = memory[: 6 * 32].reshape(6, 2, 4, 4), memory[: 24 * T].reshape(3, T, 2, 4)
    expected = la.simple_gla(**arrays | {"q": arrays["q"].copy()}, state=pool[ROWS], return_state=True)
    assert (la.simple_gla(**arrays, state=pool, state_rows=ROWS, overwrite_state=True) == expected.out).all()
    assert (pool[ROWS] == expected.state).all()
