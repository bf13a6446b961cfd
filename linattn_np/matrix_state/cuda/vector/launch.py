"""Launches of the kernels of a vector decay: sizes of a call, its arrays as the copy engine takes them, arguments."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from ....ops.cuda.arguments import NO_ROWS, address, rows_of
from ....ops.cuda.row_arrays import copied
from ....runtime.arrays import Array, cast, dtype_name
from ....runtime.cuda import launch
from ....runtime.cuda.elements import Constants
from ....runtime.cuda.tensor_map import BYTES as MAP
from ....runtime.cuda.tensor_map import moves, takes, tensor_map
from ...types import Inputs, Plan, ReadState
from .. import arguments
from ..arguments import NO_STATES, States, gate_of
from ..delta import plan as delta_plan
from ..operands import ChunkSizes, sizes_of
from . import plan as cuts

MAPS = {
    "scan": ("q", "k", "v", "g", "out"), "adds": ("k", "v", "g"), "segments": (), "segments in reverse": (),
    "inverse": ("k", "g"), "chain": ("q", "k", "v", "g", "out"), "transfers": ("v",),
}  # fmt: skip
ROWS = ("scan", "chain")  # kernels that write outputs row by row too
NO_ARRAYS = dict.fromkeys(("q", "k", "v", "g", "out"), bytes(MAP)) | {"to": NO_ROWS} | dict.fromkeys(
    ("begins", "added", "decays", "transfers", "u", "states", "grams", "inverses", "factors",
     "new_values", "flags", "handed"), 0)  # fmt: skip
NO_FIELDS = dict.fromkeys(arguments.DELTA.offsets, 0) | {  # of a launch that multiplies transfer matrices
    **dict.fromkeys(("q", "k", "v", "dout", "dv", "dq", "dk"), bytes(MAP)), "out": NO_ROWS, "other": NO_ROWS,
    "g": arguments.gate_of(None, 1), "beta": arguments.gate_of(None, 1), "start": NO_STATES.values(),
    "end": NO_STATES.values(), **NO_STATES.fields_of_positions(),
}  # fmt: skip
GATES = ("bfloat16", "float32")
PLAIN, EXACT = cuts.Build(), cuts.Build(exact=True)


@dataclass(slots=True)
class VectorBatch(ChunkSizes):
    """Sizes of a call, the cut of its sequences, and what its kernels are compiled for."""

    kind: cuts.VectorKind


def batch_of(x: Inputs, plan: Plan, cut: bool = True) -> VectorBatch:
    """Sizes of a call and the cut of its sequences; without `cut` each is one segment."""
    sizes = sizes_of(x, plan)
    _, T, heads, _, K, V, N, offsets, tokens = sizes
    longest = -(-tokens // cuts.CHUNK)
    slots = N * longest if offsets is None else T // cuts.CHUNK + N
    pieces = cuts.segments(N * heads, longest, launch.multiprocessors()) if cut else 1
    each = -(-longest // pieces)
    more = 0 if plan.neighbours is None else cuts.MORE[x.beta is not None]
    gate = "bfloat16" if dtype_name(x.g) == "bfloat16" else "float32"
    before, bonus, complement = plan.query_reads is not ReadState.UPDATED, x.u is not None, plan.complement_keys
    kind = cuts.VectorKind(K, V, gate, before, bonus, offsets is not None, complement)
    return VectorBatch(*sizes, longest, slots, -(-longest // each) + more, each, kind)


def arrays_of(xp: Any, x: Inputs) -> dict[str, Array | None]:
    """q, k, v and g as the copy engine takes them, the bonus and beta in float32."""
    gate = x.g if dtype_name(x.g) in GATES else cast(xp, x.g, xp.float32)
    gate = xp.broadcast_to(gate, (*x.v.shape[:-2], *x.g.shape[-2:]))
    given = {"q": cast(xp, x.q, x.v.dtype), "k": cast(xp, x.k, x.v.dtype), "v": x.v, "g": gate}
    found = {n: row_array(y) for n, y in given.items()}
    beta = None if x.beta is None else cast(xp, x.beta, xp.float32)
    return found | {"u": None if x.u is None else xp.ascontiguousarray(cast(xp, x.u, xp.float32)), "beta": beta}


def row_array(y: Array) -> Array:
    """(B, T, heads, width) as the copy engine takes it: the array itself where it can."""
    y = y if y.ndim == 4 else y.reshape(prod(y.shape[:-3]), *y.shape[-3:])
    return y if takes(y) else copied(y)


def sum_segments(
    batch: VectorBatch, arrays: dict[str, Any], *, start: States, reverse: bool = False, **given: Array
) -> None:
    """The state that each segment but the first begins with; reverse: its gradient after each but the last."""
    name = "segments in reverse" if reverse else "segments"
    launch_one(name, batch, batch.N * batch.heads * (cuts.STATE // 1024), arrays, start=start, **given)


def multiply_transfers(batch: ChunkSizes, reverse: bool = False, **given: Array) -> None:
    """The same from offsets and transfer matrices, reverse by their transposes: the delta rule's kernel."""
    kernel, constants = delta_plan.KERNELS["segments"], transfer_constants(batch, reverse)
    packed = arguments.DELTA.packed(NO_FIELDS | {n: address(y) for n, y in given.items()} | {
        "offsets": address(batch.offsets), "T": batch.T, "heads": batch.heads, "segments": batch.segments,
        "chunks": batch.chunks,
    })  # fmt: skip
    kernel.built(constants).launch(batch.N * batch.heads * 8, packed, (batch.offsets, *given.values()))


