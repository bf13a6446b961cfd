"""Erase FREE with a decay of the key channels, or none, as CUDA kernels on CuPy arrays.

For what the kernels of a vector decay cover: compute capability 90, bfloat16, K and V up to 128. What a chunk of 64
tokens does to the state, all chunks at once (free/free_factors.cu), exact in the chunks that decay by more than
62 nats, which the first build flags; then the chain of the chunks (free_chain.cu).
docs/internals/free_rank_one.md has the equations.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ....ops.cuda.arguments import NO_ROWS, address, rows_of
from ....runtime.arrays import Array, cast, dtype_name
from ....runtime.cuda import launch
from ....runtime.cuda.tensor_map import BYTES as MAP
from ....runtime.cuda.tensor_map import moves
from ... import policy
from ...types import Decay, Erase, Inputs, Plan, ReadState, Saved
from .. import arguments, operands, shared_memory, vector
from .. import vector_launch as launches
from ..arguments import NO_STATES, States
from ..operands import ChunkSizes, as_state, empty_positions, public_ends, sizes_of, states_at, with_positions
from . import plan as cuts
from .plan import CHAIN, EXACT_GRADS, FACTORS, GRADS, Build

MAPS = {FACTORS: ("q", "k", "g", "a", "b"), CHAIN: ("v", "out")}
NO_ARRAYS = dict.fromkeys(("q", "k", "v", "g", "a", "b", "out"), bytes(MAP)) | {"to": NO_ROWS} | dict.fromkeys(
    ("factors", "extras", "states", "corrections", "flags"), 0)  # fmt: skip
PLAIN = Build()
BACKWARD = Build(backward=True, keep=True)
KERNELS_OF_BACKWARD = [(FACTORS, BACKWARD), (FACTORS, BACKWARD._replace(exact=True)), (CHAIN, BACKWARD),
                       (GRADS, PLAIN), (EXACT_GRADS, PLAIN)]  # fmt: skip


def unsupported_reason(call: Any) -> str | None:
    """Why the kernels do not cover a call with erase FREE; None where they do."""
    x = call.x
    if x.erase is not Erase.FREE or x.decay is Decay.SCALAR:
        return "the kernels are of a free rank-one term with a decay of the key channels, or none"
    if call.plan.query_reads is not ReadState.UPDATED:
        return "the kernels of a free rank-one term read each token after its own write"
    return vector.unsupported_arrays(x if x.g is not None else x._replace(g=x.k), call.plan)


def how(call: Any) -> str:
    """The kernels of a call that is covered, in words."""
    return "chains of chunks by warpgroup products (wgmma), exact where a chunk of 64 tokens decays by over 62 nats"


def gives_states(call: Any) -> bool:
    """Whether forward stores states at the positions of a call: no backward follows, which would not add gradients."""
    return operands.gives_states(call.plan) and not (call.plan.gradients or call.plan.is_ragged)


class Residuals(NamedTuple):
    """What a forward may store of every chunk: the state before it and the corrections w."""

    states: Array
    corrections: Array


@dataclass(slots=True)
class Batch(ChunkSizes):
    """Sizes of a call, and what its kernels are compiled for."""

    kind: cuts.FreeKind

    @property
    def stored(self) -> int:
        """Chunks of all heads."""
        return self.slots * self.heads


def batch_of(x: Inputs, plan: Plan) -> Batch:
    """Sizes of a call."""
    sizes = sizes_of(x, plan)
    _, T, _, _, K, V, N, offsets, tokens = sizes
    longest = -(-tokens // cuts.CHUNK)
    slots = N * longest if offsets is None else T // cuts.CHUNK + N
    gate = "float32" if x.g is not None and dtype_name(x.g) != "bfloat16" else "bfloat16"
    return Batch(*sizes, longest, slots, 1, longest, cuts.FreeKind(K, V, gate, offsets is not None))


def arrays_of(xp: Any, x: Inputs) -> dict[str, Any]:
    """The arrays as the copy engine takes them; log decays of zero where there are none."""
    if x.g is None:
        x = x._replace(g=xp.zeros((*x.v.shape[:-2], 1, x.k.shape[-1]), dtype=x.v.dtype))
    arrays = launches.arrays_of(xp, x)
    return arrays | {n: launches.row_array(cast(xp, getattr(x, n), x.v.dtype)) for n in ("a", "b")}


def forward(x: Inputs, plan: Plan, state: Array | None, keep: bool | None = None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved). keep: with Residuals; by default for a backward, unless too large."""
    xp, batch, arrays = plan.xp, batch_of(x, plan), arrays_of(plan.xp, x)
    sizes = residual_sizes(batch)
    if keep is None:
        keep = vector.keeps(plan, batch.stored * sum(sizes.values()))
    build = Build(keep=keep, at=plan.states_at is not None)
    prepare(batch, [(FACTORS, PLAIN), (FACTORS, PLAIN._replace(exact=True)), (CHAIN, build)])
    if plan.gradients:
        prepare(batch, KERNELS_OF_BACKWARD)
    out = xp.empty((*batch.lead, batch.T, batch.heads, batch.V), dtype=x.v.dtype)
    end = xp.empty((batch.N, batch.H, batch.K, batch.V), dtype=xp.float32)
    at = empty_positions(xp, plan, batch)
    start = states_at(as_state(xp, state, batch), batch, batch.group)
    last = with_positions(xp, states_at(end, batch, batch.group), at, plan, batch)
    arrays["out"] = out if out.ndim == 4 else out.reshape(prod(batch.lead), *out.shape[-3:])
    kept = {n: xp.empty((batch.stored, size), dtype=xp.int8) for n, size in sizes.items()} if keep else {}
    launch_one(CHAIN, batch, batch.N * batch.heads, arrays, build, start=start, end=last, **kept,
               **factors_of(xp, batch, arrays, plan.scale, PLAIN))  # fmt: skip
    return out, public_ends(end, at, batch), Saved(x, plan, state, Residuals(**kept) if keep else None)


