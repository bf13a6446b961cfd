"""Rounding errors of outputs that are divided by q.z, by their own length, or by nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import linattn_np as la

from .result import Curve, Panel, ProbeResult, Table

K, V = 64, 16
EPS = float(np.finfo(np.float32).eps)


def _rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(1e-6))


HOW: dict[str, Callable[..., np.ndarray]] = {
    "none": la.linear_attention,
    "RMSNorm": lambda *x, **options: _rms(la.linear_attention(*x, **options)),
    "num / den": lambda *x, **options: la.linear_attention(*x, **options, normalize=True),
    "num / den, elu + 1": lambda *x, **options: la.linear_attention(*x, **options, normalize=True, feature_map="elu+1"),
}


def probe(quick: bool = False) -> ProbeResult:
    """Float32 against float64: as q.z goes to 0, and over more and more tokens."""
    rng = np.random.default_rng(0)
    T, cosines = (256 if quick else 1024), (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
    lengths = (64, 256, 1024) if quick else (64, 256, 1024, 4096, 16384)
    near = {name: [0.0] * len(cosines) for name in HOW}
    for _ in range(4 if quick else 16):
        x = _towards(rng, T, cosines)
        for name, how in HOW.items():
            found = _error(how, x, causal=False)
            near[name] = [max(a, b) for a, b in zip(near[name], found, strict=True)]
    long, size = {name: list[float]() for name in HOW}, {name: list[float]() for name in HOW}
    for n in lengths:
        x = tuple(rng.standard_normal((n, 1, d)).astype(np.float32) for d in (K, K, V))
        for name, how in HOW.items():
            long[name].append(max(_error(how, x)))
            size[name].append(float(abs(how(*x)).max()))
    columns = ("normaliser", *(f"T = {n}" for n in lengths))
    tables = [
        Table(f"error of a query's output in eps, {T} tokens, by the cosine of q and z = sum k",
              ("normaliser", *(f"{c:g}" for c in cosines)), [(n, *y) for n, y in near.items()]),
        Table("largest error of a token's output in eps, normal q and k", columns, [(n, *y) for n, y in long.items()]),
        Table("largest entry of the output", columns, [(n, *y) for n, y in size.items()]),
    ]  # fmt: skip
    panels = [Panel("q.z goes to 0", "cosine of q and z", "error in eps",
                    [Curve(n, cosines, y) for n, y in near.items() if "elu" not in n]),
              Panel("more tokens", "T", "error in eps", [Curve(n, lengths, y) for n, y in long.items()])]  # fmt: skip
    divided, plain = near["num / den"], near["none"]
    known = (
        f"at a cosine of {cosines[-1]:g} num / den is off by {divided[-1]:.2g} eps, the numerator by "
        f"{plain[-1]:.2g} and its RMSNorm by {near['RMSNorm'][-1]:.2g}; with elu + 1, whose features are "
        f"positive, num / den by {max(long['num / den, elu + 1']):.2g} eps at most, over {lengths[-1]:,} tokens."
    )
    meaning = (
        "features of both signs go with RMSNorm or no normaliser, num / den with features that are positive; "
        "rounding is what is measured, and says nothing about what a model learns with either."
    )
    return ProbeResult("normalisers", "How do normalisers round as q.z goes to 0 and T grows?", tables, [
        f"From a cosine of 1 to {cosines[-1]:g} the error of num / den grows {divided[-1] / divided[0]:,.0f} times, "
        f"that of the numerator {plain[-1] / plain[0]:.2g} times.",
        f"Over {lengths[-1]:,} tokens the largest entry is {size['none'][-1]:,.0f} without a normaliser (at "
        f"{lengths[0]} tokens {size['none'][0]:,.0f}), {size['num / den'][-1]:,.0f} with num / den of features of both "
        f"signs, {size['RMSNorm'][-1]:.2g} with RMSNorm.",
    ], panels, known, meaning)  # fmt: skip


def _towards(rng: np.random.Generator, T: int, cosines: tuple[float, ...]) -> tuple[np.ndarray, ...]:
    """(q, k, v), q (len(cosines), 1, K) of unit length with these cosines to the sum of the keys."""
    k, v = (rng.standard_normal((T, 1, d)).astype(np.float32) for d in (K, V))
    z = k[:, 0].astype(float).sum(axis=0)
    z /= np.linalg.norm(z)
    other = rng.standard_normal(K)
    other -= (other @ z) * z
    other /= np.linalg.norm(other)
    c = np.array(cosines)[:, None]
    return (c * z + np.sqrt(1 - c * c) * other).astype(np.float32)[:, None], k, v


def _error(how: Callable[..., Any], x: tuple[np.ndarray, ...], **options: Any) -> list[float]:
    """Of each query's output, over its size, in eps of float32."""
    exact = how(*(y.astype(float) for y in x), **options)[:, 0]
    off = abs(how(*x, **options)[:, 0] - exact).max(axis=-1) / abs(exact).max(axis=-1)
    return [float(y) for y in off / EPS]
