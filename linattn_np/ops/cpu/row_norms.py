"""Norms of rows in compiled loops, forward and backward: ops/norms.py has the equations.

    y = f (x - m) weight + bias      f = 1 / sqrt(mean (x - m)^2 + eps), m = mean x of layer and group norms, else 0
    l2:  f = 1 / sqrt(|x|^2 + eps)   lengths are in range for every row (rows.py:length_of)

A row passes three times, from the first cache. Row r is group r mod `groups`, which has its own weight and bias.
"""

from __future__ import annotations

from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ...runtime.constants import constant_ones
from ...runtime.pieces.memory import empty, working
from ...runtime.pieces.piece import Vector, Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.tiles import dot, sum_of
from ...runtime.pieces.views import row
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from .formulas import dense
from .loops import over, sweep
from .numbers import OPTIONS, number
from .rows import Length, length_of
from .sums import over_first

BLOCK = 2**15  # numbers of a task
ROWS = Workspace(
    "row_norms", ("count", "D", "groups", "each", "centred", "weighted", "biased", "tasks", "parts"), ("root", "size"),
    (), {"given": {name: Field("count", "D") for name in ("x", "dy", "out")} | {
        "weight": Field("groups", "D"), "bias": Field("groups", "D"), "dweight": Field("parts", "D"),
        "dbias": Field("parts", "D"), "scratch": Field("tasks", "D")}})  # fmt: skip
Work = workspace_kind(ROWS)


class Norm(NamedTuple):
    """eps inside the root; whether the mean is taken off; whether a mean of squares is rooted, or their sum."""

    eps: float
    centred: bool = False
    mean: bool = True


# formulas: of vectors of up to three rows, and numbers of a row


@njit(**OPTIONS)
def less(x: Any, y: Any, z: Any, m: Any) -> Any:
    return x - m


@njit(**OPTIONS)
def scaled(x: Any, y: Any, z: Any, f: Any) -> Any:
    return f[0] * x * f[1]


@njit(**OPTIONS)
def weighted(x: Any, weight: Any, z: Any, f: Any) -> Any:
    return f[0] * x * f[1] * weight


@njit(**OPTIONS)
def shifted(x: Any, weight: Any, bias: Any, f: Any) -> Any:
    return f[0] * x * f[1] * weight + bias


@njit(**OPTIONS)
def plus(x: Any, y: Any, z: Any, f: Any) -> Any:
    return x + y


@njit(**OPTIONS)
def times(x: Any, y: Any, z: Any, f: Any) -> Any:
    return x * y


@piece
def inverse_length(w: Work, x: Vector) -> Length:
    """(factor, f / factor): x_j factor (f / factor) is f x_j, in range."""
    length, factor = length_of(x, len(x), w.root)
    return factor, w.size / length


@piece
def centre(x: Vector, out: Vector):
    """out = x - mean x"""
    over(less, x, x, x, sum_of(x, len(x)) / number(x, len(x)), out)


@piece
def norm(w: Work, first: Whole, last: Whole):
    """out = y of tasks first..last of `each` rows."""
    for task in range(first, last):
        begin, end = task * w.each, min((task + 1) * w.each, w.count)
        g = begin % w.groups
        for r in range(begin, end):
            x, y = row(w.x, r), row(w.out, r)
            if w.centred:
                centre(x, y)
                x = y
            f = inverse_length(w, x)
            if w.biased:
                over(shifted, x, row(w.weight, g), row(w.bias, g), f, y)
            elif w.weighted:
                over(weighted, x, row(w.weight, g), x, f, y)
            else:
                over(scaled, x, x, x, f, y)
            g = g + 1 if g + 1 < w.groups else 0


@njit(**OPTIONS)
def parts(x: Any, dy: Any, weight: Any, dweight: Any, dbias: Any, f: Any) -> Any:
    """(d, dweight, dbias, terms of <n, d>), n = f x, d = dy weight"""
    n = f[0] * x * f[1]
    d = dy * weight
    return d, dweight + dy * n, dbias + dy, n * d


@njit(**OPTIONS)
def norm_slope(x: Any, d: Any, z: Any, f: Any) -> Any:
    """f (d - n mean(n d)), n = f x;  f[2]: the mean"""
    return f[0] * f[1] * (d - f[0] * x * f[1] * f[2])


