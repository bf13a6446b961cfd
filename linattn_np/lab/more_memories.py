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
SLOWLY = -(2.0**-8)  # log decay a token
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


class HalfKeys(Memory):
    """DeltaProduct of two steps: the value at each half of the key, both made unit, with the strength of one half.

    A token has one pair here, and steps that share its key are one step of the delta rule, of strength
    1 - (1 - beta_1) (1 - beta_2). Halves are orthogonal keys that the query has too: a token erases two directions.
    """

    name = "delta_product"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.delta_product)

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        K, channels = k.shape[-1], np.arange(k.shape[-1])
        steps = k[:, :, None] * np.stack([channels < K // 2, channels >= K // 2]).astype(k.dtype)[:, None]
        steps = steps / np.linalg.norm(steps, axis=-1, keepdims=True)  # (B, T, 2, 1, K)
        values = np.broadcast_to(v[:, :, None], (*v.shape[:2], 2, *v.shape[2:]))
        return q, steps, values, np.full(values.shape[:-1], 0.5, v.dtype)


class Slopes(Retention):
    """Lightning attention: the retention memory with the ALiBi slopes of four heads, 1/4 to 1/256."""

    name = "lightning_attention"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.lightning_attention)

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        *qkv, _ = super().arrays(logits, classes, q, k, v)
        return *qkv, (4.0 ** -np.arange(1, 5)).astype(v.dtype)


class Fading(Memory):
    """Simple GLA with one log decay of -2^-8 a token: what transxssm is without its rotation."""

    name = "simple_gla"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.simple_gla)

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return q, k, v, np.full(v.shape[:3], SLOWLY, v.dtype)


class RotatedStateSpace(Memory):
    """TransXSSM: mamba2 with steps of 1, a log decay of -2^-8 a token, inputs and outputs turned by their distance."""

    name = "transxssm"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.transxssm)

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return v, np.ones(v.shape[:3], v.dtype), np.full(1, SLOWLY, v.dtype), k, q


class Erasing(Memory):
    """IPLR: half of what the key finds is taken out and the whole value written, twice longhorn's state."""

    name = "iplr"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.iplr)

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return q, k, v, -k / 2, k


class Corrected(Memory):
    """Comba: the same with a log decay of -2^-8 a token, p being half the key and the strength 1."""

    name = "comba"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.comba)

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return q, k, v, k / 2, np.full(v.shape[:3], SLOWLY, v.dtype), np.ones(v.shape[:3], v.dtype)


class FadingErasing(Memory):
    """DPLR: iplr with log decays from -2^-8 to -2^-11 a token, over the channels of keys."""

    name = "dplr"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.dplr)

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return q, k, v, slowly(k), -k / 2, k


class Rwkv7(Memory):
    """RWKV-7: the decays of dplr; what the key finds is taken out at a rate from 1/4 to 3/4, over the channels."""

    name = "rwkv7"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.rwkv7)

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return q, k, v, slowly(k), -k, k * np.linspace(0.25, 0.75, k.shape[-1]).astype(k.dtype)


class ChannelFading(Memory):
    """GLA: log decays from -2^-8 to -2^-11 a token, over the channels of keys."""

    name = "gla"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.gla)

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return q, k, v, slowly(k)


class Rwkv6(Memory):
    """RWKV-6: the decays of gla, which begin a token later, and a bonus of 1."""

    name = "rwkv6"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.rwkv6)

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return q, k, v, slowly(k), np.ones((1, k.shape[-1]), k.dtype)


class FadingWeights(Memory):
    """Decaying fast weights: log decays from -2^-8 to -2^-11 a token, over the channels of keys and of values."""

    name = "dfw"
    function: ClassVar[Callable[..., Any]] = staticmethod(la.dfw)

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return q, k, v, slowly(k), slowly(v)


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


def slowly(x: np.ndarray) -> np.ndarray:
    """Log decays from -2^-8 to -2^-11 over the channels of x, in its shape."""
    return np.broadcast_to(-(2.0 ** -np.linspace(8, 11, x.shape[-1])).astype(x.dtype), x.shape)


def halves(x: np.ndarray) -> np.ndarray:
    """[max(x, 0), max(-x, 0)]: (..., 2 K)."""
    return np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)], axis=-1)


def directions(K: int) -> np.ndarray:
    """(K, K) random unit columns, always the same."""
    d = np.random.default_rng(K).standard_normal((K, K))
    return d / np.linalg.norm(d, axis=0)


KINDS = (Slopes, Fading, Rotated, RotatedStateSpace, ChannelFading, Rwkv6, FadingWeights, Hgrn2, Longhorn, Erasing,
         HalfKeys, Corrected, FadingErasing, Rwkv7, Slots, GatedSlots, Fourier, Performer, Based, Rebased)  # fmt: skip
MORE = {kind.name: kind() for kind in KINDS}
