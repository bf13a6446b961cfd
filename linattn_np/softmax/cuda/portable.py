"""Softmax attention by products of warps on CuPy arrays: every device and float of up to 32 bits, and caches.

A sequence of a few tokens after a cache has its keys in pieces, each read by a block, and is put together by a second
kernel, which also appends the tokens to a cache that is overwritten. Longer ones have a block for 64 queries.
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any, NamedTuple

from ...ops.cuda.arguments import address, rows_of
from ...runtime.arrays import Array, cast, dtype_name
from ...runtime.cuda import launch
from ...runtime.cuda.elements import ELEMENTS
from .. import policy
from ..types import Inputs, KeyValueCache, SoftmaxPlan
from . import arguments, calls
from . import portable_plan as cuts
from .calls import FAR, TAKEN, SavedLogs, SoftmaxBatch
from .portable_plan import KERNELS, PortableKind

ARRAYS = ("q", "k", "v", "out", "past_k", "past_v", "b", "dout", "dq", "dk", "dv")
POINTERS = ("sums", "readers", "sinks", "logs", "parts", "maxima", "lengths", "counts", "offsets", "dots", "rows",
            "near", "far", "crossing")  # fmt: skip


class PortableCall(NamedTuple):
    """A call's sizes, its arrays with contiguous rows, and the constants of its kernels."""

    batch: SoftmaxBatch
    kind: PortableKind
    x: Inputs
    past: dict[str, Array]  # the cache (sequences, slots, heads, width) and lengths; {} without
    shorts: int  # tokens of the longest sequence whose keys are read in pieces; 0: none
    longs: int  # of the longest other one
    cotangents: tuple[Array, ...] = ()  # further arrays like the values

    @property
    def slots(self) -> int:
        """Slots of the cache."""
        return self.past["k"].shape[1] if self.past else 0


def unsupported_reason(x: Any, plan: SoftmaxPlan) -> str | None:
    """Why the kernels do not support a call; None if they do."""
    if type(x) is not Inputs or any(y is not None and n not in TAKEN for n, y in x._asdict().items()) or plan.strict:
        return f"the kernels are for softmax attention of {', '.join(TAKEN)}, where a query reads its own token"
    if x.q is None or 0 in (*x.q.shape, *x.k.shape, *x.v.shape):
        return "there is nothing to compute"
    if plan.chunk_size not in (None, "parallel"):
        return f"chunk_size={plan.chunk_size!r}: the kernels choose their own tiles"
    if plan.dtype == plan.xp.float64:
        return "float64 is computed by array calls"
    elements = {dtype_name(y) for y in x[:3]}
    if len(elements) > 1 or not elements <= set(ELEMENTS):
        return "the kernels take q, k and v in one of bfloat16, float16 and float32"
    if max(x.k.shape[-1], x.v.shape[-1]) > policy.WIDEST_PORTABLE:
        return (f"keys are {x.k.shape[-1]} and values {x.v.shape[-1]} wide, the kernels support up to "
                f"{policy.WIDEST_PORTABLE}")  # fmt: skip
    if max(x.q.shape[-3], x.k.shape[-3]) >= FAR:
        return f"sequences of {FAR} tokens or more are computed by array calls"
    if x.v.device.id != launch.current_device():
        return f"the arrays are on device {x.v.device.id}, the current one is {launch.current_device()}"
    return launch.unusable()


def differentiates(plan: SoftmaxPlan, x: Inputs) -> bool:
    """Whether kernels compute the gradients of a call: not through a cache with gates, a window or sequences."""
    return not plan.has_state or (x.g is None and plan.window is None and not plan.is_ragged)