@piece
def norm_vjp(w: Work, first: Whole, last: Whole):
    """out = dx, dweight and dbias summed over the rows of each task.

    n = f (x - m), d = dy weight;  dx = f (d - n mean(n d)), less its mean of centred rows; sums for means of l2.
    """
    for task in range(first, last):
        begin, end = task * w.each, min((task + 1) * w.each, w.count)
        g, centred = begin % w.groups, row(w.scratch, task)
        if w.weighted:
            for n in range(task * w.groups, (task + 1) * w.groups):
                dweight, dbias = row(w.dweight, n), row(w.dbias, n)
                for i in range(w.D):
                    dweight[i] = 0.0
                    dbias[i] = 0.0
        for r in range(begin, end):
            x, dy, dx = row(w.x, r), row(w.dy, r), row(w.out, r)
            if w.centred:
                centre(x, centred)
                x = centred
            f = inverse_length(w, x)
            if w.weighted:
                dweight, dbias = row(w.dweight, task * w.groups + g), row(w.dbias, task * w.groups + g)
                along = sweep(parts, (x, dy, row(w.weight, g), dweight, dbias), f, (dx, dweight, dbias))
                d = dx
            else:
                along = f[0] * f[1] * dot(x, dy, len(x))
                d = dy
            over(norm_slope, x, d, d, (f[0], f[1], along / (w.size * w.size)), dx)
            if w.centred:
                centre(dx, dx)
            g = g + 1 if g + 1 < w.groups else 0


def rows_of(x: np.ndarray, D: int) -> np.ndarray:
    """x as rows of D numbers side by side at one distance, else a copy."""
    if x.shape[-1] == D and x.strides[-1] == x.itemsize and x.ndim > 1:
        strides = [x.shape[n + 1] * x.strides[n + 1] == x.strides[n] for n in range(x.ndim - 2)]
        if all(strides) and x.strides[-2] > 0:
            return x
    return dense(x, x.dtype).reshape(-1, D)


def forward(x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, how: Norm, D: int) -> np.ndarray:
    """Norms of x (..., groups D), not empty, D numbers each; weight, bias (groups D)."""
    out = empty(x.shape, x.dtype)
    _run(norm, {"x": rows_of(x, D), "out": out.reshape(-1, D)}, weight, bias, how)
    return out


def backward(
    x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, how: Norm, dy: np.ndarray, D: int
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """(dx, dweight, dbias), the last two (groups D,), or None."""
    dx = empty(x.shape, x.dtype)
    found = _run(norm_vjp, {"x": rows_of(x, D), "dy": rows_of(dy, D), "out": dx.reshape(-1, D)}, weight, bias, how)
    wanted = {"dweight": weight is not None, "dbias": bias is not None}
    sums = [over_first(found[n][None])[0] if wanted[n] else None for n in ("dweight", "dbias")]
    return dx, *sums


def _run(
    kernel: Any, arrays: dict[str, np.ndarray], weight: np.ndarray | None, bias: np.ndarray | None, how: Norm
) -> dict[str, np.ndarray]:
    """A kernel over all its tasks, in threads; the sums of each task (tasks, groups D)."""
    out = arrays["out"]
    (count, D), dtype = out.shape, out.dtype
    groups = 1 if weight is None and bias is None else max(y.size for y in (weight, bias) if y is not None) // D
    if weight is None and bias is not None:
        weight = constant_ones((groups * D,), dtype)
    each = max(BLOCK // D, 1)
    tasks = -(-count // each)
    sizes = {"count": count, "D": D, "groups": groups, "each": each, "tasks": tasks, "parts": tasks * groups,
             "centred": int(how.centred), "weighted": int(weight is not None), "biased": int(bias is not None),
             "size": sqrt(D) if how.mean else 1.0, "root": sqrt(how.eps * (D if how.mean else 1))}  # fmt: skip
    held = arrays | {n: dense(y, dtype).reshape(groups, D) for n, y in (("weight", weight), ("bias", bias))
                     if y is not None}  # fmt: skip
    sums = {}
    if kernel is norm_vjp:
        sums = {n: working((tasks * groups, D), dtype) for n in ("dweight", "dbias") if weight is not None}
        held |= sums | {"scratch": working((tasks, D), dtype)}
    over_matrices(kernel, ROWS, sizes | held, tasks, dtype.name)
    return {n: y.reshape(tasks, groups * D) for n, y in sums.items()}
