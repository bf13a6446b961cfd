"""The delta rule as portable CUDA kernels (mma.sync): every dtype but float64, K and V up to 256, any alignment.

Forward: A of every chunk (delta_inverse.cu), then the chain of the chunks (delta_scan.cu). Backward: the chain again
for what the chunks write, N, and the state before each, and in reverse for dv and the gradient of the state after each
(delta_scan_reverse.cu); with both states known all other gradients of a chunk need no other (delta_scan_grads.cu).
Where batch and heads leave the card idle, sequences are cut into segments: the chains without outputs say what each
adds to the state and multiplies it by, and delta_scan_segments.cu which state each begins (backward: ends) with.
"""

from __future__ import annotations

import struct
from math import gcd, prod
from typing import Any, NamedTuple

from ...cuda import launch
from ...ground.namespace import Array, cast, dtype_name, sum_to
from ..kinds import Row
from . import cuda_delta_plan as cuts
from . import cuda_kernels as plain
from . import cuda_plan
from .cuda_plan import round_up
from .inputs import Inputs, Plan, Saved

INVERSE, SCAN = "matrix_state/delta_inverse.cu", "matrix_state/delta_scan.cu"
REVERSE, GRADS = "matrix_state/delta_scan_reverse.cu", "matrix_state/delta_scan_grads.cu"
SEGMENTS, LEAST = "matrix_state/delta_scan_segments.cu", 8  # chunks that a segment has at least


class Pass(NamedTuple):
    """One compiled chain, or the inverse."""

    file: str
    entry: str
    constants: cuda_plan.Constants
    shared: int
    threads: int
    parts: int  # blocks over the value columns


class Kind(NamedTuple):
    """What kernels are compiled for."""

    element: str
    K: int
    V: int
    align: int  # bytes that every row's address and length are a multiple of
    decay: bool
    own: bool = False  # erase vectors of their own
    before: bool = False  # which read the state before it decays
    cut: bool = False  # sequences are cut into segments
    capability: int = 80


def _constants(kind: Kind, **more: int) -> cuda_plan.Constants:
    values = {
        "LA_DTYPE": cuda_plan.ELEMENTS[kind.element], "LA_DECAY": int(kind.decay), "LA_REVERSE": 0,
        "LA_ALIGN": kind.align, "LA_K": kind.K, "LA_V": kind.V, "LA_C": chunk_length(kind.element),
        "LA_TILES": 1, "LA_OWN": int(kind.own), "LA_BEFORE": int(kind.before),
    }  # fmt: skip
    return tuple(sorted((values | more).items()))


def _sizes(element: str) -> tuple[int, int, int, int]:
    """(C, bytes of an element, of a gram matrix, of a chunk's sums of decays)."""
    C = chunk_length(element)
    return C, cuda_plan.BYTES[element], gram_bytes(element), (4 if element == "float32" else 3) * C * 4


def chunk_length(element: str) -> int:
    """C: shared memory holds 64 tokens of 16-bit elements, 32 of float32."""
    return 32 if element == "float32" else 64


def gram_bytes(element: str) -> int:
    """Bytes of an element of A."""
    return 2 if element == "bfloat16" else 4


