"""The softmax of rows in compiled loops: ops/softmax_rows.py has the equations. A row stays in the caches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ...runtime.pieces.memory import empty, working
from ...runtime.pieces.piece import Number, Vector, Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.tiles import dot, max_of, sum_of
from ...runtime.pieces.views import row
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from .formulas import dense
from .loops import over
from .numbers import OPTIONS, exp, number
from .row_norms import rows_of
from .rows import fill

BLOCK = 2**14  # numbers of a task
ROWS = Workspace("softmax_rows", ("count", "D", "each"), (), (), {
    "given": {name: Field("count", "D") for name in ("x", "dy", "out")}})  # fmt: skip
Work = workspace_kind(ROWS)
LOSS = Workspace("cross_entropy", ("count", "D", "each", "ignored", "is_mean", "each_d"), ("smoothing", "z"), (), {
    "given": {"x": Field("count", "D"), "dx": Field("count", "D"), "out": Field("count"), "d": Field("given_d"),
              "sums": Field("two"), "scratch": Field("tasks", "D"),
              "labels": Field("count", dtype="int64")}})  # fmt: skip
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
        if w.labels[r] == w.ignored:
            w.out[r] = 0.0
            continue
        m = largest(x)
        over(exp_less, x, x, x, m, y)
        lse = m + np.log(sum_of(y, n))
        loss = lse + w.z * lse * lse - (1.0 - w.smoothing) * x[w.labels[r]]
        w.out[r] = loss - w.smoothing / n * sum_of(x, n) if w.smoothing else loss  # columns may be -inf


@piece
def total(w: Loss, first: Whole, last: Whole):
    """sums = (the mean loss of the rows that have one, or their sum; the number of these rows)"""
    loss, number = 0.0, 0.0
    for r in range(w.count):
        if w.labels[r] != w.ignored:
            loss += w.out[r]
            number += 1.0
    w.sums[0] = loss / max(number, 1.0) if w.is_mean else loss
    w.sums[1] = max(number, 1.0) if w.is_mean else 1.0


@njit(**OPTIONS)
def slope(p: Any, x: Any, y: Any, numbers: Any) -> Any:
    return numbers[0] * p - numbers[1]


@piece
def slopes(w: Loss, first: Whole, last: Whole):
    """dx = d_r (p (1 + 2 z lse) - (1 - s) [j = label] - s / D);  d_r: one of each row, or one over sums[1] of all"""
    for r in range(first * w.each, min(last * w.each, w.count)):
        x, dx, n = row(w.x, r), row(w.dx, r), w.D
        if w.labels[r] == w.ignored:
            fill(dx, 0.0)
            continue
        d = w.d[r] if w.each_d else w.d[0] / w.sums[1]
        m = largest(x)
        over(exp_less, x, x, x, m, dx)
        total = sum_of(dx, n)
        weight = d * (1.0 + 2.0 * w.z * (m + np.log(total))) / total
        over(slope, dx, dx, dx, (number(x, weight), number(x, d * w.smoothing / n)), dx)
        dx[w.labels[r]] -= d * (1.0 - w.smoothing)


class Rows(NamedTuple):
    """How losses of rows are formed: s, z, and the label of rows without a loss."""

    smoothing: float
    z: float
    ignored: int


def cross_entropy(x: np.ndarray, labels: np.ndarray, how: Rows) -> np.ndarray:
    """Losses (R,) of rows (R, D), R and D from 1; labels (R,) in 0..D - 1, or ignored."""
    out, tasks = empty((len(x),), x.dtype), _tasks(x)
    _run_losses(losses, x, {"out": out, "scratch": working((tasks, x.shape[1]), x.dtype)}, labels, how, tasks)
    return out


def loss_sums(x: np.ndarray, labels: np.ndarray, how: Rows, losses: np.ndarray, is_mean: bool) -> np.ndarray:
    """(loss, number of rows that it is divided by) of all rows."""
    sums = working((2,), x.dtype)
    arrays = {"out": losses, "sums": sums}
    _run_losses(total, x, arrays, labels, how, 1, {"is_mean": int(is_mean), "two": 2})
    return sums


def cross_entropy_vjp(
    x: np.ndarray, labels: np.ndarray, how: Rows, d: np.ndarray, sums: np.ndarray | None = None
) -> np.ndarray:
    """dx (R, D) from the cotangents of the losses (R,), or of loss_sums: (1,)."""
    dx = empty(x.shape, x.dtype)
    arrays = {"dx": dx, "d": dense(d, x.dtype)} | ({} if sums is None else {"sums": sums})
    sizes = {"each_d": int(sums is None), "given_d": d.size, "two": 2}
    _run_losses(slopes, x, arrays, labels, how, _tasks(x), sizes)
    return dx


def _tasks(x: np.ndarray) -> int:
    return -(-len(x) // max(BLOCK // x.shape[1], 1))


def _run_losses(kernel: Any, x: np.ndarray, arrays: dict[str, Any], labels: np.ndarray, how: Rows, tasks: int,
                sizes: dict[str, int] = {}) -> None:  # noqa: B006  # fmt: skip
    count, D = x.shape
    held = arrays | {"x": rows_of(x, D), "labels": np.ascontiguousarray(labels, np.int64)}
    sizes = {"count": count, "D": D, "each": max(BLOCK // D, 1), "tasks": tasks} | sizes
    over_matrices(kernel, LOSS, sizes | held | how._asdict(), tasks, x.dtype.name)


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
