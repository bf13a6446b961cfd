"""Rotation of pairs of channels by angles, and its transpose.

A rotation by angles (..., P) is the array (2, ..., P) of their cosines and sines. Among traced array calls, one of P
angles is one kernel (cpu/rotary.py), with the same bits.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ..runtime.arrays import Array, Namespace, cast
from ..runtime.tracing import Trace, traced


def rotation(xp: Namespace, angle: Array, dtype: Any) -> Array:
    """The rotation by angle (..., P)."""
    return cast(xp, xp.stack([xp.cos(angle), xp.sin(angle)], axis=0), dtype)


def inverse(xp: Namespace, turn: Array) -> Array:
    """The rotation back."""
    return xp.stack([turn[0, ...], -turn[1, ...]], axis=0)


def rotate(xp: Namespace, x: Array, turn: Array) -> Array:
    """Channels (2 p, 2 p + 1) of x (..., K) rotated by (2, ..., P), p < P; channels from 2 P on are unchanged."""
    P = turn.shape[-1]
    if (trace := _one_rotation(x, turn)) is not None:
        from .cpu.rotary import columns_rotated

        return columns_rotated(trace, x, xp.reshape(turn, (2, P)))
    c, s, even, odd = turn[0, ...], turn[1, ...], x[..., 0 : 2 * P : 2], x[..., 1 : 2 * P : 2]
    rotated = xp.stack([even * c - odd * s, even * s + odd * c], axis=-1)
    rotated = xp.reshape(rotated, (*rotated.shape[:-2], 2 * P))
    return rotated if x.shape[-1] == 2 * P else xp.concat([rotated, x[..., 2 * P :]], axis=-1)


def rotate_rows(xp: Namespace, S: Array, turn: Array) -> Array:
    """Rows (2 p, 2 p + 1) of S (..., K, V) rotated by (2, ..., 1, P), as `rotate` does the columns of S^T."""
    P = turn.shape[-1]
    if (trace := _one_rotation(S, turn)) is not None:
        from .cpu.rotary import rows_rotated

        return rows_rotated(trace, S, xp.reshape(turn, (2, P)))
    c, s = (xp.matrix_transpose(turn[n, ...]) for n in range(2))
    even, odd = S[..., 0 : 2 * P : 2, :], S[..., 1 : 2 * P : 2, :]
    rotated = xp.stack([even * c - odd * s, even * s + odd * c], axis=-2)
    rotated = xp.reshape(rotated, (*rotated.shape[:-3], 2 * P, S.shape[-1]))
    return rotated if S.shape[-2] == 2 * P else xp.concat([rotated, S[..., 2 * P :, :]], axis=-2)


def _one_rotation(x: Array, turn: Array) -> Trace | None:
    """The trace of x, if there are not more angles than P."""
    return traced(x) if prod(turn.shape) == 2 * turn.shape[-1] > 0 else None


def rows_angle_vjp(xp: Namespace, y: Array, dy: Array, P: int) -> Array:
    """The gradient of the angle of each pair of rows and column (..., P, V), from the result y of rotate_rows."""
    even, odd, other = slice(0, 2 * P, 2), slice(1, 2 * P, 2), slice(None)
    return y[..., even, other] * dy[..., odd, other] - y[..., odd, other] * dy[..., even, other]


def rotate_vjp(xp: Namespace, y: Array, turn: Array, dy: Array) -> tuple[Array, Array]:
    """(dx, dangle) from the result y: dx is dy rotated back, dangle = y_even dy_odd - y_odd dy_even."""
    P = turn.shape[-1]
    even, odd, other = slice(0, 2 * P, 2), slice(1, 2 * P, 2), ...
    dx = rotate(xp, dy, inverse(xp, turn))
    return dx, y[other, even] * dy[other, odd] - y[other, odd] * dy[other, even]
