"""Calls whose factors and inputs of the recurrence kernels make of a variant's arrays, as they read these.

CuPy arrays only (cuda/calls.py, cuda_src/elementwise/gates.cuh); others come as Inputs, which array calls or compiled
loops have made.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ...core import Computation, Computed, Explained, register
from ...runtime.arrays import Array, is_cupy
from ..core import CORE
from ..types import AVERAGE, GatedInputs, Plan, Residuals


class Gated(Computation):
    """The computation of GatedInputs."""

    def forward(self, fn: str, x: GatedInputs, plan: Plan, state: Any, wanted: str | None) -> Computed:
        """(the states of all tokens, the final state, residuals)."""
        from ..cuda import calls

        out, end, marks = calls.forward(plan, x, state)
        return out, end, Residuals(x, plan, "cuda", state, marks)

    def backward(self, residuals: Residuals, dout: Array | None, dstate: Any) -> tuple[GatedInputs, Any]:
        """Gradients of the inputs and of the initial state."""
        from ..cuda import calls

        return calls.backward(residuals, dout, dstate)

    def explain(self, fn: str, x: GatedInputs, plan: Plan, wanted: str | None) -> Explained:
        """Two operations a factor and sum, eight a complex one."""
        from ..cuda import calls

        others = {n: "it takes NumPy arrays" if n == "numba" else "covers the call too"
                  for n in CORE.BACKENDS if n != "cuda"}  # fmt: skip
        each = (8.0 if x.is_complex else 4.0 if x.formula == AVERAGE else 2.0) * x.x.shape[-1]
        reason = f"{'requested' if wanted else 'the default path'}: {calls.described(plan, x)}"
        return Explained("cuda", reason, others, "tiles", None, each * prod(x.x.shape[:-1]), each)


def gated(c: Any, formula: str, x: Array, y: Array = None, z: Array = None, *parameters: Array) -> GatedInputs | None:
    """The inputs of a call c that kernels compute; None of others."""
    if not (c.kernels and is_cupy(c.xp)):
        return None
    from ..cuda import calls

    own = GatedInputs(formula, x, y, z, parameters)
    return own if calls.unsupported_reason(own, c.plan) is None else None


GATED = Gated()
register(GATED, GatedInputs)
