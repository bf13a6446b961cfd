"""Decays of the value channels alone, by the kernels of a decay of the key channels, on the transposed state.

    S_t = S_{t-1} diag(e^{gv_t}) + k_t^T v_t        S^T_t = diag(e^{gv_t}) S^T_{t-1} + v_t^T k_t
    out_t = scale q_t S_t                           the gradient of <q'_t, scale S^T_t q_t> with respect to q'_t

So the output is the gradient of the queries in a call with keys v, values k and the cotangent q, and the gradients
are the output and the gradients of that call with the cotangent of the output as its queries.
"""

from __future__ import annotations

from typing import Any

from ....ops.sums import sum_of_groups
from ....runtime.arrays import Array, cast, dtype_name, shared_heads
from ...types import Decay, Erase, Inputs, Plan, ReadState, Saved
from . import calls as vector
from . import gradients as vector_backward


def unsupported_reason(x: Inputs, plan: Plan) -> str | None:
    """Why the kernels do not cover a call with a decay of the value channels; None where they do."""
    if x.erase is not Erase.NONE or x.decay is not Decay.NONE or x.gv is None:
        return "the kernels are of a decay of the value channels alone"
    if x.u is not None or plan.query_reads is not ReadState.UPDATED:
        return "the kernels of a decay of the value channels read a token's own write, without a bonus"
    if x.q is None or max(x.q.shape[-2], x.gv.shape[-2]) > x.v.shape[-2]:
        return "there are no queries, or more heads of them or of decays than of values"
    if dtype_name(x.q) != dtype_name(x.k):
        return "queries and keys are of different dtypes"
    if dtype_name(x.v) != dtype_name(x.k) and (dtype_name(x.v) != "float32" or "v" not in plan.computed):
        return "the chunk kernels of a vector decay take bfloat16"
    heads = min(x.k.shape[-2], x.gv.shape[-2])  # those that are compared: of views, nothing is computed
    return vector.unsupported_arrays(Inputs(x.k, x.v[..., :heads, :], x.k, x.gv[..., :heads, :]), plan)


unsupported_gradients = unsupported_reason


def how(x: Inputs, plan: Plan) -> str:
    """The kernels of a call that is covered, in words."""
    return f"the transposed state: {vector.how(x, plan)}"


def handles(x: Inputs, plan: Plan) -> frozenset[str]:
    """The preprocessing steps that the kernels include."""
    return frozenset()


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved)."""
    xp, own = plan.xp, plan._replace(computed=(), gate_lower_bound=None)
    _, end, residuals = vector.forward(_transposed(plan, x, None), own, _exchanged(xp, state), keep=True)
    q = shared_heads(xp, x.q, x.v.shape[-2])
    out = vector_backward.query_gradients(residuals, q, plan.dtype if "v" in plan.computed else x.v.dtype)
    end = _exchanged(xp, end) if plan.returns_state else xp.swapaxes(end, -1, -2)
    return out, end, Saved(x, plan, state, None)


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state."""
    x, plan, state, _ = saved
    xp, own = plan.xp, plan._replace(computed=(), gate_lower_bound=None)
    dout = xp.zeros(x.v.shape, dtype=x.k.dtype) if dout is None else dout
    dq, _, residuals = vector.forward(_transposed(plan, x, dout), own, _exchanged(xp, state), keep=True)
    q = shared_heads(xp, x.q, x.v.shape[-2])
    d, dstate = vector_backward.backward(residuals, q, _exchanged(xp, dstate))
    dq, dk = (sum_of_groups(xp, cast(xp, y, plan.dtype), like.shape[-2]) if y.shape != like.shape else y
              for y, like in ((dq, x.q), (d.v, x.k)))  # fmt: skip
    none = dict.fromkeys(Inputs._fields)
    dstate = xp.swapaxes(dstate, -1, -2) if state is None else _exchanged(xp, dstate)
    return Inputs(**none | {"q": dq, "k": dk, "v": d.k, "gv": d.g}), dstate


def _transposed(plan: Plan, x: Inputs, q: Array | None) -> Inputs:
    """The call on the transposed state with queries q, None: its keys; all rows in the dtype of the keys."""
    xp, kind = plan.xp, x.k.dtype
    k = cast(xp, x.v, kind)
    return Inputs(k if q is None else cast(xp, q, kind), k, shared_heads(xp, x.k, x.v.shape[-2]), x.gv)


def _exchanged(xp: Any, state: Array | None) -> Array | None:
    """S^T of S, and back."""
    return None if state is None else xp.ascontiguousarray(xp.swapaxes(state, -1, -2))
