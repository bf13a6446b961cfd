"""Memories without learned parameters, one per variant that memories.py does not have; some have larger states.

A variant without a function here has a memory by its spec: its queries, keys and values, and constants by the
distributions of its other arrays (Samples.distributions).

All of them receive the same keys and queries. Quantities that a model would learn, or that a paper leaves open, are
fixed here and given in the docstring. A function below turns q (None where nothing is read), k, v (B, T, 1, K or V)
into the positional arrays of the public function of its name.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

import linattn_np as la
from linattn_np.spec import VariantFunction

from .memories import RECURRENT, FourHeads, Logits, Memory

Arrays = tuple[Any, ...]
SHARPNESS = 32.0  # of the softmax reference: weights e^{32 q.k}
LOW_SHARPNESS = 2.0  # of random features, whose relative variance grows like e^{4 sharpness}
LOG_DECAY = -(2.0**-8)  # per token


class FixedMemory(Memory):
    """A memory whose arrays depend on q, k and v alone."""

    def __init__(self, arrays_of: Callable[[Any, Any, Any], Arrays], **options: Any) -> None:
        self.name = arrays_of.__name__
        self.function = getattr(la, self.name)
        self.arrays_of, self.options = arrays_of, options

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> Arrays:
        return self.arrays_of(q, k, v)

    def matrix(self, logits: Logits, state: Any) -> np.ndarray:
        return getattr(state, "S", state)


CONSTANTS: Mapping[str, float] = {"strength": 0.5, "share": 0.5}  # by distribution; 1 of others


class SpecMemory(Memory):
    """A memory whose arrays follow from the spec of its variant; optional arrays are not given."""

    constants = CONSTANTS

    def __init__(self, variant: VariantFunction) -> None:
        self.name, self.function, self.variant = variant.spec.name, variant, variant

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> Arrays:
        spec, change = self.variant.spec, self.variant.spec.change
        roles = {change.query: q, change.key: k, change.value: v}
        names = [name for name, arg in spec.arrays.items() if not arg.optional]
        return tuple(roles[name] if name in roles else self._constant(name, k, v) for name in names)

    def _constant(self, name: str, k: Any, v: Any) -> Any:
        kind, letters = self.variant.samples.distribution(name), self.variant.spec.arrays[name].axes.split()
        if kind in ("unit", "half unit", "direction"):
            return k / 2 if kind == "half unit" else k
        like = {"K": k, "V": v}.get(letters[-1])
        if kind == "log decay" and like is not None:
            return channel_decays(like)
        value = LOG_DECAY if kind == "log decay" else self.constants.get(kind, 1.0)
        lead = v.shape[:3] if letters[0] == "T" else (1,)
        return np.full((*lead, *(() if like is None else like.shape[-1:])), value, v.dtype)

    def matrix(self, logits: Logits, state: Any) -> np.ndarray:
        return getattr(state, "S", state)


class CacheMemory(SpecMemory):
    """Attention of logits 32 q.k, whose state is a cache: log decays of -2^-8 a token, maps along k, strengths 1/2."""

    options = MappingProxyType({"scale": SHARPNESS})
    constants = MappingProxyType({**CONSTANTS, "positive": -LOG_DECAY})

    def matrix(self, logits: Logits, state: Any) -> np.ndarray:
        """What linear attention has of the keys and values of a cache."""
        return np.einsum("blhk,blhv->bhkv", state.k, state.v)


class StickBreaking(CacheMemory):
    """Logits 32 q.k - 12, by a further channel: nothing divides the shares, so those of other keys must be small."""

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> Arrays:
        return None if q is None else with_channel(q, -1.0), with_channel(k, 12 / SHARPNESS), v


class RetNet(FourHeads):
    """RetNet: four heads with decays of 1 - 2^-5 .. 1 - 2^-8, keys and queries rotated by their position."""

    name = "retnet"
    function = staticmethod(la.retnet)

    def decays(self, logits: Logits) -> np.ndarray:
        return np.log1p(-(2.0 ** -np.arange(5, 9)))


class LightningAttention(FourHeads):
    """Lightning attention: four heads with the ALiBi slopes 1/4 to 1/256."""

    name = "lightning_attention"
    function = staticmethod(la.lightning_attention)

    def decays(self, logits: Logits) -> np.ndarray:
        return 4.0 ** -np.arange(1, 5)


def transxssm(q: Any, k: Any, v: Any) -> Arrays:
    """TransXSSM: mamba2 with step sizes of 1, a log decay of -2^-8 per token, B and C rotated by their position."""
    return v, np.ones(v.shape[:3], v.dtype), np.full(1, LOG_DECAY, v.dtype), k, q


def hgrn2(q: Any, k: Any, v: Any) -> Arrays:
    """HGRN-2: input and forget gate of a channel are tied, a sixteenth of the key; separate channels for each sign."""
    return None if q is None else by_sign(q), v, np.log1p(-by_sign(k) / 16).astype(k.dtype)


def longhorn(q: Any, k: Any, v: Any) -> Arrays:
    """Exact Longhorn with beta = 1: for unit keys the delta rule with beta = 1/2."""
    return q, k, v, np.ones(v.shape[:3], v.dtype)


def iplr(q: Any, k: Any, v: Any) -> Arrays:
    """IPLR: erases half of the value read with the key and writes the whole value; twice longhorn's state."""
    return q, k, v, -k / 2, k


