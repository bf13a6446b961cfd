"""Losses of a prediction y of v: the gradient e = dl/dy and its transpose.

    dot   l = -<y, v>             e = -v
    l2    l = |y - v|^2 / 2       e = y - v

With y = x + LN(z), l2 is the LN-L2 loss |LN(z) - (v - x)|^2 / 2.
"""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Array


def dot(y: Array | None, v: Array) -> Array:
    """-v."""
    return -v


def dot_vjp(y: Array | None, v: Array, de: Array) -> tuple[Any, Array]:
    """(dy, dv); None for 0."""
    return None, -de


def l2(y: Array, v: Array) -> Array:
    """y - v."""
    return y - v


def l2_vjp(y: Array, v: Array, de: Array) -> tuple[Any, Array]:
    """(dy, dv)."""
    return de, -de


LOSSES = {"dot": (dot, dot_vjp), "l2": (l2, l2_vjp)}


def loss_of(given: Any) -> Any:
    """(e, e_vjp) of a name or of the caller."""
    return LOSSES[given] if isinstance(given, str) else given
