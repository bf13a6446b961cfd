"""The delta rule as CUDA kernels on CuPy arrays: erase DELTA, decay NONE or SCALAR.

Here are those by warpgroup products, for compute capability 90, bfloat16, K and V up to 128; all else takes the
portable ones of cuda_delta_portable.py. Forward: what a chunk can know before it sees a state, all chunks at once
(delta_block.cu), then the chain of the chunks (delta_chain.cu). Backward: the chain in reverse for dv and the gradients
of the states (delta_reverse.cu), then forward again for all the others (delta_grads.cu). Where batch and heads leave
the card idle, sequences are cut into segments: what a segment does to the state is a matrix and a sum (delta_adds.cu),
of which a small kernel makes the state that each segment begins with (delta_segments.cu), and backward the gradient
that each ends with. docs/chain.md has it all.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any, NamedTuple

from ...cuda import launch
from ...cuda.tensor_map import BYTES as MAP
from ...cuda.tensor_map import moves, takes, tensor_map
from ...ground.namespace import Array, cast, sum_to
from ..kinds import Decay, Row
from . import cuda_delta_plan as cuts
from . import cuda_delta_portable
from .cuda_kernels import States, _element, _pack_gate, _public, _shared, _spread, _state, _states, head_sums
from .inputs import Inputs, Plan, Saved

MAPS = ("q", "k", "v", "dout", "dv", "dq", "dk")  # in the order of struct DeltaArguments
WHOLE, ADD = range(2)  # launches of the reverse chain
NO_STATES = States(None, 0, 0, 0)
# struct DeltaArguments after its maps and gates, in the order of its fields
ROWS, TAIL = struct.Struct("<4q2i"), struct.Struct("<3q8q6qq10if")
POINTERS = ("begins", "added", "transfers", "turned", "dg", "dbeta")
NO_ROWS, NO_MAP = ROWS.pack(0, 0, 0, 0, 1, 0), bytes(MAP)
PADDING = bytes(-(len(MAPS) * MAP + 4 * ROWS.size + TAIL.size) % 64)


def refuses(call: Any) -> str | None:
    """Why the kernels do not cover a call with an erase DELTA; None where they do."""
    x, plan = call.x, call.plan
    if not plan.xp.__name__.endswith("cupy"):
        return "the arrays are not CuPy arrays"
    if x.decay is Decay.VECTOR:
        return "the kernels of the delta rule cover decay NONE and SCALAR so far"
    if x.r is not x.k and (plan.erase_row is Row.DECAYED or x.r.shape[-2] != x.k.shape[-2]):
        return "the kernels of the delta rule read with the key itself, or before the decay with as many heads as keys"
    if x.q is None or not plan.causal or plan.query_row is not Row.AFTER:
        return "the kernels write and read in one pass, each token after its own write; this call does not"
    if plan.dtype == plan.xp.float64:
        return "float64 is computed by the chunk form in CuPy"
    if plan.chunk_size not in (None, cuts.CHUNK):
        return f"chunk_size={plan.chunk_size!r}: the kernels choose their own chunks"
    if 0 in (*x.v.shape, *x.k.shape, *x.q.shape):
        return "there is nothing to compute"
    if x.k.shape[-2] > x.v.shape[-2]:
        return "there are more key heads than value heads"
    if x.v.device.id != launch.current_device():
        return f"the arrays are on device {x.v.device.id}, the current one is {launch.current_device()}"
    if (why := launch.unusable()) or _wgmma(x, plan):
        return why
    K, V, own = x.k.shape[-1], x.v.shape[-1], x.r is not x.k
    return cuda_delta_portable.too_large(_element(x.q, x.k, x.v, x.r), K, V, launch.shared_limit(), own)


def how(call: Any) -> str:
    """The kernels of a call that is covered, in words."""
    wgmma = _wgmma(call.x, call.plan)
    return "chains of chunks by warpgroup products (wgmma)" if wgmma else "portable chains of chunks (mma.sync)"


def divides(x: Inputs, plan: Plan) -> bool:
    """Whether the kernels of a call take the lengths out of q and k themselves."""
    return _wgmma(x, plan)


def skips(x: Inputs, plan: Plan) -> bool:
    """Whether the kernels of a call read after the last step of a token alone."""
    return _wgmma(x, plan) and cuts.skips(plan.steps, x.k.shape[-1], x.v.shape[-1])


def _wgmma(x: Inputs, plan: Plan) -> bool:
    if x.r is not x.k or plan.erase_row is not Row.DECAYED:
        return False
    return cuts.takes(_element(x.q, x.k, x.v, x.r), x.k.shape[-1], x.v.shape[-1], launch.capability())


class Batch(NamedTuple):
    """Sizes of a call and the cut of its sequences."""

    lead: tuple[int, ...]
    T: int
    heads: int  # of the outputs
    H: int  # of the values and the state
    K: int
    V: int
    N: int  # sequences
    offsets: Array | None  # of a ragged batch, on the device
    longest: int  # chunks of the longest sequence
    slots: int  # chunks of a head, over the whole batch
    segments: int
    chunks: int  # of a segment
    decay: bool
    unit: bool  # q and k are divided by their length
    steps: int  # of a token, of which the last reads


class Kept(NamedTuple):
    """What a forward keeps for its backward: the chunks' blocks; of segments, first states and turned transfers."""

    blocks: Array | None
    begins: Array | None
    turned: Array | None


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved)."""
    if not _wgmma(x, plan):
        return cuda_delta_portable.forward(x, plan, state)
    xp, batch = plan.xp, _batch(x, plan)
    launch.prepare(tuple(
        (cuts.KERNELS[name].file, cuts.constants(name, batch.K, batch.V, batch.decay, reverse, batch.unit, batch.steps))
        for name, reverse in cuts.names(batch.segments, plan.gradients)
    ), launch.capability())  # fmt: skip
    arrays = _arrays(xp, x)
    out = xp.empty((*batch.lead, batch.T // batch.steps, batch.heads, batch.V), dtype=x.v.dtype)
    end = xp.empty((batch.N, batch.H, batch.K, batch.V), dtype=xp.float32)
    start, group = _state(xp, state, batch), batch.heads // batch.H
    blocks = _blocks(xp, batch, arrays)
    begins, turned = _begins(xp, batch, arrays, blocks, start, group, plan.gradients)
    _launch("chain", batch, batch.N * batch.heads * batch.segments, arrays, out=out, blocks=blocks, begins=begins,
            start=_states(start, batch), start_group=group, end=_states(end, batch), end_group=group, scale=plan.scale)
    blocks = blocks if plan.gradients and cuts.saves_blocks(blocks.nbytes) else None
    return out, _public(end, batch), Saved(x, plan, state, Kept(blocks, begins, turned))


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state; the keys' own as they read is in theirs as they write."""
    x, plan, state, kept = saved
    if isinstance(kept, cuda_delta_portable.Kept) or (kept is None and not _wgmma(x, plan)):
        return cuda_delta_portable.backward(saved, dout, dstate)
    kept = kept or Kept(None, None, None)
    xp, batch = plan.xp, _batch(x, plan)
    arrays, heads, dtype = _arrays(xp, x), batch.heads, x.v.dtype
    shape = (*batch.lead, batch.T, heads)
    asked = (*batch.lead, batch.T // batch.steps, heads, batch.V)
    dout = xp.zeros(asked, dtype=dtype) if dout is None else cast(xp, dout, dtype)
    arrays["dout"] = _row_array(dout)
    for name, width in (("dq", batch.K), ("dk", batch.K), ("dv", batch.V)):
        tokens = batch.T // batch.steps if name == "dq" else batch.T
        arrays[name] = xp.empty((prod(batch.lead), tokens, heads, width), dtype=dtype)
    dg = xp.empty(asked[:-1], dtype=xp.float32) if batch.decay else None
    dbeta = xp.empty(shape, dtype=xp.float32)
    first = xp.empty((batch.N, heads, batch.K, batch.V), dtype=xp.float32)
    group = heads // batch.H
    blocks = _blocks(xp, batch, arrays) if kept.blocks is None else kept.blocks
    ends = xp.empty((batch.slots * heads, cuts.ENDS), dtype=xp.int8)
    last = _states(_spread(xp, _state(xp, dstate, batch), batch), batch)
    chain = {"blocks": blocks, "ends": ends, "out": arrays["dv"], "other": arrays["v"], "start": last,
             "end": _states(first, batch), "scale": plan.scale}
    if batch.segments == 1:
        _launch("reverse", batch, batch.N * heads, arrays, **chain, which=WHOLE)
    else:
        _reverse_segments(xp, batch, arrays, chain, kept.turned)
    start = _states(_state(xp, state, batch), batch)
    _launch("grads", batch, batch.N * heads * batch.segments, arrays, blocks=blocks, ends=ends, out=arrays["dq"],
            other=arrays["dk"], begins=kept.begins, start=start, start_group=group, dg=dg, dbeta=dbeta,
            scale=plan.scale)
    grads = {n: head_sums(xp, arrays["d" + n], getattr(x, n).shape) for n in ("q", "k", "v")}
    for name, d in (("g", dg), ("beta", dbeta)):
        if d is not None:
            y = getattr(x, name)
            grads[name] = sum_to(xp, _shared(xp, d[..., None], (*batch.lead, *y.shape[-3:])), y.shape)
    if group > 1:
        first = xp.sum(xp.reshape(first, (batch.N, batch.H, group, batch.K, batch.V)), axis=2)
    return Inputs(**{name: grads.get(name) for name in Inputs._fields}), _public(first, batch)


def _batch(x: Inputs, plan: Plan) -> Batch:
    xp, sequences, lead, (T, H, V) = plan.xp, plan.sequences, tuple(x.v.shape[:-3]), x.v.shape[-3:]
    K, heads = x.k.shape[-1], max(x.q.shape[-2], H)
    ragged = sequences[0].row is not None
    N = len(sequences) if ragged else prod(lead)
    longest = max(-(-(s.stop - s.start) // cuts.CHUNK) for s in sequences)
    offsets = xp.asarray([0, *(s.stop for s in sequences)], dtype=xp.int64) if ragged else None
    slots = T // cuts.CHUNK + N if ragged else N * longest  # a sequence's chunks begin at first // CHUNK + its number
    each = -(-longest // cuts.segments(N * heads, longest))
    return Batch(lead, T, heads, H, K, V, N, offsets, longest, slots, -(-longest // each), each, x.g is not None,
                 plan.unit, plan.steps)


def _row_array(y: Array) -> Array:
    """(B, T, heads, width) as the copy engine takes it: the array itself where it can."""
    y = y if y.ndim == 4 else y.reshape(prod(y.shape[:-3]), *y.shape[-3:])
    return y if takes(y) else y.copy()


def _arrays(xp: Any, x: Inputs) -> dict[str, Array | None]:
    """q, k, v and the gates in float32."""
    gates = {n: None if y is None else cast(xp, y, xp.float32) for n, y in (("g", x.g), ("beta", x.beta))}
    return {"q": _row_array(x.q), "k": _row_array(x.k), "v": _row_array(x.v)} | gates


def _blocks(xp: Any, batch: Batch, arrays: dict[str, Array | None]) -> Array:
    """What every chunk knows before it sees a state."""
    blocks = xp.empty((batch.slots * batch.heads, cuts.KEPT + batch.unit * cuts.LENGTHS), dtype=xp.int8)
    _launch("block", batch._replace(chunks=batch.longest), batch.N * batch.heads * batch.longest, arrays,
            blocks=blocks)
    return blocks


def _begins(
    xp: Any, batch: Batch, arrays: dict[str, Array | None], blocks: Array, start: Array | None, group: int,
    gradients: bool,
) -> tuple[Array | None, Array | None]:
    """(the state that each segment begins with, what segments multiply it by, transposed, where gradients follow)."""
    if batch.segments == 1:
        return None, None
    slots, inner = batch.N * batch.heads, batch.segments - 1
    added, transfers = (xp.empty((slots * inner, cuts.STATE), dtype=xp.float32) for _ in range(2))
    turned = xp.empty((slots * inner, cuts.STATE), dtype=xp.float32) if gradients else None
    begins = xp.empty((slots * batch.segments, cuts.STATE), dtype=xp.float32)
    _launch("adds", batch, slots * inner * 4, arrays, blocks=blocks, start=_states(start, batch), start_group=group,
            added=added, transfers=transfers, turned=turned)
    _launch("segments", batch, slots * 8, arrays, added=added, transfers=transfers, begins=begins)
    return begins, turned


def _reverse_segments(
    xp: Any, batch: Batch, arrays: dict[str, Array | None], chain: dict[str, Any], turned: Array | None
) -> None:
    """The reverse chain of sequences in segments."""
    slots, inner = batch.N * batch.heads, batch.segments - 1
    added = xp.empty((slots * inner, cuts.STATE), dtype=xp.float32)
    begins = xp.empty((slots * batch.segments, cuts.STATE), dtype=xp.float32)
    _launch("reverse", batch, slots * inner, arrays, **chain, added=added, which=ADD)
    _launch("segments", batch, slots * 8, arrays, reverse=True, added=added, turned=turned, begins=begins)
    _launch("reverse", batch, slots * batch.segments, arrays, **chain, begins=begins)


def _pointer(y: Array | None) -> int:
    return 0 if y is None else y.data.ptr


def _pack_rows(y: Array | None, heads: int, steps: int = 1) -> bytes:
    """Strides in bytes of an array whose heads `heads` of the outputs share, of rows for tokens of so many steps."""
    if y is None:
        return NO_ROWS
    y = y if y.ndim == 4 else y.reshape(prod(y.shape[:-3]), *y.shape[-3:])
    return ROWS.pack(y.data.ptr, y.strides[0], y.strides[1] // steps, y.strides[2], heads // y.shape[2], 0)


def _places(states: States) -> tuple[int, int, int, int]:
    return _pointer(states.array), states.slot, states.row, states.column


def _launch(
    name: str, batch: Batch, grid: int, arrays: dict[str, Any], *, reverse: bool = False, out: Array | None = None,
    other: Array | None = None, start: States = NO_STATES, end: States = NO_STATES, start_group: int = 1,
    end_group: int = 1, which: int = WHOLE, scale: float = 1.0, **pointers: Array | None,
) -> None:
    """One kernel. pointers: by the names of struct DeltaArguments (attention/delta.cuh)."""
    how, given, maps = cuts.KERNELS[name], pointers.get, cuts.MAPS[name]
    if "sizes" not in arrays:
        arrays["sizes"] = [batch.heads // arrays[n].shape[-2] for n in ("q", "k", "v")]
        arrays["gates"] = _pack_gate(arrays["g"], batch) + _pack_gate(arrays["beta"], batch)
    packed = b"".join((
        *(_map(arrays, n, batch.steps) if n in maps else NO_MAP for n in MAPS),
        _pack_rows(out, batch.heads, batch.steps if name in cuts.STEPPED else 1), _pack_rows(other, batch.heads),
        arrays["gates"],
        TAIL.pack(
            _pointer(batch.offsets), _pointer(given("blocks")), _pointer(given("ends")), *_places(start),
            *_places(end), *(_pointer(given(n)) for n in POINTERS), batch.slots, batch.T, batch.heads, batch.segments,
            batch.chunks, *arrays["sizes"], start_group, end_group, which, scale),
    ))  # fmt: skip
    named = None
    if moves():
        whole = (out, other, start.array, end.array, *pointers.values())
        named = (*(arrays[n] for n in (*maps, "g", "beta")), batch.offsets, *whole)
    constants = cuts.constants(name, batch.K, batch.V, batch.decay, reverse, batch.unit, batch.steps)
    launch.launch(how.file, how.entry, constants, grid, how.threads, cuts.shared(name, batch.unit), packed + PADDING,
                  named)


def _map(arrays: dict[str, Any], name: str, steps: int) -> bytes:
    """The tensor map of an array, made once a call."""
    key = f"map of {name}"
    if key not in arrays:
        arrays[key] = tensor_map(arrays[name], steps if name in cuts.A_TOKEN else 1)
    return arrays[key]
