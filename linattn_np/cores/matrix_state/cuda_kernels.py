"""The chunk form as CUDA kernels on CuPy arrays: erase NONE, decay NONE or SCALAR, K and V up to 256.

One pass over the tokens (cuda_src/matrix_state/scan.cu) is the forward and, with its arrays exchanged and time turned
round, every gradient; nothing is kept but the inputs. On compute capability 90 the same pass runs by warpgroup products
(scan_wgmma.cu), and dk and dv come from one pass together (writes_wgmma.cu). Sequences are cut into segments where
batch and heads leave the card idle: a first pass sums up what each segment adds to the state, and a small kernel makes
of that the state each segment begins with.
"""

from __future__ import annotations

import struct
from math import gcd, prod
from typing import Any, NamedTuple

from ...cuda import launch
from ...ground.namespace import Array, cast, dtype_name, sum_to
from ..kinds import Decay, Erase, Row
from . import cuda_plan as cuts
from . import cuda_wgmma
from .inputs import Inputs, Plan, Saved

SEGMENTS, GATE = "matrix_state/segments.cu", "matrix_state/gate_grad.cu"
HEAD_SUMS = "matrix_state/head_sums.cu"


def refuses(call: Any) -> str | None:
    """Why the kernels do not cover a call; None where they do."""
    x, plan = call.x, call.plan
    if not plan.xp.__name__.endswith("cupy"):
        return "the arrays are not CuPy arrays"
    if x.erase is not Erase.NONE or x.decay is Decay.VECTOR or x.gv is not None:
        return "the kernels cover erase NONE with decay NONE or SCALAR so far"
    if x.q is None or not plan.causal:
        return "the kernels write and read in one pass; this call does not read along the way"
    if x.u is not None or plan.query_row is not Row.AFTER:
        return "the kernels read a token's own write, without a bonus"
    if plan.dtype == plan.xp.float64:
        return "float64 is computed by the chunk form in CuPy"
    if plan.chunk_size not in (None, 64):
        return f"chunk_size={plan.chunk_size!r}: the kernels choose their own chunks"
    K, V = x.k.shape[-1], x.v.shape[-1]
    if max(K, V) > cuts.WIDEST:
        return f"keys are {K} and values {V} wide, the kernels hold up to {cuts.WIDEST}"
    if 0 in (*x.v.shape, *x.k.shape, *x.q.shape):
        return "there is nothing to compute"
    if x.k.shape[-2] > x.v.shape[-2]:
        return "there are more key heads than value heads"
    if x.v.device.id != launch.current_device():
        return f"the arrays are on device {x.v.device.id}, the current one is {launch.current_device()}"
    return launch.unusable()


def how(call: Any) -> str:
    """The passes of a call that is covered, in words."""
    q, k, v = _rows(call.plan.xp, call.x.q, call.x.k, call.x.v)
    tf32 = ", tf32 products" if _products(q, call.plan) == "tf32" else ""
    return "passes by warpgroup products (wgmma)" if _wgmma(q, k, v) else f"portable passes (mma.sync){tf32}"


def _wgmma(q: Array, k: Array, v: Array) -> bool:
    K, V = k.shape[-1], v.shape[-1]
    return cuda_wgmma.takes(dtype_name(q), K, V, _alignment((q, k, v), K, V), launch.capability())


def _element(*arrays: Array) -> str:
    """The element that arrays are computed in: bfloat16 or float16 if all are, else float32."""
    names = {dtype_name(y) for y in arrays}
    return names.pop() if len(names) == 1 and names <= set(cuts.ELEMENTS) else "float32"


