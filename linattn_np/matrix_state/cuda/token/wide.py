"""Keys wider than the kernel of a few tokens: a launch for each block of channels, its part of the state in place.

out_t = sum over blocks b of q_tb S_tb, in the order of the blocks

With the delta rule, of one token, launches before these read y = sum over blocks b of r_tb S_{t-1,b}; the values become
beta_t (v_t - e^{g_t} y), and nothing is erased any more.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ....ops.cuda.formulas import compiled
from ....ops.sums import added
from ....runtime.arrays import Array, cast
from ... import policy
from ... import preprocess as steps
from ...types import Decay, Erase, Inputs, Plan, ReadState, Saved
from .launch import launched, states


def takes(x: Inputs, plan: Plan) -> bool:
    """Whether the launches compute a call, of keys in several blocks; without an erase term, the blocks are apart."""
    whole = plan.states_at is None and plan.pool_rows is None and not plan.is_ragged
    return whole and len(steps.cuts(without_erase(x, plan))) > 1


def without_erase(x: Inputs, plan: Plan) -> Inputs:
    """The inputs without the erase term of a delta rule that is two launches for each block: of one token."""
    one = x.erase is Erase.DELTA and x.decay is not Decay.VECTOR and x.v.shape[-3] == 1
    one = one and plan.micro_steps == 1 and plan.query_reads is ReadState.UPDATED
    return x._replace(r=None, beta=None) if one and x.k.shape[-1] > policy.WIDEST_CUDA else x


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Saved]:
    """(out, final state, saved); the final state is `state` itself if the plan allows overwriting, else float32."""
    out, end = summed(x, plan, state)
    return None if out is None else cast(plan.xp, out, x.v.dtype), end, Saved(x, plan, state, None)


def residuals(saved: Saved) -> steps.Wide:
    """What the transpose of the sum over blocks needs."""
    x, plan, state, _ = saved
    wide, inner = x._replace(v=cast(plan.xp, x.v, plan.dtype)), plan._replace(overwrite=False)
    each = [(steps.part(wide, c), None if state is None else state[..., c, :]) for c in steps.cuts(x)]
    return steps.Wide(wide, plan, [Saved(part, inner, S, None) for part, S in each])


def summed(x: Inputs, plan: Plan, state: Array | None) -> tuple[Any, Any]:
    """(out in float32, final state)."""
    if x.erase is Erase.DELTA:
        x = without_erase(x, plan)._replace(v=_new_values(x, plan, state))
    xp, (H, V), K, out = plan.xp, x.v.shape[-2:], x.k.shape[-1], None
    lead, wide = tuple(x.v.shape[:-3]), x._replace(v=cast(xp, x.v, xp.float32))
    start, is_own = states(xp, state, K, V)
    end: Any = state if plan.overwrite and is_own else xp.empty((*lead, H, K, V), dtype=xp.float32)
    last: Any = start if end is state else end.reshape(prod(lead), H, K, V)
    for c in steps.cuts(x):
        of_block = None if start is None else start[:, :, c, :]
        y, *_ = launched(steps.part(wide, c), plan, of_block, to=last[:, :, c, :])
        out = y if out is None or y is None else added(xp, out, y)
    return out, end


def _new_values(x: Inputs, plan: Plan, state: Array | None) -> Array:
    """beta_t (v_t - r_t S), in float32; S is decayed where r reads the decayed state."""
    xp, f32, new = plan.xp, plan.xp.float32, (x.v.shape, plan.xp.float32)
    if state is None:
        return compiled("product", (x.v, x.beta), new, f32)
    reader = Inputs(x.r, x.k, cast(xp, x.v, f32), x.g)
    before = plan._replace(scale=1.0, query_reads=ReadState.PREVIOUS, overwrite=False)
    y, _ = summed(reader, before, state)
    g = x.g if plan.erase_reads is ReadState.DECAYED else None
    error = compiled("decayed_sum", (y, compiled("scaled", (x.v,), new, f32, -1.0), g), new, f32)
    return compiled("product", (error, compiled("scaled", (x.beta,), (x.beta.shape, f32), f32, -1.0)), new, f32)
