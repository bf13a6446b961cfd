"""One token of a NORMALISED read-out: the state and its sum of weights in one launch of step.cu.

Of keys wider than the kernel, launches for the blocks of the state (wide.py), then its sum of weights by formulas.
"""

from __future__ import annotations

from typing import Any

from ....ops.cuda.formulas import compiled
from ....runtime.arrays import Array, cast
from ....runtime.cuda import launch
from ... import policy
from ...types import Decay, Erase, Inputs, Plan
from . import wide
from .launch import Sums, launched


def takes(x: Inputs, plan: Plan, state: Any) -> bool:
    """Whether the kernel computes a call: of one token, in float32, without an erase term or decays of channels."""
    K, V = x.k.shape[-1], x.v.shape[-1]
    plain = x.erase is Erase.NONE and x.decay is not Decay.VECTOR and x.gv is x.u is None and x.q is not None
    usual = plan.causal and plan.states_at is None and not plan.is_ragged and plan.pool_rows is None
    small = K > 0 and 0 < V <= policy.WIDEST_CUDA and 0 not in (*x.v.shape, *x.q.shape)
    H, heads = x.v.shape[-2], [y.shape[-2] for y in (x.k, x.g) if y is not None]
    fits = max(heads) <= H if K <= policy.WIDEST_CUDA else {*heads, x.q.shape[-2]} == {H}
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
    if x.k.shape[-1] > policy.WIDEST_CUDA:
        return _of_wide_keys(x, plan, S, Sums(w, least, eps, z))
    out, end, z_end = launched(x, plan, S, Sums(w, least, eps, z))
    return cast(plan.xp, out, x.v.dtype), (end, z_end)


def _of_wide_keys(x: Inputs, plan: Plan, S: Array | None, sums: Sums) -> tuple[Any, Any]:
    """z_t = e^{g_t} z_{t-1} + w_t k_t, and the sums over blocks divided by scale q_t z_t."""
    f32, (w, least, eps, z) = plan.xp.float32, sums
    v = x.v if w is None else compiled("product", (x.v, w), (x.v.shape, f32), f32)
    out, end = wide.summed(x._replace(v=v), plan, S)
    new = (x.k.shape, f32)
    if z is None:
        z_end = compiled("scaled", (x.k,), new, f32, 1.0) if w is None else compiled("product", (x.k, w), new, f32)
    else:
        before = z[..., None, :, :]
        z_end = compiled("decayed_sum", (before, x.k, x.g, w), before if plan.overwrite else new, f32)
    read = compiled("inner", (x.q, z_end), ((*out.shape[:-1], 1), f32), f32)
    average = compiled("average", (out, read, least), (out.shape, x.v.dtype), f32, plan.scale, eps)
    return average, (end, z_end[..., 0, :, :])
