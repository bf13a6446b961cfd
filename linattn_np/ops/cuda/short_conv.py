"""The causal short convolution of CuPy arrays, its final states and its gradients (cuda_src/nn/short_conv.cu)."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...runtime.arrays import Array
from ...runtime.constants import constant_array
from ...runtime.cuda import record
from ..sequences import Sequences
from ..short_conv import ShortConv, ShortConvGrads
from .arguments import CONV, address
from .formulas import put
from .row_arrays import dense, is_aligned, is_narrow, kind_of, launched, tokens_of, working_dtype
from .sums import over_middle

SOURCE = "nn/short_conv.cu"
WARPS = 4
EACH, EACH_BACK = 16, 128  # tokens of a segment; of a backward at most
WARPS_BACK = 2048  # segments of a backward that a large device computes at once
WIDEST = 8
BYTES = 8  # that a lane moves together
GROUP, GROUP_BACK = 4, 4  # tokens that are loaded together
BLOCKS = 4  # of a multiprocessor, in a backward
MIX, BEFORE = 1, 2  # LA_SHIFT


class Cut(NamedTuple):
    """Sequences cut into segments: tables on the device (None where sequences have T tokens each)."""

    sequences: int
    T: int
    pieces: int  # segments of all sequences
    per_sequence: int
    offsets: Array | None
    segments: Array | None


def takes(W: int) -> bool:
    """Whether kernels have this width."""
    return 1 <= W <= WIDEST


# Weights of a convolution: (D, W); of a token shift (D,), the share of the token before, or None: that token. Past
# inputs are one state a sequence, or with `places` (N,) rows of a pool.


def forward(sequences: Sequences, x: Array, conv: ShortConv, past: Array | None, places: Array | None = None) -> Array:
    """y (..., T, D), dense, in the dtype of x."""
    y = record.empty(tuple(x.shape), x.dtype)
    _launch("conv", sequences, x, conv, past, EACH, {"y": y, "places": places})
    return y


def step(
    sequences: Sequences, x: Array, conv: ShortConv, past: Array | None, end: Array | None, places: Array | None = None
) -> Array:
    """y (..., 1, D) of one token a sequence; final states are written to `end`: `past` itself, or one a sequence."""
    y = record.empty(tuple(x.shape), x.dtype)
    own = {"y": y, "end": end, "places": places}
    _launch("conv_step", sequences, x, conv, past, 0, own, 0 if end is None else end.shape[-2])
    return y


def room_for_end(sequences: Sequences, x: Array, S: int, dtype: Any) -> Array:
    """Memory for one final state a sequence, in `dtype`."""
    lead = tuple(x.shape[:-2]) if sequences.offsets is None else (len(sequences.offsets) - 1,)
    return record.empty((*lead, S, x.shape[-1]), dtype)


def end(sequences: Sequences, x: Array, past: Array | None, to: Array, places: Array | None = None) -> None:
    """The last S of [past, x], zeros before, into `to` (..., S, D): `past` itself, or one a sequence."""
    if to.size:
        conv = ShortConv(x)  # its weights are not read
        _launch("conv_end", sequences, x, conv, past, 0, {"y": to, "places": places}, to.shape[-2])


def backward(
    sequences: Sequences, x: Array, conv: ShortConv, past: Array | None, dy: Array, dend: Array | None = None
) -> ShortConvGrads:
    """Gradients in the dtypes of their arrays; dend: the cotangent of the final states."""
    dx = record.empty(tuple(x.shape), x.dtype)
    dpast = None if past is None else record.empty(tuple(past.shape), past.dtype)
    dend = dense(dend)
    S = 0 if dend is None else dend.shape[-2]
    if past is not None and past.size:
        _launch("conv_end_vjp", sequences, x, conv, past, 0, {"dpast": dpast, "dend": dend}, S)
    own = {"y": dx, "dpast": dpast, "dend": dend, "dy": dy}
    parts = _launch("conv_vjp", sequences, x, conv, past, _each_back(x), own, S)
    if parts is None:
        return ShortConvGrads(dx, None, None, dpast)
    D, W = x.shape[-1], _width(conv)
    sums = over_middle(parts)[0].reshape(W + 1, D)
    dweight, dbias = record.empty(tuple(conv.weight.shape), conv.weight.dtype), None
    put(dweight, sums[:W].T if conv.weight.ndim == 2 else sums[0] - sums[1])
    if conv.bias is not None:
        dbias = record.empty((D,), conv.bias.dtype)
        put(dbias, sums[W])
    return ShortConvGrads(dx, dweight, dbias, dpast)


def _each_back(x: Array) -> int:
    """Tokens of a segment of a backward: few where there is little work, so that enough warps share it."""
    each, warps = EACH_BACK, x.nbytes // (32 * BYTES * EACH_BACK)
    while each > EACH and warps < WARPS_BACK:
        each, warps = each // 2, warps * 2
    return each


def _width(conv: ShortConv) -> int:
    return conv.weight.shape[1] if conv.weight is not None and conv.weight.ndim == 2 else 2


def _launch(
    entry: str, sequences: Sequences, x: Array, conv: ShortConv, past: Array | None, each: int, own: dict[str, Any],
    S: int = 0,
) -> Any:  # fmt: skip
    """own: arrays that the entry has besides x, weights and past. S: of states where there is no past."""
    D, dy, dend, places = x.shape[-1], own.get("dy"), own.get("dend"), own.get("places")
    is_end = entry.startswith("conv_end")
    weight, bias, past = None if is_end else dense(conv.weight), None if is_end else dense(conv.bias), dense(past)
    (x, x_rows), (dy, dy_rows) = tokens_of(x), tokens_of(dy)
    cut = _cut(sequences, x, each or 1)
    wide = working_dtype(x, weight, bias, past, dy, dend)
    per = BYTES // x.itemsize if x.itemsize < 8 else 1
    states = [own[n] for n in ("y", "end", "dpast", "dend") if own.get(n) is not None]
    given = (x, bias, past, dy, *states, weight if weight is not None and weight.ndim == 1 else None)
    while per > 1 and (D % per or not is_aligned(per, *given)):
        per //= 2
    state = own["y"] if entry == "conv_end" else own.get("end", dend)
    W, shift = (1, 0) if is_end else (_width(conv), BEFORE if weight is None else MIX if weight.ndim == 1 else 0)
    constants = {
        "LA_PER": per, "LA_W": W, "LA_DOUBLE": int(wide.itemsize == 8),
        "LA_DTYPE": kind_of(x), "LA_WEIGHT": kind_of(weight), "LA_BIAS": kind_of(bias),
        "LA_PAST": kind_of(past), "LA_END": 2 if state is None else kind_of(state),
        "LA_GRAD": kind_of(x if dy is None else dy), "LA_SILU": int(conv.activation == "silu"),
        "LA_RESIDUAL": int(conv.residual), "LA_GROUP": GROUP_BACK if entry == "conv_vjp" else GROUP,
        "LA_BLOCKS": BLOCKS if W <= 4 and wide.itemsize == 4 else 1,
        "LA_NARROW": int(is_narrow(own.get("y", x), own.get("dpast"))), "LA_SHIFT": shift,
        "LA_PLACE": 8 if places is None else places.itemsize,
        "LA_POOLED": int(places is not None and state is not None and state is past),
    }  # fmt: skip
    tiles, steps = -(-D // (32 * per)), -(-cut.pieces // WARPS)
    parts = record.empty((1, steps, (W + 1) * D), wide) if entry == "conv_vjp" and shift != BEFORE else None
    packed = CONV.pack(
        x=x_rows, dy=dy_rows, weight=address(weight), bias=address(bias), past=address(past),
        dend=address(dend), y=address(own.get("y")), end=address(own.get("end")), dpast=address(own.get("dpast")),
        parts=address(parts), places=address(places), pool=0 if places is None else past.shape[0],
        offsets=address(cut.offsets), segments=address(cut.segments), D=D, S=S if past is None else past.shape[-2],
        T=cut.T, each=each, count=cut.pieces, per_sequence=cut.per_sequence, sequences=cut.sequences,
    )  # fmt: skip
    blocks = -(-cut.sequences * -(-D // per) // (32 * WARPS)) if each == 0 else tiles * steps
    arrays = (x, dy, weight, bias, past, *own.values(), parts, cut.offsets, cut.segments)
    launched(SOURCE, entry, constants, blocks, 32 * WARPS, packed, *{id(y): y for y in arrays}.values())
    return parts


def _cut(sequences: Sequences, x: Array, each: int) -> Cut:
    T = x.shape[-2]
    if sequences.offsets is None:
        count, per = prod(x.shape[:-2]), -(-T // each)
        return Cut(count, T, count * per, per, None, None)
    edges, xp = sequences.offsets, sequences.xp
    pieces = [(n, t) for n, (a, b) in enumerate(pairwise(edges)) for t in range(0, b - a, each)]

    def table(name: str, values: Any, dtype: Any) -> Array:
        key = ("segments", name, edges, each)
        return constant_array(xp, key, x.device, lambda: xp.asarray(np.array(values, dtype)))

    tables = table("offsets", edges, np.int64), table("segments", pieces, np.int32)
    return Cut(len(edges) - 1, T, len(pieces), 0, *tables)
