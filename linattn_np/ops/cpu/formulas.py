"""The kernel of all formulas: a kind says which one a call computes, and the others are not compiled for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime.arrays import NARROW, STORAGE, dtype_name
from ...runtime.constants import constant_array
from ...runtime.pieces.memory import empty, working
from ...runtime.pieces.piece import Whole, piece
from ...runtime.pieces.views import row
from ...runtime.recorder import refuse
from .elementwise import (
    added,
    bounded,
    bounded_vjp,
    capped,
    capped_vjp,
    complement,
    complement_vjp,
    copy,
    decay,
    decay_vjp,
    feature,
    feature_vjp,
    gate_vjp,
    log_decay,
    log_decay_vjp,
    log_forget,
    log_forget_vjp,
    log_rest,
    log_rest_vjp,
    product,
    scaled,
    skip_and_gate,
    step_size,
    step_size_vjp,
)
from .grid import Work, begin_task, begin_tile, end_tile, over_grid, takes
from .rowwise import (
    angle_of_pair,
    appended,
    cos_sin,
    dpfp,
    dpfp_vjp,
    hold,
    hold_vjp,
    inner,
    normed,
    over_length,
    over_length_vjp,
    quotient,
    quotient_vjp,
    rotated,
    rotated_pair,
    softmax,
    softmax_vjp,
    strength,
    strength_vjp,
)

OF_NUMBERS = ("copy", "scaled", "product", "complement", "complement_vjp", "log_rest", "step_size", "step_size_vjp",
              "skip_and_gate", "gate_vjp", "capped", "log_forget", "log_decay", "bounded", "feature",
              "feature_vjp", "added", "capped_vjp", "log_forget_vjp", "log_rest_vjp",
              "log_decay_vjp", "bounded_vjp", "decay", "decay_vjp")  # fmt: skip
OF_ROWS = ("appended", "quotient", "normed", "over_length", "softmax", "softmax_vjp", "strength", "cos_sin", "rotated",
           "rotated_pair", "dpfp", "inner", "quotient_vjp", "strength_vjp",
           "angle_of_pair", "hold", "hold_vjp", "over_length_vjp", "dpfp_vjp")  # fmt: skip
KINDS = {name: n for n, name in enumerate((*OF_NUMBERS, *OF_ROWS))}
(COPY, SCALED, PRODUCT, COMPLEMENT, COMPLEMENT_VJP, LOG_REST, STEP_SIZE, STEP_SIZE_VJP, SKIP_AND_GATE, GATE_VJP,
 CAPPED, LOG_FORGET, LOG_DECAY, BOUNDED, FEATURE, FEATURE_VJP, ADDED, CAPPED_VJP, LOG_FORGET_VJP, LOG_REST_VJP,
 LOG_DECAY_VJP, BOUNDED_VJP, DECAY, DECAY_VJP, APPENDED, QUOTIENT, NORMED, OVER_LENGTH, SOFTMAX, SOFTMAX_VJP,
 STRENGTH, COS_SIN, ROTATED, ROTATED_PAIR, DPFP, INNER, QUOTIENT_VJP, STRENGTH_VJP, ANGLE_OF_PAIR, HOLD, HOLD_VJP,
 OVER_LENGTH_VJP, DPFP_VJP) = KINDS.values()  # fmt: skip


@piece
def compute(w: Work):
    """The formula of a tile, token by token."""
    kind, how, a, b = w.kind, w.how, w.a, w.b
    X, Y, Z, U, OUT = w.x_tile, w.y_tile, w.z_tile, w.u_tile, w.out_tile
    for i in range(w.m):
        x, y, z, u, out = row(X, i), row(Y, i), row(Z, i), row(U, i), row(OUT, i)
        if kind == COPY:
            copy(x, out)
        elif kind == SCALED:
            scaled(x, a, out)
        elif kind == PRODUCT:
            product(x, y, z, out)
        elif kind == COMPLEMENT:
            complement(x, y, out)
        elif kind == COMPLEMENT_VJP:
            complement_vjp(x, y, z, out)
        elif kind == LOG_REST:
            log_rest(x, out)
        elif kind == STEP_SIZE:
            step_size(x, y, how, a, b, out)
        elif kind == STEP_SIZE_VJP:
            step_size_vjp(x, y, z, how, a, b, out)
        elif kind == SKIP_AND_GATE:
            skip_and_gate(x, y, z, u, out)
        elif kind == GATE_VJP:
            gate_vjp(x, y, z, out)
        elif kind == CAPPED:
            capped(x, a, out)
        elif kind == LOG_FORGET:
            log_forget(x, a, b, how, out)
        elif kind == LOG_DECAY:
            log_decay(x, y, z, out)
        elif kind == BOUNDED:
            bounded(x, y, z, a, out)
        elif kind == FEATURE:
            feature(x, how, out)
        elif kind == FEATURE_VJP:
            feature_vjp(x, y, how, out)
        elif kind == APPENDED:
            appended(x, y, u, out)
        elif kind == QUOTIENT:
            quotient(x, y, a, out)
        elif kind == NORMED:
            normed(x, y, z, a, out)
        elif kind == OVER_LENGTH:
            over_length(x, y, a, out)
        elif kind == SOFTMAX:
            softmax(x, how, out)
        elif kind == SOFTMAX_VJP:
            softmax_vjp(x, y, out)
        elif kind == STRENGTH:
            strength(x, y, how, out)
        elif kind == COS_SIN:
            cos_sin(x, y, out)
        elif kind == ROTATED:
            rotated(x, y, z, how, out)
        elif kind == ROTATED_PAIR:
            rotated_pair(x, y, z, how, out)
        elif kind == DPFP:
            dpfp(x, how, out)
        elif kind == ADDED:
            added(x, y, out)
        elif kind == CAPPED_VJP:
            capped_vjp(x, y, a, out)
        elif kind == LOG_FORGET_VJP:
            log_forget_vjp(x, y, a, b, how, out)
        elif kind == INNER:
            inner(x, y, z, u, out)
        elif kind == QUOTIENT_VJP:
            quotient_vjp(x, y, z, a, out)
        elif kind == LOG_REST_VJP:
            log_rest_vjp(x, y, z, out)
        elif kind == STRENGTH_VJP:
            strength_vjp(x, y, z, how, out)
        elif kind == LOG_DECAY_VJP:
            log_decay_vjp(x, y, z, u, how, out)
        elif kind == BOUNDED_VJP:
            bounded_vjp(x, y, z, u, a, how, out)
        elif kind == DECAY:
            decay(x, y, z, how, a, out)
        elif kind == DECAY_VJP:
            decay_vjp(x, y, z, u, how, a, out)
        elif kind == ANGLE_OF_PAIR:
            angle_of_pair(x, y, a, out)
        elif kind == HOLD:
            hold(x, y, z, out)
        elif kind == HOLD_VJP:
            hold_vjp(x, y, z, u, out)
        elif kind == OVER_LENGTH_VJP:
            over_length_vjp(x, y, z, a, out)
        elif kind == DPFP_VJP:
            dpfp_vjp(x, y, how, out)


@piece
def formula(w: Work, first: Whole, last: Whole):
    """Tasks first..last."""
    for n in range(first, last):
        begin_task(w, n)
        for t in range(w.t0, w.t1, w.tile_tokens):
            for c in range(w.c0, w.c1, w.tile_columns):
                begin_tile(w, t, c)
                compute(w)
                end_tile(w)


def compiled(name: str, arrays: Any, out: Any, dtype: Any, a: float = 0.0, b: float = 0.0, how: int = 0) -> Any:
    """`out`, filled by a formula of NumPy arrays x, y, z, u; None: one that the formula does not have.

    out: an array, or (shape, dtype) of a new one. dtype: that of the computation, float32 for 16 bits.
    """
    dtype = "float32" if np.dtype(dtype).name in NARROW else dtype
    return over_grid(formula, (name, KINDS[name], int(how)), arrays, out, dtype, (float(a), float(b)), name in OF_ROWS)


def both(
    name: str, arrays: Any, out: Any, dtype: Any, a: float = 0.0, how: int = 0, more: bool = True
) -> tuple[Any, Any]:
    """The two results of a transpose, of one shape and dtype; more: whether the second one is wanted."""
    first = compiled(name, arrays, out, dtype, a, how=how)
    return first, compiled(name, arrays, out, dtype, a, how=how + 2) if more else None


def put(to: np.ndarray, x: np.ndarray) -> None:
    """to[...] = x, of any storage dtypes."""
    if not takes(to, x):
        refuse("NumPy casts an array")
        to[...] = x
        return
    compiled("copy", (x,), to, _wide(to, x))


def _wide(*arrays: np.ndarray) -> str:
    """The dtype in which numbers of arrays are computed."""
    return "float64" if any(dtype_name(y) == "float64" for y in arrays) else "float32"


def dense(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x in a dtype and in C order."""
    if x.dtype == dtype and x.flags.c_contiguous:
        return x
    to = working(x.shape, np.dtype(dtype))
    put(to, x)
    return to


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A new array of zeros."""
    return compiled("copy", (constant_of(0.0, dtype),), (shape, dtype), np.dtype(dtype))


def constant_of(x: float, dtype: np.dtype) -> np.ndarray:
    """A number as a constant (1,)."""
    name = np.dtype(dtype).name
    return constant_array(np, ("number", x, name), "cpu", lambda: np.full(1, x, dtype))


def cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x in a dtype, in the order of its axes."""
    if not takes(x) or np.dtype(dtype).name not in STORAGE:
        return x.astype(dtype)
    order = sorted(range(x.ndim), key=lambda axis: -abs(x.strides[axis]))
    to = empty(tuple(x.shape[axis] for axis in order), np.dtype(dtype)).transpose(np.argsort(order))
    put(to, x)
    return to


