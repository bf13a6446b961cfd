"""The softmax of rows in compiled loops: ops/softmax_rows.py has the equations. A row stays in the caches."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ...runtime.pieces.memory import empty
from ...runtime.pieces.piece import Number, Vector, Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.tiles import dot, max_of, sum_of
from ...runtime.pieces.views import row
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from .loops import over
from .numbers import OPTIONS, exp, number
from .row_norms import rows_of

BLOCK = 2**14  # numbers of a task
ROWS = Workspace("softmax_rows", ("count", "D", "each"), (), (), {
    "given": {name: Field("count", "D") for name in ("x", "dy", "out")}})  # fmt: skip
Work = workspace_kind(ROWS)
LOSS = Workspace("cross_entropy", ("count", "D", "each"), ("smoothing", "z"), (), {
    "given": {"x": Field("count", "D"), "dx": Field("count", "D"), "out": Field("count"),
              "scratch": Field("tasks", "D"), "labels": Field("count", dtype="int64")}})  # fmt: skip
Loss = workspace_kind(LOSS)


@njit(**OPTIONS)
def exp_less(x: Any, y: Any, z: Any, m: Any) -> Any:
    return exp(x - m)


@njit(**OPTIONS)
def multiple(x: Any, y: Any, z: Any, f: Any) -> Any:
    return f * x


@njit(**OPTIONS)
def transposed(y: Any, dy: Any, z: Any, along: Any) -> Any:
    return y * (dy - along)


@piece
def largest(x: Vector) -> Number:
    """max x, 0 of nothing but -inf."""
    m = max_of(x, len(x))
    return m if m > number(x, -np.inf) else number(x, 0)


@piece
def shares(x: Vector, out: Vector):
    """out = softmax x; a NaN or inf spreads to its row."""
    over(exp_less, x, x, x, largest(x), out)
    total = sum_of(out, len(out))
    one = number(x, 1)
    over(multiple, out, out, out, one if total == 0 else one / total, out)


@piece
def forward(w: Work, first: Whole, last: Whole):
    """out = softmax x of tasks first..last of `each` rows."""
    for r in range(first * w.each, min(last * w.each, w.count)):
        shares(row(w.x, r), row(w.out, r))


@piece
def backward(w: Work, first: Whole, last: Whole):
    """out = y (dy - <y, dy>)"""
    for r in range(first * w.each, min(last * w.each, w.count)):
        y, dy = row(w.out, r), row(w.dy, r)
        shares(row(w.x, r), y)
        over(transposed, y, dy, y, dot(y, dy, len(y)), y)


@piece
def losses(w: Loss, first: Whole, last: Whole):
    """out_r = lse - (1 - s) x_label - s mean x + z lse^2, of tasks first..last of `each` rows; lse = log sum e^x."""
    for r in range(first * w.each, min(last * w.each, w.count)):
        x, y, n = row(w.x, r), row(w.scratch, first), w.D
        m = largest(x)
        over(exp_less, x, x, x, m, y)
        lse = m + np.log(sum_of(y, n))
        w.out[r] = lse + w.z * lse * lse - (1.0 - w.smoothing) * x[w.labels[r]] - w.smoothing / n * sum_of(x, n)


@njit(**OPTIONS)
def slope(p: Any, x: Any, y: Any, numbers: Any) -> Any:
    return numbers[0] * p - numbers[1]


@piece
def slopes(w: Loss, first: Whole, last: Whole):
    """dx = d_r (p (1 + 2 z lse) - (1 - s) [j = label] - s / D)"""
    for r in range(first * w.each, min(last * w.each, w.count)):
        x, dx, n, d = row(w.x, r), row(w.dx, r), w.D, w.out[r]
        m = largest(x)
        over(exp_less, x, x, x, m, dx)
        total = sum_of(dx, n)
        weight = d * (1.0 + 2.0 * w.z * (m + np.log(total))) / total
        over(slope, dx, dx, dx, (number(x, weight), number(x, d * w.smoothing / n)), dx)
        dx[w.labels[r]] -= d * (1.0 - w.smoothing)


def cross_entropy(x: np.ndarray, labels: np.ndarray, smoothing: float, z: float) -> np.ndarray:
    """Losses (R,) of rows (R, D), R and D from 1; labels (R,) in 0..D - 1."""
    out = np.empty(len(x), x.dtype)
    _run_losses(losses, x, {"out": out}, labels, (smoothing, z))
    return out


def cross_entropy_vjp(x: np.ndarray, labels: np.ndarray, smoothing: float, z: float, d: np.ndarray) -> np.ndarray:
    """dx (R, D) from the cotangents of the losses (R,)."""
    dx = empty(x.shape, x.dtype)
    _run_losses(slopes, x, {"dx": dx, "out": np.ascontiguousarray(d)}, labels, (smoothing, z))
    return dx


def _run_losses(
    kernel: Any, x: np.ndarray, arrays: dict[str, Any], labels: np.ndarray, how: tuple[float, float]
) -> None:
    (count, D), (smoothing, z) = x.shape, how
    each = max(BLOCK // D, 1)
    tasks = -(-count // each)
    held = arrays | {"x": rows_of(x, D), "labels": np.ascontiguousarray(labels, np.int64),
                     "scratch": np.empty((tasks, D), x.dtype)}  # fmt: skip
    sizes = {"count": count, "D": D, "each": each, "tasks": tasks, "smoothing": smoothing, "z": z}
    over_matrices(kernel, LOSS, sizes | held, tasks, x.dtype.name)


def softmax(x: np.ndarray) -> np.ndarray:
    """Of rows (..., D), not empty."""
    return _run(forward, {"x": x})


def softmax_vjp(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """dx"""
    return _run(backward, {"x": x, "dy": dy})


def _run(kernel: Any, arrays: dict[str, np.ndarray]) -> np.ndarray:
    x = arrays["x"]
    out, D = empty(x.shape, x.dtype), x.shape[-1]
    count, each = x.size // D, max(BLOCK // D, 1)
    held = {n: rows_of(y, D) for n, y in (arrays | {"out": out}).items()}
    over_matrices(kernel, ROWS, {"count": count, "D": D, "each": each} | held, -(-count // each), x.dtype.name)
    return out