def _products(x: Array, plan: Plan) -> str:
    """What passes over arrays like x multiply: their element, or tf32 where that was asked for."""
    name = dtype_name(x)
    return "tf32" if name == "float32" and plan.precision == "tf32" else name


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
    longest: int
    element: str
    decay: bool
    align: int
    segments: int
    chunks: int  # of a segment
    wgmma: bool  # the passes by warpgroup products

    @property
    def tokens(self) -> int:
        return prod(self.lead) * self.T


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved)."""
    xp = plan.xp
    q, k, v = _rows(xp, x.q, x.k, x.v)
    batch = _batch(x, plan, q, k, v)
    _prepare(batch, plan)
    out = xp.empty((*batch.lead, batch.T, batch.heads, batch.V), dtype=v.dtype)
    end = xp.empty((batch.N, batch.H, batch.K, batch.V), dtype=xp.float32)
    g = None if x.g is None else cast(xp, x.g, xp.float32)
    start = _state(xp, state, batch)
    begins = _begins(xp, batch, k, v, g, start, 1.0, reverse=False)
    group = batch.heads // batch.H
    _scan(batch, q, k, v, out, g, begins or _states(start, batch), plan.scale, 1.0, group=0 if begins else group,
          end=_states(end, batch), end_group=group)
    return cast(xp, out, x.v.dtype), _public(end, batch), Saved(x, plan, state, begins)


def backward(
    saved: Saved, dout: Array | None, dstate: Array | None, values: bool = True
) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state; without `values` neither the values' nor the state's."""
    x, plan, state, begins = saved
    xp = plan.xp
    q, k, v = _rows(xp, x.q, x.k, x.v)
    shape = (*x.v.shape[:-2], max(x.q.shape[-2], x.v.shape[-2]), x.v.shape[-1])
    dout = xp.zeros(shape, dtype=v.dtype) if dout is None else cast(xp, dout, v.dtype)
    dout = _rows(xp, dout)[0]
    if _alignment((dout,), V := dout.shape[-1], V) < cuda_wgmma.ALIGN and _wgmma(q, k, v):
        dout = dout.copy()
    batch = _batch(x, plan, q, k, v, dout)
    g = None if x.g is None else cast(xp, x.g, xp.float32)
    group, f32 = batch.heads // batch.H, xp.float32
    dq, dk, dv = (xp.empty((*batch.lead, batch.T, batch.heads, D), dtype=v.dtype) for D in (batch.K, batch.K, batch.V))
    last = _spread(xp, _state(xp, dstate, batch), batch)
    first = xp.empty((batch.N, batch.heads, batch.K, batch.V), dtype=f32)
    ends = _begins(xp, batch, q, dout, g, last, plan.scale, reverse=True)
    later = ends or _states(last, batch)
    dots = _Dots(xp, batch) if _wants_dots(batch, plan) else None
    if _writes_at_once(batch):
        _writes(batch, (q, k, v, dout, dk, dv), g, later.transposed(), plan.scale, group=0 if ends else 1,
                end=_states(first, batch).transposed(), dots=dots)
    else:
        if values:
            _scan(batch, k, q, dout, dv, g, later, 1.0, plan.scale, group=0 if ends else 1, reverse=True,
                  end=_states(first, batch))
        _scan(batch, v, dout, q, dk, g, later.transposed(), 1.0, plan.scale, group=0 if ends else 1, reverse=True,
              dots=None if dots is None else dots.of(k, 1))
    earlier = begins or _states(_state(xp, state, batch), batch)
    _scan(batch, dout, v, k, dq, g, earlier.transposed(), plan.scale, 1.0, group=0 if begins else group,
          dots=None if dots is None else dots.of(q, 0))
    grads = {"q": _shared(xp, dq, x.q.shape), "k": _shared(xp, dk, x.k.shape), "v": _shared(xp, dv, x.v.shape)}
    if g is not None and dots is not None:
        dg = _shared(xp, _gate_grad(xp, batch, g, dots)[..., None], (*batch.lead, *x.g.shape[-3:]))
        grads["g"] = sum_to(xp, dg, x.g.shape)
    if group > 1:
        first = xp.sum(xp.reshape(first, (batch.N, batch.H, group, batch.K, batch.V)), axis=2)
    return Inputs(**{name: grads.get(name) for name in Inputs._fields}), _public(first, batch)


class States(NamedTuple):
    """Where states lie: rows are value columns, columns key columns; strides count floats."""

    array: Array | None
    slot: int
    row: int
    column: int
    sums: Array | None = None

    def transposed(self) -> States:
        return self._replace(row=self.column, column=self.row)

    def packed(self) -> bytes:
        return struct.pack("<4q", 0 if self.array is None else self.array.data.ptr, self.slot, self.row, self.column)


def _states(array: Array | None, batch: Any) -> States:
    return States(array, batch.K * batch.V, 1, batch.V)


def _state(xp: Any, state: Array | None, batch: Any) -> Array | None:
    """A public state as contiguous float32 (N, H, K, V)."""
    if state is None:
        return None
    return xp.ascontiguousarray(cast(xp, state, xp.float32)).reshape(batch.N, batch.H, batch.K, batch.V)


