"""The selective scan of CuPy arrays by the kernels of cuda_src/elementwise/selective*: raw steps, skip and gate too.

A forward that a backward follows keeps the states before every tile of tokens; the backward computes the others again.
Sums over channels and tokens are sums of blocks, which are added in order: every run has the same bits.
"""

from __future__ import annotations

import math
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from ...ops.cuda.arguments import address
from ...ops.cuda.formulas import KINDS, compiled
from ...ops.cuda.row_arrays import dense, is_aligned, is_narrow, kind_of, launched, tokens_of
from ...ops.cuda.sums import each_over_middle
from ...runtime.arrays import Array, Namespace, cast, dtype_name, is_cupy
from ...runtime.config import config
from ...runtime.cuda import launch, record
from ..types import Plan, SelectiveInputs
from . import selective_plan
from .arguments import SELECTIVE
from .selective_plan import Grid

FORWARD, BACKWARD, STEP = (f"elementwise/selective{n}.cu" for n in ("", "_vjp", "_step"))
MOST_BYTES = 1 << 26  # from a token to the next one
Outputs = dict[str, Array | None]


def unsupported_reason(x: SelectiveInputs, xp: Namespace, dtype: Any) -> str | None:
    """Why the kernels do not compute a call; None if they do."""
    if not is_cupy(xp):
        return "it takes CuPy arrays"
    if x.is_complex:
        return "its kernels are those of real numbers"
    if any(dtype_name(y) not in KINDS for y in x.arrays):
        return "an array has a dtype that its kernels do not read"
    most = selective_plan.MOST_DOUBLE if dtype == xp.float64 else selective_plan.MOST
    if (N := x.channels[1]) > most:
        return f"a state has {N} numbers a channel, the kernels take up to {most}"
    if not prod(x.x.shape) * N:
        return "there is nothing to compute"
    return launch.unusable()


def forward(plan: Plan, x: SelectiveInputs, state: Array | None) -> tuple[Array, Array, Array | None]:
    """(out, the final states, the states before every tile of tokens if a backward follows)."""
    call, start = Call(plan, x), dense(state)
    out = record.empty(tuple(x.x.shape), x.x.dtype)
    own = plan.overwrite and start is state and start is not None and start.dtype == call.dtype
    end = start if own else record.empty(call.state_shape, call.dtype)
    one = call.longest == call.shortest == 1 and plan.neighbours is None
    if one and not plan.gradients and not config.training_bits:
        call.step(start, {"out": out, "end": end})
        return out, end, None
    grid = selective_plan.forward(call.N, call.double)
    marks = record.empty((call.marks(grid.tile), call.D, call.N), call.dtype) if plan.gradients else None
    call.passes(FORWARD, ("carry", "selective"), grid, start, {"out": out, "end": end, "marks": marks})
    return out, end, marks


