"""RMS norm with an output gate in compiled loops, one pass over the rows: ops/gated_norm.py has the equations.

gate after:   y = n w a,  n = f x,    f = 1 / sqrt(mean x^2 + eps),  a = act(gate)
gate before:  y = n w,    n = f x a,  f likewise of x a
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
from numba import njit

from ...runtime.constants import constant_ones
from ...runtime.doorway import expect, expect_one_dtype
from ...runtime.pieces.memory import empty, working
from ...runtime.pieces.piece import Number, Truth, Vector, Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.views import row
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from ..gated_norm import GatedNorm, check_how
from .formulas import dense
from .loops import over, sweep
from .numbers import OPTIONS, number, one_plus_exp
from .row_norms import norm_slope, rows_of, weighted
from .rows import Length, fill, length_of
from .sums import over_first

BLOCK = 2**15  # numbers of a task
ARRAYS = ("x", "gate", "dy", "out", "dgate")
NORM = Workspace("gated_norm", ("count", "D", "groups", "each", "silu", "first", "tasks", "parts"), ("root",), (), {
    "given": {name: Field("count", "D") for name in ARRAYS} | {
        "weight": Field("groups", "D"), "dweight": Field("parts", "D"), "scratch": Field("tasks", "D")},
})  # fmt: skip
Work = workspace_kind(NORM)


# formulas: of vectors of up to three rows, and f = (factor, f / factor)


@njit(**OPTIONS)
def silu(x: Any, g: Any, z: Any, f: Any) -> Any:
    return x * (g / one_plus_exp(-g))


@njit(**OPTIONS)
def sigmoid(x: Any, g: Any, z: Any, f: Any) -> Any:
    return x / one_plus_exp(-g)


@njit(**OPTIONS)
def normed_silu(x: Any, weight: Any, g: Any, f: Any) -> Any:
    return f[0] * x * f[1] * weight * (g / one_plus_exp(-g))


@njit(**OPTIONS)
def normed_sigmoid(x: Any, weight: Any, g: Any, f: Any) -> Any:
    return f[0] * x * f[1] * weight / one_plus_exp(-g)


@piece
def gate(x: Vector, g: Vector, silu_gate: Truth, out: Vector):
    """out = x act(g)"""
    if silu_gate:
        over(silu, x, g, g, 0, out)
    else:
        over(sigmoid, x, g, g, 0, out)


@piece
def over_rms(x: Vector, root: Number) -> Length:
    """(factor, f / factor), f = 1 / sqrt(mean x^2 + eps) = sqrt(D) / n, n^2 = |x|^2 + root^2; length_of's factor."""
    length, factor = length_of(x, len(x), root)
    return factor, np.sqrt(number(x, len(x))) / length


@piece
def normed(w: Work, first: Whole, last: Whole):
    """out = y of tasks first..last of `each` rows."""
    for task in range(first, last):
        begin, end = task * w.each, min((task + 1) * w.each, w.count)
        group = begin % w.groups
        for r in range(begin, end):
            x, g, y, weight = row(w.x, r), row(w.gate, r), row(w.out, r), row(w.weight, group)
            if w.first:
                gate(x, g, w.silu, y)
                over(weighted, y, weight, y, over_rms(y, w.root), y)
            elif w.silu:
                over(normed_silu, x, weight, g, over_rms(x, w.root), y)
            else:
                over(normed_sigmoid, x, weight, g, over_rms(x, w.root), y)
            group = group + 1 if group + 1 < w.groups else 0


@njit(**OPTIONS)
def after_silu(x: Any, g: Any, dy: Any, weight: Any, dweight: Any, f: Any) -> Any:
    """(d, dgate, dweight, terms of <n, d>), n = f x, d = dy a weight, a = g s, s = sigma(g), dgate = dy n weight a'."""
    s, n = 1.0 / one_plus_exp(-g), f[0] * x * f[1]
    given = dy * (g * s)
    d = given * weight
    return d, dy * n * weight * (s * (1.0 + g * (1.0 - s))), dweight + given * n, n * d


@njit(**OPTIONS)
def after_sigmoid(x: Any, g: Any, dy: Any, weight: Any, dweight: Any, f: Any) -> Any:
    s, n = 1.0 / one_plus_exp(-g), f[0] * x * f[1]
    given = dy * s
    d = given * weight
    return d, dy * n * weight * (s * (1.0 - s)), dweight + given * n, n * d


