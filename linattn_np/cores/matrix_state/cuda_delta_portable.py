"""The delta rule as portable CUDA kernels (mma.sync): every dtype but float64, K and V up to 256, any alignment.

Forward: A of every chunk (delta_inverse.cu), then the chain of the chunks (delta_scan.cu). Backward: the chain again
for what the chunks write, N, and in reverse for dv (delta_scan_reverse.cu). With N known both reads are plain scans: q
reads out of the writes (k, N), and so does the key, whose cotangent is -dv; the passes of cuda_kernels.py give their
gradients, and delta_finish.cu puts them together. Erase vectors of their own that read the state before it decays read
what the token before left: their scan is of arrays one token later.
"""

from __future__ import annotations

import struct
from math import gcd, prod
from typing import Any, NamedTuple

from ...cuda import launch
from ...ground.namespace import Array, cast, dtype_name, sum_to
from ..kinds import Row
from . import cuda_kernels as plain
from . import cuda_plan
from .cuda_plan import round_up
from .inputs import Inputs, Plan, Saved

INVERSE, SCAN = "matrix_state/delta_inverse.cu", "matrix_state/delta_scan.cu"
REVERSE, FINISH = "matrix_state/delta_scan_reverse.cu", "matrix_state/delta_finish.cu"


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
    shared = C * round_up(kind.K, 16) * size * (1 + kind.own) + C * C * (4 + gram) + C * 16 + C * 80 + 2 * C * 4 + sums
    constants = _constants(kind, LA_WARPS=C // 16, LA_SHARED=shared)
    return Pass(INVERSE, "inverse", constants, shared, 2 * C, 1)


def chain_pass(kind: Kind, limit: int, reverse: bool = False, outputs: bool = True) -> Pass:
    """The chain, forward or in reverse, within `limit` bytes of shared memory."""
    (C, size, gram, sums), V = _sizes(kind.element), kind.V
    warps = 1
    while warps < 8 and warps * 16 < V:
        warps *= 2
    stage = C * (round_up(kind.K, 16) * (1 + outputs + kind.own) + 16 * warps) * size + C * C * gram + C * 4
    rest = outputs * C * C * gram + warps * sums
    stages = 2 if 2 * stage + rest <= limit else 1
    shared = stages * stage + rest
    more = {} if reverse else {"LA_OUTPUTS": int(outputs)}
    constants = _constants(kind, LA_WARPS=warps, LA_STAGES=stages, LA_BLOCKS=1, LA_SHARED=shared, **more)
    return Pass(REVERSE if reverse else SCAN, "reverse" if reverse else "scan", constants, shared, 32 * warps,
                -(-V // (16 * warps)))


def finish_constants(kind: Kind, size: int | None = None) -> cuda_plan.Constants:
    """What puts the gradients together; size: bytes of an element of the parts of dk."""
    return _constants(kind, LA_PARTS=size or cuda_plan.BYTES[kind.element])


def too_large(element: str, K: int, V: int, limit: int, own: bool = False) -> str | None:
    """Why tiles of these widths do not fit a device of `limit` bytes of shared memory a block; None where they do."""
    if max(K, V) > cuda_plan.WIDEST:
        return f"keys are {K} and values {V} wide, the kernels hold up to {cuda_plan.WIDEST}"
    kind = Kind(element, K, V, cuda_plan.BYTES[element], True, own, own)
    passes = inverse_pass(kind), chain_pass(kind, limit)
    need = max(how.shared for how in passes)  # plain scans fit every device
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
        return Kind(self.element, self.K, self.V, self.align, self.g is not None, self.r is not None, self.before)


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved)."""
    xp, batch = plan.xp, _batch(x, plan)
    limit = launch.shared_limit()
    passes = [inverse_pass(batch.kind), chain_pass(batch.kind, limit)]
    if plan.gradients:
        passes += [chain_pass(batch.kind, limit, outputs=False), chain_pass(batch.kind, limit, reverse=True)]
    launch.prepare(tuple((how.file, how.constants) for how in passes), launch.capability())
    out = xp.empty((*batch.lead, batch.T, batch.heads, batch.V), dtype=batch.v.dtype)
    end = xp.empty((batch.N, batch.H, batch.K, batch.V), dtype=xp.float32)
    group = batch.heads // batch.H
    _chain(batch, passes[1], batch.v, _inverses(xp, batch), out=out, start=plain._state(xp, state, batch),
           start_group=group, end=end, end_group=group, scale=plan.scale)
    return cast(xp, out, x.v.dtype), plain._public(end, batch), Saved(x, plan, state, None)


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state; the keys' own as they read is in theirs as they write."""
    x, plan, state, _ = saved
    xp, batch, limit = plan.xp, _batch(x, plan), launch.shared_limit()
    group, dtype = batch.heads // batch.H, batch.v.dtype
    shape = (*batch.lead, batch.T, batch.heads)
    dout = xp.zeros((*shape, batch.V), dtype=dtype) if dout is None else cast(xp, dout, dtype)
    rows = dout if dout.ndim == 4 else dout.reshape(prod(batch.lead), *dout.shape[-3:])
    if _alignment((rows,), batch.K, batch.V) < batch.align or rows.strides[-1] != rows.itemsize:
        rows = rows.copy()
    start, last = plain._state(xp, state, batch), plain._spread(xp, plain._state(xp, dstate, batch), batch)
    inverses, wide = _inverses(xp, batch), (prod(batch.lead), batch.T, batch.heads, batch.V)
    news, dv = (xp.empty(wide, dtype=dtype) for _ in range(2))
    apart = [xp.empty(wide, dtype=dtype) if batch.element == "float16" else None for _ in range(2)]
    first = xp.empty((batch.N, batch.heads, batch.K, batch.V), dtype=xp.float32)
    _chain(batch, chain_pass(batch.kind, limit, outputs=False), batch.v, inverses, writes=news,
           apart=apart[0], start=start, start_group=group, scale=plan.scale)
    _chain(batch, chain_pass(batch.kind, limit, reverse=True), rows, inverses, out=dv, apart=apart[1],
           start=last, end=first, scale=plan.scale)
    del inverses
    begin = start if start is None or group == 1 else xp.repeat(start, group, axis=1)
    reads = _scan_grads(batch, plan, batch.q, news, begin, rows, last)
    vectors = [batch.k if batch.r is None else batch.r, dv]
    if batch.before:
        vectors = [_later(batch, y) for y in vectors]
    keys = _scan_grads(batch, plan._replace(scale=1.0), vectors[0], news, begin, vectors[1], None)
    dk, dbeta = _finish(xp, batch, reads.k, keys, news, dv, *apart)
    grads = {"q": reads.q, "k": dk, "v": plain._shared(xp, dv, (*dv.shape[:2], *x.v.shape[-2:]))}
    if batch.before:
        grads["r"] = _earlier(batch, keys.q, dv, begin)
    grads = {n: y.reshape(getattr(x, n).shape) for n, y in grads.items()}
    if reads.g is not None:
        grads["g"] = (reads.g - keys.g).reshape(x.g.shape)
    dbeta = plain._shared(xp, dbeta[..., None], (*dv.shape[:2], *x.beta.shape[-2:]))
    grads["beta"] = sum_to(xp, dbeta.reshape((*batch.lead, *x.beta.shape[-3:])), x.beta.shape)
    if group > 1:
        first = xp.sum(xp.reshape(first, (batch.N, batch.H, group, batch.K, batch.V)), axis=2)
    return Inputs(**{name: grads.get(name) for name in Inputs._fields}), plain._public(first, batch)


def _batch(x: Inputs, plan: Plan) -> Batch:
    xp, sequences, lead, (T, H, V) = plan.xp, plan.sequences, tuple(x.v.shape[:-3]), x.v.shape[-3:]
    r = () if x.r is x.k else (x.r,)
    q, k, v, *r = plain._rows(xp, x.q, x.k, x.v, *r)
    element, ragged, heads = dtype_name(v), sequences[0].row is not None, max(x.q.shape[-2], H)
    N = len(sequences) if ragged else prod(lead)
    longest = max(-(-(s.stop - s.start) // chunk_length(element)) for s in sequences)
    offsets = xp.asarray([0, *(s.stop for s in sequences)], dtype=xp.int64) if ragged else None
    slots = T // chunk_length(element) + N if ragged else N * longest
    g, K = None if x.g is None else cast(xp, x.g, xp.float32), x.k.shape[-1]
    if g is not None and g.ndim > 4:
        g = g.reshape(prod(g.shape[:-3]), *g.shape[-3:])
    return Batch(lead, T, heads, H, K, V, N, offsets, longest, slots, element,
                 _alignment((q, k, v, *r), K, V), q, k, v, g, cast(xp, x.beta, xp.float32), r[0] if r else None,
                 plan.erase_row is not Row.DECAYED)


def _alignment(arrays: tuple[Array, ...], K: int, V: int) -> int:
    return gcd(plain._alignment(arrays, K, V), 16)


def _pack(
    batch: Batch, v: Array | None, inverses: Array, out: Array | None = None, writes: Array | None = None,
    apart: Array | None = None, start: Array | None = None, start_group: int = 1, end: Array | None = None,
    end_group: int = 1, segments: int = 1, scale: float = 1.0,
) -> bytes:
    """struct DeltaScanArguments (attention/delta_scan.cuh)."""
    four = [y if y is None or y.ndim == 4 else y.reshape(prod(y.shape[:-3]), *y.shape[-3:])
            for y in (batch.q, batch.k, v, out, writes, batch.r, apart)]  # fmt: skip
    return b"".join((
        *(plain._pack_rows(y, batch) for y in four), plain._pack_gate(batch.g, batch),
        plain._pack_gate(batch.beta, batch),
        struct.pack("<2q", plain._pointer(batch.offsets), inverses.data.ptr),
        plain._states(start, batch).packed(), plain._states(end, batch).packed(),
        struct.pack("<2iq4ifi", start_group, end_group, batch.slots, batch.T, batch.heads, segments, batch.longest,
                    scale, 0),
    ))


def _inverses(xp: Any, batch: Batch) -> Array:
    """A of every chunk."""
    C, how = chunk_length(batch.element), inverse_pass(batch.kind)
    inverses = xp.empty((batch.slots * batch.heads, C * C * gram_bytes(batch.element)), dtype=xp.int8)
    launch.launch(how.file, how.entry, how.constants, batch.N * batch.heads * batch.longest, how.threads, how.shared,
                  _pack(batch, None, inverses, segments=batch.longest))
    return inverses


def _chain(batch: Batch, how: Pass, v: Array, inverses: Array, **given: Any) -> None:
    launch.launch(how.file, how.entry, how.constants, batch.N * batch.heads * how.parts, how.threads, how.shared,
                  _pack(batch, v, inverses, **given))


def _scan_grads(
    batch: Batch, plan: Plan, q: Array, news: Array, state: Array | None, dout: Array, dstate: Array | None
) -> Inputs:
    """Gradients of q, k and g in out = scale q S, where the chunks write (k, news)."""
    x = Inputs(q, batch.k, news, batch.g)
    how = plain._batch(x, plan, q, batch.k, news, dout)
    plain._prepare(how, plan)
    begins = plain._begins(plan.xp, how, batch.k, news, batch.g, state, 1.0, reverse=False)
    return plain.backward(Saved(x, plan, state, begins), dout, dstate, values=False)[0]


def _bounds(batch: Batch, offsets: Array | None, end: int) -> Any:
    """The first (end 0) or last (1) tokens of the sequences of a batch row."""
    if offsets is None:
        return -end
    return offsets[end : len(offsets) - 1 + end] - end


def _later(batch: Batch, y: Array) -> Array:
    """y of the next token of the same sequence; zeros at the last."""
    z = y.copy()
    z[:, :-1] = y[:, 1:]
    z[:, _bounds(batch, batch.offsets, 1)] = 0
    return z


def _earlier(batch: Batch, reads: Array, dv: Array, state: Array | None) -> Array:
    """Gradient of erase vectors that read the state before the token, from that of the token before as it read after.

    A sequence's first token reads the initial state (N, heads, K, V).
    """
    dr = -reads
    dr[:, 1:] = -reads[:, :-1]
    first = _bounds(batch, batch.offsets, 0)
    if batch.offsets is not None:  # an empty sequence has none; the last may begin behind the last token
        some = batch.offsets[1:] > first
        first, state = first[some], None if state is None else state[some]
    rows = dv[:, first].reshape(-1, *dv.shape[2:])  # (N, heads, V)
    found = 0.0
    if state is not None:
        found = -(state @ rows.astype(state.dtype)[..., None])[..., 0]  # (N, heads, K)
        found = found.reshape(len(found), reads.shape[2], -1, batch.K).sum(axis=2)
    dr[:, first] = found if batch.offsets is not None or state is None else found.reshape(dr[:, first].shape)
    return dr


def _finish(
    xp: Any, batch: Batch, written: Array, keys: Inputs, news: Array, dv: Array, news_apart: Array | None,
    dv_apart: Array | None,
) -> tuple[Array, Array]:
    """(dk, dbeta) from the gradients of the two scans."""
    heads = batch.k.shape[-2]
    dk, dbeta = xp.empty_like(written), xp.empty(dv.shape[:-1], dtype=xp.float32)
    tokens = prod(batch.lead) * batch.T
    how = finish_constants(batch.kind, written.itemsize)
    packed = plain._pack_rows(batch.k, batch) + struct.pack(
        "<8q", *(plain._pointer(y) for y in (written, keys.q, keys.k, dk, news, dv, news_apart, dv_apart))
    ) + plain._pack_gate(batch.beta, batch) + struct.pack(
        "<2q4i", dbeta.data.ptr, tokens, batch.T, batch.heads, heads, 0)
    launch.launch(FINISH, "finish", how, -(-tokens * heads // 4), 128, 0, packed)
    return dk, dbeta
