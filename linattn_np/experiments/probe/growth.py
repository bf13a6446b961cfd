"""Growth of the state and of the inner loss with the number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import linattn_np as la

from .result import Curve, Panel, ProbeResult, Table, listed

DECAY, BETA = 0.95, 0.6


def _calls(T: int, shape: tuple[int, ...]) -> dict[str, Callable[..., Any]]:
    beta, g = np.full((*shape, T, 1), BETA), np.full((*shape, T, 1), np.log(DECAY))
    return {
        "linear_attention": lambda k, v: la.linear_attention(None, k, v),
        f"retention, decay {DECAY}": lambda k, v: la.retention(None, k, v, np.log([DECAY])),
        f"delta_rule, beta {BETA}": lambda k, v: la.delta_rule(None, k, v, beta),
        f"gated_delta_rule, decay {DECAY}, beta {BETA}": lambda k, v: la.gated_delta_rule(None, k, v, g, beta),
    }


def probe(quick: bool = False) -> ProbeResult:
    """The norm of the state for random pairs, and for one repeated pair."""
    K, V, draws = 16, 4, 8 if quick else 20
    lengths = [100, 400, 1600] if quick else [100, 400, 1600, 6400, 25_600]
    rng = np.random.default_rng(0)
    random: dict[str, list[float]] = {}
    same: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    for T in lengths:
        k, v = rng.standard_normal((draws, T, 1, K)), rng.standard_normal((draws, T, 1, V))
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        one_k, one_v = k[:1, :1], v[:1, :1]
        for name, call in _calls(T, (draws,)).items():
            S = call(k, v).state
            random.setdefault(name, []).append(float(np.sqrt(np.mean(np.sum(S**2, axis=(1, 2, 3))))))
        for name, call in _calls(T, (1,)).items():
            S = call(np.repeat(one_k, T, axis=1), np.repeat(one_v, T, axis=1)).state
            size = np.sqrt(np.sum(one_v**2))
            same.setdefault(name, []).append(float(np.sqrt(np.sum(S**2)) / size))
            losses.setdefault(name, []).append(_loss(name, one_k[0, 0, 0] @ S[0, 0], one_v[0, 0, 0], S))
    columns = ("memory", *(f"T = {T}" for T in lengths))
    rows = lambda d: [(n, *y) for n, y in d.items()]  # noqa: E731
    tables = [
        Table(f"|S_T| of random unit keys, root mean square of {draws} draws", (*columns, "power of T"),
              [(n, *y, _power(lengths, y)) for n, y in random.items()]),
        Table("|S_T| / |v| of one repeated pair", (*columns, "power of T"),
              [(n, *y, _power(lengths, y)) for n, y in same.items()]),
        Table("inner loss of that pair over |v|^2 (page losses.md)", columns, rows(losses)),
    ]  # fmt: skip
    grows = [n for n in random if _power(lengths, random[n]) > 0.25]
    stays = [n for n in random if abs(_power(lengths, random[n])) < 0.05]
    falls = [n for n in losses if losses[n][-1] < -2 * abs(losses[n][0])]
    panels = [
        Panel("random pairs", "T", "|S_T|", [Curve(n, lengths, y) for n, y in random.items()]),
        Panel("one pair", "T", "|S_T| / |v|", [Curve(n, lengths, y) for n, y in same.items()]),
    ]
    power = _power(lengths, random["linear_attention"])
    known = f"on random keys the state is bounded in {listed(stays)}, and grows in {listed(grows)}."
    meaning = (
        "a state that grows needs a normaliser over long streams; one that is bounded does not mean that old "
        "facts are kept: what bounds it is a decay or an overwrite."
    )
    return ProbeResult(
        "growth",
        "Does the state remain bounded over many tokens?",
        tables,
        [
            f"On random keys the state grows with T for {', '.join(grows) or 'none'} (linear attention like "
            f"T^{power:.2f}) and stays bounded for {', '.join(stays) or 'none'}.",
            f"On one repeated pair linear attention's state grows like "
            f"T^{_power(lengths, same['linear_attention']):.2f}, and the inner loss is unbounded below for "
            f"{', '.join(falls) or 'none'}.",
        ],
        panels,
        known,
        meaning,
    )


def _loss(name: str, predicted: np.ndarray, v: np.ndarray, S: np.ndarray) -> float:
    """Inner loss over |v|^2: -<kS, v> + (1 - decay) / 2 |S|^2 without erase, 1/2 |kS - v|^2 for the delta rules."""
    size = float(np.sum(v**2))
    if "delta" in name:
        return float(np.sum((predicted - v) ** 2) / 2) / size
    penalty = (1 - DECAY) / 2 * float(np.sum(S**2)) if "decay" in name else 0.0
    return (penalty - float(predicted @ v)) / size


def _power(lengths: list[int], y: list[float]) -> float:
    """d log y / d log T over the last two lengths."""
    return float(np.log(y[-1] / y[-2]) / np.log(lengths[-1] / lengths[-2]))
