"""Steps of an erasing recurrence that multiply the state, along one direction, by more than 1."""

from __future__ import annotations

from typing import Any

from ..core import GROWTH_SLACK, Growth
from ..runtime.arrays import accumulate, shared_heads
from .preprocess import strengths
from .types import Erase, EraseKey, Inputs, Plan


def growth(x: Any, plan: Plan) -> Growth | None:
    """The token that grows the state most, by the factor 1 - beta r.k (I - beta r^T k) or 1 + a.b (I + a^T b)."""
    if not isinstance(x, Inputs) or x.erase is Erase.NONE or plan.l2norm:
        return None
    xp = plan.xp
    if x.erase is Erase.FREE:
        array, term, share = "b", "-a.b", -xp.sum(accumulate(xp, x.a) * accumulate(xp, x.b), axis=-1)
    else:
        r = x.k if x.r is None or plan.erases_key else x.r
        products = xp.sum(accumulate(xp, r) * accumulate(xp, x.k), axis=-1, keepdims=True)
        beta = accumulate(xp, strengths(plan, x.beta))
        array, share = "k", (shared_heads(xp, products, beta.shape[-2]) * beta)[..., 0]
        term = {EraseKey.KEY: "beta |k|^2", EraseKey.PRODUCT: "(b k).k", EraseKey.OWN: "beta r.k"}[plan.erase_key]
    flat = xp.reshape(share, (-1,))
    high, low = float(xp.max(flat)), float(xp.min(flat))
    if high <= 2 + GROWTH_SLACK and low >= -GROWTH_SLACK:
        return None
    value, n = (high, int(xp.argmax(flat))) if high - 2 >= -low else (low, int(xp.argmin(flat)))
    T, H = share.shape[-2:]
    place = f"token {n // H % T // plan.micro_steps}, head {n % H}"
    is_error = x.erase is Erase.DELTA and plan.erase_key is not EraseKey.OWN
    return Growth(array, f"has {term} = {value:.4g} at {place}", 1 - value, is_error)
