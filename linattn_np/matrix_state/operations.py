"""Operations of the products of a forward pass, by formula."""

from __future__ import annotations

from math import prod

from .array import pairs
from .types import Erase, Inputs, Plan


def readers_of(x: Inputs) -> int:
    """Queries per token and state."""
    H = x.v.shape[-2]
    return 0 if x.q is None else max(x.q.shape[-2], H) // H if H else 1


def operations_of(x: Inputs, plan: Plan, form: str, C: int) -> tuple[float, float]:
    """Operations of the products of one memory's forward pass: (total, per token and state)."""
    (*_, T, H, V), K, q = x.v.shape, x.k.shape[-1], x.q
    if pairs.applies(x, plan):
        total = pairs.operations(x, plan)[0]
        return total, total / max(prod(x.v.shape[:-1]), 1)
    readers = readers_of(x)
    each = operations_per_token(x.erase, form, C, K, V, T, readers if plan.causal else 0)
    total = each * prod(x.v.shape[:-1])
    if plan.causal or q is None:
        return total, each
    return total + 2 * K * V * prod(q.shape[:-2]) * readers * H, each  # write everything, then read


def orders(x: Inputs, plan: Plan) -> str:
    """The operations of both orders of a product without a causal mask, for `explain`; nothing for other calls."""
    if not pairs.applies(x, plan):
        return ""
    _, by_pairs, by_state = pairs.operations(x, plan)
    return f"(Q K^T) V takes {by_pairs:,} operations, Q (K^T V) {by_state:,}"


def operations_per_token(erase: Erase, form: str, C: int, K: int, V: int, T: int, queries: int = 1) -> float:
    """Operations of the products of the forward pass per token and state (an m x n x p product counts 2 m n p).

    Readers are the queries and, if the variant erases, one erase vector; writers are k and, if FREE, b.
    """
    erasers, writers = {Erase.NONE: (0, 1), Erase.DELTA: (1, 1), Erase.FREE: (1, 2)}[erase]
    readers = queries + erasers
    if form == "recurrent form":
        return 2 * (readers + writers) * K * V
    applied = queries * writers + max(erasers * writers - 1, 0)  # gram matrices that multiply values
    inside = readers * writers * 2 * C * K + applied * 2 * C * V + erasers * (C - 1) * V
    if form == "chunk form":
        return inside + 2 * (readers + writers) * K * V if readers else 2 * writers * K * V
    earlier = max(T - C, 0) / 2  # tokens of earlier tiles, on average
    return inside + readers * writers * earlier * 2 * (K + V)