def forward(plan: SoftmaxPlan, x: Inputs, state: Any = None) -> tuple[Array, SavedLogs | None]:
    """(out (..., Tq, heads, V), residuals). With plan.overwrite the state is the cache after the tokens."""
    xp, call = plan.xp, call_of(plan, x, state)
    batch, V = call.batch, call.kind.V
    _prepare(call, ("forward",) * bool(call.longs) + ("pieces",) * bool(call.shorts) + ("cache",) * bool(call.past))
    fields = fields_of(plan, call, xp.empty((*batch.lead, batch.T, batch.heads, V), dtype=call.x.v.dtype))
    fields["sums"] = calls.decays(plan, batch, x.g)
    saves = plan.gradients and differentiates(plan, x)
    if saves:
        fields["logs"] = xp.empty((batch.rows, batch.heads, batch.T), dtype=xp.float32)
    groups = batch.sequences * batch.heads
    if call.longs:
        fields["tiles"] = -(-call.longs // cuts.block_of("forward", call.kind, launch.shared_limit())[0])
        _launch("forward", call, fields, groups * fields["tiles"])
    if call.shorts:
        _pieces(plan, call, fields)
        blocks = groups // fields["pack"] * fields["tiles"] * fields["pieces"]
        _launch("pieces", call, fields, blocks)
    fields["outputs"] = groups * call.shorts
    fields["appends"] = batch.sequences * fields["longest"] if plan.overwrite and call.past else 0
    gates = call.slots * call.past["b"].shape[2] if fields["appends"] and "b" in call.past else 0
    _launch("cache", call, fields, fields["outputs"] + fields["appends"] + batch.sequences * -(-gates // 1024))
    if plan.overwrite and state is not None:
        _write_back(state, call.past)
    return fields["out"], SavedLogs(fields["logs"], fields["sums"]) if saves else None


def backward_of_cache(
    plan: SoftmaxPlan, x: Inputs, state: Any, out: Array, saved: SavedLogs, dout: Array
) -> tuple[Inputs, KeyValueCache]:
    """(gradients of the inputs, of the cache): one call of the kernels for the call's own keys, one for the slots.

    Both have the logs and the output of all keys, so that the weights are of the whole sum.
    """
    xp, alone = plan.xp, plan._replace(has_state=False)
    if not policy.PORTABLE and calls.unsupported_reason(x, alone) is None:
        d = calls.backward(alone, x, out, saved, dout)
    else:
        d = backward(alone, x, out, saved, dout)
    if not state.v.shape[-3]:
        return d, KeyValueCache(xp.zeros_like(state.k), xp.zeros_like(state.v), xp.zeros_like(state.length))
    slots = x._replace(k=cast(xp, state.k, x.k.dtype), v=cast(xp, state.v, x.v.dtype), sinks=None)
    past = backward(alone._replace(causal=False), slots, out, saved, dout, state.length)
    wide = [cast(xp, y, plan.dtype) for y in (d.q, past.q, past.k, past.v)]
    return d._replace(q=wide[0] + wide[1]), KeyValueCache(wide[2], wide[3], xp.zeros_like(state.length))


def backward(
    plan: SoftmaxPlan, x: Inputs, out: Array, saved: SavedLogs, dout: Array, lengths: Array | None = None
) -> Inputs:
    """Gradients of the inputs of a call without a cache; of a strict one (system.py) without that of the values.

    lengths: the keys are slots of caches of these numbers of tokens, which all queries read.
    """
    xp, call = plan.xp, call_of(plan, x, None, cast(plan.xp, dout, x.v.dtype), cast(plan.xp, out, x.v.dtype))
    batch, kind, numbers = call.batch, call.kind, (call.batch.rows, call.batch.heads, call.batch.T)
    names = (("dq", batch.T, batch.heads, kind.K), ("dk", batch.Tk, batch.heads // batch.shared, kind.K),
             ("dv", batch.Tk, batch.heads // batch.shared, kind.V))  # fmt: skip
    fields = fields_of(plan, call, call.cotangents[1])
    fields |= {"dout": call.cotangents[0], "logs": saved.logs, "sums": saved.sums}
    fields["readers"] = saved.sums if saved.readers is None else saved.readers
    fields["lengths"] = None if lengths is None else xp.ascontiguousarray(cast(xp, lengths, xp.int64)).reshape(-1)
    fields |= {n: xp.empty((batch.rows, *shape), dtype=call.x.v.dtype) for n, *shape in names[: 3 - plan.strict]}
    fields["dots"] = xp.empty(numbers, dtype=xp.float32) if plan.normalize else None
    rows = cuts.block_of("queries", kind, launch.shared_limit())[0]
    parts = calls.BLOCK // rows
    if kind.gated:
        fields |= {n: xp.empty(numbers, dtype=xp.float32) for n in ("rows", "near", "far")}
        blocks = (batch.sequences * batch.heads, parts, batch.blocks, batch.blocks)
        fields["crossing"] = xp.empty(blocks, dtype=xp.float32)
    fields["tiles"] = parts * batch.blocks if kind.gated else -(-call.longs // rows)
    _launch("queries", call, fields, batch.sequences * batch.heads * fields["tiles"])
    blocks = -(-fields["longest"] // cuts.block_of("keys", kind, launch.shared_limit())[0])
    for done in cuts.passes(kind, plan.strict):
        _launch("keys", call, fields, batch.sequences * batch.heads // batch.shared * blocks, done)
    found = {n: calls.of_shape(xp, fields[f"d{n}"], getattr(x, n).shape) for n in "qkv"[: 3 - plan.strict]}
    if kind.gated:
        sums = {n: fields[n] for n in ("rows", "near", "far", "crossing")}
        found["g"] = calls.gate_gradient(plan, batch, x.g, sums, parts)
    if x.sinks is not None:
        found["sinks"] = calls.sink_gradient(plan, x, saved.logs, fields["dots"])
    return Inputs(**{n: found.get(n) for n in Inputs._fields})


def _prepare(call: PortableCall, names: tuple[str, ...]) -> None:
    """Start compiling the kernels."""
    limit = launch.shared_limit()
    wanted = tuple((KERNELS[n].file, cuts.constants(n, call.kind, limit)) for n in names)
    launch.prepare(wanted, launch.capability())


def call_of(plan: SoftmaxPlan, x: Inputs, state: Any, *cotangents: Array) -> PortableCall:
    """The call as its kernels take it."""
    xp, batch = plan.xp, calls.batch_of(plan, x)
    x = x._replace(**{n: _rows(xp, getattr(x, n)) for n in ("q", "k", "v")})
    past = {} if state is None or not state.v.shape[-3] else _past(xp, state, batch.sequences)
    cotangents = tuple(_rows(xp, y) for y in cotangents)
    arrays = [x.q, x.k, x.v, *(past[n] for n in ("k", "v") if past), *cotangents]
    align = gcd(16, *(n for y in arrays for n in (y.data.ptr, y.shape[-1] * y.itemsize, *y.strides[:-1])))
    cache = dtype_name(past["k"]) if past else None
    heads = min(16, 1 << (batch.shared - 1).bit_length()) if past and x.g is not None else 1
    kind = PortableKind(dtype_name(x.v), x.k.shape[-1], x.v.shape[-1], x.g is not None, align, cache, heads)
    lengths = [s.stop - s.start for s in plan.sequences] if plan.is_ragged else [batch.T]
    shorts = max((n for n in lengths if past and n <= policy.FEW_QUERIES), default=0)
    longs = max((n for n in lengths if not past or n > policy.FEW_QUERIES), default=0)
    return PortableCall(batch, kind, x, past, shorts, longs, cotangents)


def _rows(xp: Any, y: Array) -> Array:
    """(B, T, heads, width) with contiguous rows."""
    y = y if y.ndim == 4 else y.reshape(prod(y.shape[:-3]), *y.shape[-3:])
    return y if y.shape[-1] == 1 or y.strides[-1] == y.itemsize else xp.ascontiguousarray(y)


def _past(xp: Any, state: Any, N: int) -> dict[str, Array]:
    """The parts of a cache, dense: its own memory where it can be; keys and values of one dtype."""
    parts = state._asdict()
    kinds = {dtype_name(parts[n]) for n in ("k", "v")}
    wanted = parts["k"].dtype if len(kinds) == 1 and kinds <= set(ELEMENTS) else xp.float32
    found = {}
    for n, y in parts.items():
        kind = {"k": wanted, "v": wanted, "length": xp.int64}.get(n, xp.float32)
        y = xp.ascontiguousarray(cast(xp, y, kind))
        found[n] = y.reshape(N, *y.shape[y.ndim - {"length": 0, "b": 2}.get(n, 3) :])
    return found


def _write_back(state: Any, past: dict[str, Array]) -> None:
    """What was overwritten in a copy."""
    for n, y in past.items():
        S = getattr(state, n)
        if S.data.ptr != y.data.ptr:
            S[...] = y.reshape(S.shape).astype(S.dtype)


def fields_of(plan: SoftmaxPlan, call: PortableCall, out: Array) -> dict[str, Any]:
    """Every field of PORTABLE, arrays in the place of pointers."""
    xp, (batch, _, x, past, shorts, longs, _) = plan.xp, call
    sinks = calls.sink_array(plan, x)
    fields: dict[str, Any] = dict.fromkeys((*ARRAYS, *POINTERS))
    fields |= {"q": x.q, "k": x.k, "v": x.v, "out": out, "sinks": sinks}
    fields |= {"past_k": past.get("k"), "past_v": past.get("v"), "b": past.get("b"), "lengths": past.get("length")}
    fields |= {"counts": xp.empty(batch.sequences, dtype=xp.int64) if past else None, "offsets": batch.offsets}
    return fields | {
        "T": batch.T, "Tk": batch.Tk, "tokens": batch.rows * batch.T, "heads": batch.heads,
        "sequences": batch.sequences, "longest": max(shorts, longs) if plan.is_ragged else batch.Tk, "few": shorts,
        "group_s": 1 if sinks is None else batch.heads // len(sinks), "pack": 1, "tiles": 0, "pieces": 0,
        "piece": 1, "slots": call.slots, "window": plan.window or FAR, "causal": int(plan.causal) + int(plan.strict),
        "normalize": int(plan.normalize), "outputs": 0, "appends": 0, "shared": batch.shared,
        "blocks": batch.blocks, "scale": plan.scale,
    }  # fmt: skip


def _pieces(plan: SoftmaxPlan, call: PortableCall, fields: dict[str, Any]) -> None:
    """The fields of sequences whose keys are read in pieces."""
    batch, xp = call.batch, plan.xp
    past, Tk = min(call.slots, (plan.window or FAR) - 1), call.shorts if plan.is_ragged else batch.Tk
    piece = policy.piece(past if plan.causal else past + Tk)  # alone and in a ragged batch the same
    pieces = -(-(past + Tk) // piece)
    rows = (pieces, batch.rows, batch.T, batch.heads)
    fields |= {"pack": batch.shared, "tiles": -(-call.shorts * batch.shared // 16), "pieces": pieces, "piece": piece,
               "parts": xp.empty((*rows, call.kind.V), dtype=xp.float32),
               "maxima": xp.empty((*rows, 2), dtype=xp.float32)}  # fmt: skip


def _launch(name: str, call: PortableCall, fields: dict[str, Any], blocks: int, done: int = 0) -> None:
    """One of the kernels."""
    heads, limit = call.batch.heads, launch.shared_limit()
    given = {n: rows_of(y[..., None] if n == "b" and y is not None else y, heads) for n in ARRAYS for y in (fields[n],)}
    given |= {n: rows_of(fields[n]) for n in ("dk", "dv")}  # whose heads are groups
    packed = arguments.PORTABLE.packed(fields | given | {n: address(fields[n]) for n in POINTERS})
    constants, kernel = cuts.constants(name, call.kind, limit, done), KERNELS[name]
    threads, shared = cuts.threads(name, call.kind, limit), dict(constants).get("LA_SHARED", 0)
    named = tuple(fields[n] for n in (*ARRAYS, *POINTERS))
    launch.launch(kernel.file, kernel.entry, constants, blocks, threads, shared, packed, named)