def delta_product(q: Any, k: Any, v: Any) -> Arrays:
    """DeltaProduct with two steps: the value under each half of the key, both normalised, with beta = 1/2.

    A token has a single pair here, and steps that share its key equal one delta-rule step with beta =
    1 - (1 - beta_1) (1 - beta_2). The halves are orthogonal keys that the query contains too: a token erases two
    directions.
    """
    K, channels = k.shape[-1], np.arange(k.shape[-1])
    steps = k[:, :, None] * np.stack([channels < K // 2, channels >= K // 2]).astype(k.dtype)[:, None]
    steps = steps / np.linalg.norm(steps, axis=-1, keepdims=True)  # (B, T, 2, 1, K)
    values = np.broadcast_to(v[:, :, None], (*v.shape[:2], 2, *v.shape[2:]))
    return q, steps, values, np.full(values.shape[:-1], 0.5, v.dtype)


def comba(q: Any, k: Any, v: Any) -> Arrays:
    """Comba: iplr with a log decay of -2^-8 per token; p = k / 2, beta = 1."""
    return q, k, v, k / 2, np.full(v.shape[:3], LOG_DECAY, v.dtype), np.ones(v.shape[:3], v.dtype)


def dplr(q: Any, k: Any, v: Any) -> Arrays:
    """DPLR: iplr with log decays from -2^-8 to -2^-11 per token over the key channels."""
    return q, k, v, channel_decays(k), -k / 2, k


def rwkv7(q: Any, k: Any, v: Any) -> Arrays:
    """RWKV-7: the decays of dplr; erases the value read with the key at rates from 1/4 to 3/4 over the channels."""
    return q, k, v, channel_decays(k), -k, k * np.linspace(0.25, 0.75, k.shape[-1]).astype(k.dtype)


def abc(q: Any, k: Any, v: Any) -> Arrays:
    """ABC with as many slots as channels: logits 32 k.d for fixed random unit directions d, read by softmax(32 q.W)."""
    return q, k, v, SHARPNESS * k @ directions(k.shape[-1]).astype(k.dtype)


def gsa(q: Any, k: Any, v: Any) -> Arrays:
    """GSA with as many slots as channels: softmax(32 k.d) over the slots is the write and forget rate of each slot."""
    s = SHARPNESS * k @ directions(k.shape[-1]).astype(k.dtype)
    s = np.exp(s - s.max(-1, keepdims=True))
    return q, k, v, np.minimum(s / s.sum(-1, keepdims=True), 1 - 1e-6).astype(v.dtype)


def rfa(q: Any, k: Any, v: Any) -> Arrays:
    """e^{2 q.k} by K random Fourier features, normalised."""
    return q, k, v


def performer(q: Any, k: Any, v: Any) -> Arrays:
    """e^{2 q.k} by K log K positive random features, normalised."""
    return scaled(q, LOW_SHARPNESS), scaled(k, LOW_SHARPNESS), v


def based(q: Any, k: Any, v: Any) -> Arrays:
    """1 + z + z^2 / 2 with z = 32 q.k, normalised: the exponential to second order, K^2 / 2 features."""
    return scaled(q, SHARPNESS), scaled(k, SHARPNESS), v


def rebased(q: Any, k: Any, v: Any) -> Arrays:
    """The square of q.k after layer norms, normalised: K^2 / 2 features."""
    return scaled(q, 1.0), scaled(k, 1.0), v


def scaled(x: np.ndarray | None, sharpness: float) -> np.ndarray | None:
    """Queries or keys whose product, divided by sqrt(K) in the feature maps, is sharpness times q.k."""
    if x is None:
        return None
    return ((sharpness * x.shape[-1] ** 0.5) ** 0.5 * x).astype(x.dtype)


def with_channel(x: np.ndarray, value: float) -> np.ndarray:
    """x with a further channel of one value."""
    return np.concatenate([x, np.full_like(x[..., :1], value)], axis=-1)


def channel_decays(x: np.ndarray) -> np.ndarray:
    """Log decays from -2^-8 to -2^-11 over the channels of x, in its shape."""
    return np.broadcast_to(-(2.0 ** -np.linspace(8, 11, x.shape[-1])).astype(x.dtype), x.shape)


def by_sign(x: np.ndarray) -> np.ndarray:
    """[max(x, 0), max(-x, 0)]: (..., 2 K)."""
    return np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)], axis=-1)


def directions(K: int) -> np.ndarray:
    """(K, K) fixed random unit columns."""
    d = np.random.default_rng(K).standard_normal((K, K))
    return d / np.linalg.norm(d, axis=0)


_WRITTEN: tuple[Memory, ...] = (
    LightningAttention(), RetNet(), FixedMemory(transxssm),
    *map(FixedMemory, (hgrn2, longhorn, iplr, delta_product, comba, dplr, rwkv7)),
    FixedMemory(abc, scale=SHARPNESS), FixedMemory(gsa, scale=SHARPNESS), FixedMemory(rfa, sigma=LOW_SHARPNESS**-0.5),
    FixedMemory(performer), FixedMemory(based), FixedMemory(rebased),
)  # fmt: skip
_KNOWN = {memory.function for memory in (*RECURRENT.values(), *_WRITTEN)}
_OTHERS = [fn for fn in la.VARIANTS if fn not in _KNOWN and not fn.spec.grows and fn.spec.change.linear]
_CACHES = [
    StickBreaking(fn) if "attend_current" in fn.spec.options.defaults else CacheMemory(fn)
    for fn in la.VARIANTS
    if fn.spec.grows and fn is not la.softmax_attention
]  # which is the reference
FIXED = {memory.name: memory for memory in (*_WRITTEN, *map(SpecMemory, _OTHERS), *_CACHES)}
