"""Tables and systems of a chunk against their definitions."""

from __future__ import annotations

import array_api_compat.numpy as xp
import numpy as np
import pytest

from linattn_np.matrix_state.array.cumulative import pair_table
from linattn_np.ops.triangular import solve, solve_vjp, unit_lower
from linattn_np.runtime.arrays import keep_lower
from linattn_np.testing import relative_error


@pytest.mark.parametrize("C", [1, 7, 8, 9, 17, 64, 65, 200])
def test_the_table_of_pairs_is_made_of_own_terms(C):
    """A reset, or a gate of -50, between two tokens leaves every other pair its digits."""
    rng = np.random.default_rng(C)
    weak, strong = -rng.uniform(0, 0.1, (3, C)), rng.choice([0.0, -50.0, -1e4], (3, C))
    g = np.where(rng.random((3, C)) < 0.2, strong, weak)
    E = pair_table(xp, g, np.exp)
    for i in range(C):
        for j in range(C):
            exact = np.exp(g[:, j + 1 : i + 1].sum(-1)) if j <= i else 0.0
            np.testing.assert_allclose(E[:, i, j], exact, rtol=2e-13, atol=0)


@pytest.mark.parametrize("C", [1, 5, 8, 16, 31, 32, 33, 100])
def test_the_system_is_solved(C):
    rng = np.random.default_rng(C)
    N, R = np.tril(rng.standard_normal((2, 3, C, C)), -1) / 4, rng.standard_normal((2, 3, C, 4))
    L = unit_lower(xp, N)
    X = solve(xp, L, R)
    assert relative_error(X + N @ X, R) < 1e-12
    dN, dR = solve_vjp(xp, L, X, R)
    assert relative_error(dR + np.swapaxes(N, -1, -2) @ dR, R) < 1e-12
    assert relative_error(dN, -np.tril(dR @ np.swapaxes(X, -1, -2), -1)) < 1e-13


def test_equal_keys_at_full_strength_keep_their_digits():
    """beta = 2: the inverse has entries of 2, powers of N would have entries of 1e20."""
    N = 2 * np.tril(np.ones((64, 64), np.float32), -1)
    R = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    exact = np.linalg.solve(np.eye(64) + N.astype(float), R.astype(float))
    assert relative_error(solve(xp, unit_lower(xp, N), R), exact) < 2e-6


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_lies_above_the_diagonal_is_gone_whatever_it_was(dtype):
    P = np.full((2, 5, 5), np.nan, dtype)
    P[0] = np.inf
    lower = keep_lower(xp, P)
    assert (lower[:, *np.triu_indices(5, 1)] == 0).all()
    assert not np.isfinite(lower[:, *np.tril_indices(5)]).any()
