"""The causal short convolution in compiled loops, one pass over the tokens: ops/short_conv.py has the equations.

Rows are the tokens of all sequences, one after the other; `place` is the number of a token within its sequence.
Forward, tasks are blocks of tokens; backward, blocks of channels, whose sums over tokens have one order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime.doorway import WHOLE, expect, expect_one_dtype, expect_whole
from ...runtime.pieces.piece import Vector, Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.views import row
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from .numbers import exp, number

BLOCK = 2**15  # numbers of a task's tokens, forward
CHANNELS = 512  # of a task, backward: the rows that a token touches stay in the first cache
CONV = Workspace("short_conv", ("count", "D", "W", "each", "silu", "biased", "tasks"), (), (), {"given": {
    "x": Field("count", "D"), "dy": Field("count", "D"), "out": Field("count", "D"), "taps": Field("W", "D"),
    "dtaps": Field("W", "D"), "z": Field("tasks", "each"), "bias": Field("D"), "dbias": Field("D"),
    "place": Field("count", dtype="int64"),
}})  # fmt: skip
Work = workspace_kind(CONV)


@piece
def multiply(a: Vector, b: Vector, first: Whole, n: Whole, out: Vector):
    """out_j = a_j b_j of n channels from `first` on; out begins there."""
    for j in range(n):
        out[j] = a[first + j] * b[first + j]


@piece
def add_product(a: Vector, b: Vector, first: Whole, n: Whole, out: Vector):
    """out_j += a_j b_j likewise."""
    for j in range(n):
        out[j] += a[first + j] * b[first + j]


@piece
def add_scaled(d: Vector, b: Vector, first: Whole, n: Whole, out: Vector):
    """out_j += d_j b_j; d begins at channel `first`."""
    for j in range(n):
        out[first + j] += d[j] * b[first + j]


@piece
def linear(w: Work, t: Whole, first: Whole, n: Whole, out: Vector):
    """out = bias + sum_i taps_{W-1-i} x_{t-i} of n channels from `first` on."""
    last, reach = w.W - 1, min(w.W - 1, w.place[t])  # place[t] <= t
    multiply(row(w.x, t), row(w.taps, last), first, n, out)
    for i in range(1, reach + 1):
        add_product(row(w.x, t - i), row(w.taps, last - i), first, n, out)
    if w.biased:
        bias = w.bias
        for j in range(n):
            out[j] += bias[first + j]


@piece
def convolve(w: Work, begin: Whole, end: Whole):
    """out = act(linear) of tasks begin..end of `each` tokens."""
    for t in range(begin * w.each, min(end * w.each, w.count)):
        y = row(w.out, t)
        linear(w, t, 0, w.D, y)
        if w.silu:
            one = number(y, 1)
            for j in range(len(y)):
                y[j] = y[j] / (one + exp(-y[j]))


@piece
def through_silu(dy: Vector, first: Whole, n: Whole, z: Vector):
    """z <- dy sigma(z) (1 + z (1 - sigma(z)))"""
    one = number(z, 1)
    for j in range(n):
        s = one / (one + exp(-z[j]))
        z[j] = dy[first + j] * s * (one + z[j] * (one - s))


@piece
def convolve_vjp(w: Work, begin: Whole, end: Whole):
    """out = dx, dtaps and dbias, of tasks begin..end of `each` channels."""
    for task in range(begin, end):
        first, last, z = task * w.each, w.W - 1, row(w.z, task)
        n = min(w.each, w.D - first)
        for t in range(w.count):
            dy, reach = row(w.dy, t), min(w.W - 1, w.place[t])
            if w.silu:
                linear(w, t, first, n, z)
                through_silu(dy, first, n, z)
            else:
                for j in range(n):
                    z[j] = dy[first + j]
            if w.biased:
                dbias = w.dbias
                for j in range(n):
                    dbias[first + j] += z[j]
            for i in range(reach + 1):
                add_scaled(z, row(w.taps, last - i), first, n, row(w.out, t - i))
                add_scaled(z, row(w.x, t - i), first, n, row(w.dtaps, last - i))


def short_conv(x: np.ndarray, taps: np.ndarray, bias: np.ndarray | None, place: np.ndarray, silu: bool) -> np.ndarray:
    """x (B, T, D), taps (W, D), the last one for the token itself, place (B, T) int64; float32 or float64.

    Raises TypeError or ValueError for arrays that do not fit, W = 0, and a place before the first token or after t.
    """
    _check(x, taps, bias, place)
    x, out = _rows(x), np.empty(x.shape, x.dtype)
    each = max(BLOCK // max(x.shape[-1], 1), 1)
    _run(convolve, {"x": x, "out": out, "taps": _rows(taps), "bias": bias, "place": place}, each, silu)
    return out


def short_conv_vjp(
    x: np.ndarray, taps: np.ndarray, bias: np.ndarray | None, place: np.ndarray, silu: bool, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(dx, dtaps, dbias). Raises as short_conv, and where dy does not have the shape of x."""
    _check(x, taps, bias, place, dy)
    x, dx, dtaps = _rows(x), np.zeros(x.shape, x.dtype), np.zeros(taps.shape, x.dtype)
    dbias = None if bias is None else np.zeros(bias.shape, x.dtype)
    z = np.empty((-(-x.shape[-1] // CHANNELS), CHANNELS), x.dtype)
    _run(convolve_vjp, {"x": x, "dy": _rows(dy), "out": dx, "taps": _rows(taps), "dtaps": dtaps, "bias": bias,
                        "dbias": dbias, "z": z, "place": place}, CHANNELS, silu)  # fmt: skip
    return dx, dtaps, dbias


def _check(
    x: np.ndarray, taps: np.ndarray, bias: np.ndarray | None, place: np.ndarray, dy: np.ndarray | None = None
) -> None:
    """Raise unless everything that the loops read or write lies in the arrays."""
    fn, kinds = "short_conv", ("float32", "float64")
    sizes = expect(fn, None, kinds, x=(x, "... T D"), taps=(taps, "W D"), bias=(bias, "D?"), dy=(dy, "... T D?"))
    expect_one_dtype(fn, x=x, taps=taps, bias=bias, dy=dy)
    expect(fn, sizes, WHOLE, place=(place, "... T"))
    expect_whole(fn, "W of taps", sizes["W"])
    if place.size and (place.min() < 0 or (place > np.arange(sizes["T"])).any()):
        raise ValueError(f"{fn}: place has numbers outside 0..t, expected the number of each token t in its sequence")


def _rows(x: np.ndarray) -> np.ndarray:
    """x with its channels side by side and its tokens at one distance, else a copy."""
    strides = [x.shape[n + 1] * x.strides[n + 1] == x.strides[n] for n in range(x.ndim - 2)]
    return x if x.strides[-1] == x.itemsize and all(strides) and x.strides[-2] > 0 else np.ascontiguousarray(x)


def _run(kernel: Any, arrays: dict[str, Any], each: int, silu: bool) -> None:
    """A kernel over all its tasks, in threads."""
    x, W = arrays["x"], len(arrays["taps"])
    if not x.size:
        return
    D, held = x.shape[-1], {n: y for n, y in arrays.items() if y is not None}
    held |= {n: np.ascontiguousarray(held[n], t) for n, t in (("bias", x.dtype), ("place", np.int64)) if n in held}
    count = x.size // D
    tasks = -(-(count if kernel is convolve else D) // each)
    sizes = {"count": count, "D": D, "W": W, "each": each, "silu": int(silu), "tasks": tasks,
             "biased": int(arrays["bias"] is not None)}  # fmt: skip
    over_matrices(kernel, CONV, sizes | held, tasks, x.dtype.name)