@njit(**OPTIONS)
def before(x: Any, dy: Any, weight: Any, dweight: Any, z: Any, f: Any) -> Any:
    """(d, z, dweight, terms of <n, d>), n = f x, d = dy weight"""
    n = f[0] * x * f[1]
    d = dy * weight
    return d, z, dweight + dy * n, n * d


@njit(**OPTIONS)
def before_silu(x: Any, g: Any, d: Any, weight: Any, z: Any, f: Any) -> Any:
    """(dx, dgate, z, 0) = (d a, d x a')"""
    s = 1.0 / one_plus_exp(-g)
    return d * (g * s), d * x * (s * (1.0 + g * (1.0 - s))), z, 0.0 * x


@njit(**OPTIONS)
def before_sigmoid(x: Any, g: Any, d: Any, weight: Any, z: Any, f: Any) -> Any:
    s = 1.0 / one_plus_exp(-g)
    return d * s, d * x * (s * (1.0 - s)), z, 0.0 * x


@piece
def normed_vjp(w: Work, first: Whole, last: Whole):
    """out = dx, dgate, and dweight summed over the rows of each task.

    d = dy (a) weight;  dx = f (d - n mean(n d)), times a with the gate before;  dgate = act'(gate) times what a is of.
    """
    for task in range(first, last):
        begin, end, n = task * w.each, min((task + 1) * w.each, w.count), row(w.scratch, task)
        group = begin % w.groups
        for i in range(task * w.groups, (task + 1) * w.groups):
            fill(row(w.dweight, i), 0.0)
        for r in range(begin, end):
            x, g, dy, dx, dg = row(w.x, r), row(w.gate, r), row(w.dy, r), row(w.out, r), row(w.dgate, r)
            weight, dweight = row(w.weight, group), row(w.dweight, task * w.groups + group)
            read, many = x, number(x, len(x))
            if w.first:
                gate(x, g, w.silu, n)
                read = n
            f = over_rms(read, w.root)
            if w.first:
                along = sweep(before, (n, dy, weight, dweight, dg), f, (dx, dg, dweight))
            elif w.silu:
                along = sweep(after_silu, (x, g, dy, weight, dweight), f, (dx, dg, dweight))
            else:
                along = sweep(after_sigmoid, (x, g, dy, weight, dweight), f, (dx, dg, dweight))
            over(norm_slope, read, dx, dx, (f[0], f[1], along / many), dx)
            if w.first:
                if w.silu:
                    sweep(before_silu, (x, g, dx, weight, n), f, (dx, dg, n))
                else:
                    sweep(before_sigmoid, (x, g, dx, weight, n), f, (dx, dg, n))
            group = group + 1 if group + 1 < w.groups else 0


def gated_rms_norm(x: np.ndarray, gate: np.ndarray, weight: np.ndarray | None, how: GatedNorm) -> np.ndarray:
    """As ops/gated_norm.py, float32 or float64. Raises TypeError or ValueError for arrays that do not fit."""
    _check(x, gate, weight, how)
    out = empty(x.shape, x.dtype)
    _run(normed, {"x": x, "gate": gate, "out": out}, weight, how)
    return out


def gated_rms_norm_vjp(
    x: np.ndarray, gate: np.ndarray, weight: np.ndarray | None, how: GatedNorm, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(dx, dgate, dweight or None). Raises as gated_rms_norm, and where dy does not have the shape of x."""
    _check(x, gate, weight, how, dy)
    dx, dgate = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    parts = _run(normed_vjp, {"x": x, "gate": gate, "dy": dy, "out": dx, "dgate": dgate}, weight, how)
    return dx, dgate, None if weight is None else parts


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
    width, D, dtype = x.shape[-1], how.group or x.shape[-1], x.dtype
    weight = constant_ones((width,), dtype) if weight is None else dense(weight, dtype)
    if not x.size:
        return np.zeros(width, dtype)
    count, each, groups = x.size // D, max(BLOCK // D, 1), width // D
    tasks, sums = -(-count // each), weight
    held = {n: rows_of(y, D) for n, y in arrays.items()} | {"weight": weight.reshape(groups, D)}
    if kernel is normed_vjp:
        sums = working((tasks * groups, D), dtype)
        held |= {"dweight": sums, "scratch": working((tasks, D), dtype)}
    sizes = {"count": count, "D": D, "groups": groups, "each": each, "silu": int(how.activation == "silu"),
             "first": int(how.gate_first), "tasks": tasks, "parts": tasks * groups}  # fmt: skip
    over_matrices(kernel, NORM, sizes | held | {"root": sqrt(D * how.eps)}, tasks, dtype.name)
    return weight if sums is weight else over_first(sums.reshape(1, tasks, width))[0]
