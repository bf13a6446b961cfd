"""One token of a NORMALISED read-out: the state and its sum of weights in one launch of step.cu."""

from __future__ import annotations

from typing import Any

from ....runtime.arrays import Array, cast
from ....runtime.cuda import launch
from ... import policy
from ...types import Decay, Erase, Inputs, Plan
from .launch import Sums, launched, prepared


def takes(x: Inputs, plan: Plan, state: Any) -> bool:
    """Whether the kernel computes a call: of one token, in float32, without an erase term or decays of channels."""
    K, V = x.k.shape[-1], x.v.shape[-1]
    plain = x.erase is Erase.NONE and x.decay is not Decay.VECTOR and x.gv is x.u is None and x.q is not None
    usual = plan.causal and plan.states_at is None and not plan.is_ragged and plan.pool_rows is None
    small = 0 < K <= policy.WIDEST_CUDA and 0 < V <= policy.WIDEST_CUDA and 0 not in (*x.v.shape, *x.q.shape)
    fits = all(y.shape[-2] <= x.v.shape[-2] for y in (x.k, x.g) if y is not None)
    parts = state is None or all(S.dtype == plan.dtype for S in state)
    here = x.v.device.id == launch.current_device()
    return (plain and usual and small and fits and parts and here and x.v.shape[-3] == 1
            and plan.dtype == plan.xp.float32 and launch.unusable() is None)  # fmt: skip


def forward(x: Inputs, plan: Plan, state: Any, w: Array | None, least: Array | None, eps: float) -> tuple[Any, Any]:
    """(out, (S, z) after the token), which is `state` itself where the plan allows overwriting.

    out_t = q_t S_t over scale q_t z_t + eps, or over max(|scale q_t z_t|, least_t).
    """
    S, z = (None, None) if state is None else (state[0], plan.xp.ascontiguousarray(state[1]))
    w, least = (None if y is None else cast(plan.xp, y, plan.xp.float32) for y in (w, least))
    call = prepared(x, plan, S, Sums(w, least, eps, z))
    launched(call)
    return cast(plan.xp, call.out, x.v.dtype), (call.end, call.z_end)