def backward(
    plan: Plan, x: SelectiveInputs, marks: Array, dout: Array | None, dstate: Array | None
) -> tuple[SelectiveInputs, Array]:
    """(gradients of the inputs, of the initial states)."""
    call = Call(plan, x)
    z, D, bias = call.raw[:3]
    if dout is None:
        dout = compiled("filled", (), (tuple(x.x.shape), x.x.dtype), call.dtype)
    grid = selective_plan.backward(call.N, call.double)
    tiles, (segments, _) = -(-call.D // grid.channels), call.cut(grid)
    outputs = {n: record.empty(tuple(y.shape), y.dtype) for n, y in (("dx", x.x), ("ddt", x.dt))}
    outputs["dz"] = None if z is None else record.empty(tuple(z.shape), z.dtype)
    outputs["end"] = record.empty(call.state_shape, call.dtype)
    sums = {n: record.empty((1, tiles, call.tokens * call.N), call.dtype) for n in ("dB", "dC")}
    widths = ({} if x.A is None else {"dA": call.D * call.N}) | {"dskip": call.D, "dbias": call.D}
    sums |= {n: record.empty((1, call.sequences * segments, width), call.dtype) for n, width in widths.items()}
    call.passes(BACKWARD, ("carry_back", "selective_vjp"), grid, dense(dstate), outputs | sums | {"marks": marks}, dout)
    each = {"dB": x.B, "dC": x.C, "dA": x.A, "dskip": D, "dbias": bias}
    parts, kinds = zip(*((None, None) if y is None else (sums[n], y.dtype) for n, y in each.items()), strict=True)
    found = zip(each_over_middle(parts, kinds), each.values(), strict=True)
    dB, dC, dA, dD, dbias = (None if y is None else d.reshape(y.shape) for d, y in found)
    grads = x._replace(x=outputs["dx"], dt=outputs["ddt"], A=dA, B=dB, C=dC)
    return grads._replace(raw=call.raw._replace(z=outputs["dz"], D=dD, dt_bias=dbias)), outputs["end"]


class Call:
    """The arrays of a call and its sequences."""

    def __init__(self, plan: Plan, x: SelectiveInputs):
        assert x.raw is not None, "kernels compute steps, skip and gate too"
        (*lead, T, _), (self.D, self.N), self.plan, self.x, self.raw = x.x.shape, x.channels, plan, x, x.raw
        self.double = plan.dtype == plan.xp.float64
        self.dtype = np.dtype(np.float64 if self.double else np.float32)
        self.tokens, self.T, self.offsets = prod(lead) * T, T, None
        if plan.sequences[0].row is None:
            self.sequences, self.longest, self.shortest = prod(lead), T, T
            self.state_shape = (*lead, self.D, self.N)
        else:
            edges = (*(s.start for s in plan.sequences), plan.sequences[-1].stop)
            each = [b - a for a, b in pairwise(edges)]
            self.sequences, self.longest, self.shortest = len(each), max(each), min(each)
            self.state_shape = (self.sequences, self.D, self.N)
            self.offsets = plan.xp.asarray(np.array(edges, np.int64))

    def marks(self, tile: int) -> int:
        """Number of the kept states; a sequence's begin at its first token / tile + its number."""
        return self.tokens // tile + self.sequences

    def cut(self, grid: Grid) -> tuple[int, int]:
        """(segments of a sequence, tokens of one)"""
        blocks = self.sequences * -(-self.D // grid.channels)
        return selective_plan.segments(blocks, self.longest, launch.multiprocessors() * grid.blocks, grid.tile)

    def passes(
        self, file: str, entries: tuple[str, str], grid: Grid, start: Array | None, outputs: Outputs,
        dout: Array | None = None,
    ) -> None:  # fmt: skip
        """The pass over all tokens; with segments, after the passes that compute their initial states.

        Of plan.neighbours: so is the sum of all tokens, for which they have the state before them.
        """
        carry, entry = entries
        segments, each = self.cut(grid)
        outputs = outputs | {"begins": None, "sums": None}
        alone, back = self.plan.neighbours is None, {"LA_BACK": int(file == BACKWARD)}
        if segments > 1 or not alone:
            shape = (self.sequences, segments, self.D)
            own = (*shape, self.N)
            outputs |= {"begins": record.empty(own, self.dtype)}
            outputs |= {"sums": record.empty(own if self.x.A is None else shape, self.dtype)}
            blocks = -(-self.sequences * self.D * self.N // 128)
            self.launch(file, carry, grid, start, outputs, dout, (segments, each), None, {"LA_ALL": int(not alone)})
            if not alone:
                whole = {n: record.empty(self.state_shape, self.dtype) for n in ("end", "dA")}
                self.launch(FORWARD, "chain", grid, None, outputs | whole, dout, (segments, each), blocks,
                            back | {"LA_ALL": 1})  # fmt: skip
                start = self._entering(file, *whole.values())
            if segments > 1:
                self.launch(FORWARD, "chain", grid, start, outputs, dout, (segments, each), blocks, back)
        self.launch(file, entry, grid, start, outputs, dout, (segments, each))

    def _entering(self, file: str, offset: Array, transfer: Array) -> Array | None:
        """The state before the tokens, or the gradient of that after them, from the ranks that have the others."""
        ranks = self.plan.neighbours
        found = ranks.gradient(offset) if file == BACKWARD else ranks.state(transfer, offset)
        return None if found is None else dense(cast(self.plan.xp, found, self.dtype))

    def step(self, start: Array | None, outputs: Outputs) -> None:
        """One token of every sequence."""
        self.launch(STEP, "selective_step", selective_plan.step(self.N, self.double), start, outputs, None, (1, 1))

    def launch(
        self, file: str, entry: str, grid: Grid, start: Array | None, outputs: Outputs, dout: Array | None,
        cut: tuple[int, int], blocks: int | None = None, more: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        """One kernel; cut: (segments of a sequence, tokens of one), blocks: those of all segments if not given."""
        x, plan, tiles, one = self.x, self.plan, -(-self.D // grid.channels), file == STEP
        given = {"x": x.x, "dt": x.dt, "z": self.raw.z, "B": x.B, "C": x.C, "dout": dout}
        arrays, rows = {}, {}
        for n, y in given.items():
            arrays[n], rows[n] = tokens_of(y)
            if rows[n][1] >= MOST_BYTES:  # a tile is reached by 32 bits
                arrays[n], rows[n] = tokens_of(dense(y))
        arrays |= {"A": dense(x.A), "skip": dense(self.raw.D), "bias": dense(self.raw.dt_bias), "start": start}
        kinds = {f"LA_{n.upper()}": kind_of(arrays[n]) for n in ("x", "dt", "z", "B", "C")}
        beside = (arrays["x"], arrays["dt"], arrays["z"], arrays["dout"], outputs.get("out"), outputs.get("dx"),
                  outputs.get("ddt"), outputs.get("dz"))  # fmt: skip
        low, high = self.raw.limits
        is_open = low <= (0 if self.raw.soft else -math.inf) and high == math.inf
        per = 1 if one or self.D % 2 or not is_aligned(2, *beside) else 2
        vectors = (arrays["B"], arrays["C"], *((start, outputs["end"]) if one else ()))
        per_n = 4 if one else 2
        per_n = 1 if self.N % per_n or not is_aligned(per_n, *vectors) else per_n
        constants = grid.constants(self.double) | kinds | {
            "LA_N": self.N, "LA_SOFT": int(self.raw.soft), "LA_CLIP": int(not is_open), "LA_KEYS": int(x.A is None),
            "LA_PER": per, "LA_PER_N": per_n, "LA_GRAD": 2 if dout is None else kind_of(dout),
            "LA_NARROW": int(is_narrow(arrays["x"]) and not self.double), "LA_BACK": 0,
            "LA_ALL": 0, "LA_START": kind_of(start) if one and start is not None else 2 + self.double,
            "LA_EACH": selective_plan.STEP_EACH,
        } | (more or {})  # fmt: skip
        names = ("out", "end", "marks", "begins", "sums", "dx", "ddt", "dz", "dB", "dC", "dA", "dskip", "dbias")
        segments, each = cut
        kind_names = {f"{n}_kind": kind_of(arrays[n]) for n in ("A", "skip", "bias", "start")}
        packed = SELECTIVE.pack(
            **rows, **{n: address(arrays[n]) for n in ("A", "skip", "bias", "start")},
            **{n: address(outputs.get(n)) for n in names}, **kind_names, offsets=address(None if one else self.offsets),
            tokens=self.tokens, scale=plan.scale, low=low, high=high, T=self.T, D=self.D,
            sequences=self.tokens if one else self.sequences, segments=segments, each=each, tiles=tiles,
        )  # fmt: skip
        if blocks is None:
            rows_of = -(-self.sequences // selective_plan.STEP_EACH) if one else self.sequences * segments
            blocks = tiles * rows_of
        held = [*arrays.values(), *outputs.values(), *(() if one else (self.offsets,))]
        launched(file, entry, constants, blocks, grid.threads if entry != "chain" else 128, packed,
                 *{id(y): y for y in held if y is not None}.values())  # fmt: skip
