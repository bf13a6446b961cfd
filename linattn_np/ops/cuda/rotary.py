"""Rotations of pairs of channels of CuPy arrays, and the gradient of their angles (cuda_src/nn/rotary.cu)."""

from __future__ import annotations

from math import prod

from ...runtime.arrays import Array
from ...runtime.cuda import record
from .arguments import ROTARY, address
from .row_arrays import dense, is_aligned, kind_of, launched, strided, strides_of, working_dtype

SOURCE = "nn/rotary.cu"
HEADS, THREADS = 4, 256  # heads of a thread


def rotate(x: Array, c: Array, s: Array, interleaved: bool, back: bool) -> Array:
    """x (..., T, H, K) rotated by cosines and sines (T, P), or (..., T, H or 1, P), in the dtype of the computation."""
    y = record.empty(tuple(x.shape), x.dtype)
    _launch("rotate", x, None, c, s, y, interleaved, back)
    return y


def angles_vjp(x: Array, c: Array, s: Array, interleaved: bool, dy: Array) -> Array:
    """The gradient of angles (..., T, H or 1, P) of every token of x, in the dtype of c."""
    d = record.empty((*x.shape[:-2], 1 if c.ndim == 2 else c.shape[-2], c.shape[-1]), c.dtype)
    _launch("angles", x, dy, c, s, d, interleaved, False)
    return d


def _launch(
    entry: str, x: Array, dy: Array | None, c: Array, s: Array, y: Array, interleaved: bool, back: bool
) -> None:
    *lead, H, K = x.shape
    tokens, P, heads = prod(lead), c.shape[-1], 1 if c.ndim == 2 else c.shape[-2]
    x, dy = (None if one is None else strided(K, one)[1][0] for one in (x, dy))
    step, per = heads * P, 16 // x.itemsize
    if c.ndim == 2 and c.strides == s.strides and c.strides[1] == c.itemsize:
        step = c.strides[0] // c.itemsize
    else:
        c, s = dense(c), dense(s)
    moved, rotated = 2 if interleaved else 1, (x, dy, y if dy is None else None)  # pairs may lie together
    while per > 1 and (
        P % per or (K - 2 * P) % per or not (is_aligned(moved * per, *rotated) and is_aligned(per, c, s, y))
    ):
        per //= 2
    constants = {
        "LA_PER": per, "LA_DOUBLE": int(working_dtype(x, dy, c).itemsize == 8), "LA_DTYPE": kind_of(x),
        "LA_GRAD": kind_of(x if dy is None else dy), "LA_INTERLEAVED": int(interleaved), "LA_BACK": int(back),
    }  # fmt: skip
    packed = ROTARY.pack(x=strides_of(x, K, H), dy=strides_of(dy, K, H), cos=address(c), sin=address(s), y=address(y),
                         tokens=tokens, heads=H, period=prod(c.shape[:-1]) // heads, angle_heads=heads, K=K,
                         P=P, step=step)  # fmt: skip
    each = P // per + (K - 2 * P) // per if entry == "rotate" else P // per
    threads = tokens * each * (-(-H // HEADS) if entry == "rotate" else heads)
    launched(SOURCE, entry, constants, -(-threads // THREADS), THREADS, packed, x, dy, c, s, y)
