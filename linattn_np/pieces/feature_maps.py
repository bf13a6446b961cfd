"""Feature maps phi of linear attention, each with its transpose: phi(x) and phi_vjp(x, dphi)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_compat

from ..ground.namespace import Array
from .gates import silu, silu_vjp

FeatureMap = tuple[Callable[[Array], Array], Callable[[Array, Array], Array]]


def _xp(x: Array) -> Any:
    return array_api_compat.array_namespace(x)


def identity(x: Array) -> Array:
    return x


def identity_vjp(x: Array, dphi: Array) -> Array:
    return dphi


def elu_plus_one(x: Array) -> Array:
    """x + 1 where x > 0, e^x elsewhere (Katharopoulos et al., arXiv 2006.16236)."""
    xp = _xp(x)
    return xp.where(x > 0, x + 1, xp.exp(xp.where(x > 0, xp.zeros_like(x), x)))


def elu_plus_one_vjp(x: Array, dphi: Array) -> Array:
    xp = _xp(x)
    return dphi * xp.where(x > 0, xp.ones_like(x), xp.exp(xp.where(x > 0, xp.zeros_like(x), x)))


def relu(x: Array) -> Array:
    xp = _xp(x)
    return xp.where(x > 0, x, xp.zeros_like(x))


def relu_vjp(x: Array, dphi: Array) -> Array:
    xp = _xp(x)
    return xp.where(x > 0, dphi, xp.zeros_like(dphi))


FEATURE_MAPS: dict[str, FeatureMap] = {
    "identity": (identity, identity_vjp),
    "elu+1": (elu_plus_one, elu_plus_one_vjp),
    "relu": (relu, relu_vjp),
    "silu": (lambda x: silu(_xp(x), x), lambda x, dphi: silu_vjp(_xp(x), x, dphi)),
}


def feature_map_pair(fn: str, spec: Any) -> tuple[FeatureMap, FeatureMap]:
    """The maps of q and of k from a name, a (f, f_vjp) pair, or two of those."""
    if isinstance(spec, tuple | list) and len(spec) == 2 and not all(map(callable, spec)):
        return _one(fn, spec[0]), _one(fn, spec[1])
    return (_one(fn, spec),) * 2


def _one(fn: str, spec: Any) -> FeatureMap:
    if isinstance(spec, str) and spec in FEATURE_MAPS:
        return FEATURE_MAPS[spec]
    if isinstance(spec, tuple | list) and len(spec) == 2 and all(map(callable, spec)):
        return spec[0], spec[1]
    raise ValueError(f"{fn}: feature_map is {spec!r}, expected one of {', '.join(map(repr, FEATURE_MAPS))}, "
                     "a pair (f, f_vjp) of functions, or two of those for q and k")
