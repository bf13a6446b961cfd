"""Rotation of pairs of channels by angles, and its transpose.

A rotation by angles (..., P) is the array (2, ..., P) of their cosines and sines. Of NumPy arrays each is a kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtime.arrays import Array, Namespace, cast
from .host import kernels


def rotation(xp: Namespace, angles: Array, at: Array, dtype: Any) -> Array:
    """The rotations by angles (P,) times positions `at` (..., 1), or (): (2, ..., P)."""
    if (cpu := kernels(xp, angles, at)) is not None:
        P, lead = angles.shape[-1], np.broadcast_shapes(angles.shape[:-1], at.shape[:-1])
        both = cpu.compiled("turn", (angles, at), ((*lead, 2 * P), dtype), angles.dtype)
        return np.moveaxis(both.reshape(*lead, 2, P), -2, 0)
    angle = angles * at
    return cast(xp, xp.stack([xp.cos(angle), xp.sin(angle)], axis=0), dtype)


def rotate(xp: Namespace, x: Array, turn: Array, dtype: Any, back: bool = False) -> Array:
    """Channels (2 p, 2 p + 1) of x (..., K) rotated by (2, ..., P), p < P, in `dtype`; the others are unchanged.

    back: rotated by the opposite angles.
    """
    if (cpu := kernels(xp, x, turn)) is not None:
        return cpu.compiled("rotated", (x, turn[0], turn[1]), (x.shape, dtype), dtype, how=back)
    P, x = turn.shape[-1], cast(xp, x, dtype)
    c, s, even, odd = turn[0, ...], turn[1, ...], x[..., 0 : 2 * P : 2], x[..., 1 : 2 * P : 2]
    s = -s if back else s
    rotated = xp.stack([even * c - odd * s, even * s + odd * c], axis=-1)
    rotated = xp.reshape(rotated, (*rotated.shape[:-2], 2 * P))
    return rotated if x.shape[-1] == 2 * P else xp.concat([rotated, x[..., 2 * P :]], axis=-1)


def rotate_rows(xp: Namespace, S: Array, turn: Array, back: bool = False) -> Array:
    """Rows (2 p, 2 p + 1) of S (..., K, V) rotated by (2, ..., 1, P), as `rotate` does the columns of S^T."""
    P = turn.shape[-1]
    c, s = (xp.matrix_transpose(turn[n, ...]) for n in range(2))
    if (cpu := kernels(xp, S, turn)) is not None:
        return cpu.rotated_rows(S, c, s, back)
    s = -s if back else s
    even, odd = S[..., 0 : 2 * P : 2, :], S[..., 1 : 2 * P : 2, :]
    rotated = xp.stack([even * c - odd * s, even * s + odd * c], axis=-2)
    rotated = xp.reshape(rotated, (*rotated.shape[:-3], 2 * P, S.shape[-1]))
    return rotated if S.shape[-2] == 2 * P else xp.concat([rotated, S[..., 2 * P :, :]], axis=-2)


def rows_angle_vjp(xp: Namespace, y: Array, dy: Array, P: int) -> Array:
    """The gradient of the angle of each pair of rows and column (..., P, V), from the result y of rotate_rows."""
    even, odd, other = slice(0, 2 * P, 2), slice(1, 2 * P, 2), slice(None)
    return y[..., even, other] * dy[..., odd, other] - y[..., odd, other] * dy[..., even, other]


def rotate_vjp(
    xp: Namespace, y: Array, turn: Array, dy: Array, back: bool = False, dtype: Any = None
) -> tuple[Array, Array]:
    """(dx, dangle) from the result y: dx is dy rotated back, dangle = y_even dy_odd - y_odd dy_even, or minus that.

    dtype: of dangle, whose sum over tokens cancels; None: that of y.
    """
    P = turn.shape[-1]
    even, odd, other = slice(0, 2 * P, 2), slice(1, 2 * P, 2), ...
    dx = rotate(xp, dy, turn, y.dtype, not back)
    y, dy = (x if dtype is None else cast(xp, x, dtype) for x in (y, dy))
    dangle = y[other, even] * dy[other, odd] - y[other, odd] * dy[other, even]
    return dx, -dangle if back else dangle