def transfer_constants(batch: ChunkSizes, reverse: bool = False) -> Constants:
    """The constants of the delta rule's kernel that multiplies transfer matrices."""
    return delta_plan.constants("segments", batch.K, batch.V, True, reverse)


def begin_compiling(batch: VectorBatch, wanted: list[tuple[str, cuts.Build]], more: tuple[Any, ...] = ()) -> None:
    """Begin to compile kernels by name and build, and `more` by file and constants."""
    found = [(cuts.KERNELS[name].file, cuts.constants(name, batch.kind, build)) for name, build in wanted]
    launch.prepare((*found, *more), launch.capability())


def launch_one(
    name: str,
    batch: VectorBatch,
    grid: int,
    arrays: dict[str, Any],
    build: cuts.Build = PLAIN,
    *,
    start: States = NO_STATES,
    end: States = NO_STATES,
    scale: float = 1.0,
    every: bool = False,
    **given: Array | None,
) -> None:
    """One kernel. given: arrays by the names of NO_ARRAYS."""
    kernel, maps, heads = cuts.KERNELS[name], MAPS[name], batch.heads
    constants = cuts.constants(name, batch.kind, build)
    fields = {**NO_ARRAYS, **_shared_fields(batch, arrays), **{n: address(y) for n, y in given.items()}}
    for n in maps:
        fields[n] = map_of(arrays, n)
    if name in ROWS:
        fields["to"] = rows_of(arrays["out"], heads)
    steps, more = cuts.shares(batch.N * heads * batch.segments, batch.chunks, grid) if name == "scan" else (0, 0)
    fields |= {"steps": steps, "more": more, "every": int(every), "start": start.values(), "end": end.values(),
               "start_group": start.group, "end_group": end.group, "scale": scale,
               **end.fields_of_positions()}  # fmt: skip
    named = None
    if moves():
        named = (
            *(arrays[n] for n in maps),
            batch.offsets,
            start.array,
            end.array,
            *given.values(),
            arrays["beta"],
            *end.arrays_of_positions(),
        )
    kernel.built(constants).launch(grid, arguments.VECTOR.packed(fields), named)


def _shared_fields(batch: VectorBatch, arrays: dict[str, Any]) -> dict[str, Any]:
    """Fields that all launches of a call share, made once."""
    if "fields" not in arrays:
        heads, u = batch.heads, arrays["u"]
        arrays["fields"] = {
            "offsets": address(batch.offsets), "slots": batch.slots, "T": batch.T, "heads": heads,
            "segments": batch.segments, "chunks": batch.chunks, "beta": gate_of(arrays["beta"], heads),
            "group_u": 1 if u is None else heads // u.shape[0],
            **{f"group_{n}": heads // arrays[n].shape[-2] for n in ("q", "k", "v", "g")},
        }  # fmt: skip
    return arrays["fields"]


def map_of(arrays: dict[str, Any], name: str) -> bytes:
    """The tensor map of an array, made once a call."""
    key = f"map of {name}"
    if key not in arrays:
        arrays[key] = tensor_map(arrays[name])
    return arrays[key]
