"""Feature maps described as steps that compiled loops can evaluate chunk by chunk.

    monomials      x' = factor x;  phi_0 = w_0,  phi_j = w_j phi_s x'_l for each feature j of parent s and channel l
    exponentials   phi = e^{x W - square |x|^2 - less}
    waves          phi = [sin(y W), cos(y W)] size, y = x / |x|

A map with steps has the attribute f.steps. A norm that is applied to the rows first is a separate pair of functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import log
from typing import Any, NamedTuple

import numpy as np

from ..runtime.held import cached
from . import polynomial_maps, random_maps

SLACK = 64  # padding behind a table, since vector loads may read past its end


class Tables(NamedTuple):
    """Constants of a map for one row width and dtype."""

    W: np.ndarray | None  # (K, m)
    WT: np.ndarray | None  # (m, K)
    numbers: np.ndarray  # factor; or square, less; or size; monomials: followed by the weight of each feature
    segments: np.ndarray | None  # (S, 3) parent, first channel, first feature: features of one parent are contiguous


class Steps(NamedTuple):
    """A map and its parameters, other than the row width."""

    kind: str  # "monomials", "exponentials", "waves"
    arguments: tuple[Any, ...]
    before: tuple[Callable[..., Any], Callable[..., Any]] | None = None  # norm(x), norm_vjp(x, dy)

    def width(self, K: int) -> int:
        """The number of features for K channels."""
        return _width(self.kind, self.arguments, K)

    def skipped(self, K: int) -> int:
        """The number of monomials before the first feature."""
        return _skipped(self.kind, self.arguments, K)

    def tables(self, K: int, dtype: Any) -> Tables:
        """The constants of the map."""
        return _tables(self.kind, self.arguments, K, np.dtype(dtype).name)


def monomials(coefficients: tuple[float, ...]) -> Steps | None:
    """The monomials of a polynomial; None if a degree between two others has coefficient 0."""
    first = next((n for n, c in enumerate(coefficients) if c), len(coefficients))
    return Steps("monomials", (coefficients,)) if all(coefficients[first:]) and any(coefficients[1:]) else None


def exponentials(m: int | None, seed: int, hyperbolic: bool) -> Steps:
    """FAVOR+ with m features, None: K log K."""
    return Steps("exponentials", (m, seed, hyperbolic))


def waves(m: int, seed: int, sigma: float) -> Steps:
    """2 m random Fourier features of unit rows."""
    return Steps("waves", (m, seed, sigma))


@functools.lru_cache(64)
def _skipped(kind: str, arguments: tuple[Any, ...], K: int) -> int:
    if kind != "monomials":
        return 0
    (coefficients,) = arguments
    return polynomial_maps.powers_width(K, (1.0,) * len(coefficients)) - _width(kind, arguments, K)


@functools.lru_cache(64)
def _width(kind: str, arguments: tuple[Any, ...], K: int) -> int:
    if kind == "monomials":
        return polynomial_maps.powers_width(K, arguments[0])
    if kind == "waves":
        return 2 * arguments[0]
    m, _, hyperbolic = arguments
    m = random_maps.favor_features(K) if m is None else m
    return m + m % 2 if hyperbolic else m


@cached
def _tables(kind: str, arguments: tuple[Any, ...], K: int, name: str) -> Tables:
    dtype, m = np.dtype(name), _width(kind, arguments, K)
    if kind == "monomials":
        weights, segments = polynomial_maps.segments(K, arguments[0])
        return Tables(None, None, np.concatenate([[K**-0.25], weights, np.zeros(SLACK)]).astype(dtype), segments)
    if kind == "waves":
        half, seed, sigma = arguments
        W = random_maps.weights_of_numpy(K, half, seed, 1 / sigma, dtype)
        return Tables(W, np.ascontiguousarray(W.T), np.array([half**-0.5], dtype), None)
    _, seed, hyperbolic = arguments
    factor = K**-0.25
    W = random_maps.weights_of_numpy(K, m // 2 if hyperbolic else m, seed, factor, dtype)
    W = np.concatenate([W, -W], axis=1) if hyperbolic else W
    return Tables(W, np.ascontiguousarray(W.T), np.array([factor**2 / 2, log(m) / 2], dtype), None)
