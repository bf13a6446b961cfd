"""Lookups of several hops: a token names another by its address, that one a further one, and so on to a value."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import linattn_np as la

from .result import Curve, Panel, ProbeResult, Table, listed

SHARPNESS, SYMBOLS = 64.0, 64
DEPTHS = (1, 2, 4, 8, 16)


class Forest(NamedTuple):
    """Tokens that name an earlier token, or have a value: address, address of the one that is named, value."""

    own: np.ndarray  # (1, T, 1, K), unit vectors
    named: np.ndarray  # likewise; zeros where there is a value
    values: np.ndarray  # (1, T, 1, SYMBOLS), one-hot; zeros where another token is named
    depth: np.ndarray  # (T,) hops to the value
    symbol: np.ndarray  # (T,) what is found there


def forest(rng: np.random.Generator, T: int, K: int, orthogonal: bool = False) -> Forest:
    """Nine in ten tokens name one of the six before them."""
    own = np.eye(T) if orthogonal else rng.standard_normal((T, K))
    own /= np.linalg.norm(own, axis=-1, keepdims=True)
    named, values = np.zeros_like(own), np.zeros((T, SYMBOLS))
    depth, symbol = np.zeros(T, int), rng.integers(0, SYMBOLS, T)
    for t in range(T):
        if t and rng.random() < 0.9:
            parent = int(rng.integers(max(t - 6, 0), t))
            named[t], depth[t], symbol[t] = own[parent], depth[parent] + 1, symbol[parent]
        else:
            values[t, symbol[t]] = 1
    heads = lambda x: x[None, :, None].astype(np.float32)  # noqa: E731
    return Forest(heads(own), heads(named), heads(values), depth, symbol)


def softmax(f: Forest, calls: int) -> np.ndarray:
    """Attention to the token that is named, or to itself, one call after the other."""
    x, is_root = f.values, f.depth == 0
    q = SHARPNESS * np.where(is_root[None, :, None, None], f.own, f.named)
    for _ in range(calls):
        x = la.softmax_attention(q, f.own, x, scale=1)
    return x


def deltaformer(f: Forest) -> np.ndarray:
    """One call: a token's value is that of the token that it names, with the other sign."""
    beta = (f.depth > 0).astype(np.float32)[None, :, None]
    return la.deltaformer(SHARPNESS * f.own, f.own, f.values, beta, SHARPNESS * f.named, scale=1)


def comba(f: Forest) -> np.ndarray:
    """The same in a state of fixed size: what is predicted with the address that is named is subtracted."""
    zero = np.zeros(f.own.shape[:-1], np.float32)
    return la.comba(f.own, f.own, f.values, f.named, zero, zero + 1, scale=1)


def right(f: Forest, out: np.ndarray) -> np.ndarray:
    """(T,) whether the largest entry, of either sign, is that of the value."""
    size = abs(out[0, :, 0])
    return (size.argmax(axis=-1) == f.symbol) & (size.max(axis=-1) > 0.5)


def probe(quick: bool = False) -> ProbeResult:
    """Fraction of tokens that find their value, by the number of hops."""
    T, K, draws = (128, 64, 2) if quick else (512, 64, 8)
    runs: dict[str, Any] = {
        "softmax_attention, 1 call": lambda f: softmax(f, 1), "softmax_attention, 4 calls": lambda f: softmax(f, 4),
        "softmax_attention, 16 calls": lambda f: softmax(f, 16), "deltaformer, 1 call": deltaformer,
        "comba, 1 call": comba,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    forests = [forest(rng, T, K) for _ in range(draws)]
    found = {name: _by_depth(forests, run) for name, run in runs.items()}
    apart = [forest(rng, T, T, orthogonal=True) for _ in range(1 if quick else 2)]
    found["comba, 1 call, orthogonal addresses"] = _by_depth(apart, comba)
    widths = (2, 4, 8, 16, 64)
    narrow = {name: [_all([forest(np.random.default_rng(K), T, K) for _ in range(draws)], run) for K in widths]
              for name, run in (("deltaformer, 1 call", deltaformer), ("comba, 1 call", comba))}  # fmt: skip
    tables = [
        Table(f"{T} tokens, random addresses of {K} channels: fraction that finds its value", (
            "memory", *(f"{n} hop{'s' * (n > 1)}" for n in DEPTHS)), [(n, *y) for n, y in found.items()]),
        Table("all hops, by the channels of an address", ("memory", *(f"K = {K}" for K in widths)),
              [(n, *y) for n, y in narrow.items()]),
    ]  # fmt: skip
    panels = [Panel("hops", "hops", "found", [Curve(n, DEPTHS, y) for n, y in found.items()], log="x"),
              Panel("all hops", "channels of an address", "found",
                    [Curve(n, widths, y) for n, y in narrow.items()], log="x")]  # fmt: skip
    all_hops = [n for n, y in found.items() if min(y) > 0.99]
    one = found["softmax_attention, 1 call"]
    known = (
        f"{DEPTHS[-1]} hops are followed by {listed(all_hops)}; one call of softmax_attention finds "
        f"{100 * one[0]:.0f} % of what is one hop away and {100 * one[1]:.0f} % of what is two away."
    )
    meaning = (
        "a triangular system in the call composes lookups that softmax attention needs a layer each for; "
        "addresses are set by hand here, and a model that finds such addresses is not shown."
    )
    return ProbeResult("lookups", "How many lookups, each of which names the next, does one call follow?", tables, [
        f"deltaformer follows {DEPTHS[-1]} hops in one call for {100 * found['deltaformer, 1 call'][-1]:.0f} % of the "
        "tokens, softmax_attention one hop a call.",
        f"comba solves the same system in a state of fixed size: {100 * found['comba, 1 call'][-1]:.0f} % at "
        f"{DEPTHS[-1]} hops with {K} channels for {T} tokens, "
        f"{100 * found['comba, 1 call, orthogonal addresses'][-1]:.0f} % with a channel for each token.",
    ], panels, known, meaning)  # fmt: skip


def _by_depth(forests: list[Forest], run: Any) -> list[float]:
    hits, depths = np.concatenate([right(f, run(f)) for f in forests]), np.concatenate([f.depth for f in forests])
    return [float(hits[depths == n].mean()) if (depths == n).any() else float("nan") for n in DEPTHS]


def _all(forests: list[Forest], run: Any) -> float:
    return float(np.concatenate([right(f, run(f))[f.depth > 0] for f in forests]).mean())
