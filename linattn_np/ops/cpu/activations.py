"""Functions of every element in compiled loops: ops/gates.py and ops/activations.py have the equations.

A formula is written once, on vectors in registers; `Pointwise` makes the loops of it and of its derivative. Constants
are loaded once for four vectors; the last numbers of a block are vectors cut off at its end, with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numpy.polynomial.chebyshev import cheb2poly, poly2cheb

from ...runtime.pieces.memory import empty
from ...runtime.pieces.piece import Whole, piece, workspace_kind
from ...runtime.pieces.registers import at_least, where_positive
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.views import rows
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from ..activations import CUBE, ERFC, ROOT
from .formulas import dense
from .loops import over
from .numbers import OPTIONS, exp, one_plus_exp, series, size_of
from .numbers import softplus as soft

EACH, NEAR = 2**13, 512  # numbers of a task: a few arrays of it lie in the second cache, or in the first one
NUMBERS = Workspace("activations", ("count",), (), (), {"given": {
    name: Field("count") for name in ("x", "y", "dout", "out", "other")}})  # fmt: skip
Work = workspace_kind(NUMBERS)


class Pointwise:
    """A function of one array and its derivative times the cotangent, as loops."""

    def __init__(self, formula: Callable[..., Any], derivative: Callable[..., Any]):
        """formula(x) and derivative(x, dy), of vectors; more arguments are those of loops.py:over."""
        f, d = njit(**OPTIONS)(formula), njit(**OPTIONS)(derivative)

        def forward(w: Work, first: Whole, last: Whole):
            for task in range(first, last):
                n = min(EACH, w.count - task * EACH)
                x, out = rows(w.x, task * EACH, n), rows(w.out, task * EACH, n)
                over(f, x, x, x, 0, out)

        def backward(w: Work, first: Whole, last: Whole):
            for task in range(first, last):
                n = min(EACH, w.count - task * EACH)
                x, dy, out = rows(w.x, task * EACH, n), rows(w.dout, task * EACH, n), rows(w.out, task * EACH, n)
                over(d, x, dy, dy, 0, out)

        self.kernels = named(forward, formula), named(backward, derivative)

    def forward(self, x: np.ndarray) -> np.ndarray:
        """f(x), x of at least one number."""
        return run(self.kernels[0], {"x": x})[0]

    def backward(self, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        """f'(x) dy"""
        return run(self.kernels[1], {"x": x, "dout": dy})[0]


def named(body: Any, like: Any) -> Any:
    """A piece with the name of a formula."""
    body.__name__ = f"{like.__name__}_{body.__name__}"
    return piece(body)


