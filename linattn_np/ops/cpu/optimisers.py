"""AdamW and the norm of a gradient in one loop over all parameters: ops/optimisers.py has the equations."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from ...runtime.pieces.piece import Number, Vector, Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.vectors import F64, I64, Array, Builder, Value, constant, converted, emitted, fma, total
from ...runtime.pieces.views import rows
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace

EACH = 2**14  # numbers of a task: four arrays of it lie in the second cache
SMALL = 2**18  # numbers, up to which one thread is enough
SHARED = ("a", "b", "first", "second", "eps", "clip")
ADAMW = Workspace("adamw", (), SHARED, (), {
    "given": {name: Field("size") for name in ("p", "g", "m", "v")}
    | {"bounds": Field("ends", dtype="int64"), "keep": Field("tasks", dtype="float64"),
       "rate": Field("tasks", dtype="float64")}})  # fmt: skip
Work = workspace_kind(ADAMW)
SQUARES = Workspace("squares", (), (), (), {
    "given": {"g": Field("size"), "sums": Field("tasks", dtype="float64")}})  # fmt: skip
Squares = workspace_kind(SQUARES)


@piece
def step(p: Vector, g: Vector, m: Vector, v: Vector, keep: Number, rate: Number, a: Number, b: Number, first: Number,
         second: Number, eps: Number, clip: Number):  # fmt: skip
    """The step of a range of numbers: first, second are 1 / (1 - a^t), (1 - b^t)^{-1/2}."""
    for j in range(len(p)):
        x = clip * g[j]
        m[j] += a * (x - m[j])
        v[j] += b * (x * x - v[j])
        p[j] = keep * p[j] - rate * first * m[j] / (np.sqrt(v[j]) * second + eps)


@piece
def adamw_tasks(w: Work, first: Whole, last: Whole):
    """Each task is a range of numbers with one rate and one decay."""
    for t in range(first, last):
        at = w.bounds[t]
        n = w.bounds[t + 1] - at
        p, g, m, v = rows(w.p, at, n), rows(w.g, at, n), rows(w.m, at, n), rows(w.v, at, n)
        step(p, g, m, v, w.keep[t], w.rate[t], w.a, w.b, w.first, w.second, w.eps, w.clip)


@emitted(lambda g: float(np.square(g, dtype=np.float64).sum()), types.float64)
def squared_length(b: Builder, g: Array) -> Value:
    """The sum of squares in float64, a sum for each lane."""
    n, wide = g.shape[0], ir.VectorType(F64, g.vector.count)
    sums = cgutils.alloca_once_value(b, constant(wide, None))
    with g.vectors(I64(0), n) as j:
        y = converted(b, g.load(g.at(j), 0, g.masks(n, j, 1)[0]), wide)
        b.store(fma(b, y, y, b.load(sums)), sums)
    return total(b, b.load(sums))


@piece
def squares(w: Squares, first: Whole, last: Whole):
    """The sum of squares of each task, in float64."""
    for t in range(first, last):
        w.sums[t] = squared_length(rows(w.g, t * EACH, min(EACH, w.size - t * EACH)))


def adamw(p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, groups: Any, **numbers: float) -> None:
    """One step in place of vectors; groups: (first, last, keep, rate) of ranges that follow one another."""
    bounds, each = [0], []
    for first, last, keep, rate in groups:
        ends = [*range(first + EACH, last, EACH), last] if last > first else []
        bounds += ends
        each += [(keep, rate)] * len(ends)
    sizes = {"size": len(p), "tasks": len(each), "ends": len(bounds)}
    values = {"p": p, "g": g, "m": m, "v": v, "bounds": np.array(bounds, np.int64),
              "keep": np.array([k for k, _ in each]), "rate": np.array([r for _, r in each])}  # fmt: skip
    if each:
        over_matrices(adamw_tasks, ADAMW, sizes | numbers | values, len(each), p.dtype.name,
                      len(p) <= SMALL)  # fmt: skip


def norm(g: np.ndarray) -> float:
    """The root of the sum of squares of a vector."""
    sums = np.zeros(-(-len(g) // EACH))
    if len(g):
        over_matrices(squares, SQUARES, {"size": len(g), "tasks": len(sums), "g": g, "sums": sums}, len(sums),
                      g.dtype.name, len(g) <= SMALL)  # fmt: skip
    return float(np.sqrt(sums.sum()))
