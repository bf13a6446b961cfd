"""state_rows: the states of a call are rows of a pool, on every library."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
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
