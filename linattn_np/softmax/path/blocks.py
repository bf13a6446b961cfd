"""PaTH in blocks of C tokens: the factors of a diagonal tile and of an earlier tile.

    z_ij of a block with itself = [q_i, -E_i] [k_j, X_j]^T
    of a block I with a block J before it: q~_i R_{I-1} ... R_{J+1} k~_j^T

q~ is a query mapped to the start of its block, k~ a key mapped to the end of its own, R the product of a block's maps
(ops/householder.py). They are linear in T; a block of queries is multiplied by R from one block of keys to the next.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...ops import householder as maps
from ...runtime.arrays import Array, Namespace
from ..types import Parts


class Mapped(NamedTuple):
    """A sequence in blocks."""

    C: int
    factors: maps.Block  # (..., n, C, .)
    start: tuple[Array, Array]  # q (..., n, C, K) and E (..., n, C, C)
    end: tuple[Array, Array]  # k and X
    q: Array  # (..., n, C, K) to the start of the block
    k: Array  # (..., n, C, K) to its end
    R: Array  # (..., n, K, K)


class MappedGradients(NamedTuple):
    """Gradients of Mapped, and of the q and k of the diagonal tiles."""

    own_q: Array
    own_k: Array
    E: Array
    X: Array
    q: Array
    k: Array
    R: Array


def mapped(xp: Namespace, x: Parts, tile: int) -> Mapped:
    """The blocks of a sequence with queries."""
    C = max(min(tile, x.k.shape[-2]), 1)
    q, k, w, beta = (maps.blocks(xp, y, C) for y in (x.q, x.k, x.w, x.beta[..., None]))
    f = maps.factorised(xp, w, beta)
    (at_start, E), (at_end, X) = maps.to_start(xp, f, q), maps.to_end(xp, f, k)
    return Mapped(C, f, (q, E), (k, X), at_start, at_end, maps.product(xp, f))


def mapped_vjp(xp: Namespace, m: Mapped, d: MappedGradients, T: int) -> dict[str, Any]:
    """Gradients of q, k, w and beta, (..., T, K) and (..., T)."""
    sums = maps.HouseholderGradients(xp, m.factors)
    maps.product_vjp(m.factors, sums, d.R)
    dq = d.own_q + maps.to_start_vjp(m.factors, sums, m.start, d.q, d.E)
    dk = d.own_k + maps.to_end_vjp(m.factors, sums, m.end, d.k, d.X)
    dw, dbeta = maps.factorised_vjp(m.factors, sums)
    q, k, w, beta = (maps.tokens(xp, y, T) for y in (dq, dk, dw, dbeta))
    return {"q": q, "k": k, "w": w, "beta": beta[..., 0]}
