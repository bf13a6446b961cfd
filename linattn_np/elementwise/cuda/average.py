"""Averages in log space of CuPy arrays by the kernel of cuda_src/elementwise/average.cu, forward and backward.

Its tiles, links and launches are those of the recurrence. A forward that a backward follows keeps the states before
the backward's tiles, and behind them the last ones, each with the token whose weight is its maximum.
"""

from __future__ import annotations

from ...ops.cuda.sums import each_over_middle
from ...runtime.arrays import Array
from ...runtime.cuda import record
from ..types import GatedInputs, Plan
from .calls import Call, lasting, zeros_like

State = tuple[Array, Array, Array]  # S, n, m (..., D)
KEPT = 4  # numbers of a kept state: S, n, m, the token of m


def forward(plan: Plan, x: GatedInputs, state: State | None) -> tuple[Array, State, Array | None]:
    """(out, the final states, the kept states if a backward follows)."""
    call = Call(plan, x, None)
    out, end = lasting(tuple(x.x.shape), x.x.dtype), lasting((3, *call.state_shape), call.kind)
    marks, last, size = None, None, 0
    if plan.gradients:
        own = call.cut(True)
        count, size = call.tiles(own), own.tokens
        marks = lasting((count + call.N, call.D, KEPT), call.kind)
        last = marks[count:]
    call.run(False, {"out": out, "end": end, "marks": marks, "last": last} | starts(call, state), size)
    return out, (end[0], end[1], end[2]), marks


def backward(
    plan: Plan, x: GatedInputs, marks: Array, dout: Array | None, dstate: State | None
) -> tuple[GatedInputs, State]:
    """(gradients of the inputs, of the initial states)."""
    call = Call(plan, x, None)
    count = call.tiles(call.cut(True))
    dv, dk = lasting(tuple(x.x.shape), x.x.dtype), lasting(tuple(x.y.shape), x.y.dtype)
    begin, sums = lasting((3, *call.state_shape), call.kind), record.empty((2, count, call.D), call.real)
    own = {"dout": zeros_like(plan.xp, x.x) if dout is None else dout, "out": dv, "dgate": dk, "end": begin,
           "sums": sums, "marks": marks, "last": marks[count:]}  # fmt: skip
    call.run(True, own | starts(call, dstate))
    dw, du = (y[0] for y in each_over_middle([sums[:1], sums[1:]], [call.real] * 2))
    return GatedInputs(x.formula, dv, dk, None, (dw, du)), (begin[0], begin[1], begin[2])


def starts(call: Call, state: State | None) -> dict[str, Array | None]:
    """The parts of a state, or of its gradient."""
    parts = (None, None, None) if state is None else state
    return {name: call.state(y) for name, y in zip(("start", "start_n", "start_m"), parts, strict=True)}
