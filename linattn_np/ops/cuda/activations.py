"""Activations, gates and log decays of CuPy arrays, and their gradients: formulas of cuda_src/ops/formula.cu."""

from __future__ import annotations

from typing import Any

from ...runtime.arrays import Array
from .formulas import ACTIVATIONS, both, compiled
from .row_arrays import dense, working_dtype

LOG_DECAYS = {"softplus": "log_decay", "bounded": "bounded", "log_sigmoid": "log_sigmoid",
              "lower_bound": "lower_bound", "exp": "exponential"}  # fmt: skip
WITH_RATE = ("softplus", "bounded", "exp")


def forward(name: str, x: Array) -> Array:
    """An activation of every number, in the dtype of x."""
    x = dense(x)
    if name == "log_sigmoid":
        return compiled(name, (x,), (tuple(x.shape), x.dtype), working_dtype(x), b=1.0)
    return compiled("activation", (x,), (tuple(x.shape), x.dtype), working_dtype(x), how=ACTIVATIONS.index(name))


def backward(name: str, x: Array, dy: Array) -> Array:
    """dy times the slope, in the dtype of x."""
    x, dy = dense(x), dense(dy)
    out, wide = (tuple(x.shape), x.dtype), working_dtype(x, dy)
    if name == "log_sigmoid":
        return compiled("log_sigmoid_vjp", (x, None, None, dy), out, wide, b=1.0)
    return compiled("activation_vjp", (x, dy), out, wide, how=ACTIVATIONS.index(name))


def swiglu(x: Array, gate: Array) -> Array:
    """x silu(gate), in the dtype of x."""
    return compiled("swiglu", (dense(x), dense(gate)), (tuple(x.shape), x.dtype), working_dtype(x, gate))


def swiglu_vjp(x: Array, gate: Array, dy: Array) -> tuple[Array, Any]:
    """(dx, dgate) in the dtype of x, or of the gate if it is wider."""
    wider = max(x.dtype, gate.dtype, key=lambda dtype: dtype.itemsize)
    return both("swiglu_vjp", (dense(x), dense(gate), dense(dy)), (tuple(x.shape), wider), working_dtype(x, gate, dy))


def log_decay(a: Array, A_log: Array | None, bias: Array | None, formula: str, bound: float, divisor: float) -> Array:
    """g, in the dtype of a."""
    arrays, wide = (a, bias, A_log), working_dtype(a, bias, A_log)
    return compiled(LOG_DECAYS[formula], arrays, (tuple(a.shape), a.dtype), wide, bound, divisor)


def log_decay_vjp(
    a: Array, A_log: Array | None, bias: Array | None, formula: str, bound: float, divisor: float, dg: Array
) -> tuple[Array, Array | None]:
    """(da, the terms of dA_log of each number), in the dtype of the computation where there are parameters."""
    arrays, wide = (a, bias, A_log, dg), working_dtype(a, bias, A_log, dg)
    out, name = (tuple(a.shape), a.dtype if A_log is bias is None else wide), f"{LOG_DECAYS[formula]}_vjp"
    if formula in WITH_RATE:
        return both(name, arrays, out, wide, bound, more=A_log is not None)
    return compiled(name, arrays, out, wide, bound, divisor), None
