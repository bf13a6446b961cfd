"""Windows of rows: every `size` rows in a row, gathered and added back.

gathered(y)_t = y_t .. y_{t+size-1}        (..., T, D) to (..., T - size + 1, size, D)
"""

from __future__ import annotations

from ..runtime.arrays import Array, Namespace, device


def gathered(xp: Namespace, y: Array, size: int) -> Array:
    """The windows of rows (..., T, D)."""
    *lead, T, D = y.shape
    count = T - size + 1
    places = xp.arange(count, device=device(y))[:, None] + xp.arange(size, device=device(y))[None, :]
    return xp.reshape(xp.take(y, xp.reshape(places, (count * size,)), axis=-2), (*lead, count, size, D))


def gathered_vjp(xp: Namespace, d: Array) -> Array:
    """dy from the gradient of the windows: each row of one is added to its own."""
    *lead, count, size, D = d.shape
    zeros = xp.zeros((*lead, size, D), dtype=d.dtype, device=device(d))
    total = xp.zeros((*lead, count + size - 1, D), dtype=d.dtype, device=device(d))
    for n in range(size):
        total = total + xp.concat([zeros[..., :n, :], d[..., n, :], zeros[..., : size - 1 - n, :]], axis=-2)
    return total
