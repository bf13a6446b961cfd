"""Keys of log decays, 1 - e^g, and their gradient: when kernels compute them. No GPU."""

from __future__ import annotations

import numpy as np

import linattn_np as la
from linattn_np.matrix_state import preprocess
from linattn_np.matrix_state.types import Inputs, Plan
from linattn_np.ops.complement import complement, complement_vjp
from tests.matrix_state.cuda.step_twin import CUPY, recorded_plans, stub
from tests.matrix_state.cuda.token import host as step_calls

launched, public = step_calls.launched, step_calls.public


def test_arrays_of_any_layout_and_dtype(launched):
    """Arrays that are not dense, misaligned or of an odd size, and float64: the kernel of all formulas."""
    g = stub(np.random.default_rng(0).uniform(-3, 0, (2, 5, 3, 8)).astype(np.float32))
    for x in (g.swapaxes(1, 2), g.ravel()[1:81], g[0, 0, :, :3].copy().view(type(g)), g.astype(np.float64)):
        dtype = np.float64 if x.dtype == np.float64 else np.float32
        few = 4 * np.finfo(dtype).eps
        np.testing.assert_allclose(complement(CUPY, x, dtype), -np.expm1(x), rtol=few)
        np.testing.assert_allclose(complement_vjp(CUPY, x, x, x, dtype), x - np.exp(x) * x, rtol=few, atol=few)


def test_a_call_is_replayed(public):
    """Launches are all that a call does on the device."""
    for seed in range(3):
        x = step_calls.arrays_of(la.hgrn2, seed=seed)
        out = la.hgrn2(**{n: stub(y) for n, y in x.items()})
        assert np.abs(out - la.hgrn2(**x)).max() < 1e-5
    assert len(recorded_plans()) == 1


def test_kernels_may_have_added_the_gradient_through_the_keys():
    """d.k is None then, and dg is left as it is."""
    change, dg = la.hgrn2.spec.change, np.ones((2, 3))
    assert change.complement_keys
    assert not la.gla.spec.change.complement_keys
    assert change.to_core_vjp(None, Inputs(None, None, None, dg))["g"] is dg


def test_keys_divided_by_their_length_are_not_those_of_log_decays():
    """A backend must not take them for 1 - e^g."""
    q = np.ones((1, 2, 1, 4))
    plan = Plan(np, np.float64, 1.0, l2norm=True, complement_keys=True)
    x, inner = preprocess.OF_INPUTS["l2norm"][0](None, Inputs(q, q, q, -q), plan)
    assert np.allclose(x.k, 0.5)
    assert not inner.complement_keys
