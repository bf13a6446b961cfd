"""The compiled backend: calls on NumPy arrays as rows, tasks and kernels."""

from __future__ import annotations

from math import gcd, lcm, prod
from typing import Any

import numpy as np

from ...ops.sums import over_tokens
from ...runtime import threads
from ...runtime.arrays import complex_of, is_complex
from ...runtime.constants import constant_zeros
from ...runtime.pieces.memory import empty, working
from ...runtime.pieces.registers import LINE
from ...runtime.pieces.run import over_matrices
from ..policy import LEAST_LINES, segment
from ..types import Inputs, Plan, Residuals
from . import scan
from .spans import SPAN, real_rows, spans_of


def forward(plan: Plan, x: Inputs, state: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(out, the final states, the states before every segment of tokens if a backward follows)."""
    call = Call(plan, x, state)
    out, end = empty(x.x.shape, call.kind), empty(call.state_shape, call.kind)
    marks = call.marks() if plan.gradients else None
    call.run(scan.forward, {"out": out, "marks": marks}, state, end)
    return out, end, marks


def backward(residuals: Residuals, dout: np.ndarray | None, dstate: Any) -> tuple[Inputs, np.ndarray]:
    """(gradients of the inputs, of the initial states)."""
    x, plan, _, state, marks = residuals
    call = Call(plan, x, state)
    dx, begin = empty(x.x.shape, call.kind), empty(call.state_shape, call.kind)
    dgate = empty((call.N, call.D * x.block) if x.is_constant else x.gate.shape, call.kind)
    d = constant_zeros(np, (call.D,), call.kind, "cpu") if dout is None else dout
    call.run(scan.backward, {"dx": dx, "dgate": dgate, "dout": d, "marks": marks}, dstate, begin)
    if x.is_constant:
        dgate = over_tokens(np, dgate.view(call.real)).view(call.kind).reshape(x.gate.shape)
    return x.with_gate(dx, dgate), begin


class Call:
    """The arrays of a call as rows of real numbers, and its tasks."""

    def __init__(self, plan: Plan, x: Inputs, state: Any):
        (*lead, T, self.D), self.plan, self.x = x.x.shape, plan, x
        self.real = np.dtype(plan.dtype)
        self.is_complex = any(y is not None and is_complex(y) for y in (*x, state))
        self.kind = np.dtype(complex_of(np, self.real)) if self.is_complex else self.real
        self.width = self.D * (1 + self.is_complex)  # real numbers of a row
        self.segment = segment(self.width)
        own = spans_of(plan, tuple(lead), T, self.segment)
        self.N, self.places, self.spans, self.state_shape = own.count, own.places, own.table, (*own.lead, self.D)

    def marks(self) -> np.ndarray:
        """Memory for the states before every segment."""
        return working((self.places, self.D), self.kind)

    def run(self, kernel: Any, arrays: dict[str, np.ndarray | None], start: Any, end: np.ndarray) -> None:
        """A kernel over all its tasks."""
        if not self.width:
            return
        x, N = self.x, self.N
        count = prod(x.x.shape[:-1])
        given = {"gate": x.gate, "x": x.x, "start": start, "end": end, **arrays}
        wide = x.block * self.width
        held = {name: real_rows(y, wide if name in ("gate", "dgate") else self.width, self.kind, self.real)
                for name, y in given.items() if y is not None}  # fmt: skip
        if "dout" in held and len(held["dout"]) != count:  # zeros
            held["dout"] = np.broadcast_to(held["dout"], (count, self.width))
        if x.g is not None:
            held["factors"] = working((N, self.width), self.real)
        blocks, each = self.blocks()
        sizes = {"count": count, "gates": len(held["gate"]), "D": self.width, "N": N, "each": each, "blocks": blocks,
                 "block": x.block, "wide": wide,
                 "segment": self.segment if "marks" in held else 0, "places": self.places, "starts": N, "owners": N,
                 "dgates": len(held.get("dgate", ())), "span": SPAN, "is_log": int(x.g is not None),
                 "is_complex": int(self.is_complex), "is_constant": int(x.is_constant),
                 "has_start": int(start is not None), "scale": self.plan.scale}  # fmt: skip
        over_matrices(kernel, scan.SCAN, sizes | held | {"spans": self.spans}, N * blocks, self.real.name)

    def blocks(self) -> tuple[int, int]:
        """(blocks of channels, numbers of one): tasks for every thread, of whole lines of memory and whole matrices."""
        line, count = lcm(LINE // self.real.itemsize, self.x.block * (1 + self.is_complex)), threads.num_threads()
        blocks = count // gcd(self.N, count)
        each = max(-(-self.width // blocks // line) * line, LEAST_LINES * line)
        return -(-self.width // each), each
