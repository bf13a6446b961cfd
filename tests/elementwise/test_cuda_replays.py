"""Calls of the recurrence on CuPy arrays are recorded and replayed, emulated: no GPU."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import dispatch
from linattn_np.call import vjp as call_vjp
from linattn_np.elementwise.core import CORE
from linattn_np.runtime import recorder
from linattn_np.testing import relative_error
from tests.matrix_state.cuda.step_twin import recorded_plans, stub
from tests.matrix_state.cuda.token import host

launched, public = host.launched, host.public
FUNCTIONS = [la.scan, la.hgrn, la.min_gru, la.min_lstm, la.rg_lru, la.rwkv4]


def sample(fn, seed):
    drawn = la.testing.sample(fn, np.random.default_rng(seed), B=(2,), T=300, H=2, K=3, V=40)
    return {n: x.astype(np.float32) for n, x in drawn.items()}


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_the_second_call_is_launches_alone(public, monkeypatch, fn):
    """Other numbers at other places: nothing is checked or planned again, and only scratch counts as memory."""
    if fn is la.scan:  # whose results are all that it allocates beside scratch
        monkeypatch.setattr(recorder, "MOST_BYTES", 1 << 14)
    for seed in range(3):
        arrays = sample(fn, seed)
        expected = fn(**{n: x.astype(np.float64) for n, x in arrays.items()})
        if seed == 2:
            monkeypatch.setattr(dispatch, "prepare", None)
        out = fn(**{n: stub(x) for n, x in arrays.items()})
        assert relative_error(out, expected) <= 64 * 2.0**-23
        assert len(recorded_plans()) == 1


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_the_second_gradients_are_launches_alone(public, monkeypatch, fn):
    for seed in range(3):
        arrays = sample(fn, seed)
        wide = {n: x.astype(np.float64) for n, x in arrays.items()}
        exact, pull_exact = la.vjp(fn, **wide)
        dout = np.random.default_rng(seed + 9).standard_normal(exact.shape, dtype=np.float32)
        if seed == 2:
            monkeypatch.setattr(call_vjp, "prepare", None)
            monkeypatch.setattr(type(CORE), "backward", None)
        out, pull = la.vjp(fn, **{n: stub(x) for n, x in arrays.items()})
        grads, expected = pull(stub(dout)), pull_exact(dout.astype(np.float64))
        assert relative_error(out, exact) <= 64 * 2.0**-23
        for name in arrays:
            assert relative_error(getattr(grads, name), getattr(expected, name)) <= 64 * 2.0**-23
