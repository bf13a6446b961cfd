"""Rotations of pairs of channels by angles of a token, in both orders of channels, and angles of positions.

    (a, b) -> (a c - b s, b c + a s),   (c, s) = size (cos, sin) of the angle

halves: pairs (p, P + p), as in Llama; interleaved: pairs (2 p, 2 p + 1), as in RoFormer. Channels from 2 P on stay. The
transpose has -s. dangle_p = y_a dy_b - y_b dy_a. `rotary.py` is for states, whose rows are rotated, too.
"""

from __future__ import annotations

import numpy as np

from ..runtime.arrays import Array, Namespace


def rotate(xp: Namespace, x: Array, c: Array, s: Array, interleaved: bool) -> Array:
    """x (..., K), c and s (..., P)."""
    a, b, rest = split(x, c.shape[-1], interleaved)
    one, other = a * c - b * s, b * c + a * s
    if interleaved:
        both = xp.stack([one, other], axis=-1)
        both = xp.reshape(both, (*both.shape[:-2], 2 * c.shape[-1]))
    else:
        both = xp.concat([one, other], axis=-1)
    return xp.concat([both, rest], axis=-1)


def split(x: Array, P: int, interleaved: bool) -> tuple[Array, Array, Array]:
    """(first channels of the pairs, second ones, the rest)."""
    if interleaved:
        return x[..., 0 : 2 * P : 2], x[..., 1 : 2 * P : 2], x[..., 2 * P :]
    return x[..., :P], x[..., P : 2 * P], x[..., 2 * P :]


def angles_vjp(y: Array, dy: Array, P: int, interleaved: bool) -> Array:
    """dangle (..., P), from the result."""
    (a, b, _), (da, db, _) = split(y, P, interleaved), split(dy, P, interleaved)
    return a * db - b * da


def positions(place: np.ndarray, base: float, P: int) -> np.ndarray:
    """Angles place base^{-p / P} of tokens (T, P), in float64."""
    return place[:, None] * base ** (-np.arange(P) / max(P, 1))


def sizes(place: np.ndarray, scale_base: float, gamma: float, P: int) -> np.ndarray:
    """xPos: ((p / P + gamma) / (1 + gamma))^{place / scale_base} of tokens (T, P), in float64."""
    zeta = (np.arange(P) / max(P, 1) + gamma) / (1 + gamma)
    return zeta ** (place[:, None] / scale_base)
