"""Variants that may be given raw projections: queries and keys of any length, a gate before its formula.

    qk_l2norm=True:  q_t <- q_t / |q_t|,  k_t <- k_t / |k_t|                       (rows of 0 stay 0)
    A_log given:     g_t <- -e^{A_log} softplus(g_t + dt_bias)

The lengths are the core's (cores/matrix_state/units.py), since kernels take them out of products that they make anyway;
the gate's formula is a change of variables, here with its transpose.
"""

from __future__ import annotations

from math import prod
from typing import Any

from .card import Given
from .cores.matrix_state import cuda_projections
from .ground.namespace import Array, cast, sum_to
from .options import Options
from .pieces.gates import sigmoid, softplus


class ProjectionOptions(Options, total=False):
    """The common options, and: divide q and k by their length."""

    qk_l2norm: bool


DEFAULTS: dict[str, Any] = {"qk_l2norm": False}
EXAMPLES: tuple[dict[str, Any], ...] = ({}, {"qk_l2norm": True})


def gate_arrays(bias: str = "H") -> dict[str, Given]:
    """The arrays of the formula; bias: the shape of dt_bias."""
    words = "log of the gate's rate; given, g is a raw projection: the log decay is -e^{A_log} softplus(g + dt_bias)"
    return {"A_log": Given("H", "normal", words, optional=True, turns="g"),
            "dt_bias": Given(bias, "normal", "added to the raw g", optional=True, turns="g")}  # fmt: skip


def log_decay(c: Any) -> Array:
    """g, or what the formula makes of it.   Raises ValueError for a part of the formula without the rest."""
    if c.A_log is None:
        if c.dt_bias is not None:
            raise ValueError(f"{c.name}: dt_bias is given without A_log, expected both, or A_log alone")
        return c.g
    if c.g is None:
        raise ValueError(f"{c.name}: A_log is given without g, expected g to be the raw projection")
    if _on_device(c):
        return cuda_projections.log_decay(c.xp, c.g, c.A_log, c.dt_bias, _each(c))
    return -_rate(c) * softplus(c.xp, _raw(c))


def log_decay_vjp(c: Any, dg: Array) -> dict[str, Array]:
    """da = -e^{A_log} sigmoid(a) dg for a = g + dt_bias, its sum for dt_bias, and the sum of g dg for A_log."""
    if c.A_log is None:
        return {"g": dg}
    xp, dg = c.xp, cast(c.xp, dg, c.dtype)
    if _on_device(c):
        da, dA, dbias = cuda_projections.log_decay_vjp(xp, c.g, c.A_log, c.dt_bias, dg, _each(c))
    else:
        rate, raw = _rate(c), _raw(c)
        da, g = -rate * sigmoid(xp, raw) * dg, -rate * softplus(xp, raw)
        product = dg * xp.where(xp.isinf(g), xp.zeros_like(g), g)  # a reset has no gradient
        dA = _over_tokens(c, xp.sum(product, axis=-1) if _by_channel(c) else product, c.A_log)
        dbias = None if c.dt_bias is None else _over_tokens(c, da, c.dt_bias)
    grads = {"g": da, "A_log": dA}
    return grads if c.dt_bias is None else grads | {"dt_bias": xp.reshape(dbias, tuple(c.dt_bias.shape))}


def _on_device(c: Any) -> bool:
    """Whether a kernel computes the formula."""
    return c.dtype == c.xp.float32 and prod(c.g.shape) > 0 and cuda_projections.takes_gate(c.xp, c.g)


def _each(c: Any) -> int:
    """Numbers of a head and token."""
    return c.g.shape[-1] if _by_channel(c) else 1


def _by_channel(c: Any) -> bool:
    """Whether g is (..., T, H, K)."""
    return c.g.ndim == len(c.sizes.batch) + 3


def _rate(c: Any) -> Array:
    """e^{A_log}, with g's axes from the heads on."""
    rate = c.xp.exp(cast(c.xp, c.A_log, c.dtype))
    return rate[:, None] if _by_channel(c) else rate


def _raw(c: Any) -> Array:
    raw = cast(c.xp, c.g, c.dtype)
    return raw if c.dt_bias is None else raw + cast(c.xp, c.dt_bias, c.dtype)


def _over_tokens(c: Any, y: Array, like: Array) -> Array:
    """Sum over batch and tokens."""
    return sum_to(c.xp, y, tuple(like.shape))