def run(kernel: Any, arrays: dict[str, np.ndarray], results: tuple[str, ...] = ("out",)) -> list[np.ndarray]:
    """New arrays, written by a kernel."""
    like = next(iter(arrays.values()))
    values = {n: dense(x, x.dtype).reshape(-1) for n, x in arrays.items()}
    found = {n: empty(like.shape, like.dtype) for n in results}
    values |= {n: y.reshape(-1) for n, y in found.items()}
    over_matrices(kernel, NUMBERS, {"count": like.size} | values, -(-like.size // EACH), like.dtype.name)
    return list(found.values())


# formulas, of vectors in registers


def sigmoid_of(x: Any, *_: Any) -> Any:
    return 1.0 / one_plus_exp(-x)


def sigmoid_slope(x: Any, dy: Any, *_: Any) -> Any:
    e = exp(-size_of(x))
    return dy * (e / ((1.0 + e) * (1.0 + e)))


def silu_of(x: Any, *_: Any) -> Any:
    return x / one_plus_exp(-x)


def silu_slope(x: Any, dy: Any, *_: Any) -> Any:
    s = 1.0 / one_plus_exp(-x)
    return dy * (s * (1.0 + x * (1.0 - s)))


def softplus_of(x: Any, *_: Any) -> Any:
    return soft(x)


def softplus_slope(x: Any, dy: Any, *_: Any) -> Any:
    return dy / one_plus_exp(-x)


def log_sigmoid_of(x: Any, *_: Any) -> Any:
    return -soft(-x)


def log_sigmoid_slope(x: Any, dy: Any, *_: Any) -> Any:
    return dy / one_plus_exp(x)


@njit(**OPTIONS)
def cdf(x: Any) -> Any:
    """Phi(x)"""
    z = HALF * size_of(x)
    t = 2.0 / (2.0 + z)
    tail = 0.5 * t * exp(erfc_series(2.0 * t - 1.0) - z * z)
    return where_positive(x, 1.0 - tail, tail)


def gelu_of(x: Any, *_: Any) -> Any:
    return x * cdf(x)


def gelu_slope(x: Any, dy: Any, *_: Any) -> Any:
    return dy * (cdf(x) + x * (DENSITY * exp(-0.5 * x * x)))


@njit(**OPTIONS)
def tanh_share(x: Any) -> Any:
    """(1 + tanh u) / 2 = 1 / (1 + e^{-2 u})"""
    return 1.0 / one_plus_exp(-2.0 * ROOT * (x + CUBE * x * x * x))


def gelu_tanh_of(x: Any, *_: Any) -> Any:
    return x * tanh_share(x)


def gelu_tanh_slope(x: Any, dy: Any, *_: Any) -> Any:
    s = tanh_share(x)
    return dy * (s + x * (2.0 * ROOT) * (s * (1.0 - s)) * (1.0 + 3.0 * CUBE * x * x))


def squared_relu_of(x: Any, *_: Any) -> Any:
    y = at_least(x, 0.0)
    return y * y


def squared_relu_slope(x: Any, dy: Any, *_: Any) -> Any:
    return 2.0 * at_least(x, 0.0) * dy


HALF, DENSITY = math.sqrt(0.5), 1 / math.sqrt(2 * math.pi)
TERMS = 13  # of Chebyshev polynomials, in float32: the others add up to 7e-9
erfc_series = series(*ERFC, single=tuple(cheb2poly(poly2cheb(ERFC)[:TERMS])))
sigmoid = Pointwise(sigmoid_of, sigmoid_slope)
silu = Pointwise(silu_of, silu_slope)
softplus = Pointwise(softplus_of, softplus_slope)
log_sigmoid = Pointwise(log_sigmoid_of, log_sigmoid_slope)
gelu = Pointwise(gelu_of, gelu_slope)
gelu_tanh = Pointwise(gelu_tanh_of, gelu_tanh_slope)
squared_relu = Pointwise(squared_relu_of, squared_relu_slope)


# two arrays


@njit(**OPTIONS)
def gated(x: Any, gate: Any, *_: Any) -> Any:
    return x * (gate / one_plus_exp(-gate))


@njit(**OPTIONS)
def gate_slope(x: Any, gate: Any, dy: Any, _: Any) -> Any:
    s = 1.0 / one_plus_exp(-gate)
    return dy * x * (s * (1.0 + gate * (1.0 - s)))


@piece
def swiglu_forward(w: Work, first: Whole, last: Whole):
    """out = x silu(y)"""
    for task in range(first, last):
        n = min(EACH, w.count - task * EACH)
        x, y, out = rows(w.x, task * EACH, n), rows(w.y, task * EACH, n), rows(w.out, task * EACH, n)
        over(gated, x, y, y, 0, out)


@piece
def swiglu_backward(w: Work, first: Whole, last: Whole):
    """out = silu(y) dout, other = silu'(y) x dout; blocks of 512 numbers stay in the first cache."""
    for task in range(first, last):
        end = min((task + 1) * EACH, w.count)
        for at in range(task * EACH, end, NEAR):
            n = min(NEAR, end - at)
            x, y, dout = rows(w.x, at, n), rows(w.y, at, n), rows(w.dout, at, n)
            over(gated, dout, y, y, 0, rows(w.out, at, n))
            over(gate_slope, x, y, dout, 0, rows(w.other, at, n))


class swiglu:
    """x silu(gate), and its gradients."""

    @staticmethod
    def forward(x: np.ndarray, gate: np.ndarray) -> np.ndarray:
        """x silu(gate)"""
        return run(swiglu_forward, {"x": x, "y": gate})[0]

    @staticmethod
    def backward(x: np.ndarray, gate: np.ndarray, dy: np.ndarray) -> list[np.ndarray]:
        """(dx, dgate)"""
        return run(swiglu_backward, {"x": x, "y": gate, "dout": dy}, ("out", "other"))