def residual_sizes(batch: Batch) -> dict[str, int]:
    """Bytes of a chunk's residuals."""
    return {"states": cuts.state_bytes(batch.K, batch.V), "corrections": shared_memory.free_tile(batch.V)}


def prepare(batch: Batch, wanted: list[tuple[str, Build]]) -> None:
    """Begin to compile kernels."""
    found = [(cuts.KERNELS[name].file, cuts.constants(name, batch.kind, build)) for name, build in wanted]
    launch.prepare(tuple(found), launch.capability())


def factors_of(xp: Any, batch: Batch, arrays: dict[str, Any], scale: float, build: Build) -> dict[str, Array]:
    """The factors of every chunk, and what the backward's chain reads besides."""
    sizes = {"factors": shared_memory.free_factors_of(batch.K)}
    if build.backward:
        sizes["extras"] = shared_memory.free_extras_of(True)
    made = {n: xp.empty((batch.stored, size), dtype=xp.int8) for n, size in sizes.items()}
    flags, slots = xp.empty(batch.stored, dtype=xp.int32), batch.N * batch.heads
    for exact, pieces in ((False, batch.chunks), (True, policy.EXACT_PIECES)):
        one = build._replace(exact=exact)
        launch_one(FACTORS, batch, slots * pieces, arrays, one, scale=scale, flags=flags, **made)
    return made


def launch_one(
    name: str,
    batch: Batch,
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
    kernel, maps, heads = cuts.KERNELS[name], MAPS[name], batch.heads
    constants = cuts.constants(name, batch.kind, build)
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
    launch.launch(kernel.file, kernel.entry, constants, grid, cuts.threads(name, batch.K, batch.V),
                  dict(constants)["LA_SHARED"], arguments.FREE.packed(fields), named)  # fmt: skip
