"""Rows of a pool on a device, and which sequences begin without a state: read by launches, not by the host."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from tests.matrix_state.cuda.step_twin import recorded_plans, stub
from tests.matrix_state.cuda.token import host

launched, public = host.launched, host.public
ROWS = [[1, 3, -1, 7, -1], [-1, 4, 0, 9, 2], [5, 1, 2, 3, 4]]
FRESH = [[True, False, False, False, True], [False, False, True, False, True], [False] * 5]


def arrays_of(fn, B, T, seed):
    drawn = la.testing.sample(fn, np.random.default_rng(seed), B=(B,), T=T, H=4, K=8, V=4, optional=False)
    return {n: x.astype(np.float32) for n, x in drawn.items()}


def pool_of(dtype):
    return np.random.default_rng(1).standard_normal((6, 4, 8, 4)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("fn", [la.gated_delta_rule, la.kda, la.simple_gla], ids=lambda fn: fn.__name__)
def test_a_recorded_call_follows_the_values(public, fn, overwrite, dtype):
    """Rows outside the pool, of which there are as many as sequences or more than rows, are zeros and not written."""
    for n in range(6):
        arrays = arrays_of(fn, 5, 1, n)
        rows, fresh, start = np.array(ROWS[n % 3]), np.array(FRESH[n % 3]), pool_of(dtype)
        begins = fresh | (rows < 0) | (rows >= 6)
        state = start[np.clip(rows, 0, 5)]
        state[begins] = 0
        expected = fn(**arrays, state=state, return_state=True)
        mine, pool = {name: stub(x) for name, x in arrays.items()}, stub(start)
        out, end = fn(
            **mine, state=pool, state_rows=stub(rows), fresh=stub(fresh), return_state=True, overwrite_state=overwrite
        )
        assert np.abs(out - expected.out).max() < 1e-5
        owned = (rows >= 0) & (rows < 6)
        if overwrite:
            assert end is pool
            assert np.abs(pool[rows[owned]] - expected.state[owned].astype(dtype)).max() < 2e-3
            others = np.setdiff1d(np.arange(6), rows)
            assert np.array_equal(pool[others], start[others])
        else:
            assert np.abs(end - expected.state).max() < 1e-5
            assert np.array_equal(pool, start)
        assert len(recorded_plans()) == 1


@pytest.mark.parametrize("more", [{"T": 40}, {"reverse": True}, {"T": 40, "chunk_size": 16}], ids=str)
def test_other_calls_on_a_device_are_not_recorded_with_their_rows(public, more):
    """Calls whose rows are gathered, or go in reverse, take the rows of each call."""
    for n in range(4):
        arrays = arrays_of(la.gated_delta_rule, 2, more.get("T", 1), n)
        options = {"backend": "chunks" if "T" in more else None} | {k: x for k, x in more.items() if k != "T"}
        rows, fresh, start = np.array(ROWS[n % 3][:2]), np.array(FRESH[n % 3][:2]), pool_of(np.float32)
        state = start[np.clip(rows, 0, 5)]
        state[fresh | (rows < 0)] = 0
        expected = la.gated_delta_rule(**arrays, **options, state=state, return_state=True)
        pool = stub(start)
        mine = {k: stub(x) for k, x in arrays.items()}
        out = la.gated_delta_rule(
            **mine, **options, state=pool, fresh=stub(fresh), state_rows=stub(rows), overwrite_state=True
        )
        assert np.abs(out - expected.out).max() < 1e-5
        owned = rows >= 0
        assert np.abs(np.asarray(pool)[rows[owned]] - expected.state[owned]).max() < 1e-5
        others = np.setdiff1d(np.arange(6), rows)
        assert np.array_equal(np.asarray(pool)[others], start[others])
