"""Keys wider than the kernel of a few tokens: a launch for each block of channels, its part of the state in place.

out_t = sum over blocks b of q_tb S_tb, in the order of the blocks
"""

from __future__ import annotations

from math import prod
from typing import Any

from ....ops.sums import added
from ....runtime.arrays import Array, cast
from ... import preprocess as steps
from ...types import Inputs, Plan, Saved
from .launch import launched, prepared, states


def takes(x: Inputs, plan: Plan) -> bool:
    """Whether the launches compute a call, of keys in several blocks; without an erase term, the blocks are apart."""
    return plan.states_at is None and plan.pool_rows is None and not plan.is_ragged and len(steps.cuts(x)) > 1


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
    xp, (H, V), K, out = plan.xp, x.v.shape[-2:], x.k.shape[-1], None
    lead, wide = tuple(x.v.shape[:-3]), x._replace(v=cast(xp, x.v, xp.float32))
    start, is_own = states(xp, state, K, V)
    end: Any = state if plan.overwrite and is_own else xp.empty((*lead, H, K, V), dtype=xp.float32)
    last: Any = start if end is state else end.reshape(prod(lead), H, K, V)
    for c in steps.cuts(x):
        of_block = None if start is None else start[:, :, c, :]
        call = prepared(steps.part(wide, c), plan, of_block, to=last[:, :, c, :])
        launched(call)
        out = call.out if out is None or call.out is None else added(xp, out, call.out)
    return out, end
