"""Read a state without writing: every query sees the same S.   out = scale q S."""

from __future__ import annotations

from ...core import CallPlan
from ...runtime.arrays import Array, cast, sum_to, swap
from ..heads import join_state, split, split_state
from ..types import Plan


def _split(plan: CallPlan | Plan, q: Array, state: Array) -> tuple[Array, Array, list[slice]]:
    """q (..., G, R, T, K), state (..., G, R, K, V) (or one row per sequence), and token ranges that share a state."""
    xp, G = plan.xp, min(q.shape[-2], state.shape[-3])
    return (
        split(xp, cast(xp, q, plan.dtype), G),
        split_state(xp, cast(xp, state, plan.dtype), G),
        [slice(s.start, s.stop) for s in plan.sequences],
    )


def read_fwd(plan: CallPlan | Plan, q: Array, state: Array) -> Array:
    """q (..., Tq, Hq, K), state (..., H, K, V) or (N, H, K, V) -> (..., Tq, max(Hq, H), V)."""
    xp = plan.xp
    core, S, ranges = _split(plan, q, state)
    if plan.sequences and plan.sequences[0].row is not None:
        out = xp.concat([core[..., t, :] @ S[n, ...] for n, t in enumerate(ranges)], axis=-2) if ranges else core @ S
    else:
        out = core @ S
    out = plan.scale * out
    return swap(xp, xp.reshape(out, (*out.shape[:-4], out.shape[-4] * out.shape[-3], *out.shape[-2:])), -3)


def read_vjp(plan: CallPlan | Plan, q: Array, state: Array, dout: Array) -> tuple[Array, Array]:
    """(dq, dstate) in the dtype of the computation."""
    xp, T = plan.xp, plan.xp.matrix_transpose
    core, S, ranges = _split(plan, q, state)
    c = plan.scale * split(xp, cast(xp, dout, plan.dtype), core.shape[-4])
    if plan.sequences and plan.sequences[0].row is not None:
        dq = xp.concat([c[..., t, :] @ T(S[n, ...]) for n, t in enumerate(ranges)], axis=-2)
        dS = xp.stack([sum_to(xp, T(core[..., t, :]) @ c[..., t, :], S.shape[1:]) for t in ranges], axis=0)
    else:
        dq, dS = c @ T(S), sum_to(xp, T(core) @ c, S.shape)
    dq = sum_to(xp, dq, core.shape)
    dq = swap(xp, xp.reshape(dq, (*dq.shape[:-4], dq.shape[-4] * dq.shape[-3], *dq.shape[-2:])), -3)
    return dq, join_state(xp, dS)
