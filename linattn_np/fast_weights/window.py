"""The tokens of a loss: the token itself, or those of a window that ends with it, each with its share.

    l_t = sum_{t - c < i <= t} share_i l(f(k_i), v_i)

The state has the last c - 1 tokens; before the first one are tokens of share 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..runtime.arrays import Array, Namespace
from .types import Learner, State, Tokens, Tree


class Rows(NamedTuple):
    """Keys, values and shares (..., c, 1) of the tokens of a loss, or their gradients; no shares: 1."""

    k: Any
    v: Any
    share: Any


def rows_of(xp: Namespace, f: Learner, x: Tokens, state: State) -> Rows:
    """The rows of some tokens."""
    own = Rows(x.k, x.v, x.rates.share)
    if f.window == 1:
        return own
    return Rows(*(xp.concat([old, new], axis=-2) for old, new in zip(state.past, own, strict=True)))


def after(f: Learner, rows: Rows, past: Tree) -> Tree:
    """The state's tokens after those tokens."""
    return past if f.window == 1 else tuple(y[..., y.shape[-2] - f.window + 1 :, :] for y in rows)


def rows_vjp(xp: Namespace, f: Learner, d: Rows, dpast: Tree) -> tuple[Rows, Tree]:
    """(gradients of own rows, of the state's tokens) from those of all rows, and of the state's tokens afterwards."""
    if f.window == 1:
        return d, dpast
    c = f.window - 1

    def added(y: Array, more: Array) -> Array:
        return y + xp.concat([xp.zeros_like(y[..., : y.shape[-2] - c, :]), more], axis=-2)

    whole = [added(y, more) for y, more in zip(d, dpast, strict=True)]
    return Rows(*(y[..., c:, :] for y in whole)), tuple(y[..., :c, :] for y in whole)
