"""Outputs divided by the sum of their weights, on CuPy arrays: the sums by kernels of their own beside the passes.

    S_t = e^{g_t} S_{t-1} + k_t^T w_t v_t        z_t = e^{g_t} z_{t-1} + w_t k_t        s_t = scale q_t z_t^T
    out_t = scale q_t S_t / (s_t + eps),  or  scale q_t S_t / max(|s_t|, least_t)

A column of ones among the values would make them V + 1 wide, for which the passes have no tiles, and float32. Instead
the passes compute the numerators of w v, scan/normaliser.cu the sums, and what they add to the gradients of q, k and g,
and scan/quotient.cu divides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ....ops.cuda.arguments import NO_ROWS, address, rows_of
from ....ops.cuda.formulas import compiled
from ....ops.sums import added, sum_to
from ....runtime.arrays import Array, cast, device, dtype_name
from ....runtime.constants import constant_zeros
from ....runtime.cuda.elements import ELEMENTS, Constants
from ....runtime.cuda.launch import Kernel
from ... import policy
from ...types import Inputs, Plan
from .. import arguments
from ..arguments import gate_of
from ..operands import (
    Sizes,
    dense_rows,
    is_wide,
    one_head_each,
    public_state,
    public_state_gradient,
    sizes_of,
    sum_shared_heads,
)
from . import calls

SUMS, QUOTIENT = "scan/normaliser.cu", "scan/quotient.cu"
PART = 128  # tokens of a part
FEW = 8  # parts that the kernels behind them add up themselves
CHANNELS, MOST_WARPS = 128, 8  # of a warp, of a block
ROWS_OF_BLOCK = 8  # of quotient.cu


class Carried(NamedTuple):
    """What parts of sequences begin with, (slots, heads, K), in the direction of time; few: what they add."""

    begins: Array
    decays: Array  # (slots, heads)
    start: Array | None  # (N, heads, K), None: 0
    end: Array | None  # likewise, after the last part; None if few
    few: bool


class Normaliser(NamedTuple):
    """What the backward reads."""

    batch: Sizes
    num: Array  # numerators
    sums: Array  # (..., T, heads)
    w: Array | None  # (..., T, H)
    least: Array | None
    eps: float
    z: Carried


def takes(x: Inputs, plan: Plan) -> bool:
    """Whether the kernels divide the outputs of a call: of more than a few tokens."""
    if policy.is_short_cuda(plan) or plan.states_at is not None or plan.pool_rows is not None or x.q is None:
        return False
    widest = policy.WIDEST_CUDA
    block = x._replace(q=x.q[..., :widest], k=x.k[..., :widest])  # wider keys are blocks of channels
    return x.k.shape[-1] <= CHANNELS * MOST_WARPS and calls.unsupported_reason(block, plan) is None


def alike(x: Any, plan: Plan) -> Any:
    """Inputs whose q, k and v are all bfloat16, else float32."""
    rows = {n: getattr(x, n) for n in ("q", "k", "v")}
    if {dtype_name(y) for y in rows.values()} == {"bfloat16"}:
        return x
    return x._replace(**{n: cast(plan.xp, y, plan.dtype) for n, y in rows.items()})


def weighted(x: Inputs, w: Array | None) -> Inputs:
    """With values w v."""
    return x if w is None else x._replace(v=compiled("product", (x.v, w[..., None]), (x.v.shape, x.v.dtype), "float32"))


def divided(
    x: Inputs, plan: Plan, num: Array, z: Array | None, w: Array | None, least: Array | None, eps: float
) -> tuple[Array, Array, Normaliser]:
    """(outputs, z after the last token, residuals).   num: the numerators; z: before the first token, None for 0."""
    xp, batch = plan.xp, Sizes(*sizes_of(x, plan))
    w, least, z = (None if y is None else xp.ascontiguousarray(cast(xp, y, xp.float32)) for y in (w, least, z))
    of = _carried(xp, x, batch, {"w": w}, z, plan.returns_state, back=False)
    out, sums = xp.empty(num.shape, dtype=num.dtype), xp.empty((*batch.lead, batch.T, batch.heads), dtype=xp.float32)
    _launch("sums", xp, x, batch, w=w, z=of, sums=sums, scale=plan.scale)
    _divide("quotient", batch, num, out, sums, least=least, eps=eps)
    end = _no_state(xp, x, batch) if of.end is None else public_state(of.end, batch)
    return out, end, Normaliser(batch, num, sums, w, least, eps, of)


def numerators_vjp(plan: Plan, saved: Normaliser, dout: Array) -> tuple[Array, Array]:
    """(the gradient of the numerators, that of the sums (..., T, heads)) from that of the outputs."""
    xp, num = plan.xp, saved.num
    dout = dense_rows(xp, cast(xp, dout, num.dtype))
    dnum, c = xp.empty(num.shape, dtype=num.dtype), xp.empty(saved.sums.shape, dtype=xp.float32)
    _divide("quotient_vjp", saved.batch, dout, dnum, saved.sums, u=num, numbers=c, least=saved.least, eps=saved.eps)
    return dnum, c


def add_gradients(
    x: Inputs, plan: Plan, saved: Normaliser, d: Inputs, c: Array, dz: Array | None
) -> tuple[Inputs, Array | None, Array]:
    """(gradients of every input, of w (..., T, H), of the initial z); d: those through the numerators.

    d.v is the gradient of w v. c: the gradient of the sums, dz: that of the last z.
    """
    xp, (batch, _, sums, w, *_) = plan.xp, saved
    dz = None if dz is None else xp.ascontiguousarray(cast(xp, dz, xp.float32))
    column = replace(batch, V=1)
    if dz is not None and batch.group > 1:
        dz = one_head_each(xp, dz.reshape(batch.N, batch.H, batch.K, 1), column)
    later = _carried(xp, x, batch, {"c": c, "scale": plan.scale}, dz, plan.has_state, back=True)
    shape = (*batch.lead, batch.T, batch.heads)
    dw, dg = (None if y is None else xp.empty(shape, dtype=xp.float32) for y in (w, x.g))
    own = {}
    for name in ("q", "k"):
        y, dy = getattr(x, name), getattr(d, name)
        in_place = dy.dtype == y.dtype and y.shape[-2] == batch.heads and dy.flags.c_contiguous
        own[f"d{name}"] = dy if in_place else xp.empty((*shape, batch.K), dtype=y.dtype)
    add = (own["dq"] is d.q) + 2 * (own["dk"] is d.k)
    _launch("grads", xp, x, batch, **own, w=w, c=c, z=saved.z, later=later, sums=sums, dw=dw, dg=dg, add=add,
            scale=plan.scale)  # fmt: skip
    grads = {n: _joined(xp, getattr(d, n), own[f"d{n}"], getattr(x, n)) for n in ("q", "k")}
    if dg is not None and d.g is not None:
        more = sum_shared_heads(xp, dg[..., None], (*batch.lead, *x.g.shape[-3:]))
        grads["g"] = added(xp, d.g, cast(xp, sum_to(xp, more, x.g.shape), d.g.dtype))
    if dw is not None:
        dw = sum_shared_heads(xp, dw[..., None], (*x.v.shape[:-1], 1))[..., 0]
        grads["v"] = xp.empty(x.v.shape, dtype=x.v.dtype)
        _divide("weights_vjp", batch, cast(xp, d.v, x.v.dtype), grads["v"], w, u=x.v, numbers=dw)
    if later.end is None:
        return d._replace(**grads), dw, _no_state(xp, x, batch)
    return d._replace(**grads), dw, public_state_gradient(xp, later.end[..., None], column)[..., 0]


def _no_state(xp: Any, x: Inputs, batch: Sizes) -> Array:
    """Zeros in the place of a z that nobody reads."""
    zeros = constant_zeros(xp, (1,), xp.float32, device(x.v))
    return xp.broadcast_to(zeros, (*(batch.lead if batch.offsets is None else (batch.N,)), batch.H, batch.K))


def _joined(xp: Any, d: Array, more: Array, x: Array) -> Array:
    """d + more, summed over the heads that share one of x's; `more` itself where the kernel has added d."""
    return d if more is d else added(xp, d, cast(xp, sum_shared_heads(xp, more, x.shape), d.dtype))