def rotated_rows(S: Any, c: Any, s: Any, back: bool) -> Any:
    """Rows (2 p, 2 p + 1) of S (..., K, V) rotated by cosines c and sines s (..., P, 1); the others are unchanged."""
    (*lead, K, V), P, dtype = S.shape, c.shape[-2], S.dtype
    wide = _wide(S)
    pairs = (*lead, P, 2 * V)  # rows side by side
    if 2 * P == K and S.strides[-2:] == (V * S.itemsize, S.itemsize):
        return compiled("rotated_pair", (S.reshape(pairs), c, s), (pairs, dtype), wide, how=back).reshape(S.shape)
    out = compiled("copy", (S,), (S.shape, dtype), wide)
    if P:
        own = out[..., : 2 * P, :].reshape(pairs)
        compiled("rotated_pair", (own, c, s), own, wide, how=back)
    return out


def interleaved(x: Any, n: int, at: int) -> Any:
    """(..., T, n, heads, D) with x (..., T, heads, D) at place `at` of n, and zeros at the others."""
    *lead, heads, D = x.shape
    out = working((*lead, n, heads, D), x.dtype)
    zero = constant_of(0.0, x.dtype)
    for part in (out[..., :at, :, :], out[..., at + 1 :, :, :]):
        put(part, zero)
    put(out[..., at, :, :], x)
    return out
