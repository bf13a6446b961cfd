"""The compiled selective scan: calls on NumPy arrays as rows, workers and kernels."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ...runtime import threads
from ...runtime.arrays import cast
from ...runtime.constants import constant_zeros, host_constants
from ...runtime.pieces.memory import empty, working
from ...runtime.pieces.registers import NARROW
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.vectors import BYTES
from ...runtime.recorder import refuse
from ..types import Plan
from . import selective

if TYPE_CHECKING:
    from ..readouts.selective import SelectiveInputs

SEGMENT = 32  # tokens between kept states
BLOCK = 1024  # bytes of a row: the channels of a job, whose sums of dB and dC do not depend on the threads


def forward(plan: Plan, x: SelectiveInputs, state: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(out, the final states, the states before every segment of tokens if a backward follows)."""
    call = Call(plan, x)
    out, end = empty(x.x.shape, call.dtype), empty(call.state_shape, call.dtype)
    marks = call.marks() if plan.gradients else None
    call.run(selective.forward, {"out": out, "marks": marks}, state, end)
    return out, end, marks


def backward(
    plan: Plan, x: SelectiveInputs, state: Any, marks: np.ndarray, dout: np.ndarray | None, dstate: Any
) -> tuple[SelectiveInputs, np.ndarray]:
    """(gradients of the inputs, of the initial states)."""
    refuse("NumPy adds sums of blocks")
    call = Call(plan, x)
    dx, ddt, begin = (empty(s, call.dtype) for s in (x.x.shape, x.x.shape, call.state_shape))
    sums = {n: working((call.blocks, call.count, call.N), call.dtype) for n in ("dB", "dC")}
    dA = working((call.owners, call.N, call.D), call.dtype)
    d = np.broadcast_to(constant_zeros(np, (call.D,), call.dtype, "cpu"), x.x.shape) if dout is None else dout
    made = {"dx": dx, "ddt": ddt, "dA": dA, "dout": d, "marks": marks} | sums
    call.run(selective.backward, made, dstate, begin)
    dB, dC = (np.sum(y, axis=0).reshape(x.B.shape) for y in sums.values())
    return x._replace(x=dx, dt=ddt, A=np.sum(dA, axis=0).T, B=dB, C=dC), begin


class Call:
    """The arrays of a call as rows, its sequences and its blocks of channels."""

    def __init__(self, plan: Plan, x: SelectiveInputs):
        (*lead, T, self.D), self.N, self.plan, self.x = x.x.shape, x.A.shape[1], plan, x
        self.dtype = np.dtype(plan.dtype)
        self.each = BLOCK // self.dtype.itemsize
        self.blocks, self.count = -(-self.D // self.each), prod(lead) * T
        if plan.sequences[0].row is None:
            ends = tuple((n * T, n * T + T) for n in range(prod(lead)))
        else:
            lead, ends = [len(plan.sequences)], tuple((s.start, s.stop) for s in plan.sequences)
        self.owners, self.state_shape = len(ends), (*lead, self.D, self.N)
        counts = [-(-(stop - start) // SEGMENT) for start, stop in ends]
        self.places = sum(counts)
        spans = [(*end, first) for end, first in zip(ends, np.cumsum([0, *counts]), strict=False)]
        self.spans = host_constants.once(
            ("spans", ends, SEGMENT), lambda: np.array(spans, np.int64).reshape(-1, selective.SPAN)
        )

    def marks(self) -> np.ndarray:
        """Memory for the states before every segment."""
        return working((self.places * self.N, self.D), self.dtype)

    def rows(self, y: np.ndarray, width: int) -> np.ndarray:
        """An array in the dtype of the computation, as rows of numbers side by side."""
        y = cast(np, y, self.dtype)
        y = y if y.strides[-1] == y.itemsize or y.shape[-1] == 1 else np.ascontiguousarray(y)
        return y.reshape(-1, width)

    def run(self, kernel: Any, made: dict[str, Any], start: Any, end: np.ndarray) -> None:
        """A kernel over all its jobs."""
        x, D, N = self.x, self.D, self.N
        if not D or not N or not self.owners:
            end[...] = 0
            return
        jobs = self.owners * self.blocks
        workers, column = min(threads.num_threads(), jobs), NARROW * BYTES // self.dtype.itemsize
        given = {"x": (x.x, D), "dt": (x.dt, D), "B": (x.B, N), "C": (x.C, N), "A": (x.A, N), "end": (end, D * N)}
        given |= {n: (y, N if n in ("dB", "dC") else D) for n, y in made.items() if y is not None}
        given |= {} if start is None else {"start": (start, D * N)}
        held = {n: self.rows(y, width) for n, (y, width) in given.items()}
        kept = workers * (SEGMENT + 1) * N
        held |= {n: working((workers * N, self.each), self.dtype) for n in ("A_rows", "h")}
        if "dx" in held:
            held |= {n: working((kept, column), self.dtype) for n in ("states", "decays")}
        sizes = {"jobs": jobs, "workers": workers, "blocks": self.blocks, "each": self.each, "segment": SEGMENT,
                 "has_start": int(start is not None), "scale": self.plan.scale,
                 "count": self.count, "D": D, "N": N, "DN": D * N, "starts": self.owners, "owners": self.owners,
                 "marked": len(held.get("marks", ())), "rows": self.owners * N, "partial": self.blocks * self.count,
                 "scratch": workers * N, "kept": kept, "column": column, "span": selective.SPAN}  # fmt: skip
        over_matrices(kernel, selective.SELECTIVE, sizes | held | {"spans": self.spans}, workers, self.dtype.name)
