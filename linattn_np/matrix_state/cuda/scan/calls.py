"""The chunk form as CUDA kernels on CuPy arrays: erase NONE, decay NONE or SCALAR, K and V up to 256.

One pass over the tokens (cuda_src/scan/scan.cu) computes the forward and, with its arrays exchanged and time reversed,
every gradient; the inputs are the only residuals. On compute capability 90 the pass uses warpgroup products
(scan_wgmma.cu), and one pass computes dk and dv (writes_wgmma.cu). Where batch and heads leave multiprocessors idle,
sequences are cut into segments: a first pass computes the offset that each segment adds to the state, and a small
kernel the initial state of each segment. Between other ranks the two passes are apart (neighbours.py).

Wider keys in bfloat16 are panels of WIDEST_GROUP channels, each a head with a state of its own: q S = sum_p q_p S_p;
two equal panels up to twice that width, where the passes of warpgroup products take them and nothing decays. With a
decay a forward in panels is faster than a portable one of whole keys, a forward and backward slower (K = 256, an H200);
a call and its vjp take the same passes, so that they have the same bits.
"""

from __future__ import annotations

from typing import Any

from ....ops.cuda.row_arrays import copied
from ....ops.sums import sum_to
from ....runtime.arrays import Array, cast, dtype_name
from ....runtime.cuda import launch
from ... import policy
from ...types import Decay, Erase, Inputs, Plan, ReadState, Saved
from .. import operands
from ..operands import (
    alignment,
    as_rows,
    as_state,
    one_head_each,
    public_state_gradient,
    sizes_of,
    states_at,
    sum_shared_heads,
)
from . import neighbours, wgmma
from . import plan as cuts
from .launch import Dots, ScanBatch, begins_of, gate_grad, prepare, scan, wants_dots, writes, writes_at_once


