"""A call of the delta rule as the portable kernels take it: sizes, arrays, launches."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from ....ops.cuda.arguments import address, rows_of
from ....ops.cuda.row_arrays import copied
from ....runtime.arrays import Array, cast, dtype_name
from ....runtime.cuda import launch
from ....runtime.cuda.launch import Kernel
from ...types import Inputs, Plan, ReadState
from .. import arguments, operands
from ..arguments import NO_STATES, States, gate_of
from . import delta_plan as cuts
from .delta_plan import PortableDeltaKind


@dataclass(slots=True)
class PortableDeltaBatch(operands.ChunkSizes):
    """Sizes of a call, and its arrays in the layout of the kernels."""

    kind: PortableDeltaKind
    q: Array
    k: Array
    v: Array
    g: Array | None
    beta: Array
    r: Array | None  # separate erase vectors


def batch_of(x: Inputs, plan: Plan) -> PortableDeltaBatch:
    xp, erase = plan.xp, () if plan.erases_key else (x.r,)
    q, k, v, *r = operands.as_rows(xp, x.q, x.k, x.v, *erase)
    sizes = operands.sizes_of(x, plan)
    _, T, heads, _, K, V, N, offsets, tokens = sizes
    element = dtype_name(v)
    C = cuts.chunk_length(element)
    longest = -(-tokens // C)
    slots = N * longest if offsets is None else T // C + N
    parts = max(1, -(-V // 128))  # blocks of the scan over the value columns
    each = -(-longest // cuts.segments(N * heads * parts, longest, launch.multiprocessors()))
    segments = -(-longest // each)
    g = None if x.g is None else cast(xp, x.g, xp.float32)
    if g is not None and g.ndim > 4:
        g = g.reshape(prod(g.shape[:-3]), *g.shape[-3:])
    kind = PortableDeltaKind(element, K, V, operands.alignment((q, k, v, *r), K, V), g is not None, bool(r),
                plan.erase_reads is not ReadState.DECAYED, segments > 1, launch.capability())  # fmt: skip
    return PortableDeltaBatch(*sizes, longest, slots, segments, each, kind, q, k, v, g, cast(xp, x.beta, xp.float32),
                 r[0] if r else None)  # fmt: skip


def cotangent_of(xp: Any, batch: PortableDeltaBatch, dout: Array | None, shape: tuple[int, ...]) -> Array:
    """dout (B, T, heads, V) in the layout of the kernels; zeros for None."""
    if dout is None:
        return xp.zeros((*shape, batch.V), dtype=batch.v.dtype)
    dout = cast(xp, dout, batch.v.dtype)
    rows = dout if dout.ndim == 4 else dout.reshape(shape[0], *dout.shape[-3:])
    fine = operands.alignment((rows,), batch.K, batch.V) >= batch.kind.align and rows.strides[-1] == rows.itemsize
    return rows if fine else copied(rows)


def launch_chain(
    batch: PortableDeltaBatch, how: Kernel, inverses: Array, start: States, end: States, **more: Any
) -> None:
    """Launch a scan, or the inverses. more: v, out, writes, states, transfers, and other fields of DELTA_SCAN."""
    heads, rows = batch.heads, {n: more.pop(n, None) for n in ("v", "out", "writes")}
    states, transfers = more.pop("states", None), more.pop("transfers", NO_STATES)
    blocks = batch.N * heads * batch.segments * how.parts
    fields = {
        "q": rows_of(batch.q, heads), "k": rows_of(batch.k, heads), "r": rows_of(batch.r, heads),
        "g": gate_of(batch.g, heads), "beta": gate_of(batch.beta, heads), "offsets": address(batch.offsets),
        "inverses": inverses.data.ptr, "states": address(states), "start": start.values(), "end": end.values(),
        "start_group": start.group, "end_group": end.group, "transfers": transfers.values(), "slots": batch.slots,
        "T": batch.T, "heads": heads, "segments": batch.segments, "chunks": batch.chunks, "scale": 1.0,
    }  # fmt: skip
    fields |= {name: rows_of(y, heads) for name, y in rows.items()}
    if "segments" in more:  # every chunk is a segment
        blocks = batch.N * heads * batch.chunks_longest
    packed = arguments.DELTA_SCAN.pack(**fields | more)
    how.launch(
        blocks, packed, (*arrays_of(batch), *rows.values(), inverses, states, start.array, end.array, transfers.array)
    )


def arrays_of(batch: PortableDeltaBatch) -> tuple[Array | None, ...]:
    """The arrays of a call that its launches take."""
    return batch.q, batch.k, batch.r, batch.g, batch.beta, batch.offsets