def inverse_pass(kind: Kind) -> Pass:
    """A of every chunk."""
    C, size, gram, sums = _sizes(kind.element)
    factors = 2 if kind.element == "bfloat16" else 4
    keys = max(C * round_up(kind.K, 16) * size * (1 + kind.own), C * C * gram)
    shared = keys + C * C * factors + C * 80 + 2 * C * 4 + sums
    constants = _constants(kind, LA_WARPS=C // 16, LA_SHARED=shared)
    return Pass(INVERSE, "inverse", constants, shared, 2 * C, 1)


OUTPUTS, WRITES, ADDS = 1, 0, 2  # what a chain is walked for: LA_OUTPUTS


# how a chain may be cut: tiles of 16 value rows a warp, blocks a multiprocessor, stages, places of the queries
NARROW, ALONE, LEAST_SHARED = ((1, 2, 2, 2), (1, 2, 2, 1)), ((1, 1, 2, 2), (1, 1, 2, 1), (1, 1, 1, 1)), (1, 1, 1, 1)
WIDE = (2, 2, 2, 1)  # half as many warps read each operand from shared memory; where a batch fills the card


def chain_pass(kind: Kind, limit: int, reverse: bool = False, what: int = OUTPUTS) -> Pass:
    """The chain, forward or in reverse, within `limit` bytes of shared memory."""
    wide = kind.element == "bfloat16" and kind.K <= 128 and kind.V > 64 and not kind.cut
    cuttings: tuple[tuple[int, ...], ...] = NARROW if kind.V <= 64 else ()
    if wide and kind.capability == 90:  # they spill elsewhere
        cuttings = (WIDE,)
    cuttings += ALONE
    for cut in cuttings:
        how = _chain_pass(kind, reverse, what, *cut)
        if how.shared <= (limit if cut[1] == 1 else limit // 2 - 512):
            return how
    return _chain_pass(kind, reverse, what, *LEAST_SHARED)


def _chain_pass(kind: Kind, reverse: bool, what: int, tiles: int, blocks: int, stages: int, places: int) -> Pass:
    (C, size, gram, sums), V = _sizes(kind.element), kind.V
    warps = 1
    while warps < 8 // tiles and warps * 16 * tiles < V:
        warps *= 2
    rows = 16 * tiles * warps
    reads = reverse or what == OUTPUTS  # the queries
    apart = kind.element == "float16" and what == (OUTPUTS if reverse else WRITES)  # betas, which what is kept is over
    keys = C * round_up(kind.K, 16) * size
    stage = keys * (1 + kind.own) + C * rows * size + C * C * gram + (1 + apart) * C * 4
    shared = stages * stage + reads * (places * keys + C * C * gram) + warps * sums
    constants = _constants(kind, LA_WARPS=warps, LA_TILES=tiles, LA_RUN=16 if tiles > 1 or size == 4 else C,
                           LA_STAGES=stages, LA_PLACES=places, LA_BLOCKS=blocks, LA_SHARED=shared, LA_OUTPUTS=what)
    parts = -(-V // rows) + (-(-kind.K // rows) if what == ADDS and not reverse else 0)
    return Pass(REVERSE if reverse else SCAN, "reverse" if reverse else "scan", constants, shared, 32 * warps, parts)


def segments_pass(kind: Kind, reverse: bool) -> Pass:
    """The states that segments begin with, or in reverse end with."""
    constants = _constants(kind, LA_REVERSE=int(reverse), LA_WARPS=8)
    return Pass(SEGMENTS, "segments", constants, 0, 256, -(-kind.V // 16))


def segments(blocks: int, chunks: int) -> int:
    """Pieces of sequences of `chunks` chunks, where the chain of a whole batch has `blocks` blocks.

    What n segments add and multiply by takes 2 n - 3 blocks for each, which are to be there at once.
    """
    places = cuda_plan.MULTIPROCESSORS // max(blocks, 1)
    return max(1, min(places, (places + 3) // 2, chunks // LEAST))


def grads_pass(kind: Kind, limit: int) -> Pass:
    """Every other gradient, a block a chunk; keys in pieces of as many columns as leave room for two blocks, or fit."""
    (C, size, gram, sums), K, V = _sizes(kind.element), round_up(kind.K, 16), round_up(kind.V, 16)

    def shared(groups: int, piece: int) -> int:
        columns = V * piece * gram + C * piece * size * (2 + kind.own)
        small = sums + 2 * C * 4 + groups * 3 * C * 4 + 64
        return 3 * C * V * size + 2 * C * C * gram + small + columns + (C * piece * 2 if size == 2 else 0)

    cuttings = [(2, 64)] * (size == 2 and K > 32) + [(2, 32), (1, 16)]  # warps beside one another, columns of a piece
    pair = [cut for cut in cuttings[:-1] if 2 * (shared(*cut) + 1024) <= limit + 1024]
    groups, piece = next((cut for cut in pair or cuttings if shared(*cut) <= limit), cuttings[-1])
    constants = _constants(kind, LA_WARPS=groups * C // 16, LA_PIECE=piece, LA_SHARED=shared(groups, piece),
                           LA_BLOCKS=2 if pair else 1)
    return Pass(GRADS, "grads", constants, shared(groups, piece), groups * C * 2, 1)


def state_bytes(kind: Kind) -> int:
    """Bytes of the state of a chunk."""
    return round_up(kind.K, 16) * round_up(kind.V, 16) * gram_bytes(kind.element)


def passes(kind: Kind, limit: int, gradients: bool) -> dict[str, Pass]:
    """Everything that a call and its backward launch."""
    found = {"inverse": inverse_pass(kind), "out": chain_pass(kind, limit)}
    if kind.cut:
        found["what a segment adds"] = chain_pass(kind, limit, what=ADDS)
        found["states of segments"] = segments_pass(kind, False)
    if gradients:
        found["what is written"] = chain_pass(kind, limit, what=WRITES)
        found["dv"] = chain_pass(kind, limit, True)
        found["gradients"] = grads_pass(kind, limit)
    if gradients and kind.cut:
        found["dstate a segment adds"] = chain_pass(kind, limit, True, ADDS)
        found["dstates of segments"] = segments_pass(kind, True)
    return found


def too_large(element: str, K: int, V: int, limit: int, own: bool = False) -> str | None:
    """Why tiles of these widths do not fit a device of `limit` bytes of shared memory a block; None where they do."""
    if max(K, V) > cuda_plan.WIDEST:
        return f"keys are {K} and values {V} wide, the kernels hold up to {cuda_plan.WIDEST}"
    kind = Kind(element, K, V, cuda_plan.BYTES[element], True, own, own)
    need = max(how.shared for how in passes(kind, limit, True).values())
    return f"{K} x {V} {element} takes {need} bytes of shared memory, a block has {limit}" if need > limit else None


class Batch(NamedTuple):
    """Sizes of a call, and its arrays as the kernels take them."""

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
    element: str
    align: int
    q: Array
    k: Array
    v: Array
    g: Array | None
    beta: Array
    r: Array | None  # erase vectors of their own
    before: bool

    @property
    def kind(self) -> Kind:
        return Kind(self.element, self.K, self.V, self.align, self.g is not None, self.r is not None, self.before,
                    self.segments > 1, launch.capability())


class Kept(NamedTuple):
    """What a forward keeps for its backward: A of the chunks; of segments, first states and transfers."""

    inverses: Array | None
    begins: Array | None
    transfers: Array | None


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved)."""
    xp, batch = plan.xp, _batch(x, plan)
    limit = launch.shared_limit()
    wanted = passes(batch.kind, limit, plan.gradients)
    launch.prepare(tuple((how.file, how.constants) for how in wanted.values()), launch.capability())
    out = xp.empty((*batch.lead, batch.T, batch.heads, batch.V), dtype=batch.v.dtype)
    end = xp.empty((batch.N, batch.H, batch.K, batch.V), dtype=xp.float32)
    group, start = batch.heads // batch.H, plain._state(xp, state, batch)
    inverses = _inverses(xp, batch)
    begins, transfers = _begins(xp, batch, inverses, start, limit)
    _chain(batch, chain_pass(batch.kind, limit), batch.v, inverses, out=out,
           **_start(batch, start, group, begins), end=plain._states(end, batch), end_group=group, scale=plan.scale)
    kept = inverses if plan.gradients and cuts.saves_blocks(inverses.nbytes) else None
    return cast(xp, out, x.v.dtype), plain._public(end, batch), Saved(x, plan, state, Kept(kept, begins, transfers))


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state; the keys' own as they read is in theirs as they write."""
    x, plan, state, kept = saved
    xp, batch, limit = plan.xp, _batch(x, plan), launch.shared_limit()
    group, dtype, kind = batch.heads // batch.H, batch.v.dtype, batch.kind
    shape = (prod(batch.lead), batch.T, batch.heads)
    rows = _cotangent(xp, batch, dout, shape)
    start, last = plain._state(xp, state, batch), plain._spread(xp, plain._state(xp, dstate, batch), batch)
    inverses = _inverses(xp, batch) if kept is None or kept.inverses is None else kept.inverses
    begins, transfers = _begins(xp, batch, inverses, start, limit) if kept is None else kept[1:]
    news, dv = (xp.empty((*shape, batch.V), dtype=dtype) for _ in range(2))
    apart = xp.empty_like(dv) if batch.element == "float16" else None
    first = xp.empty((batch.N, batch.heads, batch.K, batch.V), dtype=xp.float32)
    states, ends = (xp.empty((batch.slots * batch.heads, state_bytes(kind)), dtype=xp.int8) for _ in range(2))
    _chain(batch, chain_pass(kind, limit, what=WRITES), batch.v, inverses, writes=news, states=states,
           **_start(batch, start, group, begins), scale=plan.scale)
    begins = _ends(xp, batch, inverses, transfers, rows, last, limit, plan.scale)
    _chain(batch, chain_pass(kind, limit, reverse=True), rows, inverses, out=dv, writes=apart, states=ends,
           **_start(batch, last, 1, begins), end=plain._states(first, batch), scale=plan.scale)
    del inverses, begins, transfers
    names = ("q", "k", "r") if batch.r is not None else ("q", "k")
    grads = {n: xp.empty((*shape, batch.K), dtype=dtype) for n in names}
    gates = {n: xp.empty(shape, dtype=xp.float32) for n in (("g", "beta") if batch.g is not None else ("beta",))}
    _grads(batch, grads_pass(kind, limit), rows, dv if apart is None else apart, news, states, ends, grads, gates,
           plan.scale)
    grads = {n: plain._shared(xp, y, (*shape[:2], *getattr(x, n).shape[-2:])).reshape(getattr(x, n).shape)
             for n, y in (grads | {"v": dv}).items()}
    for n, y in gates.items():
        like = getattr(x, n)
        y = plain._shared(xp, y[..., None], (*shape[:2], *like.shape[-2:]))
        grads[n] = sum_to(xp, y.reshape((*batch.lead, *like.shape[-3:])), like.shape)
    if group > 1:
        first = xp.sum(xp.reshape(first, (batch.N, batch.H, group, batch.K, batch.V)), axis=2)
    return Inputs(**{name: grads.get(name) for name in Inputs._fields}), plain._public(first, batch)


def _batch(x: Inputs, plan: Plan) -> Batch:
    xp, sequences, lead, (T, H, V) = plan.xp, plan.sequences, tuple(x.v.shape[:-3]), x.v.shape[-3:]
    own = () if x.r is x.k else (x.r,)
    q, k, v, *r = plain._rows(xp, x.q, x.k, x.v, *own)
    element, ragged, heads = dtype_name(v), sequences[0].row is not None, max(x.q.shape[-2], H)
    N = len(sequences) if ragged else prod(lead)
    longest = max(-(-(s.stop - s.start) // chunk_length(element)) for s in sequences)
    offsets = xp.asarray([0, *(s.stop for s in sequences)], dtype=xp.int64) if ragged else None
    slots = T // chunk_length(element) + N if ragged else N * longest
    parts = max(1, -(-V // 128))  # blocks of the chain over the value columns
    each = -(-longest // segments(N * heads * parts, longest))
    g, K = None if x.g is None else cast(xp, x.g, xp.float32), x.k.shape[-1]
    if g is not None and g.ndim > 4:
        g = g.reshape(prod(g.shape[:-3]), *g.shape[-3:])
    return Batch(lead, T, heads, H, K, V, N, offsets, longest, slots, -(-longest // each), each, element,
                 _alignment((q, k, v, *r), K, V), q, k, v, g, cast(xp, x.beta, xp.float32), r[0] if r else None,
                 plan.erase_row is not Row.DECAYED)


def _alignment(arrays: tuple[Array, ...], K: int, V: int) -> int:
    return gcd(plain._alignment(arrays, K, V), 16)


def _cotangent(xp: Any, batch: Batch, dout: Array | None, shape: tuple[int, ...]) -> Array:
    """dout (B, T, heads, V) as the kernels take it; zeros where there is none."""
    if dout is None:
        return xp.zeros((*shape, batch.V), dtype=batch.v.dtype)
    dout = cast(xp, dout, batch.v.dtype)
    rows = dout if dout.ndim == 4 else dout.reshape(shape[0], *dout.shape[-3:])
    fine = _alignment((rows,), batch.K, batch.V) >= batch.align and rows.strides[-1] == rows.itemsize
    return rows if fine else rows.copy()


NONE = plain.States(None, 0, 0, 0)


def _pack(
    batch: Batch, v: Array | None, inverses: Array, out: Array | None = None, writes: Array | None = None,
    states: Array | None = None, start: plain.States = NONE, start_group: int = 1, end: plain.States = NONE,
    end_group: int = 1, transfers: plain.States = NONE, segments: int = 1, chunks: int = 1, scale: float = 1.0,
) -> bytes:
    """struct DeltaScanArguments (attention/delta_scan.cuh)."""
    four = [y if y is None or y.ndim == 4 else y.reshape(prod(y.shape[:-3]), *y.shape[-3:])
            for y in (batch.q, batch.k, v, out, batch.r, writes)]  # fmt: skip
    return b"".join((
        *(plain._pack_rows(y, batch) for y in four), plain._pack_gate(batch.g, batch),
        plain._pack_gate(batch.beta, batch),
        struct.pack("<3q", plain._pointer(batch.offsets), inverses.data.ptr, plain._pointer(states)),
        start.packed(), end.packed(), struct.pack("<2i", start_group, end_group), transfers.packed(),
        struct.pack("<q4ifi", batch.slots, batch.T, batch.heads, segments, chunks, scale, 0),
    ))


def _inverses(xp: Any, batch: Batch) -> Array:
    """A of every chunk."""
    C, how = chunk_length(batch.element), inverse_pass(batch.kind)
    inverses = xp.empty((batch.slots * batch.heads, C * C * gram_bytes(batch.element)), dtype=xp.int8)
    launch.launch(how.file, how.entry, how.constants, batch.N * batch.heads * batch.longest, how.threads, how.shared,
                  _pack(batch, None, inverses, segments=batch.longest))
    return inverses


def _chain(batch: Batch, how: Pass, v: Array, inverses: Array, **given: Any) -> None:
    launch.launch(how.file, how.entry, how.constants, batch.N * batch.heads * batch.segments * how.parts, how.threads,
                  how.shared, _pack(batch, v, inverses, segments=batch.segments, chunks=batch.chunks, **given))


def _of_segments(xp: Any, batch: Batch, rows: int) -> plain.States:
    """A matrix (rows, K) for every segment, sequence and head."""
    array = xp.empty((batch.N * batch.heads * batch.segments, rows, batch.K), dtype=xp.float32)
    return plain.States(array, rows * batch.K, batch.K, 1)


def _start(batch: Batch, start: Array | None, group: int, begins: Array | None) -> dict[str, Any]:
    """What a chain begins with: the state of each sequence, or of each segment."""
    if begins is None:
        return {"start": plain._states(start, batch), "start_group": group}
    return {"start": plain.States(begins, batch.V * batch.K, batch.K, 1), "start_group": 0}


def _begins(
    xp: Any, batch: Batch, inverses: Array, start: Array | None, limit: int
) -> tuple[Array | None, Array | None]:
    """(the state that each segment begins with, what it multiplies a state by); None where nothing is cut."""
    if batch.segments == 1:
        return None, None
    added, transfers = _of_segments(xp, batch, batch.V), _of_segments(xp, batch, batch.K)
    group = batch.heads // batch.H
    _chain(batch, chain_pass(batch.kind, limit, what=ADDS), batch.v, inverses, start=plain._states(start, batch),
           start_group=group, end=added, transfers=transfers)
    return _sum_up(xp, batch, added.array, transfers.array, start, group, False), transfers.array


def _ends(
    xp: Any, batch: Batch, inverses: Array, transfers: Array | None, dout: Array, last: Array | None, limit: int,
    scale: float,
) -> Array | None:
    """The gradient of the state that each segment ends with."""
    if batch.segments == 1:
        return None
    added = _of_segments(xp, batch, batch.V)
    _chain(batch, chain_pass(batch.kind, limit, True, ADDS), dout, inverses, start=plain._states(last, batch),
           end=added, scale=scale)
    return _sum_up(xp, batch, added.array, transfers, last, 1, True)


def _sum_up(
    xp: Any, batch: Batch, added: Array, transfers: Array, start: Array | None, group: int, reverse: bool
) -> Array:
    """Launches delta_scan_segments.cu with its Arguments."""
    begins, how = xp.empty_like(added), segments_pass(batch.kind, reverse)
    packed = struct.pack("<4q", plain._pointer(batch.offsets), added.data.ptr, transfers.data.ptr, begins.data.ptr)
    packed += plain._states(start, batch).packed() + struct.pack(
        "<6i", group, batch.T, batch.heads, batch.segments, batch.chunks, 0)
    launch.launch(how.file, how.entry, how.constants, batch.N * batch.heads * how.parts, how.threads, how.shared,
                  packed)
    return begins


def _grads(
    batch: Batch, how: Pass, dout: Array, dv: Array, news: Array, states: Array, ends: Array,
    grads: dict[str, Array], gates: dict[str, Array], scale: float,
) -> None:
    """Launches delta_scan_grads.cu with struct DeltaGradArguments (attention/delta_scan_grads.cuh)."""
    rows = (batch.q, batch.k, batch.r, dout, dv, news, grads["q"], grads["k"], grads.get("r"))
    packed = b"".join((
        *(plain._pack_rows(y, batch) for y in rows), plain._pack_gate(batch.g, batch),
        plain._pack_gate(batch.beta, batch), struct.pack("<6q", *(plain._pointer(y) for y in (
            batch.offsets, states, ends, gates.get("g"), gates["beta"])), batch.slots),
        struct.pack("<4ifi", batch.T, batch.heads, batch.longest, 0, scale, 0),
    ))
    launch.launch(how.file, how.entry, how.constants, batch.N * batch.heads * batch.longest, how.threads, how.shared,
                  packed)
