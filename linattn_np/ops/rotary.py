"""Rotation of pairs of channels by angles, and its transpose.

A rotation by angles (..., P) is the array (2, ..., P) of their cosines and sines. Of NumPy and CuPy arrays each is a
kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtime.arrays import Array, Namespace, cast, is_cupy
from .host import kernels, numpy_kernels
from .product import product
from .sums import difference


def rotation(xp: Namespace, angles: Array, at: Array, dtype: Any) -> Array:
    """The cosines and sines of angles (P,) times positions `at` (..., 1), or (): (2, ..., P)."""
    if (cpu := kernels(xp, angles, at)) is not None:
        P, lead = angles.shape[-1], np.broadcast_shapes(angles.shape[:-1], at.shape[:-1])
        both = cpu.compiled("cos_sin", (angles, at), ((*lead, 2 * P), dtype), angles.dtype)
        return np.moveaxis(both.reshape(*lead, 2, P), -2, 0)
    angle = angles * at
    return cast(xp, xp.stack([xp.cos(angle), xp.sin(angle)], axis=0), dtype)


def rotate(xp: Namespace, x: Array, cos_sin: Array, dtype: Any, back: bool = False) -> Array:
    """Channels (2 p, 2 p + 1) of x (..., K) rotated by (2, ..., P), p < P, in `dtype`; the others are unchanged.

    back: rotated by the opposite angles.
    """
    if (rows := _rows(xp, x, cos_sin)) is not None and x.dtype == dtype:
        return rows.rotate(x, *_by_token(cos_sin), True, back)
    if (cpu := kernels(xp, x, cos_sin)) is not None:
        return cpu.compiled("rotated", (x, cos_sin[0], cos_sin[1]), (x.shape, dtype), dtype, how=back)
    P, x = cos_sin.shape[-1], cast(xp, x, dtype)
    c, s, even, odd = cos_sin[0, ...], cos_sin[1, ...], x[..., 0 : 2 * P : 2], x[..., 1 : 2 * P : 2]
    s = -s if back else s
    rotated = xp.stack([even * c - odd * s, even * s + odd * c], axis=-1)
    rotated = xp.reshape(rotated, (*rotated.shape[:-2], 2 * P))
    return rotated if x.shape[-1] == 2 * P else xp.concat([rotated, x[..., 2 * P :]], axis=-1)


def angles_vjp(xp: Namespace, x: Array, cos_sin: Array, dy: Array, dtype: Any) -> Array:
    """The gradient of the angles of each token (..., T, H or 1, P) in `dtype`, from y = rotate(x, cos_sin):

    y_even dy_odd - y_odd dy_even, summed over heads or not.   cos_sin: (2, T, 1, P), for kernels in `dtype`: sums over
    tokens cancel
    """
    if (rows := _rows(xp, x, cos_sin, dy)) is not None:
        return rows.angles_vjp(x, *_by_token(cos_sin), True, dy)
    even, odd = slice(0, 2 * cos_sin.shape[-1], 2), slice(1, 2 * cos_sin.shape[-1], 2)
    y = rotate(xp, x, cos_sin, cos_sin.dtype)
    pairs = ((y[..., even], dy[..., odd]), (y[..., odd], dy[..., even]))
    return difference(xp, *(product(xp, *pair, dtype=dtype) for pair in pairs))


def _rows(xp: Namespace, x: Array, cos_sin: Array, *others: Array) -> Any:
    """The kernels for rotations (2, T, 1, P) of x (..., T, H, K) on CuPy arrays, or None."""
    if not is_cupy(xp) or cos_sin.ndim != 4 or cos_sin.shape[2] != 1 or cos_sin.shape[1] != x.shape[-3]:
        return None
    if not x.size or not cos_sin.size or kernels(xp, x, cos_sin, *others) is None:
        return None
    from .cuda import rotary

    return rotary


def _by_token(cos_sin: Array) -> tuple[Array, Array]:
    """Cosines and sines (T, P)."""
    return cos_sin[0, :, 0, :], cos_sin[1, :, 0, :]


def rotate_rows(xp: Namespace, S: Array, cos_sin: Array, back: bool = False) -> Array:
    """Rows (2 p, 2 p + 1) of S (..., K, V) rotated by (2, ..., 1, P), as `rotate` does the columns of S^T."""
    P = cos_sin.shape[-1]
    c, s = (xp.matrix_transpose(cos_sin[n, ...]) for n in range(2))
    if (cpu := kernels(xp, S, cos_sin)) is not None:
        return cpu.rotated_rows(S, c, s, back)
    s = -s if back else s
    even, odd = S[..., 0 : 2 * P : 2, :], S[..., 1 : 2 * P : 2, :]
    rotated = xp.stack([even * c - odd * s, even * s + odd * c], axis=-2)
    rotated = xp.reshape(rotated, (*rotated.shape[:-3], 2 * P, S.shape[-1]))
    return rotated if S.shape[-2] == 2 * P else xp.concat([rotated, S[..., 2 * P :, :]], axis=-2)


def rows_angle_vjp(xp: Namespace, y: Array, dy: Array, P: int, dtype: Any, factor: float = 1.0) -> Array:
    """factor times the gradient of the angle of each pair of rows (..., P), from the result y of rotate_rows.

    dtype: in which it is computed, since sums over columns cancel.
    """
    if (cpu := numpy_kernels(xp, y, dy)) is not None and P:
        pairs = [x[..., : 2 * P, :].reshape((*x.shape[:-2], P, 2 * x.shape[-1])) for x in (y, dy)]
        return cpu.compiled("angle_of_pair", pairs, ((*y.shape[:-2], P, 1), dtype), dtype, factor)[..., 0]
    y, dy = cast(xp, y, dtype), cast(xp, dy, dtype)
    even, odd, other = slice(0, 2 * P, 2), slice(1, 2 * P, 2), slice(None)
    d = y[..., even, other] * dy[..., odd, other] - y[..., odd, other] * dy[..., even, other]
    return factor * xp.sum(d, axis=-1)


def rotate_vjp(
    xp: Namespace, y: Array, cos_sin: Array, dy: Array, back: bool = False, dtype: Any = None
) -> tuple[Array, Array]:
    """(dx, dangle) from the result y: dx is dy rotated back, dangle = y_even dy_odd - y_odd dy_even, or minus that.

    dtype: of dangle, whose sum over tokens cancels; None: that of y.
    """
    P = cos_sin.shape[-1]
    even, odd, other = slice(0, 2 * P, 2), slice(1, 2 * P, 2), ...
    dx = rotate(xp, dy, cos_sin, y.dtype, not back)
    y, dy = (x if dtype is None else cast(xp, x, dtype) for x in (y, dy))
    dangle = y[other, even] * dy[other, odd] - y[other, odd] * dy[other, even]
    return dx, -dangle if back else dangle
