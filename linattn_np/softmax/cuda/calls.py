"""The softmax core as CUDA kernels on CuPy arrays: bfloat16 and float16 on compute capability 90.

Forward stores out and l, the log2 sums of the exponentials. Backward forms p again in one pass by blocks of keys, which
add to dq in float32 in a fixed order; a kernel before forms <dout, out>, and one after rounds dq. With gates a kernel
before sums up the log decays (arguments.py:DECAYS), one finds the largest key of each block, which bounds the logits so
that blocks of keys without weights are skipped (limit.cuh), and one after computes dg from sums of dz.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ...ops.cuda.arguments import NO_ROWS, address, rows_of
from ...ops.cuda.row_arrays import copied
from ...ops.sums import sum_of_groups
from ...runtime.arrays import Array, cast, dtype_name
from ...runtime.cuda import launch
from ...runtime.cuda.tensor_map import BYTES as MAP
from ...runtime.cuda.tensor_map import moves, takes, tensor_map
from .. import policy
from ..types import Inputs, SoftmaxPlan
from . import arguments
from . import plan as cuts
from .plan import BLOCK, KERNELS, ROWS, SoftmaxKind

TAKEN = ("q", "k", "v", "g", "sinks")  # arrays of a call
GATE_SUMS = ("rows", "near", "far", "crossing", "dq", "tiles", "ends")  # with sums of dz, see arguments.py
FAR = 1 << 30  # more tokens than any window, and than a sequence has here


class SoftmaxBatch(NamedTuple):
    """Sizes of a call, and the constants of its kernels."""

    lead: tuple[int, ...]
    T: int  # queries
    Tk: int
    heads: int  # of the outputs
    shared: int  # heads of the outputs whose dk and dv are one
    sequences: int
    blocks: int  # of the longest sequence
    offsets: Array | None  # of a ragged batch, on the device
    kind: SoftmaxKind

    @property
    def slots(self) -> int:
        """Blocks of queries in all, rounded up for each sequence."""
        return self.sequences * self.blocks if self.offsets is None else self.T // BLOCK + self.sequences

    @property
    def rows(self) -> int:
        """Batch rows."""
        return prod(self.lead)


class SavedLogs(NamedTuple):
    """What a forward stores besides its output; with gates also which keys have weights (arguments.py:ATTENTION)."""

    logs: Array  # (batch, heads, T)
    sums: Array | None  # (batch, heads, T, 4), of gates
    bounds: Array | None = None  # (heads, slots)
    least: Array | None = None  # (heads, slots, 8)
    readers: Array | None = None  # sums as queries read them, where these are other ones (gates.cu)


def unsupported_reason(x: Any, plan: SoftmaxPlan) -> str | None:
    """Why the kernels do not support a call of the core, or of one of its read-outs; None if they do."""
    if not plan.xp.__name__.endswith("cupy"):
        return "the arrays are not CuPy arrays"
    if type(x) is not Inputs or any(y is not None and n not in TAKEN for n, y in x._asdict().items()) or plan.strict:
        return f"the kernels are for softmax attention of {', '.join(TAKEN)}, where a query reads its own token"
    if plan.has_state:
        return "caches are read by the portable kernels"
    if x.q is None or 0 in (*x.q.shape, *x.k.shape, *x.v.shape):
        return "there is nothing to compute"
    if plan.chunk_size not in (None, "parallel"):
        return f"chunk_size={plan.chunk_size!r}: the kernels choose their own tiles"
    if not plan.scale > 0:
        return f"scale is {plan.scale}, the kernels need one above 0"
    elements, K, V = {dtype_name(y) for y in x[:3]}, x.k.shape[-1], x.v.shape[-1]
    if len(elements) > 1 or not elements <= {"bfloat16", "float16"}:
        return "the kernels take q, k and v in bfloat16 or in float16"
    if max(K, V) > policy.WIDEST_CUDA:
        return f"keys are {K} and values {V} wide, the kernels support up to {policy.WIDEST_CUDA}"
    if max(x.q.shape[-3], x.k.shape[-3]) >= FAR:
        return f"sequences of {FAR} tokens or more are computed by array calls"
    if x.v.device.id != launch.current_device():
        return f"the arrays are on device {x.v.device.id}, the current one is {launch.current_device()}"
    if why := launch.unusable():
        return why
    if not cuts.takes(next(iter(elements)), K, V, launch.capability()):
        return f"the kernels are for compute capability 90, the device has {launch.capability()}"
    return None


def forward(plan: SoftmaxPlan, x: Inputs, state: None = None) -> tuple[Array, SavedLogs]:
    """(out (..., Tq, heads, V), residuals)."""
    xp, batch = plan.xp, batch_of(plan, x)
    q, k, v = (row_array(xp, y) for y in (x.q, x.k, x.v))
    names = ("forward", *(("decays", "norms") if batch.kind.gated else ()))
    _prepare(batch, names + (("dots", "backward", "dq") if plan.gradients else ()))
    out = xp.empty((*batch.lead, batch.T, batch.heads, batch.kind.V), dtype=v.dtype)
    saved = SavedLogs(xp.empty((batch.rows, batch.heads, batch.T), dtype=xp.float32), decays(plan, batch, x.g))
    if batch.kind.gated:
        slots = (batch.heads, batch.slots)
        saved = saved._replace(**{n: xp.empty(size, dtype=xp.float32) for n, size in
                                  (("bounds", slots), ("least", (*slots, 8)))})  # fmt: skip
    largest = norms(plan, batch, x.g, k, saved.sums)
    attend("forward", plan, batch, sinks=sink_array(plan, x), q=q, k=k, v=v, out=out, norms=largest, **saved._asdict())
    return out[..., : x.v.shape[-1]], saved


def backward(plan: SoftmaxPlan, x: Inputs, out: Array, saved: SavedLogs, dout: Array) -> Inputs:
    """Gradients of the inputs."""
    xp, batch = plan.xp, batch_of(plan, x)
    gated = batch.kind.gated
    _prepare(batch, ("dots", "backward", "dq", *("gates",) * gated, *("sinks",) * (x.sinks is not None)))
    q, k, v, dout = (row_array(xp, cast(xp, y, x.v.dtype)) for y in (x.q, x.k, x.v, dout))
    numbers, (K, V), keys = (batch.rows, batch.heads, batch.T), batch.kind[1:3], batch.heads // batch.shared
    tiles = batch.heads * batch.slots * (BLOCK // ROWS)
    sizes: dict[str, Any] = {"dots": numbers, "dq": tiles * cuts.tile_dq(batch.kind), "added": tiles}
    if gated:
        sizes |= {"near": numbers, "far": numbers, "tiles": tiles * batch.blocks, "ends": keys * batch.slots}
    sums = {n: xp.empty(size, dtype=xp.int32 if n in ("added", "ends") else xp.float32) for n, size in sizes.items()}
    own = {n: sums[n] for n in ("dots", "added", "ends") if n in sums}
    dots(batch, row_array(xp, cast(xp, out, v.dtype)), dout, plan.normalize, saved, **own)
    dq = xp.empty((batch.rows, batch.T, batch.heads, K), dtype=q.dtype)
    dk, dv = (xp.empty((batch.rows, batch.Tk, keys, width), dtype=q.dtype) for width in (K, V))
    given = {"q": q, "k": k, "v": v, "dout": dout, "logs": saved.logs, "sums": saved.sums}
    attend("backward", plan, batch, out=dk, other=dv, **given, **sums)
    attend("dq", plan, batch, out=dq, q=q, k=k, v=v, dq=sums["dq"], added=sums["added"])
    found = {n: of_shape(xp, d, getattr(x, n).shape) for n, d in (("q", dq), ("k", dk), ("v", dv))}
    if gated:
        found["g"] = gate_gradient(plan, batch, x.g, {n: sums[n] for n in GATE_SUMS if n in sums})
    if x.sinks is not None:
        found["sinks"] = sink_gradient(plan, x, saved.logs, sums["dots"])
    return Inputs(**{n: found.get(n) for n in Inputs._fields})


def batch_of(plan: SoftmaxPlan, x: Inputs) -> SoftmaxBatch:
    """The sizes of a call."""
    xp, (T, Hq), lead = plan.xp, x.q.shape[-3:-1], tuple(x.v.shape[:-3])
    Tk, Hk, H = x.k.shape[-3], x.k.shape[-2], x.v.shape[-2]
    heads, (K, V) = max(Hq, Hk, H), (-(-y.shape[-1] // 8) * 8 for y in (x.k, x.v))
    kind, offsets, longest, N = SoftmaxKind(dtype_name(x.v), K, V, x.g is not None), None, max(T, Tk), prod(lead)
    kind = kind._replace(polynomial=plan.polynomial is not None)
    if plan.is_ragged:
        offsets = xp.asarray([0, *(s.stop for s in plan.sequences)], dtype=xp.int64)
        longest, N = max(s.stop - s.start for s in plan.sequences), len(plan.sequences)
    return SoftmaxBatch(lead, T, Tk, heads, heads // max(Hk, H), N, -(-longest // BLOCK), offsets, kind)


def row_array(xp: Any, y: Array) -> Array:
    """(B, T, heads, width) as the copy engine takes it: the array itself where it can, widths a multiple of 8."""
    y, D = y if y.ndim == 4 else y.reshape(prod(y.shape[:-3]), *y.shape[-3:]), y.shape[-1]
    if D % 8:
        wide = xp.zeros((*y.shape[:-1], -(-D // 8) * 8), dtype=y.dtype)
        wide[..., :D] = y
        return wide
    return y if takes(y) else copied(y)


def attend(name: str, plan: SoftmaxPlan, batch: SoftmaxBatch, **arrays: Any) -> None:
    """A kernel of ATTENTION; arrays by the names of their fields."""
    own = batch.heads // batch.shared if name == "backward" else batch.heads
    kernel, constants = KERNELS[name], cuts.constants(name, batch.kind)
    named = (*arrays.values(), batch.offsets) if moves() else None
    packed = arguments.ATTENTION.packed(fields_of(plan, batch, own, arrays))
    launch.launch(kernel.file, kernel.entry, constants, batch.sequences * own * batch.blocks, kernel.threads,
                  dict(constants)["LA_SHARED"], packed, named)  # fmt: skip


def fields_of(plan: SoftmaxPlan, batch: SoftmaxBatch, own: int, arrays: dict[str, Any]) -> dict[str, Any]:
    """The fields of ATTENTION; own: heads of the blocks of a launch."""
    heads, sinks = batch.heads, arrays.get("sinks")
    maps = [n for n in ("q", "k", "v", "dout") if arrays.get(n) is not None]
    fields: dict[str, Any] = dict.fromkeys(("q", "k", "v", "dout"), bytes(MAP))
    fields |= {n: tensor_map(arrays[n]) for n in maps}
    names = ("sums", "logs", "dots", "added", *GATE_SUMS, "norms", "bounds", "least", "sinks")
    fields |= {n: address(arrays.get(n)) for n in names} | {"offsets": address(batch.offsets)}
    fields |= {n: rows_of(arrays[n]) if n in arrays else NO_ROWS for n in ("out", "other")}
    fields |= {f"group_{n}": heads // arrays[n].shape[-2] for n in ("q", "k", "v")}
    each = 2 * max(batch.T, batch.Tk) * (batch.kind.K + batch.kind.V) * heads // own
    each += 4 * batch.T * batch.kind.K * heads // own if "dq" in arrays else 0
    return fields | {
        "group_s": 1 if sinks is None else heads // len(sinks), "shared": batch.shared, "T": batch.T, "Tk": batch.Tk,
        "heads": heads, "blocks": batch.blocks, "slots": batch.slots,
        "section": max(min(policy.SECTION_BYTES // each, batch.sequences * own), 1),
        "sequences": batch.sequences, "offset": 0, "window": plan.window or FAR, "causal": int(plan.causal),
        "normalize": int(plan.normalize), "scale": plan.scale, "eps": plan.eps,
        **dict(zip(("constant", "linear", "quadratic"), plan.polynomial or (0.0, 0.0, 0.0), strict=True)),
    }  # fmt: skip


def _prepare(batch: SoftmaxBatch, names: tuple[str, ...]) -> None:
    wanted = tuple((KERNELS[n].file, cuts.constants(n, batch.kind)) for n in names)
    launch.prepare(wanted, launch.capability())


def dots(
    batch: SoftmaxBatch,
    out: Array,
    dout: Array,
    normalize: bool,
    saved: SavedLogs,
    *,
    dots: Array,
    added: Array | None = None,
    ends: Array | None = None,
) -> None:
    """What the backward begins with: <dout, out> of every row, 0 without a denominator; counts; ends of queries."""
    kernel, tiles = KERNELS["dots"], 0 if added is None else added.size
    pairs = 0 if ends is None else batch.sequences * batch.heads // batch.shared
    limits = (saved.sums, saved.bounds, saved.least, ends, batch.offsets)
    packed = arguments.DOTS.pack(
        out=rows_of(out), dout=rows_of(dout), dots=address(dots), added=address(added), rows=dots.size, tiles=tiles,
        **dict(zip(("sums", "bounds", "least", "ends", "offsets"), map(address, limits), strict=True)),
        T=batch.T, heads=batch.heads, normalize=int(normalize), pairs=pairs, shared=batch.shared, blocks=batch.blocks,
        slots=batch.slots)  # fmt: skip
    launch.launch(kernel.file, kernel.entry, cuts.constants("dots", batch.kind),
                  pairs + -(-dots.size * 16 // kernel.threads), kernel.threads, 0, packed,
                  (out, dout, dots, added, *limits))  # fmt: skip


def decays(plan: SoftmaxPlan, batch: SoftmaxBatch, g: Array | None) -> Array | None:
    """The sums of log decays of every token; None without gates."""
    return None if g is None else _decays(plan, batch, g, "sums")[0]


def strict_decays(plan: SoftmaxPlan, batch: SoftmaxBatch, g: Array | None) -> list[Array | None]:
    """[sums, readers]: sums that queries of earlier tokens read exclude their own g, which cancels."""
    if g is None:
        return [None, None]
    sums = _decays(plan, batch, g, "sums", *("readers",) * plan.normalize)
    return [sums[0], sums[-1]]


def _decays(plan: SoftmaxPlan, batch: SoftmaxBatch, g: Array, *names: str) -> list[Array]:
    shape = batch.rows, batch.heads, batch.T, 4
    arrays = {name: plan.xp.empty(shape, dtype=plan.xp.float32) for name in names}
    _gates("decays", plan, batch, g, batch.sequences * batch.heads, **arrays)
    return list(arrays.values())


def norms(plan: SoftmaxPlan, batch: SoftmaxBatch, g: Array | None, k: Array, sums: Array | None) -> Array | None:
    """The largest norm of the keys of every block of a head; None without gates."""
    if g is None:
        return None
    largest = plan.xp.empty((batch.heads, batch.slots), dtype=plan.xp.float32)
    blocks = batch.sequences * batch.heads * batch.blocks
    _gates("norms", plan, batch, g, blocks, k=k, sums=sums, norms=largest)
    return largest


def gate_gradient(plan: SoftmaxPlan, batch: SoftmaxBatch, g: Array, sums: dict[str, Array], parts: int = 1) -> Array:
    """dg, summed over the heads that share a gate."""
    dg = plan.xp.empty((batch.rows, batch.T, batch.heads, 1), dtype=plan.xp.float32)
    _gates("gates", plan, batch, g, batch.sequences * batch.heads * batch.blocks, parts, **sums, dg=dg)
    return of_shape(plan.xp, dg, (*g.shape, 1))[..., 0]


def _gates(
    name: str, plan: SoftmaxPlan, batch: SoftmaxBatch, g: Array, blocks: int, parts: int = 1, **arrays: Array
) -> None:
    """A kernel of gates; parts: of the sums of a block of queries."""
    g = cast(plan.xp, g, plan.xp.float32).reshape(batch.rows, batch.T, g.shape[-1], 1)
    names, kernel = ("sums", "readers", *GATE_SUMS, "norms", "dg"), KERNELS[name]
    packed = arguments.GATES.packed({n: address(arrays.get(n)) for n in names} | {
        "g": rows_of(g, batch.heads), "k": rows_of(arrays.get("k"), batch.heads), "offsets": address(batch.offsets),
        "T": batch.T, "heads": batch.heads, "blocks": batch.blocks, "slots": batch.slots,
        "sequences": batch.sequences, "window": plan.window or FAR, "shared": batch.shared,
        "pitch": cuts.tile_dq(batch.kind) if "dq" in arrays else 0, "parts": parts})  # fmt: skip
    named = (g, batch.offsets, *arrays.values())
    launch.launch(kernel.file, kernel.entry, cuts.constants(name, batch.kind), blocks, kernel.threads, 0, packed, named)


def of_shape(xp: Any, d: Array, shape: tuple[int, ...]) -> Array:
    """Gradients (B, T, heads, D) in the shape of their array, summed over the heads that share one of it."""
    d = d[..., : shape[-1]]
    return sum_of_groups(xp, xp.ascontiguousarray(d), shape[-2]).reshape(shape)


def sink_array(plan: SoftmaxPlan, x: Inputs) -> Array | None:
    """The sinks as kernels read them, dense float32; None without."""
    return None if x.sinks is None else plan.xp.ascontiguousarray(cast(plan.xp, x.sinks, plan.xp.float32))


def sink_gradient(plan: SoftmaxPlan, x: Inputs, logs: Array, dots: Array | None) -> Array:
    """dsink = -sum_i e^{sink - l_i} <dout_i, out_i>; 0 without a denominator."""
    xp, kernel, (N,), (rows, heads, T) = plan.xp, KERNELS["sinks"], x.sinks.shape, logs.shape
    if not plan.normalize:
        return xp.zeros((N,), dtype=xp.float32)
    named = {"sinks": sink_array(plan, x), "logs": logs, "dots": dots, "dsinks": xp.empty((N,), dtype=xp.float32)}
    packed = arguments.SINKS.pack(**{n: address(y) for n, y in named.items()}, batch=rows, each=heads // N * T)
    launch.launch(kernel.file, kernel.entry, (), N, kernel.threads, 0, packed, tuple(named.values()))
    return named["dsinks"]
