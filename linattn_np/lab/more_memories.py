"""Further memories of the probe: nothing of them is learned, and some keep more numbers than the others.

Keys and queries are those of every memory. What a paper would learn, or leaves open, is fixed here and stands in the
docstring.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

import linattn_np as la

from .memories import Logits, Memory, Retention

SHARPNESS = 32.0  # of the softmax reference
MILD = 2.0  # of random features: their relative variance grows like e^(4 sharpness)


class Rotated(Retention):
    """RetNet: the retention memory, keys and queries turned by their distance."""

    name = "retnet"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.retnet)


class Longhorn(Memory):
    """Exact Longhorn with a rate of 1: what is written is the nearest to both, half of the error of a unit key."""

    name = "longhorn"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.longhorn)

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return q, k, v, np.ones(v.shape[:3], v.dtype)


class FadingWeights(Memory):
    """Decaying fast weights: log decays from -2^-8 to -2^-11 a token, over the channels of keys and of values."""

    name = "dfw"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.dfw)

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        g, gv = (np.broadcast_to(-(2.0 ** -np.linspace(8, 11, x.shape[-1])).astype(x.dtype), x.shape) for x in (k, v))
        return q, k, v, g, gv


class Hgrn2(Memory):
    """HGRN-2: a channel forgets as much as it takes in, a sixteenth of the key; its two signs are channels apart."""

    name = "hgrn2"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.hgrn2)

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return None if q is None else halves(q), v, np.log1p(-halves(k) / 16).astype(k.dtype)


class Slots(Memory):
    """ABC with as many slots as channels: logits 32 k.d of fixed random unit directions d, read by softmax(32 q.W)."""

    name = "abc"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.abc)
    options: ClassVar[dict[str, Any]] = {"scale": SHARPNESS}

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return q, k, v, SHARPNESS * k @ directions(k.shape[-1]).astype(k.dtype)

    def matrix(self, state: Any) -> np.ndarray:
        return state.S


class GatedSlots(Slots):
    """GSA with as many slots as channels: softmax(32 k.d) over the slots says how much of it each takes and forgets."""

    name = "gsa"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.gsa)

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        s = SHARPNESS * k @ directions(k.shape[-1]).astype(k.dtype)
        s = np.exp(s - s.max(-1, keepdims=True))
        return q, k, v, np.minimum(s / s.sum(-1, keepdims=True), 1 - 1e-6).astype(v.dtype)


class Features(Memory):
    """Keys and queries through a feature map, answers over the sum of their weights."""

    sharpness: ClassVar[float] = 1.0

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        factor = (self.sharpness * k.shape[-1] ** 0.5) ** 0.5  # the maps divide q.k by sqrt(K)
        q, k = (None if x is None else (factor * x).astype(x.dtype) for x in (q, k))
        return q, k, v

    def matrix(self, state: Any) -> np.ndarray:
        return state.S


class Based(Features):
    """1 + z + z^2 / 2, z = 32 q.k: softmax's exponential to the second order, K^2 / 2 features."""

    name = "based"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.based)
    sharpness: ClassVar[float] = SHARPNESS


class Rebased(Features):
    """The square of normed q.k, K^2 / 2 features."""

    name = "rebased"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.rebased)


class Performer(Features):
    """e^(2 q.k) by K log K positive random features."""

    name = "performer"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.performer)
    sharpness: ClassVar[float] = MILD


class Fourier(Features):
    """e^(2 q.k) by K random Fourier features, as many as there are channels."""

    name = "rfa"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.rfa)
    options: ClassVar[dict[str, Any]] = {"sigma": MILD**-0.5}

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return q, k, v


def halves(x: np.ndarray) -> np.ndarray:
    """[max(x, 0), max(-x, 0)]: (..., 2 K)."""
    return np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)], axis=-1)


def directions(K: int) -> np.ndarray:
    """(K, K) random unit columns, always the same."""
    d = np.random.default_rng(K).standard_normal((K, K))
    return d / np.linalg.norm(d, axis=0)


MORE = {kind.name: kind() for kind in (Rotated, Longhorn, FadingWeights, Hgrn2, Slots, GatedSlots, Fourier, Performer,
                                       Based, Rebased)}  # fmt: skip
