"""The compiled selective scan: calls on NumPy arrays as rows, workers and kernels."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...ops.cpu.formulas import dense
from ...ops.host import write
from ...ops.sums import over_tokens
from ...runtime import threads
from ...runtime.arrays import complex_of
from ...runtime.constants import constant_ones, constant_zeros
from ...runtime.pieces.memory import empty, working
from ...runtime.pieces.registers import NARROW
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.vectors import BYTES
from ..types import Plan, SelectiveInputs
from . import complex_selective, selective
from .spans import SPAN, real_rows, spans_of

SEGMENT, WIDE = 32, 64  # tokens between kept states; numbers of a channel from which on they are twice as many
COMPLEX = ("A", "B", "C", "start", "end")  # complex for complex channels; the other arrays are real
BLOCK = 1024  # bytes of a row: the channels of a job, whose sums of dB and dC do not depend on the threads


def forward(plan: Plan, x: SelectiveInputs, state: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(out, the final states, the states before every segment of tokens if a backward follows)."""
    call = Call(plan, x)
    out, end = empty(x.x.shape, call.dtype), empty(call.state_shape, call.kind)
    marks = call.marks() if plan.gradients else None
    call.run("forward", {"out": out, "marks": marks}, state, end)
    return out, end, marks


def backward(
    plan: Plan, x: SelectiveInputs, state: Any, marks: np.ndarray, dout: np.ndarray | None, dstate: Any
) -> tuple[SelectiveInputs, np.ndarray]:
    """(gradients of the inputs, of the initial states)."""
    call = Call(plan, x)
    dx, begin, kinds = empty(x.x.shape, call.dtype), empty(call.state_shape, call.kind), 3 if x.dt is None else 1
    sums = None if x.A is None else working((call.owners, kinds * call.N, call.D), call.dtype)
    d = np.broadcast_to(constant_zeros(np, (call.D,), call.dtype, "cpu"), x.x.shape) if dout is None else dout
    made = {"dx": dx, "dA": sums, "dout": d, "marks": marks}
    if x.dt is None:
        dskip = None if call.skip is None else working((call.owners, call.D), call.dtype)
        call.run("backward", made | {"dskip": dskip}, dstate, begin)
        dA, dB, dC = call.of_channels(over_tokens(np, sums, 2), kinds)
        dD = None if dskip is None else over_tokens(np, dskip)
        return x._replace(x=dx, A=dA, B=dB, C=dC, raw=None if dD is None else x.raw._replace(D=dD)), begin
    ddt, tokens = empty(x.x.shape, call.dtype), [working((call.blocks, call.count, call.N), call.dtype) for _ in "BC"]
    call.run("backward", made | {"ddt": ddt, "dB": tokens[0], "dC": tokens[1]}, dstate, begin)
    dB, dC = (over_tokens(np, y, 2).view(call.kind).reshape(x.B.shape) for y in tokens)
    if (dA := None if sums is None else over_tokens(np, sums, 2)) is not None:
        dA = call.of_channels(dA, 1)[0] if x.is_complex else dA.T
    return x._replace(x=dx, dt=ddt, A=dA, B=dB, C=dC), begin


class Call:
    """The arrays of a call as rows, its sequences and its blocks of channels."""

    def __init__(self, plan: Plan, x: SelectiveInputs):
        (*lead, T, self.D), self.plan, self.x = x.x.shape, plan, x
        self.dtype = np.dtype(plan.dtype)
        self.kind = np.dtype(complex_of(np, self.dtype)) if x.is_complex else self.dtype
        self.N = x.channels[1] * (1 + x.is_complex)  # real numbers of a channel
        self.each = BLOCK // self.dtype.itemsize
        self.blocks, self.count = -(-self.D // self.each), prod(lead) * T
        self.segment = SEGMENT if self.N <= WIDE else 2 * SEGMENT
        self.skip = x.raw.D if x.dt is None and x.raw is not None else None
        own = spans_of(plan, tuple(lead), T, self.segment)
        self.owners, self.places, self.spans = own.count, own.places, own.table
        self.state_shape = (*own.lead, *x.channels)

    def marks(self) -> np.ndarray:
        """Memory for the states before every segment."""
        return working((self.places * self.N, self.D), self.dtype)

    def of_channels(self, sums: np.ndarray, kinds: int) -> list[np.ndarray]:
        """Sums (kinds N, D) as arrays of channels (D, N), complex if the numbers are."""
        each = dense(sums.T, self.dtype).reshape(self.D, kinds, self.N)
        return [each[:, n].view(self.kind) for n in range(kinds)]

    def run(self, name: str, made: dict[str, Any], start: Any, end: np.ndarray) -> None:
        """The kernel `forward` or `backward` over all its jobs."""
        x, D, N = self.x, self.D, self.N
        if not D or not N or not self.owners:
            zero = constant_zeros(np, (1,), self.dtype, "cpu")
            for y in (end, *(y for name, y in made.items() if y is not None and name not in ("dout", "marks"))):
                write(np, y, zero)
            return
        jobs = self.owners * self.blocks
        workers, column = min(threads.num_threads(), jobs), NARROW * BYTES // self.dtype.itemsize
        given = {"x": (x.x, D), "end": (end, D * N), "B": (x.B, N), "C": (x.C, N)}
        given |= {} if x.A is None else {"A": (x.A, N)}
        given["dt"] = (np.broadcast_to(constant_ones((D,), self.dtype), x.x.shape) if x.dt is None else x.dt), D
        given |= {n: (y, N if n in ("dB", "dC") else D) for n, y in made.items() if y is not None}
        given |= {} if self.skip is None else {"skip": (self.skip, D)}
        given |= {} if start is None else {"start": (start, D * N)}
        held = {n: real_rows(y, width, self.kind if n in COMPLEX else self.dtype, self.dtype)
                for n, (y, width) in given.items()}  # fmt: skip
        kept, scratch = (
            workers * (self.segment + 1) * N,
            ("A_rows", "h", *(("B_rows", "C_rows") if x.dt is None else ())),
        )
        held |= {n: working((workers * N, self.each), self.dtype) for n in scratch}
        more = (*(("states",) if "dx" in held else ()), *(("decays",) if "dx" in held or x.is_complex else ()))
        held |= {n: working((kept, column), self.dtype) for n in more}
        sizes = {"jobs": jobs, "workers": workers, "blocks": self.blocks, "each": self.each, "segment": self.segment,
                 "has_start": int(start is not None), "in_columns": int(self.plan.chunk_size == 1 or x.A is None),
                 "is_constant": int(x.dt is None), "by_keys": int(x.A is None),
                 "scale": (1 + x.is_complex) * self.plan.scale,
                 "count": self.count, "D": D, "N": N, "DN": D * N, "starts": self.owners, "owners": self.owners,
                 "inputs": len(held["B"]), "weights": workers * N if x.dt is None else 0,
                 "skips": len(held.get("skip", ())), "dskips": len(held.get("dskip", ())),
                 "marked": len(held.get("marks", ())), "rows": len(held.get("dA", ())),
                 "partial": self.blocks * self.count, "scratch": workers * N, "kept": kept, "column": column,
                 "span": SPAN}  # fmt: skip
        kernel = getattr(complex_selective if x.is_complex else selective, name)
        over_matrices(kernel, selective.SELECTIVE, sizes | held | {"spans": self.spans}, workers, self.dtype.name,
                      of=frozenset(("rates" if x.A is not None else "keys",)))  # fmt: skip
