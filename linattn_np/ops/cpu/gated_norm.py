"""RMS norm with an output gate in compiled loops, one pass over the rows: ops/gated_norm.py has the equations.

gate after:   y = n w a,  n = f x,    f = 1 / sqrt(mean x^2 + eps),  a = act(gate)
gate before:  y = n w,    n = f x a,  f likewise of x a
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from ...runtime.doorway import expect, expect_one_dtype
from ...runtime.pieces.piece import Number, Truth, Vector, Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.views import row
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from ..gated_norm import GatedNorm, check_how
from .numbers import exp, number
from .rows import Length, length_of

BLOCK = 2**15  # numbers of a task
ARRAYS = ("x", "gate", "dy", "out", "dgate")
NORM = Workspace("gated_norm", ("count", "D", "groups", "each", "silu", "first", "tasks", "parts"), ("root",), (), {
    "given": {name: Field("count", "D") for name in ARRAYS} | {
        "weight": Field("groups", "D"), "dweight": Field("parts", "D"), "scratch": Field("tasks", "D"),
        "slope": Field("tasks", "D")},
})  # fmt: skip
Work = workspace_kind(NORM)


@piece
def activate(g: Vector, silu: Truth, out: Vector):
    """out = sigma(g), or g sigma(g)"""
    one = number(out, 1)
    if silu:
        for j in range(len(out)):
            out[j] = g[j] / (one + exp(-g[j]))
    else:
        for j in range(len(out)):
            out[j] = one / (one + exp(-g[j]))


@piece
def activate_vjp(g: Vector, silu: Truth, d: Vector):
    """d <- d act'(g)"""
    one = number(d, 1)
    for j in range(len(d)):
        s = one / (one + exp(-g[j]))
        d[j] *= s * (one + g[j] * (one - s)) if silu else s * (one - s)


@piece
def over_rms(x: Vector, root: Number) -> Length:
    """(factor, f / factor), f = 1 / sqrt(mean x^2 + eps) = sqrt(D) / n, n^2 = |x|^2 + root^2; length_of's factor."""
    length, factor = length_of(x, len(x), root)
    return factor, np.sqrt(number(x, len(x))) / length


@piece
def normed(w: Work, begin: Whole, end: Whole):
    """out = y of tasks begin..end of `each` rows."""
    for task in range(begin, end):
        a = row(w.scratch, task)
        for r in range(task * w.each, min((task + 1) * w.each, w.count)):
            x, y, weight = row(w.x, r), row(w.out, r), row(w.weight, r % w.groups)
            activate(row(w.gate, r), w.silu, a)
            if w.first:
                for j in range(len(y)):
                    y[j] = x[j] * a[j]
                factor, f = over_rms(y, w.root)
                for j in range(len(y)):
                    y[j] = factor * y[j] * f * weight[j]
            else:
                factor, f = over_rms(x, w.root)
                for j in range(len(y)):
                    y[j] = factor * x[j] * f * weight[j] * a[j]


@piece
def normed_vjp(w: Work, begin: Whole, end: Whole):
    """out = dx, dgate, and dweight summed over the rows of each task.

    dn = dy w (a);  dx = f (dn - n mean(n dn)), times a with the gate before;  dgate = act'(gate) times what a is of.
    """
    for task in range(begin, end):
        a, n = row(w.scratch, task), row(w.slope, task)
        for r in range(task * w.each, min((task + 1) * w.each, w.count)):
            x, g, dy, dx, dg = row(w.x, r), row(w.gate, r), row(w.dy, r), row(w.out, r), row(w.dgate, r)
            weight, dweight = row(w.weight, r % w.groups), row(w.dweight, task * w.groups + r % w.groups)
            activate(g, w.silu, a)
            for j in range(len(n)):
                n[j] = x[j] * a[j] if w.first else x[j]
            factor, f = over_rms(n, w.root)
            for j in range(len(n)):
                n[j] = factor * n[j] * f
                dx[j] = dy[j] if w.first else dy[j] * a[j]
                dg[j] = dy[j] * n[j] * weight[j]
            for j in range(len(n)):
                dweight[j] += dx[j] * n[j]
                dx[j] *= weight[j]
            along = dot(n, dx, len(n)) / number(n, len(n))
            for j in range(len(n)):
                dx[j] = f * (dx[j] - n[j] * along) * factor
            if w.first:
                for j in range(len(n)):
                    dg[j] = dx[j] * x[j]
                    dx[j] *= a[j]
            activate_vjp(g, w.silu, dg)


def gated_rms_norm(x: np.ndarray, gate: np.ndarray, weight: np.ndarray | None, how: GatedNorm) -> np.ndarray:
    """As ops/gated_norm.py, float32 or float64. Raises TypeError or ValueError for arrays that do not fit."""
    _check(x, gate, weight, how)
    out = np.empty(x.shape, x.dtype)
    _run(normed, {"x": x, "gate": gate, "out": out}, weight, how)
    return out


def gated_rms_norm_vjp(
    x: np.ndarray, gate: np.ndarray, weight: np.ndarray | None, how: GatedNorm, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dx, dgate, dweight). Raises as gated_rms_norm, and where dy does not have the shape of x."""
    _check(x, gate, weight, how, dy)
    dx, dgate = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    parts = _run(normed_vjp, {"x": x, "gate": gate, "dy": dy, "out": dx, "dgate": dgate}, weight, how)
    return dx, dgate, parts


def _check(
    x: np.ndarray, gate: np.ndarray, weight: np.ndarray | None, how: GatedNorm, dy: np.ndarray | None = None
) -> None:
    """Raise unless everything that the loops read or write lies in the arrays."""
    fn = "gated_rms_norm"
    expect(fn, None, ("float32", "float64"), x=(x, "... D"), gate=(gate, "... D"), dy=(dy, "... D?"))
    expect_one_dtype(fn, x=x, gate=gate, dy=dy)
    expect(fn, {"D": x.shape[-1]}, weight=(weight, "D?"))
    check_how(fn, how, x.shape[-1])


def _run(kernel: Any, arrays: dict[str, np.ndarray], weight: np.ndarray | None, how: GatedNorm) -> np.ndarray:
    """A kernel over all its tasks, in threads; the sum of the weight's gradients."""
    x = arrays["x"]
    width, D = x.shape[-1], how.group or x.shape[-1]
    weight = np.ones(width, x.dtype) if weight is None else np.ascontiguousarray(weight, x.dtype)
    if not x.size:
        return np.zeros(width, x.dtype)
    count, each, groups = x.size // D, max(BLOCK // D, 1), width // D
    tasks = -(-count // each)
    held = {n: np.ascontiguousarray(y).reshape(count, D) for n, y in arrays.items()} | {
        "weight": weight.reshape(groups, D), "dweight": np.zeros((tasks * groups, D), x.dtype),
        "scratch": np.empty((tasks, D), x.dtype), "slope": np.empty((tasks, D), x.dtype)}  # fmt: skip
    sizes = {"count": count, "D": D, "groups": groups, "each": each, "silu": int(how.activation == "silu"),
             "first": int(how.gate_first), "tasks": tasks, "parts": tasks * groups}  # fmt: skip
    over_matrices(kernel, NORM, sizes | held | {"root": sqrt(D * how.eps)}, tasks, x.dtype.name)
    return held["dweight"].reshape(tasks, width).sum(axis=0)
