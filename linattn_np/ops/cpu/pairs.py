"""Rotations of pairs of channels in compiled loops: ops/pairs.py has the equations. A row stays in the first cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ...runtime.pieces.memory import empty, working
from ...runtime.pieces.piece import Truth, Vector, Whole, piece, workspace_kind
from ...runtime.pieces.registers import load_part, registers, store, store_part
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import numbers_at, row, start_of
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from .formulas import compiled, constant_of
from .loops import over
from .numbers import OPTIONS
from .row_norms import rows_of
from .rows import fill

BLOCK = 2**15  # numbers of a task
PAIRS = Workspace("pairs", ("count", "K", "P", "rotations", "share", "each", "interleaved", "back"), (), (), {"given": {
    "x": Field("count", "K"), "c": Field("rotations", "P"), "s": Field("rotations", "P"),
    "out": Field("count", "K"), "dy": Field("count", "K"), "angles": Field("rotations", "P")}})  # fmt: skip
Work = workspace_kind(PAIRS)
_, load = registers(1)


@njit(**OPTIONS)
def same(x: Any, *_: Any) -> Any:
    return x


@piece
def halves(x: Vector, c: Vector, s: Vector, back: Truth, out: Vector):
    """Channels p and P + p."""
    P, size, one = len(c), x.itemsize, BYTES // x.itemsize
    a, b = numbers_at(x, start_of(x, 0), P), numbers_at(x, start_of(x, 0) + P * size, P)
    to, other = numbers_at(x, start_of(out, 0), P), numbers_at(x, start_of(out, 0) + P * size, P)
    sign, whole = -1.0 if back else 1.0, P // one * one
    for j in range(0, whole, one):
        u, v, cosine, sine = load(a, j), load(b, j), load(c, j), sign * load(s, j)
        store(u * cosine - v * sine, to, j)
        store(v * cosine + u * sine, other, j)
    if whole < P:
        u, v, cosine, sine = load_part(a, whole), load_part(b, whole), load_part(c, whole), sign * load_part(s, whole)
        store_part(u * cosine - v * sine, to, whole)
        store_part(v * cosine + u * sine, other, whole)


@piece
def neighbours(x: Vector, c: Vector, s: Vector, back: Truth, out: Vector):
    """Channels 2 p and 2 p + 1."""
    if back:
        for p in range(len(c)):
            out[2 * p] = x[2 * p] * c[p] + x[2 * p + 1] * s[p]
            out[2 * p + 1] = x[2 * p + 1] * c[p] - x[2 * p] * s[p]
    else:
        for p in range(len(c)):
            out[2 * p] = x[2 * p] * c[p] - x[2 * p + 1] * s[p]
            out[2 * p + 1] = x[2 * p + 1] * c[p] + x[2 * p] * s[p]


@piece
def rotated(w: Work, first: Whole, last: Whole):
    """out = the rows of tasks first..last rotated; `share` rows have one rotation."""
    for r in range(first * w.each, min(last * w.each, w.count)):
        x, out, n = row(w.x, r), row(w.out, r), r // w.share % w.rotations
        if w.interleaved:
            neighbours(x, row(w.c, n), row(w.s, n), w.back != 0, out)
        else:
            halves(x, row(w.c, n), row(w.s, n), w.back != 0, out)
        size, rest = x.itemsize, w.K - 2 * w.P
        tail = numbers_at(x, start_of(w.x, r) + 2 * w.P * size, rest)
        over(same, tail, tail, tail, 0, numbers_at(x, start_of(w.out, r) + 2 * w.P * size, rest))


@piece
def angles(w: Work, first: Whole, last: Whole):
    """dangle = sum of y_a dy_b - y_b dy_a over the `share` rows of a rotation, of tasks first..last; y: x."""
    P, size = w.P, w.x.itemsize
    for n in range(first * w.each, min(last * w.each, w.rotations)):
        out = row(w.angles, n)
        fill(out, 0.0)
        for r in range(n * w.share, (n + 1) * w.share):
            y, dy = row(w.x, r), row(w.dy, r)
            if w.interleaved:
                for p in range(P):
                    out[p] += y[2 * p] * dy[2 * p + 1] - y[2 * p + 1] * dy[2 * p]
            else:
                b, db = numbers_at(y, start_of(w.x, r) + P * size, P), numbers_at(y, start_of(w.dy, r) + P * size, P)
                for p in range(P):
                    out[p] += y[p] * db[p] - b[p] * dy[p]


def rotate(x: np.ndarray, c: np.ndarray, s: np.ndarray, share: int, interleaved: bool, back: bool) -> np.ndarray:
    """Rows x (..., K), not empty; c, s (..., P): row r is rotated by number r // share mod their count."""
    out, K = empty(x.shape, x.dtype), x.shape[-1]
    count, each, P = x.size // K, max(BLOCK // K, 1), c.shape[-1]
    sizes = {"count": count, "K": K, "P": P, "rotations": c.size // P, "share": share, "each": each,
             "interleaved": int(interleaved), "back": int(back)}  # fmt: skip
    held = {"x": rows_of(x, K), "c": rows_of(c, P), "s": rows_of(s, P), "out": out.reshape(-1, K)}
    over_matrices(rotated, PAIRS, sizes | held, -(-count // each), x.dtype.name)
    return out


def angles_vjp(y: np.ndarray, dy: np.ndarray, shape: tuple[int, ...], interleaved: bool) -> np.ndarray:
    """dangle (..., P) of the result y (..., K), in this shape; where it has fewer numbers, rows share an angle."""
    (*_, K), P = y.shape, shape[-1]
    out = working(shape, y.dtype)
    rotations, count = out.size // P, y.size // K
    share = count // rotations
    each = max(BLOCK // (share * K), 1)
    sizes = {"count": count, "K": K, "P": P, "rotations": rotations, "share": share, "each": each,
             "interleaved": int(interleaved)}  # fmt: skip
    held = {"x": rows_of(y, K), "dy": rows_of(dy, K), "angles": out.reshape(-1, P)}
    over_matrices(angles, PAIRS, sizes | held, -(-rotations // each), y.dtype.name)
    return out


def cos_sin_of(angle: np.ndarray) -> list[np.ndarray]:
    """(cos, sin) of angles (..., P), as halves of rows."""
    P, dtype = angle.shape[-1], angle.dtype
    out = compiled("cos_sin", (angle, constant_of(1.0, dtype)), ((*angle.shape[:-1], 2 * P), dtype), dtype)
    return [out[..., :P], out[..., P:]]