def _carried(
    xp: Any, x: Inputs, batch: Sizes, weights: dict[str, Any], start: Array | None, has_end: bool, back: bool
) -> Carried:
    """has_end: whether what is after the last part is read."""
    heads = batch.heads if back else batch.H
    begins = xp.empty((batch.tokens // PART + 2 * batch.N, heads, batch.K), dtype=xp.float32)
    how = {"heads": heads, "back": back, "begins": begins, "decays": xp.empty(begins.shape[:2], dtype=xp.float32)}
    _launch("adds", xp, x, batch, **how, **weights)
    if batch.longest <= FEW * PART and not has_end:
        return Carried(begins, how["decays"], start, None, True)
    end = xp.empty((batch.N, heads, batch.K), dtype=xp.float32)
    _launch("carry", xp, x, batch, **how, start=start, end=end)
    return Carried(begins, how["decays"], None, end, False)


def constants(dtype: str, K: int, decay: bool, wide: bool, back: bool = False) -> Constants:
    """The constants of normaliser.cu for keys of K channels; wide: rows are read four elements at a time."""
    return (("LA_BACK", int(back)), ("LA_DECAY", int(decay)), ("LA_DTYPE", ELEMENTS[dtype]), ("LA_K", K),
            ("LA_WIDE", int(wide)))  # fmt: skip


def row_constants(dtype: str, V: int, wide: bool) -> Constants:
    """The constants of quotient.cu for rows of V columns."""
    return ("LA_DTYPE", ELEMENTS[dtype]), ("LA_V", V), ("LA_WIDE", int(wide))


def _launch(
    entry: str, xp: Any, x: Inputs, batch: Sizes, heads: int | None = None, back: bool = False, add: int = 0,
    scale: float = 1.0, z: Carried | None = None, later: Carried | None = None, **given: Any,
) -> None:  # fmt: skip
    """An entry of normaliser.cu. heads: of the launch, those of the outputs if None. given: arrays by their names."""
    few = 0
    for n, of in enumerate((z, later)):
        if of is not None:
            few += of.few << n
            names = ("later", "later_decays", "later_start") if n else ("begins", "decays", "start")
            given |= dict(zip(names, of[:3] if of.few else (of.begins, None, None), strict=True))
    heads = batch.heads if heads is None else heads
    rows = {n: given.get(n) for n in ("dq", "dk")} | {n: dense_rows(xp, getattr(x, n)) for n in ("q", "k")}
    used = {"adds": "q" if back else "k", "carry": ""}.get(entry, "q k").split()
    rows = {n: y if n in used or n in given else None for n, y in rows.items()}
    numbers = ("w", "c", "start", "end", "begins", "decays", "later", "later_decays", "later_start", "sums", "dw",
               "dg")  # fmt: skip
    g = None if x.g is None else cast(xp, x.g, xp.float32)
    parts, w = -(-batch.longest // PART), given.get("w")
    wide = batch.K % 4 == 0 and all(is_wide(y) for y in rows.values() if y is not None)
    packed = arguments.NORMALISER.pack(
        **{n: NO_ROWS if y is None else rows_of(y, heads) for n, y in rows.items()}, g=gate_of(g, heads),
        offsets=address(batch.offsets), **{n: address(given.get(n)) for n in numbers}, T=batch.T, heads=heads,
        parts=parts, group=heads // batch.H, group_w=1 if w is None else heads // w.shape[-1], add=add, few=few,
        scale=scale)  # fmt: skip
    warps = -(-batch.K // CHANNELS)
    blocks, threads = (warps, CHANNELS) if entry == "carry" else (parts * (1 + (entry == "grads")), 32 * warps)
    build = constants(dtype_name(x.k), batch.K, g is not None, wide, back)
    named = (*rows.values(), g, batch.offsets, *(given.get(n) for n in numbers))
    Kernel(SUMS, entry, threads, build).launch(batch.N * heads * blocks, packed, named)


def _divide(
    entry: str, batch: Sizes, x: Array, y: Array, sums: Array, u: Array | None = None, numbers: Array | None = None,
    least: Array | None = None, eps: float = 0.0,
) -> None:  # fmt: skip
    """An entry of quotient.cu: rows x (..., T, heads, V) to y."""
    heads, V = y.shape[-2:]
    rows = {"x": x, "u": u, "y": y}
    wide = V % 4 == 0 and all(is_wide(r) for r in rows.values() if r is not None)
    packed = arguments.QUOTIENT.pack(
        **{n: rows_of(r, heads) for n, r in rows.items()}, sums=address(sums), least=address(least),
        numbers=address(numbers), rows=batch.tokens * heads, T=batch.T, heads=heads,
        group=1 if least is None else heads // least.shape[-1], eps=eps)  # fmt: skip
    build = row_constants(dtype_name(y), V, wide)
    named = (*rows.values(), sums, least, numbers)
    Kernel(QUOTIENT, entry, 32 * ROWS_OF_BLOCK, build).launch(-(-batch.tokens * heads // ROWS_OF_BLOCK), packed, named)
