"""A constant diagonal system: a state of N complex numbers a channel, which is read as the real part of a sum.

    h_t[d, n] = e^{A[d, n]} h_{t-1}[d, n] + B[d, n] x_t[d],   out_t[d] = 2 scale Re sum_n C[d, n] h_t[d, n]

In compiled loops (cpu/) it is the selective scan whose steps are 1, with an A, B and C of each channel; CuPy arrays
have kernels (cuda/diagonal.py): no array has T x D x N numbers. By array calls D N channels of the core have one.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ...core import Computation, Computed, Explained, register
from ...ops.sums import over_tokens
from ...runtime.arrays import Array, Namespace, as_computed, cast, conjugate, is_cupy
from ..core import CORE, unsupported_reason
from ..types import Inputs, Plan, SystemInputs
from ..types import Residuals as CoreResiduals
from .selective import apart, flat


class Residuals(NamedTuple):
    """Residuals of a forward pass."""

    x: SystemInputs
    plan: Plan
    state: Any
    marks: Any  # of the compiled loops and kernels: the states that pieces of sequences begin with
    states: Any  # of array calls: the states of all tokens
    core: CoreResiduals | None


class Diagonal(Computation):
    """The computation of SystemInputs."""

    def forward(self, fn: str, x: SystemInputs, plan: Plan, state: Any, wanted: str | None) -> Computed:
        """(out, the final state (..., D, N), residuals)."""
        if (calls := compiled(x, plan, wanted)) is not None:
            out, end, marks = calls.forward(plan, x if is_cupy(plan.xp) else x.selective, state)
            return out, end, Residuals(x, plan, state, marks, None, None)
        xp, C = plan.xp, as_computed(plan.xp, x.C, plan.dtype)
        states, end, core = CORE.forward(
            fn, driven(plan, x), plan, None if state is None else flat(plan.xp, state), wanted
        )
        states = apart(plan.xp, states, x)
        out = 2 * xp.sum(xp.real(C * states), axis=-1)
        return out, apart(plan.xp, end, x), Residuals(x, plan, state, None, states, core)

    def backward(self, residuals: Residuals, dout: Array | None, dstate: Any) -> tuple[SystemInputs, Any]:
        """Gradients of the inputs and of the initial state."""
        x, plan, state, marks, states, core = residuals
        if core is None and is_cupy(plan.xp):
            from ..cuda import diagonal

            return diagonal.backward(plan, x, marks, dout, dstate)
        if core is None:
            from ..cpu import selective_calls

            grads, begin = selective_calls.backward(plan, x.selective, state, marks, dout, dstate)
            return SystemInputs(grads.x, *grads[2:5], None if grads.raw is None else grads.raw.D), begin
        xp, dC, dstates = plan.xp, plan.xp.zeros_like(as_computed(plan.xp, x.C, plan.dtype)), None
        if dout is not None:
            twice = xp.astype(2 * cast(xp, dout, plan.dtype), states.dtype)[..., None]
            dC = over_tokens(xp, twice * xp.conj(states), 2)
            dstates = flat(plan.xp, twice * conjugate(xp, as_computed(xp, x.C, plan.dtype)))
        d, begin = CORE.backward(core, dstates, None if dstate is None else flat(plan.xp, dstate))
        dx, B = apart(plan.xp, d.x, x), as_computed(xp, x.B, plan.dtype)
        dB = over_tokens(xp, dx * xp.astype(cast(xp, x.x, plan.dtype), dx.dtype)[..., None], 2)
        dx = xp.sum(xp.real(dx * conjugate(xp, B)), axis=-1)
        return SystemInputs(dx, xp.reshape(d.g, x.A.shape), dB, dC), apart(plan.xp, begin, x)

    def explain(self, fn: str, x: SystemInputs, plan: Plan, wanted: str | None) -> Explained:
        """Eight operations of a state's number; else as the core explains D N channels."""
        if compiled(x, plan, wanted) is None or not is_cupy(plan.xp):
            return CORE.explain(fn, driven(plan, x), plan, wanted)
        others = {n: unsupported_reason(x.selective, plan, n) or "covers the call too"
                  for n in CORE.BACKENDS if n != "cuda"}  # fmt: skip
        each = 8.0 * prod(x.C.shape)
        why = f"{'requested' if wanted else 'the default path'}: elementwise/diagonal.cu"
        return Explained("cuda", why, others, "tiles of tokens in turn", None, each * prod(x.x.shape[:-1]), each)


def compiled(x: SystemInputs, plan: Plan, wanted: str | None) -> Any:
    """The compiled loops or kernels that compute a call; None: array calls do."""
    if wanted in (None, "cuda") and kernels_reason(x, plan.xp, plan.dtype) is None:
        from ..cuda import diagonal

        return diagonal
    if wanted in (None, "numba") and unsupported_reason(x.selective, plan, "numba") is None:
        from ..cpu import selective_calls

        return selective_calls
    return None


def kernels_reason(x: SystemInputs, xp: Namespace, dtype: Any) -> str | None:
    """Why CUDA kernels do not compute a call; None if they do, and then the skip too."""
    if not is_cupy(xp):
        return "it takes CuPy arrays"
    from ..cuda import diagonal

    return diagonal.unsupported_reason(x, xp, dtype)


def driven(plan: Plan, x: SystemInputs) -> Inputs:
    """D N channels of the core: B x, of log factors A."""
    xp, B = plan.xp, as_computed(plan.xp, x.B, plan.dtype)
    u = B * xp.astype(cast(xp, x.x, plan.dtype), B.dtype)[..., None]
    return Inputs(flat(plan.xp, u), None, xp.reshape(x.A, (x.A.shape[0] * x.A.shape[1],)))


register(Diagonal(), SystemInputs)
