"""Queries and keys through a feature map, and outputs over the sum of their weights.

    S_t = e^{g_t} S_{t-1} + phi(k_t)^T v_t        z_t = z_{t-1} + phi(k_t)
    out_t = scale phi(q_t) S_t                    with eps: the same / (scale phi(q_t) z_t^T + eps)

Compiled loops make features chunk by chunk and divide as they write (numba_features.py); elsewhere features are made
first, the values have a column of ones, and its output divides the others. The state has z as its last column.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...ground.backend import Choice
from ...ground.namespace import Array, cast
from ...pieces.averages import divide, divide_vjp, with_ones
from ...pieces.map_steps import Steps
from . import NUMBA
from . import backward as room_backward
from . import choose as room_choose
from . import forward as room_forward
from .inputs import Average, Inputs, Plan


class MappedInputs(NamedTuple):
    """NumPy arrays (..., T, heads, width), or their gradients, and a map that has steps."""

    q: Array  # (..., T, Hq, K)  None: write without reading
    k: Array  # (..., T, Hk, K)
    v: Array  # (..., T, H, V)
    g: Array = None  # (..., T, H, 1)
    map: Any = None  # (f, f_vjp)
    eps: float | None = None  # added to the sum of weights that outputs are divided by; None: no division

    @property
    def steps(self) -> Steps:
        return self.map[0].steps

    def memories(self) -> list[Inputs]:
        """The room's inputs as far as shapes go: one number for all features."""
        M, V = self.steps.width(self.k.shape[-1]), self.v.shape[-1] + (self.eps is not None)
        q, k, v = (None if x is None else np.broadcast_to(np.zeros((), x.dtype), (*x.shape[:-1], width))
                   for x, width in ((self.q, M), (self.k, M), (self.v, V)))  # fmt: skip
        return [Inputs(q, k, v, self.g)]


class Saved(NamedTuple):
    """What a forward pass keeps for its backward."""

    x: MappedInputs
    plan: Plan
    starts: Any  # what the room keeps
    out: Array | None  # and what it divided by: with eps alone
    sums: Array | None
    features: tuple[Array | None, Array] | None  # phi(q), phi(k), where they were made


class Kept(NamedTuple):
    """The room's, so that a call looks the same from outside."""

    saved: Saved
    q: Any = True  # nothing of it is made again


def choose(fn: str, x: MappedInputs, plan: Plan, wanted: str | None) -> Choice:
    """The backend of a call."""
    return room_choose(fn, x.memories()[0], plan, wanted)


def is_compiled(fn: str, x: MappedInputs, plan: Plan, wanted: str | None) -> bool:
    """Whether features are made in compiled loops: in chunks, where there is something to walk over."""
    if plan.chunk_size == 1 or 0 in (*x.v.shape, *x.k.shape):
        return False
    return choose(fn, x, plan, wanted).backend is NUMBA


def how(fn: str, x: MappedInputs, plan: Plan, wanted: str | None) -> str:
    """Where features are made, in words."""
    return "features chunk by chunk" if is_compiled(fn, x, plan, wanted) else "features by array calls"


def forward(
    fn: str, x: MappedInputs, plan: Plan, state: Array | None, wanted: str | None
) -> tuple[Array | None, Array, Kept]:
    """(out, final state with z, kept)."""
    if not is_compiled(fn, x, plan, wanted):
        return _forward_of_features(fn, x, plan, state, wanted)
    dtype, sums = np.dtype(plan.dtype), None
    v = x.v if x.eps is None else cast(np, x.v, dtype)  # averages are kept as they are computed
    q, k, before = x.q, x.k, x.steps.before
    if before is not None:
        q, k = (None if y is None else before[0](cast(np, y, dtype)) for y in (q, k))
    own = plan._replace(features=x.steps._replace(before=None))
    if x.eps is not None:
        if x.q is not None:
            heads = max(x.v.shape[-2], x.q.shape[-2])
            sums = np.empty((*x.v.shape[:-2], heads, 1), dtype)
        own = own._replace(average=Average(x.eps, sums))
    out, end, saved = NUMBA.module.forward(Inputs(q, k, v, x.g), own, state)
    return out, end, Kept(Saved(x, plan, saved, out, sums, None))


def _forward_of_features(
    fn: str, x: MappedInputs, plan: Plan, state: Array | None, wanted: str | None
) -> tuple[Array | None, Array, Kept]:
    """The same with features made first."""
    q, k = (None if y is None else x.map[0](cast(np, y, plan.dtype)) for y in (x.q, x.k))
    v = x.v if x.eps is None else with_ones(np, cast(np, x.v, plan.dtype))
    out, end, kept = room_forward(fn, Inputs(q, k, v, x.g), plan, state, wanted)
    sums = None
    if x.eps is not None and out is not None:
        out, sums = divide(np, out, x.eps)
    return out, end, Kept(Saved(x, plan, kept, out, sums, (q, k)))


def backward(kept: Kept, dout: Array | None, dstate: Array | None) -> tuple[MappedInputs, Array]:
    """Gradients of every input, and of the initial state with z."""
    x, plan, starts, out, sums, features = kept.saved
    if features is None:
        if x.eps is not None:
            own = starts.plan
            starts = starts._replace(plan=own._replace(average=own.average._replace(out=out)))
        d, dS = NUMBA.module.backward(starts, dout, dstate)
        before, dq, dk = x.steps.before, d.q, d.k
        if before is not None:
            dq, dk = (None if y is None else before[1](cast(np, y, plan.dtype), dy) for y, dy in ((x.q, dq), (x.k, dk)))
        return MappedInputs(dq, dk, d.v, d.g), dS
    if x.eps is not None and dout is not None:
        dout = divide_vjp(np, cast(np, out, plan.dtype), sums, cast(np, dout, plan.dtype))
    d, dS = room_backward(starts, dout, dstate)
    takes = getattr(x.map[1], "takes_features", False)
    dq, dk = (None if y is None else x.map[1](cast(np, y, plan.dtype), dphi, *((phi,) if takes else ()))
              for y, dphi, phi in zip((x.q, x.k), (d.q, d.k), features, strict=True))  # fmt: skip
    return MappedInputs(dq, dk, d.v if x.eps is None else d.v[..., :-1], d.g), dS
