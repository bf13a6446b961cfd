"""RMS norm with an output gate, before or after it, each with its transpose.

gate after:   y = norm(x) weight act(gate)          FLA's FusedRMSNormGated, Gated DeltaNet, KDA
gate before:  y = norm(x act(gate)) weight          Mamba-2; the norm of groups of channels
"""

from __future__ import annotations

from typing import NamedTuple

from ..runtime.arrays import Array, Namespace, over_tokens
from ..runtime.values import is_whole, is_word, shown
from .gates import sigmoid, silu, silu_vjp
from .norms import rms_norm, rms_norm_vjp

ACTIVATIONS = ("silu", "sigmoid")


class GatedNorm(NamedTuple):
    """eps inside the root; the gate's activation; whether it comes before the norm; channels normed together."""

    eps: float = 1e-6
    activation: str = "silu"
    gate_first: bool = False
    group: int | None = None  # None: all


class GatedNormGrads(NamedTuple):
    """Gradients of gated_rms_norm; weight's is None without one."""

    x: Array
    gate: Array
    weight: Array | None


def check_how(fn: str, how: GatedNorm, D: int) -> None:
    """Raise ValueError unless a norm is one of rows of D channels: its activation, whole groups."""
    if not is_word(how.activation, ACTIVATIONS):
        raise ValueError(f"{fn}: activation is {shown(how.activation)}, expected one of {', '.join(ACTIVATIONS)}")
    if how.group is not None and (not is_whole(how.group) or D % how.group):
        raise ValueError(f"{fn}: group is {shown(how.group)}, expected a divisor of D = {D}")


def gated_rms_norm(xp: Namespace, x: Array, gate: Array, weight: Array | None, how: GatedNorm) -> Array:
    """x, gate (..., D), weight (D,) or None -> (..., D)."""
    act = _act(xp, gate, how)
    y = _norm(xp, x * act if how.gate_first else x, how)
    y = y if weight is None else y * weight
    return y if how.gate_first else y * act


def gated_rms_norm_vjp(
    xp: Namespace, x: Array, gate: Array, weight: Array | None, how: GatedNorm, dy: Array
) -> GatedNormGrads:
    act = _act(xp, gate, how)
    inner = x * act if how.gate_first else x
    normed = _norm(xp, inner, how)
    scaled = dy if how.gate_first else dy * act  # the gradient of norm(..) weight
    dweight = None if weight is None else over_tokens(xp, scaled * normed)
    dinner = _norm_vjp(xp, inner, how, scaled if weight is None else scaled * weight)
    if how.gate_first:
        return GatedNormGrads(dinner * act, _act_vjp(xp, gate, how, dinner * x), dweight)
    read = normed if weight is None else normed * weight
    return GatedNormGrads(dinner, _act_vjp(xp, gate, how, dy * read), dweight)


def _grouped(x: Array, how: GatedNorm) -> tuple[int, ...]:
    D = x.shape[-1]
    return (*x.shape[:-1], D // (how.group or max(D, 1)), how.group or D)


def _norm(xp: Namespace, x: Array, how: GatedNorm) -> Array:
    return xp.reshape(rms_norm(xp, xp.reshape(x, _grouped(x, how)), how.eps), x.shape)


def _norm_vjp(xp: Namespace, x: Array, how: GatedNorm, dy: Array) -> Array:
    shape = _grouped(x, how)
    return xp.reshape(rms_norm_vjp(xp, xp.reshape(x, shape), xp.reshape(dy, shape), how.eps), x.shape)


def _act(xp: Namespace, gate: Array, how: GatedNorm) -> Array:
    return silu(xp, gate) if how.activation == "silu" else sigmoid(xp, gate)


def _act_vjp(xp: Namespace, gate: Array, how: GatedNorm, dy: Array) -> Array:
    if how.activation == "silu":
        return silu_vjp(xp, gate, dy)
    s = sigmoid(xp, gate)
    return dy * s * (1 - s)
