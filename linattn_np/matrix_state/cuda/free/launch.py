"""A call with a free rank-one term as its kernels take it: sizes, arrays, launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....ops.cuda.arguments import NO_ROWS, address, rows_of
from ....runtime.arrays import Array, cast, dtype_name
from ....runtime.cuda import launch
from ....runtime.cuda.tensor_map import BYTES as MAP
from ....runtime.cuda.tensor_map import moves
from ... import policy
from ...types import Inputs, Plan
from .. import arguments, shared_memory
from ..arguments import NO_STATES, States
from ..operands import ChunkSizes, sizes_of
from ..vector import launch as launches
from . import plan as cuts
from .plan import CHAIN, EXACT_GRADS, FACTORS, GRADS, Build

MAPS = {FACTORS: ("q", "k", "g", "a", "b"), CHAIN: ("v", "out")}
NO_ARRAYS = dict.fromkeys(("q", "k", "v", "g", "a", "b", "out"), bytes(MAP)) | {"to": NO_ROWS} | dict.fromkeys(
    ("factors", "extras", "states", "corrections", "flags"), 0)  # fmt: skip
PLAIN = Build()
BACKWARD = Build(backward=True, keep=True)
KERNELS_OF_BACKWARD = [(FACTORS, BACKWARD), (FACTORS, BACKWARD._replace(exact=True)), (CHAIN, BACKWARD),
                       (GRADS, PLAIN), (EXACT_GRADS, PLAIN)]  # fmt: skip


@dataclass(slots=True)
class FreeBatch(ChunkSizes):
    """Sizes of a call, and what its kernels are compiled for."""

    kind: cuts.FreeKind

    @property
    def stored(self) -> int:
        """Chunks of all heads."""
        return self.slots * self.heads


def batch_of(x: Inputs, plan: Plan) -> FreeBatch:
    """Sizes of a call."""
    sizes = sizes_of(x, plan)
    _, T, _, _, K, V, N, offsets, tokens = sizes
    longest = -(-tokens // cuts.CHUNK)
    slots = N * longest if offsets is None else T // cuts.CHUNK + N
    gate = "float32" if x.g is not None and dtype_name(x.g) != "bfloat16" else "bfloat16"
    return FreeBatch(*sizes, longest, slots, 1, longest, cuts.FreeKind(K, V, gate, offsets is not None))


def arrays_of(xp: Any, x: Inputs) -> dict[str, Any]:
    """The arrays as the copy engine takes them; log decays of zero where there are none."""
    if x.g is None:
        x = x._replace(g=xp.zeros((*x.v.shape[:-2], 1, x.k.shape[-1]), dtype=x.v.dtype))
    arrays = launches.arrays_of(xp, x)
    return arrays | {n: launches.row_array(cast(xp, getattr(x, n), x.v.dtype)) for n in ("a", "b")}


def residual_sizes(batch: FreeBatch) -> dict[str, int]:
    """Bytes of a chunk's residuals."""
    return {"states": cuts.state_bytes(batch.K, batch.V), "corrections": shared_memory.free_tile(batch.V)}


def prepare(batch: FreeBatch, wanted: list[tuple[str, Build]]) -> None:
    """Begin to compile kernels."""
    found = [(cuts.KERNELS[name].file, cuts.constants(name, batch.kind, build)) for name, build in wanted]
    launch.prepare(tuple(found), launch.capability())


def factors_of(xp: Any, batch: FreeBatch, arrays: dict[str, Any], scale: float, build: Build) -> dict[str, Array]:
    """The factors of every chunk, and what the backward's chain reads besides."""
    sizes = {"factors": shared_memory.free_factors_of(batch.K)}
    if build.backward:
        sizes["extras"] = shared_memory.free_extras_of(True)
    factors = {n: xp.empty((batch.stored, size), dtype=xp.int8) for n, size in sizes.items()}
    flags, slots = xp.empty(batch.stored, dtype=xp.int32), batch.N * batch.heads
    for exact, pieces in ((False, batch.chunks), (True, policy.EXACT_PIECES)):
        one = build._replace(exact=exact)
        launch_one(FACTORS, batch, slots * pieces, arrays, one, scale=scale, flags=flags, **factors)
    return factors


def launch_one(
    name: str,
    batch: FreeBatch,
    grid: int,
    arrays: dict[str, Any],
    build: Build = PLAIN,
    *,
    start: States = NO_STATES,
    end: States = NO_STATES,
    scale: float = 1.0,
    **given: Array | None,
) -> None:
    """One kernel. given: arrays by the names of NO_ARRAYS."""
    maps, heads = MAPS[name], batch.heads
    fields: dict[str, Any] = NO_ARRAYS | {n: address(y) for n, y in given.items()}
    fields |= {n: launches.map_of(arrays, n) for n in maps}
    if name == CHAIN:
        fields["to"] = rows_of(arrays["out"], heads)
    fields |= {
        "offsets": address(batch.offsets), "slots": batch.slots, "T": batch.T, "heads": heads,
        "segments": batch.segments, "chunks": batch.chunks, "scale": scale, "start": start.values(),
        "end": end.values(), "start_group": start.group, "end_group": end.group, **end.fields_of_positions(),
        **{f"group_{n}": heads // arrays[n].shape[-2] for n in ("q", "k", "v", "g", "a", "b")},
    }  # fmt: skip
    named = None
    if moves():
        named = (*(arrays[n] for n in maps), batch.offsets, start.array, end.array, *given.values(),
                 *end.arrays_of_positions())  # fmt: skip
    cuts.kernel(name, batch.kind, build).launch(grid, arguments.FREE.packed(fields), named)
