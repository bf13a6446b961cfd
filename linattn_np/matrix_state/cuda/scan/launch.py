"""Launches of the passes over the tokens and of the small kernels that complete them, for erase NONE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ....ops.cuda.arguments import address, rows_of
from ....runtime.arrays import Array
from ....runtime.cuda import launch
from ....runtime.cuda.launch import Kernel
from ... import policy
from ...types import Plan
from .. import arguments
from ..arguments import NO_STATES, States, gate_of
from ..operands import Sizes, build_at
from . import plan as cuts
from . import wgmma

SEGMENTS, GATE = "scan/segments.cu", "scan/gate_grad.cu"


@dataclass(slots=True)
class ScanBatch(Sizes):
    """Sizes of a call and the partition of its sequences."""

    element: str
    decay: bool
    align: int
    segments: int
    chunks: int  # per segment
    wgmma: bool  # whether passes use warpgroup products


class DotsOfPass(NamedTuple):
    """The part of Dots that one pass computes: x of <x, out>, and fields of its arguments by name."""

    x: Array | None = None
    pointers: tuple[int, int, int, int] = (0, 0, 0, 0)  # dots, states, products, marks
    arrays: tuple[Array, ...] = ()


class Dots:
    """Terms of the gate gradient: <q, dq> and <k, dk> of every token, <S, dS> at every checkpoint."""

    def __init__(self, xp: Any, batch: ScanBatch):
        self.how = _pass(batch, batch.V, batch.K, False, True, True)
        self.marks = -(-max(batch.longest, 1) // policy.MARK_TOKENS[batch.element])
        slots = batch.N * batch.heads * self.marks
        self.tokens = [
            xp.empty((cuts.dot_parts(self.how), batch.heads, batch.tokens), dtype=xp.float32) for _ in range(2)
        ]
        self.states = xp.empty((slots, cuts.mark_floats(self.how)), dtype=xp.float32)
        self.products = xp.empty((slots, cuts.all_warps(self.how)), dtype=xp.float32)

    def of(self, x: Array, which: int) -> DotsOfPass:
        """which: 0 the readers (q with dq), 1 the writers (k with dk)."""
        arrays = (self.tokens[which], self.states, self.products)
        return DotsOfPass(x, (*(y.data.ptr for y in arrays), self.marks), arrays)


def writes_at_once(batch: ScanBatch) -> bool:
    """Whether one pass computes dk and dv."""
    return batch.wgmma and wgmma.takes_writes(batch.K, batch.V)


def wants_dots(batch: ScanBatch, plan: Plan) -> bool:
    """Whether backward computes the gate gradient."""
    return batch.decay and plan.gate_gradient


def _pass(batch: ScanBatch, K: int, V: int, reverse: bool, outputs: bool, dots: bool, at: int = 0) -> Kernel:
    if batch.wgmma:
        return wgmma.scan_pass(K, V, batch.decay, reverse, outputs, dots, at)
    kind = cuts.ScanKind(batch.element, K, V, batch.align, batch.decay, reverse, outputs, dots)
    return cuts.scan_pass(kind, launch.shared_limit())


def _small(batch: ScanBatch, decay: bool, reverse: bool) -> cuts.Constants:
    return cuts.common_constants(batch.element, decay, reverse, cuts.chunk_of(batch.wgmma))


def prepare(batch: ScanBatch, plan: Plan) -> None:
    """Start compiling all kernels of a call and its backward, in parallel."""
    K, V, decay, dots, at = batch.K, batch.V, batch.decay, wants_dots(batch, plan), build_at(plan)
    passes, small = [_pass(batch, K, V, False, True, False, at)], []
    if plan.gradients:
        passes.append(_pass(batch, V, K, False, True, dots))
        if writes_at_once(batch):
            passes.append(wgmma.writes_pass(K, V, decay, dots, at))
        else:
            passes += [_pass(batch, K, V, True, True, False), _pass(batch, V, K, True, True, dots)]
        small += [(GATE, _small(batch, True, False))] if dots else []
    if batch.segments > 1:
        for reverse in (False, True)[: 1 + plan.gradients]:
            passes.append(_pass(batch, K, V, reverse, False, False))
            small.append((SEGMENTS, _small(batch, decay, reverse)))
    wanted = (*((how.file, how.constants) for how in passes), *small)
    if len(wanted) > 1:
        launch.prepare(wanted, launch.capability())


def scan(
    batch: ScanBatch,
    arrays: tuple[Array | None, Array, Array, Array | None],
    g: Array | None,
    start: States,
    end: States | None,
    factors: tuple[float, float],
    reverse: bool = False,
    dots: DotsOfPass | None = None,
    every: bool = False,
) -> None:
    """One pass over q, k, v, out; without q and out the offsets of segments, to `end`. factors: of reads, of writes.

    every: the offset of the last segment too.
    """
    q, k, v, out = arrays
    heads, end, of, (read, write) = batch.heads, end or NO_STATES, dots or DotsOfPass(), factors
    how = _pass(batch, k.shape[-1], v.shape[-1], reverse, q is not None, dots is not None, end.build_at)
    dot_sums, states, products, marks = of.pointers
    packed = arguments.SCAN.pack(
        q=rows_of(q, heads), k=rows_of(k, heads), v=rows_of(v, heads), x=rows_of(of.x, heads), out=rows_of(out, heads),
        g=gate_of(g, heads), offsets=address(batch.offsets), start=start.values(), end=end.values(),
        start_group=start.group, end_group=end.group, sums=address(end.sums), dots=dot_sums, states=states,
        products=products, marks=marks, tokens=batch.tokens, T=batch.T, heads=heads, segments=batch.segments,
        chunks=batch.chunks, every=int(every), read=read, write=write, **end.fields_of_positions())  # fmt: skip
    how.launch(batch.N * batch.segments * heads * how.parts, packed,
                  (q, k, v, of.x, out, g, batch.offsets, start.array, end.array, end.sums, *of.arrays,
                   *end.arrays_of_positions()))  # fmt: skip


def writes(
    batch: ScanBatch,
    arrays: tuple[Array, ...],
    g: Array | None,
    start: States,
    end: States,
    write: float,
    dots: Dots | None,
) -> None:
    """dk and dv from q, k, v, dout in one pass."""
    how = wgmma.writes_pass(batch.K, batch.V, batch.decay, dots is not None, start.build_at)
    of = DotsOfPass() if dots is None else dots.of(arrays[1], 1)
    dot_sums, states, _, marks = of.pointers
    rows = dict(zip(("q", "k", "v", "dout", "dk", "dv"), (rows_of(y, batch.heads) for y in arrays), strict=True))
    packed = arguments.WRITES.pack(
        **rows, g=gate_of(g, batch.heads), offsets=address(batch.offsets), start=start.values(), end=end.values(),
        start_group=start.group, end_group=1, dots=dot_sums, states=states, marks=marks, tokens=batch.tokens,
        T=batch.T, heads=batch.heads, segments=batch.segments, chunks=batch.chunks, write=write,
        **start.fields_of_positions())  # fmt: skip
    how.launch(
        batch.N * batch.segments * batch.heads,
        packed,
        (*arrays, g, batch.offsets, start.array, end.array, *of.arrays[:2], *start.arrays_of_positions()),
    )


def begins_of(
    xp: Any, batch: ScanBatch, k: Array, v: Array, g: Array | None, start: States, write: float, reverse: bool
) -> States | None:
    """The initial state of each segment, in the direction of the scan; None for one segment."""
    if batch.segments == 1:
        return None
    states = empty_states(xp, batch)
    scan(batch, (None, k, v, None), g, NO_STATES, states, (1.0, write), reverse)
    sum_segments(batch, states, start, reverse)
    return states._replace(group=0)


def empty_states(xp: Any, batch: ScanBatch) -> States:
    """A state and a sum of log2 decays for each segment."""
    slots = batch.N * batch.heads * batch.segments
    return States(xp.empty((slots, batch.V, batch.K), dtype=xp.float32), batch.K * batch.V, batch.K, 1,
                  xp.empty(slots, dtype=xp.float32))  # fmt: skip


def sum_segments(batch: ScanBatch, states: States, start: States, reverse: bool) -> None:
    """From the offsets of segments to the states that they begin with, in place."""
    blocks = -(-batch.K * batch.V // 256)
    packed = arguments.SEGMENTS.pack(
        states=states.values(), start=start.values(), start_group=start.group, sums=address(states.sums),
        offsets=address(batch.offsets), elements=batch.K * batch.V, T=batch.T, heads=batch.heads,
        segments=batch.segments, chunks=batch.chunks, columns=batch.K, blocks=blocks)  # fmt: skip
    launch.launch(
        SEGMENTS,
        "segments",
        _small(batch, batch.decay, reverse),
        batch.N * batch.heads * blocks,
        256,
        0,
        packed,
        (states.array, start.array, states.sums, batch.offsets),
    )


def gate_grad(xp: Any, batch: ScanBatch, g: Array, dots: Dots) -> Array:
    """dg of every output head: (..., T, heads)."""
    dg = xp.empty((*batch.lead, batch.T, batch.heads), dtype=xp.float32)
    blocks = batch.N * batch.heads * dots.marks
    packed = arguments.GATE_GRAD.pack(
        read_dots=dots.tokens[0].data.ptr,
        write_dots=dots.tokens[1].data.ptr,
        products=dots.products.data.ptr,
        g=gate_of(g, batch.heads),
        dg=dg.data.ptr,
        offsets=address(batch.offsets),
        tokens=batch.tokens,
        marks=dots.marks,
        blocks=blocks,
        T=batch.T,
        heads=batch.heads,
        parts=cuts.dot_parts(dots.how),
        warps=cuts.all_warps(dots.how) // cuts.dot_parts(dots.how),
    )
    launch.launch(
        GATE,
        "gate_grad",
        _small(batch, True, False),
        -(-blocks // 4),
        128,
        0,
        packed,
        (*dots.tokens, dots.products, g, dg, batch.offsets),
    )
    return dg
