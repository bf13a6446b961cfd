"""Rotation of pairs of channels by angles, and its transpose.

Among traced array calls a rotation by P angles is one kernel (cpu/rotary.py), with the same bits.
"""

from __future__ import annotations

from math import prod

from ..runtime.arrays import Array, Namespace, cast
from ..runtime.tracing import Trace, traced


def rotate(xp: Namespace, x: Array, angle: Array) -> Array:
    """Channels (2 p, 2 p + 1) of x (..., K) rotated by angle (..., P), p < P; channels from 2 P on are unchanged."""
    P = angle.shape[-1]
    c, s = (cast(xp, f(angle), x.dtype) for f in (xp.cos, xp.sin))
    if (trace := _one_rotation(x, angle)) is not None:
        from .cpu.rotary import columns_rotated

        return columns_rotated(trace, x, *(xp.reshape(y, (P,)) for y in (c, s)))
    even, odd = x[..., 0 : 2 * P : 2], x[..., 1 : 2 * P : 2]
    rotated = xp.stack([even * c - odd * s, even * s + odd * c], axis=-1)
    rotated = xp.reshape(rotated, (*rotated.shape[:-2], 2 * P))
    return rotated if x.shape[-1] == 2 * P else xp.concat([rotated, x[..., 2 * P :]], axis=-1)


def rotate_rows(xp: Namespace, S: Array, angle: Array) -> Array:
    """Rows (2 p, 2 p + 1) of S (..., K, V) rotated by angle (..., 1, P), as `rotate` does the columns of S^T."""
    P = angle.shape[-1]
    c, s = (cast(xp, f(angle), S.dtype) for f in (xp.cos, xp.sin))
    if (trace := _one_rotation(S, angle)) is not None:
        from .cpu.rotary import rows_rotated

        return rows_rotated(trace, S, *(xp.reshape(y, (P,)) for y in (c, s)))
    c, s = xp.matrix_transpose(c), xp.matrix_transpose(s)
    even, odd = S[..., 0 : 2 * P : 2, :], S[..., 1 : 2 * P : 2, :]
    rotated = xp.stack([even * c - odd * s, even * s + odd * c], axis=-2)
    rotated = xp.reshape(rotated, (*rotated.shape[:-3], 2 * P, S.shape[-1]))
    return rotated if S.shape[-2] == 2 * P else xp.concat([rotated, S[..., 2 * P :, :]], axis=-2)


def _one_rotation(x: Array, angle: Array) -> Trace | None:
    """The trace of x, if there are not more angles than P."""
    return traced(x) if prod(angle.shape) == angle.shape[-1] > 0 else None


def rows_angle_vjp(xp: Namespace, y: Array, dy: Array, P: int) -> Array:
    """The gradient of the angle of each pair of rows and column (..., P, V), from the result y of rotate_rows."""
    even, odd, other = slice(0, 2 * P, 2), slice(1, 2 * P, 2), slice(None)
    return y[..., even, other] * dy[..., odd, other] - y[..., odd, other] * dy[..., even, other]


def rotate_vjp(xp: Namespace, y: Array, angle: Array, dy: Array) -> tuple[Array, Array]:
    """(dx, dangle) from the result y: dx is dy rotated by -angle, dangle = y_even dy_odd - y_odd dy_even."""
    P = angle.shape[-1]
    even, odd, other = slice(0, 2 * P, 2), slice(1, 2 * P, 2), ...
    return rotate(xp, dy, -angle), y[other, even] * dy[other, odd] - y[other, odd] * dy[other, even]