def _spread(xp: Any, state: Array | None, batch: Any) -> Array | None:
    """(N, H, K, V) for one of the heads that share a state, zeros for the others: (N, heads, K, V)."""
    group = batch.heads // batch.H
    if state is None or group == 1:
        return state
    wide = xp.zeros((batch.N, batch.H, group, batch.K, batch.V), dtype=state.dtype)
    wide[:, :, 0, :, :] = state
    return xp.reshape(wide, (batch.N, batch.heads, batch.K, batch.V))


def _public(state: Array, batch: Any) -> Array:
    """(N, H, K, V) as the caller's (..., H, K, V); a ragged batch keeps N."""
    return state if batch.offsets is not None or len(batch.lead) == 1 else state.reshape(*batch.lead, *state.shape[1:])


def _shared(xp: Any, d: Array, shape: tuple[int, ...]) -> Array:
    """Gradients (..., heads, D) summed over the heads that share one of `shape`'s."""
    if d.shape[-2] == shape[-2]:
        return d
    if dtype_name(d) == "bfloat16" and d.shape[-1] % 8 == 0:
        return head_sums(xp, d, shape)
    d = xp.reshape(d, (*d.shape[:-2], shape[-2], d.shape[-2] // shape[-2], d.shape[-1]))
    return xp.sum(d, axis=-2, dtype=xp.float32)


def head_sums(xp: Any, d: Array, shape: tuple[int, ...]) -> Array:
    """The same of a contiguous bfloat16 array of whole vectors of 8, in its dtype."""
    group = d.shape[-2] // shape[-2]
    if group > 1:
        x, d = d, xp.empty(shape, dtype=d.dtype)
        packed = struct.pack("<3q2i", x.data.ptr, d.data.ptr, d.nbytes // 16, group, d.shape[-1] // 8)
        launch.launch(HEAD_SUMS, "head_sums", (), -(-d.nbytes // 16 // 256), 256, 0, packed, (x, d))
    return d.reshape(shape)


def _rows(xp: Any, *arrays: Array) -> list[Array]:
    """Arrays (B, T, heads, width) in the dtype they are computed in, with contiguous rows."""
    dtype = xp.float32 if _element(*arrays) == "float32" else arrays[0].dtype
    arrays = tuple(cast(xp, y, dtype) for y in arrays)
    fine = [y.shape[-1] == 1 or y.strides[-1] == y.itemsize for y in arrays]
    arrays = tuple(y if ok else xp.ascontiguousarray(y) for y, ok in zip(arrays, fine, strict=True))
    return [y if y.ndim == 4 else y.reshape(prod(y.shape[:-3]), *y.shape[-3:]) for y in arrays]


def _batch(x: Inputs, plan: Plan, *arrays: Array) -> Batch:
    sequences, xp = plan.sequences, plan.xp
    ragged = sequences[0].row is not None if sequences else True
    lead, (T, H, V), (Hq, K) = tuple(x.v.shape[:-3]), x.v.shape[-3:], x.q.shape[-2:]
    element, heads = _products(arrays[0], plan), max(Hq, H)
    N = len(sequences) if ragged else prod(lead)
    longest = max((s.stop - s.start for s in sequences), default=0)
    offsets = None
    if ragged:
        offsets = xp.asarray([s.start for s in sequences] + [sequences[-1].stop if sequences else 0], dtype=xp.int64)
    wgmma = _wgmma(*arrays[:3])
    chunks = max(-(-longest // (cuda_wgmma.CHUNK if wgmma else cuts.CHUNK)), 1)
    each = -(-chunks // _segments(element, K, V, wgmma, N * heads, longest))
    return Batch(lead, T, heads, H, K, V, N, offsets, longest, element, x.g is not None, _alignment(arrays, K, V),
                 -(-chunks // each), each, wgmma)


def _segments(element: str, K: int, V: int, wgmma: bool, slots: int, tokens: int) -> int:
    """Pieces that the sequences of `slots` sequences and heads are cut into."""
    if wgmma:
        how = cuda_wgmma.scan_pass(K, V, True)
        return cuts.segments(slots * how.parts, tokens, how.resident)
    return cuts.segments(slots * cuts.scan_pass(element, K, V, 16, True, cuts.SMALLEST_LIMIT).parts, tokens, 2)


def _alignment(arrays: tuple[Array, ...], K: int, V: int) -> int:
    """The largest of 16, 8, 4, 2 bytes that divides where every row of inputs and outputs begins, and its length."""
    size = arrays[0].itemsize
    common = gcd(16, K * size, V * size)
    for y in arrays:
        common = gcd(common, y.data.ptr, *(s for s, n in zip(y.strides[:-1], y.shape[:-1], strict=True) if n > 1))
    return common


def _pack_rows(y: Array | None, batch: Any) -> bytes:
    if y is None:
        return struct.pack("<4q2i", 0, 0, 0, 0, 1, 0)
    y_batch, y_token, y_head, _ = y.strides
    return struct.pack("<4q2i", y.data.ptr, y_batch, y_token, y_head, batch.heads // y.shape[-2], 0)


def _pack_gate(g: Array | None, batch: Any) -> bytes:
    """Strides in floats; a gate without batch axes is the same in every row."""
    if g is None:
        return struct.pack("<4q2i", 0, 0, 0, 0, 1, 0)
    if g.ndim > 3:
        g = g.reshape(prod(g.shape[:-3]), *g.shape[-3:])
    lead = g.strides[0] // 4 if g.ndim > 3 else 0
    return struct.pack("<4q2i", g.data.ptr, lead, g.strides[-3] // 4, g.strides[-2] // 4, batch.heads // g.shape[-2], 0)


def _pass(batch: Batch, K: int, V: int, reverse: bool, outputs: bool, dots: bool) -> cuts.Pass:
    if batch.wgmma:
        return cuda_wgmma.scan_pass(K, V, batch.decay, reverse, outputs, dots)
    return cuts.scan_pass(batch.element, K, V, batch.align, batch.decay, launch.shared_limit(), reverse, outputs, dots)


def _small(batch: Batch, decay: bool, reverse: bool) -> cuts.Constants:
    chunk = cuda_wgmma.CHUNK if batch.wgmma else cuts.CHUNK
    return cuts.common_constants(batch.element, decay, reverse, chunk)


def _writes_at_once(batch: Batch) -> bool:
    return batch.wgmma and cuda_wgmma.takes_writes(batch.K, batch.V)


def _wants_dots(batch: Batch, plan: Plan) -> bool:
    """Whether the backward makes a gradient of the gates."""
    return batch.decay and plan.gate_gradient


def _prepare(batch: Batch, plan: Plan) -> None:
    """Begin to compile what a call will launch, and what its backward will, all at once."""
    K, V, decay, dots = batch.K, batch.V, batch.decay, _wants_dots(batch, plan)
    passes, small = [_pass(batch, K, V, False, True, False)], []
    if plan.gradients:
        passes.append(_pass(batch, V, K, False, True, dots))
        if _writes_at_once(batch):
            passes.append(cuda_wgmma.writes_pass(K, V, decay, dots))
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


def _pointer(y: Array | None) -> int:
    return 0 if y is None else y.data.ptr


def _scan(
    batch: Batch, q: Array | None, k: Array, v: Array, out: Array | None, g: Array | None, start: States, read: float,
    write: float, *, group: int, reverse: bool = False, end: States | None = None, end_group: int = 1,
    dots: _DotsOfPass | None = None,
) -> None:
    """One pass. group: heads that share a start state; 0: `start` has one a segment."""
    if out is not None and out.ndim != 4:
        out = out.reshape(prod(batch.lead), *out.shape[-3:])
    how = _pass(batch, k.shape[-1], v.shape[-1], reverse, q is not None, dots is not None)
    x, dot_pointers, more = (None, (0, 0, 0, 0), ()) if dots is None else (dots.x, dots.pointers, dots.arrays)
    end = end or States(None, 0, 0, 0)
    arguments = b"".join((
        *(_pack_rows(y, batch) for y in (q, k, v, x, out)), _pack_gate(g, batch),
        struct.pack("<q", _pointer(batch.offsets)), start.packed(), end.packed(),
        struct.pack("<ii", group, end_group), struct.pack("<q", _pointer(end.sums)),
        struct.pack("<4q", *dot_pointers),
        struct.pack("<q4i2f", batch.tokens, batch.T, batch.heads, batch.segments, batch.chunks, read, write),
    ))
    launch.launch(how.file, "scan", how.constants, batch.N * batch.segments * batch.heads * how.parts, how.threads,
                  how.shared, arguments, (q, k, v, x, out, g, batch.offsets, start.array, end.array, end.sums, *more))


def _writes(
    batch: Batch, arrays: tuple[Array, ...], g: Array | None, start: States, write: float, *, group: int, end: States,
    dots: _Dots | None,
) -> None:
    """dk and dv from q, k, v, dout in one pass; group as in _scan."""
    how = cuda_wgmma.writes_pass(batch.K, batch.V, batch.decay, dots is not None)
    arrays = tuple(y if y.ndim == 4 else y.reshape(prod(batch.lead), *y.shape[-3:]) for y in arrays)
    of = _DotsOfPass(None, (0, 0, 0, 0), ()) if dots is None else dots.of(arrays[1], 1)
    written, states, _, marks = of.pointers
    arguments = b"".join((
        *(_pack_rows(y, batch) for y in arrays), _pack_gate(g, batch), struct.pack("<q", _pointer(batch.offsets)),
        start.packed(), end.packed(), struct.pack("<2i", group, 1), struct.pack("<3q", written, states, marks),
        struct.pack("<q4ifi", batch.tokens, batch.T, batch.heads, batch.segments, batch.chunks, write, 0),
    ))
    launch.launch(how.file, "writes", how.constants, batch.N * batch.segments * batch.heads, how.threads, how.shared,
                  arguments, (*arrays, g, batch.offsets, start.array, end.array, *of.arrays[:2]))


def _begins(
    xp: Any, batch: Batch, k: Array, v: Array, g: Array | None, start: Array | None, write: float, reverse: bool
) -> States | None:
    """The state that each segment begins with (in the direction of the walk); None where there is one segment."""
    if batch.segments == 1:
        return None
    slots = batch.N * batch.heads * batch.segments
    states = States(xp.empty((slots, batch.V, batch.K), dtype=xp.float32), batch.K * batch.V, batch.K, 1,
                    xp.empty(slots, dtype=xp.float32))
    none = States(None, 0, 0, 0)
    _scan(batch, None, k, v, None, g, none, 1.0, write, group=1, reverse=reverse, end=states)
    group = 1 if reverse else batch.heads // batch.H
    blocks = -(-batch.K * batch.V // 256)
    launch.launch(
        SEGMENTS, "segments", _small(batch, batch.decay, reverse),
        batch.N * batch.heads * blocks, 256, 0,
        states.packed() + _states(start, batch).packed() + struct.pack(
            "<4q6i", group, _pointer(states.sums), _pointer(batch.offsets), batch.K * batch.V, batch.T, batch.heads,
            batch.segments, batch.chunks, batch.K, blocks),
        (states.array, start, states.sums, batch.offsets),
    )
    return states


class _DotsOfPass(NamedTuple):
    x: Array | None
    pointers: tuple[int, int, int, int]
    arrays: tuple[Array, ...]


class _Dots:
    """What the gradient of the gates is made of: <q, dq> and <k, dk> of every token, <S, dS> of every few chunks."""

    def __init__(self, xp: Any, batch: Batch):
        self.how = _pass(batch, batch.V, batch.K, False, True, True)
        self.marks = -(-max(batch.longest, 1) // cuts.MARKS[batch.element])
        slots = batch.N * batch.heads * self.marks
        self.tokens = [xp.empty((self.how.dot_parts, batch.heads, batch.tokens), dtype=xp.float32) for _ in range(2)]
        self.states = xp.empty((slots, self.how.mark_floats), dtype=xp.float32)
        self.products = xp.empty((slots, self.how.dot_parts * self.how.warps), dtype=xp.float32)

    def of(self, x: Array, which: int) -> _DotsOfPass:
        """which: 0 what reads (q, with dq), 1 what writes (k, with dk)."""
        arrays = (self.tokens[which], self.states, self.products)
        return _DotsOfPass(x, (*(y.data.ptr for y in arrays), self.marks), arrays)


def _gate_grad(xp: Any, batch: Batch, g: Array, dots: _Dots) -> Array:
    """dg of every output head: (..., T, heads)."""
    dg = xp.empty((*batch.lead, batch.T, batch.heads), dtype=xp.float32)
    blocks = batch.N * batch.heads * dots.marks
    launch.launch(
        GATE, "gate_grad", _small(batch, True, False), -(-blocks // 4), 128, 0,
        struct.pack("<3q", dots.tokens[0].data.ptr, dots.tokens[1].data.ptr, dots.products.data.ptr)
        + _pack_gate(g, batch) + struct.pack(
            "<5q4i", dg.data.ptr, _pointer(batch.offsets), batch.tokens, dots.marks, blocks, batch.T, batch.heads,
            dots.how.dot_parts, dots.how.warps),
        (*dots.tokens, dots.products, g, dg, batch.offsets),
    )
    return dg
