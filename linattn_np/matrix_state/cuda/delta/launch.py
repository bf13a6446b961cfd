"""A call of the delta rule as its kernels for capability 90 take it: sizes, arrays, launches."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from ....ops.cuda.arguments import NO_ROWS, address, rows_of
from ....ops.cuda.row_arrays import copied
from ....runtime.arrays import Array, cast
from ....runtime.cuda import launch
from ....runtime.cuda.tensor_map import BYTES as MAP
from ....runtime.cuda.tensor_map import moves, takes, tensor_map
from ... import policy
from ...types import Inputs, Plan
from .. import arguments, operands
from ..arguments import NO_STATES, States, gate_of
from . import plan as cuts

WHOLE, ADD, EVERY = range(3)  # modes of the reverse scan
NO_ARRAYS = dict.fromkeys(("q", "k", "v", "dout", "dv", "dq", "dk"), bytes(MAP)) | dict.fromkeys(
    ("checkpoints", "ends", "begins", "added", "transfers", "dg", "dbeta"), 0)  # fmt: skip


@dataclass(slots=True)
class DeltaBatch(operands.ChunkSizes):
    """Sizes of a call and the partition of its sequences."""

    decay: bool
    unit: bool  # q and k are divided by their L2 norm
    eps: float  # added to the squared norm
    steps: int  # micro-steps of a token; the last one reads


def batch_of(x: Inputs, plan: Plan) -> DeltaBatch:
    """Sizes of a call and the cut of its sequences."""
    sizes = operands.sizes_of(x, plan)
    _, T, heads, _, _, _, N, offsets, tokens = sizes
    longest = -(-tokens // policy.GROUP_CHUNK)
    # the chunks of sequence n begin at slot first // GROUP_CHUNK + n
    slots = N * longest if offsets is None else T // policy.GROUP_CHUNK + N
    each = -(-longest // cuts.segments(N * heads, longest, launch.multiprocessors()))
    return DeltaBatch(
        *sizes,
        longest,
        slots,
        -(-longest // each) + (0 if plan.neighbours is None else cuts.MORE),
        each,
        x.g is not None,
        plan.l2norm,
        plan.l2norm_eps,
        plan.micro_steps,
    )


def row_array(y: Array) -> Array:
    """(B, T, heads, width) in a layout that the copy engine supports: the array itself if possible."""
    y = y if y.ndim == 4 else y.reshape(prod(y.shape[:-3]), *y.shape[-3:])
    return y if takes(y) else copied(y)


def arrays_of(xp: Any, x: Inputs) -> dict[str, Array | None]:
    """q, k, v and the gates in float32."""
    gates = {n: None if y is None else cast(xp, y, xp.float32) for n, y in (("g", x.g), ("beta", x.beta))}
    return {"q": row_array(x.q), "k": row_array(x.k), "v": row_array(x.v)} | gates


def add_gradients(xp: Any, batch: DeltaBatch, arrays: dict[str, Array | None], dout: Array | None, dtype: Any) -> None:
    """dout, and dq, dk, dv to be written."""
    tokens = batch.T // batch.steps
    if dout is None:
        dout = xp.zeros((*batch.lead, tokens, batch.heads, batch.V), dtype=dtype)
    arrays["dout"] = row_array(cast(xp, dout, dtype))
    for name, T, width in (("dq", tokens, batch.K), ("dk", batch.T, batch.K), ("dv", batch.T, batch.V)):
        arrays[name] = xp.empty((prod(batch.lead), T, batch.heads, width), dtype=dtype)


def launch_one(
    name: str,
    batch: DeltaBatch,
    grid: int,
    arrays: dict[str, Any],
    *,
    reverse: bool = False,
    start: States = NO_STATES,
    end: States = NO_STATES,
    **more: Any,
) -> None:
    """Launch one kernel. more: out, other (arrays of rows), which, every, scale, chunks; arrays by NO_ARRAYS' names."""
    maps, heads = cuts.MAPS[name], batch.heads
    which, scale, chunks = more.pop("which", WHOLE), more.pop("scale", 1.0), more.pop("chunks", batch.chunks)
    every = int(more.pop("every", False))
    rows, at = {n: more.pop(n, None) for n in ("out", "other")}, end if name == "chain" else start
    fields = {**NO_ARRAYS, **_shared_fields(batch, arrays)}
    for n in maps:
        fields[n] = _map(arrays, n, batch.steps)
    for n, y in more.items():
        fields[n] = address(y)
    fields |= {
        "out": _token_rows(rows["out"], heads, batch.steps if name in cuts.STEPPED else 1),
        "other": _token_rows(rows["other"], heads, 1), "start": start.values(), "end": end.values(),
        "segments": batch.segments, "chunks": chunks, "start_group": start.group, "end_group": end.group,
        "which": which, "every": every, "scale": scale, "eps": batch.eps, **at.fields_of_positions(),
    }  # fmt: skip
    packed = arguments.DELTA.packed(fields)
    named = None
    if moves():
        whole = (*rows.values(), start.array, end.array, *more.values(), *at.arrays_of_positions())
        named = (*(arrays[n] for n in (*maps, "g", "beta")), batch.offsets, *whole)
    constants = cuts.constants(name, batch.K, batch.V, batch.decay, reverse, batch.unit, batch.steps, at.build_at)
    cuts.KERNELS[name].built(constants).launch(grid, packed, named)


def _token_rows(y: Array | None, heads: int, steps: int) -> tuple[int, ...]:
    """The ROWS struct of an array with one row per token of `steps` micro-steps."""
    if y is None:
        return NO_ROWS
    data, by_batch, by_token, by_head, group = rows_of(y, heads)
    return data, by_batch, by_token // steps, by_head, group


def _shared_fields(batch: DeltaBatch, arrays: dict[str, Any]) -> dict[str, Any]:
    """Fields that all launches of a call share, computed once."""
    if "fields" not in arrays:
        heads = batch.heads
        arrays["fields"] = {
            "g": gate_of(arrays["g"], heads), "beta": gate_of(arrays["beta"], heads),
            "offsets": address(batch.offsets), "slots": batch.slots, "T": batch.T, "heads": heads,
            **{f"group_{n}": heads // arrays[n].shape[-2] for n in ("q", "k", "v")},
        }  # fmt: skip
    return arrays["fields"]


def _map(arrays: dict[str, Any], name: str, steps: int) -> bytes:
    """The tensor map of an array, encoded once per call."""
    key = f"map of {name}"
    if key not in arrays:
        arrays[key] = tensor_map(arrays[name], steps if name in cuts.A_TOKEN else 1)
    return arrays[key]