def unsupported_reason(x: Inputs, plan: Plan) -> str | None:
    """Why the kernels do not support a call; None if they do."""
    if not plan.xp.__name__.endswith("cupy"):
        return "the arrays are not CuPy arrays"
    if x.erase is not Erase.NONE or x.decay is Decay.VECTOR or x.gv is not None:
        return "the kernels cover erase NONE with decay NONE or SCALAR so far"
    if x.q is None or not plan.causal:
        return "the kernels write and read in one pass; this call does not read along the way"
    if x.u is not None or plan.query_reads is not ReadState.UPDATED:
        return "the kernels read a token's own write, without a bonus"
    if plan.dtype == plan.xp.float64:
        return "float64 is computed by the chunk form in CuPy"
    if plan.chunk_size not in (None, 64):
        return f"chunk_size={plan.chunk_size!r}: the kernels choose their own chunks"
    K, V = x.k.shape[-1], x.v.shape[-1]
    if max(K // panels(x, plan), V) > policy.WIDEST_CUDA:
        return f"keys are {K} and values {V} wide, the kernels support up to {policy.WIDEST_CUDA}"
    return operands.unsupported_reason(x)


unsupported_gradients = unsupported_reason


def panels(x: Inputs, plan: Plan) -> int:
    """The number of panels of the keys of a call: 1 unless they are wide, dense, and there are as many q, k and v.

    Keys that the portable passes take whole are two panels of passes by warpgroup products, unless they decay.
    """
    K, rows = x.k.shape[-1], (x.q, x.k, x.v)
    n, width = (2, 16) if K <= policy.WIDEST_CUDA else (K // policy.WIDEST_GROUP, policy.WIDEST_GROUP)
    if K <= policy.WIDEST_GROUP or K % width or x.q is None or len({y.shape[-2] for y in rows}) > 1:
        return 1
    apart = plan.neighbours is not None or plan.states_at is not None
    apart = apart or not all(y.flags.c_contiguous for y in (x.q, x.k)) or (n == 2 and x.g is not None)
    if apart or operands.common_element(*rows) != "bfloat16":
        return 1
    portable = n == 2 and not _wgmma(*as_rows(plan.xp, _panel_heads(x.q, n), _panel_heads(x.k, n), x.v))
    return 1 if portable else n


def _rows(x: Inputs, plan: Plan) -> list[Array]:
    """q, k and v of the passes: panels are heads."""
    n = panels(x, plan)
    q, k = (y if n == 1 else _panel_heads(y, n) for y in (x.q, x.k))
    return as_rows(plan.xp, q, k, x.v)


def _panel_heads(y: Array, n: int) -> Array:
    """(..., H, K) as (..., H n, K / n)."""
    return y.reshape((*y.shape[:-2], y.shape[-2] * n, y.shape[-1] // n))


def handles(x: Inputs, plan: Plan) -> frozenset[str]:
    """The preprocessing steps that the passes include: states at positions, whose gradients they add.

    The offsets of segments are computed without positions. A backward reads what segments begin with, of one nothing.
    """
    if panels(x, plan) > 1:
        return frozenset({"wide_keys"})
    rows, between = _rows(x, plan), operands.neighbours_handled(plan)
    batch = _batch(x, plan, *rows) if plan.gradients else None
    if batch is not None and batch.segments == 1 and plan.neighbours is None:
        between |= {"recompute"}
    if not _wgmma(*rows):
        return between
    whole = batch is None or (batch.segments == 1 and writes_at_once(batch))
    return between | operands.states_handled(plan) if whole else between


def how(x: Inputs, plan: Plan) -> str:
    """The passes of a supported call, in words."""
    q, k, v = _rows(x, plan)
    tf32 = ", tf32 products" if _products(q, plan) == "tf32" else ""
    words = "passes by warpgroup products (wgmma)" if _wgmma(q, k, v) else f"portable passes (mma.sync){tf32}"
    n = panels(x, plan)
    return words if n == 1 else f"{words}; keys of {x.k.shape[-1]} channels in {n} panels, each a head"


def _wgmma(q: Array, k: Array, v: Array) -> bool:
    K, V = k.shape[-1], v.shape[-1]
    return wgmma.takes(dtype_name(q), K, V, alignment((q, k, v), K, V), launch.capability())


def _products(x: Array, plan: Plan) -> str:
    """The element type of products: that of the arrays, or tf32 with precision="tf32"."""
    name = dtype_name(x)
    return "tf32" if name == "float32" and plan.precision == "tf32" else name


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved)."""
    xp = plan.xp
    q, k, v = _rows(x, plan)
    batch = _batch(x, plan, q, k, v)
    prepare(batch, plan)
    out = xp.empty((*batch.lead, batch.T, batch.heads, batch.V), dtype=v.dtype)
    end = xp.empty((batch.N, batch.H, batch.K, batch.V), dtype=xp.float32)
    g = None if x.g is None else cast(xp, x.g, xp.float32)
    start = states_at(as_state(xp, state, batch), batch, batch.group)
    if plan.neighbours is None:
        begins = begins_of(xp, batch, k, v, g, start, 1.0, reverse=False)
    else:
        begins, state = neighbours.entered(xp, plan, batch, k, v, g)
    at = operands.empty_positions(xp, plan, batch)
    last = operands.with_positions(xp, states_at(end, batch, batch.group), at, plan, batch)
    scan(batch, (q, k, v, out), g, begins or start, last, (plan.scale, 1.0))
    ends = operands.public_ends(end, at, batch)
    if panels(x, plan) > 1:
        out, ends = sum_shared_heads(xp, out, x.v.shape), _of_panels(ends, x)
    return cast(xp, out, x.v.dtype), ends, Saved(x, plan, state, begins)


def _of_panels(state: Array, x: Inputs) -> Array:
    """States of panels (..., H n, K / n, V) as (..., H, K, V)."""
    return state.reshape((*state.shape[:-3], x.v.shape[-2], x.k.shape[-1], x.v.shape[-1]))


def backward(saved: Saved, dout: Array | None, dstate: Any, values: bool = True) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state; without `values` none of v and the state."""
    x, plan, state, begins = saved
    xp = plan.xp
    q, k, v = _rows(x, plan)
    dout = _cotangent(x, plan, dout, q, k, v)
    batch = _batch(x, plan, q, k, v, dout)
    g = None if x.g is None else cast(xp, x.g, xp.float32)
    dk, dv = (xp.empty((*batch.lead, batch.T, batch.heads, D), dtype=v.dtype) for D in (batch.K, batch.V))
    dend, dat = operands.split_gradients(xp, dstate, batch)
    between = None if plan.neighbours is None else neighbours.left(xp, plan, batch, q, dout, g)
    last = states_at(one_head_each(xp, as_state(xp, dend, batch), batch), batch)
    last = operands.with_positions(xp, last, dat, plan, batch)
    first = xp.empty((batch.N, batch.heads, batch.K, batch.V), dtype=xp.float32)
    later = between or begins_of(xp, batch, q, dout, g, last, plan.scale, reverse=True) or last
    dots = Dots(xp, batch) if wants_dots(batch, plan) else None
    if writes_at_once(batch):
        writes(
            batch,
            (q, k, v, dout, dk, dv),
            g,
            later.transposed(),
            states_at(first, batch).transposed(),
            plan.scale,
            dots,
        )
    else:
        if values:
            scan(batch, (k, q, dout, dv), g, later, states_at(first, batch), (1.0, plan.scale), reverse=True)
        scan(
            batch,
            (v, dout, q, dk),
            g,
            later.transposed(),
            None,
            (1.0, plan.scale),
            reverse=True,
            dots=None if dots is None else dots.of(k, 1),
        )
    dv = sum_shared_heads(xp, dv, x.v.shape)  # before dq: panels of dv are large
    dq = xp.empty((*batch.lead, batch.T, batch.heads, batch.K), dtype=q.dtype)
    earlier = begins or states_at(as_state(xp, state, batch), batch, batch.group)
    crossed = None  # what gradients of states inside a block of the gate gradient add there
    if dots is not None and dat is not None:
        crossed = operands.with_positions(
            xp, states_at(None, batch), dat, plan, batch, policy.MARK_TOKENS["bfloat16"]
        ).transposed()
    scan(
        batch,
        (dout, v, k, dq),
        g,
        earlier.transposed(),
        crossed,
        (plan.scale, 1.0),
        dots=None if dots is None else dots.of(q, 0),
    )
    wide = panels(x, plan) > 1
    dq, dk = (d.reshape(y.shape) if wide else d for d, y in ((dq, x.q), (dk, x.k)))
    grads = {"v": dv} | {n: sum_shared_heads(xp, d, getattr(x, n).shape) for n, d in (("q", dq), ("k", dk))}
    if g is not None and dots is not None:
        dg = sum_shared_heads(xp, gate_grad(xp, batch, g, dots)[..., None], (*batch.lead, *x.g.shape[-3:]))
        grads["g"] = sum_to(xp, dg, x.g.shape)
    dstate = public_state_gradient(xp, first, batch)
    return Inputs(**{n: grads.get(n) for n in Inputs._fields}), _of_panels(dstate, x) if wide else dstate


def _cotangent(x: Inputs, plan: Plan, dout: Array | None, q: Array, k: Array, v: Array) -> Array:
    """dout (B, T, heads, V) in the dtype of v, aligned if the passes require it."""
    xp, (H, V) = plan.xp, x.v.shape[-2:]
    shape = (*x.v.shape[:-2], max(x.q.shape[-2], H), V)
    dout = xp.zeros(shape, dtype=v.dtype) if dout is None else cast(xp, dout, v.dtype)
    dout = as_rows(xp, dout)[0]
    return copied(dout) if alignment((dout,), V, V) < policy.ROW_BYTES and _wgmma(q, k, v) else dout


def _batch(x: Inputs, plan: Plan, *arrays: Array) -> ScanBatch:
    n, (lead, T, heads, H, K, V, N, offsets, longest) = panels(x, plan), sizes_of(x, plan)
    heads, K = heads * n, K // n
    sizes = (lead, T, heads, H * n, K, V, N, offsets, longest)
    element, by_groups = _products(arrays[0], plan), _wgmma(*arrays[:3])
    chunks = max(-(-longest // cuts.chunk_of(by_groups)), 1)
    each = -(-chunks // _segments(element, K, V, by_groups, N * heads, longest))
    segments = -(-chunks // each) + (plan.neighbours is not None)
    return ScanBatch(*sizes, element, x.g is not None, alignment(arrays, K, V), segments, each, by_groups)


def _segments(element: str, K: int, V: int, by_groups: bool, slots: int, tokens: int) -> int:
    """Number of segments of the sequences of `slots` sequences and heads."""
    if by_groups:
        one = wgmma.scan_pass(K, V, True)
        return cuts.segments(slots * one.parts, tokens, cuts.constant(one, "LA_BLOCKS"), launch.multiprocessors())
    parts = cuts.scan_pass(cuts.ScanKind(element, K, V, 16, True), policy.LEAST_SHARED).parts
    return cuts.segments(slots * parts, tokens, 2, launch.multiprocessors())
