"""The modules that a CuPy call enters, outside the kernels' host code: matrix_state/cuda/ and runtime/cuda/."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from tests.matrix_state.cuda.step_twin import stub
from tests.matrix_state.cuda.test_replay import drawn
from tests.matrix_state.cuda.token import host as step_calls
from tests.test_entered_modules import entered, outside

launched, public, doubling = step_calls.launched, step_calls.public, step_calls.doubling
KERNELS = ("matrix_state/cuda/", "runtime/cuda/", "ops/cuda/")


def check(call, most=17):
    """A first call: `most` outside the kernels' host code. A replayed one: 14 in all."""
    call()
    replay.clear()
    first, replayed = entered(call), entered(call)
    assert any(name.startswith(KERNELS) for name in first)
    assert not any(name.startswith(("matrix_state/cpu/", "runtime/compiled/")) for name in first)
    assert len(outside(first, KERNELS)) <= most, sorted(outside(first, KERNELS))
    assert len(replayed) <= 14, sorted(replayed)


@pytest.mark.parametrize("more", [{}, {"state": 1, "return_state": True}], ids=["plain", "state"])
def test_a_step_on_stubs_of_cupy_arrays(public, more):
    x, S = drawn(0)
    check(lambda: la.gated_delta_rule(**x, **(more | {"state": S} if more else {})))


def test_vjp_on_stubs_of_cupy_arrays(public, monkeypatch):
    doubling(monkeypatch)
    x, S = drawn(0)
    dout = stub(np.ones(x["v"].shape, np.float32))
    check(lambda: la.vjp(la.gated_delta_rule, **x, state=S)[1](dout), 22)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 64, 1000])
@pytest.mark.parametrize("pulled", [False, True], ids=["call", "vjp"])
def test_a_call_on_cupy_arrays(cp, T, pulled):
    rng = np.random.default_rng(0)
    q, k, v = (cp.asarray(rng.standard_normal((2, T, 4, 64)).astype(np.float32)) for _ in range(3))
    g, beta = (cp.asarray(rng.uniform(0, 1, (2, T, 4)).astype(np.float32)) for _ in range(2))
    if pulled:
        dout = cp.ones_like(v)
        check(lambda: la.vjp(la.gated_delta_rule, q, k, v, -g, beta)[1](dout), 22)
    else:
        check(lambda: la.gated_delta_rule(q, k, v, -g, beta), 17)
