"""Two writes under one key, and online regression of a noisy linear map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import linattn_np as la

from .result import Curve, Panel, ProbeResult, Table, listed


def shares(run: Callable[..., Any]) -> tuple[float, float]:
    """(a, b) with out = a v1 + b v2 after writing v1 and then v2 under the same key."""
    rng = np.random.default_rng(0)
    key = rng.standard_normal(8)
    k = np.tile(key / np.linalg.norm(key), (2, 1, 1))
    v = np.eye(2)[:, None]
    a, b = run(k, v)[-1, 0]
    return float(a), float(b)


def rebinding(quick: bool = False) -> ProbeResult:
    """Weights of two values written under one key."""
    one = np.ones((2, 1))
    ridge = np.full((1, 8), 1e-9)
    memories = {
        "linear_attention": lambda k, v: la.linear_attention(k, k, v),
        "retention, decay 0.8": lambda k, v: la.retention(k, k, v, np.log([0.8]), scale=1),
        "delta_rule, beta 1": lambda k, v: la.delta_rule(k, k, v, one, scale=1),
        "delta_rule, beta 0.5": lambda k, v: la.delta_rule(k, k, v, one / 2, scale=1),
        "longhorn, beta 1": lambda k, v: la.longhorn(k, k, v, one, scale=1),
        "gated_delta_rule, decay 0.8": lambda k, v: la.gated_delta_rule(k, k, v, np.log(0.8) * one, one, scale=1),
        "mesa_net, ridge 1e-9": lambda k, v: la.mesa_net(k, k, v, 0 * one, one, ridge, scale=1, solver="exact"),
        "mesa_net, ridge 1e-9, decay 0.8": lambda k, v: la.mesa_net(k, k, v, np.log(0.8) * one, one, ridge, scale=1,
                                                                    solver="exact"),
    }  # fmt: skip
    shares_of = {name: shares(run) for name, run in memories.items()}
    near = lambda x, y: abs(x - y) < 1e-6  # noqa: E731
    latest = [n for n, (a, b) in shares_of.items() if near(a, 0) and near(b, 1)]
    mean = [n for n, (a, b) in shares_of.items() if near(a, 0.5) and near(b, 0.5)]
    added = [n for n, (a, b) in shares_of.items() if near(a, 1) and near(b, 1)]
    table = Table(
        "read with the key after v1 and then v2 were written under it",
        ("memory", "of v1", "of v2"),
        [(n, *ab) for n, ab in shares_of.items()],
    )
    panel = Panel(
        "weights of the two values",
        "",
        "weight",
        [Curve(f"v{i + 1}", list(range(len(shares_of))), [ab[i] for ab in shares_of.values()], "o") for i in (0, 1)],
        log="",
        ticks=tuple(shares_of),
    )
    named = [n for n in shares_of if n not in (*latest, *mean, *added)]
    known = (
        f"the latest value alone is read from {listed(latest)}; the mean of both from {listed(mean)}; their sum "
        f"from {listed(added)}; other weights from {listed(named)}."
    )
    meaning = (
        "a memory that reads the latest value alone is right where a name is bound anew; this is one exact "
        "key, and does not say what happens to similar ones."
    )
    return ProbeResult(
        "rebinding",
        "What is read after a second value is written under the same key?",
        [table],
        [
            f"The latest value alone: {', '.join(latest) or 'none'}.",
            f"The mean of both: {', '.join(mean) or 'none'}.",
            f"Their sum: {', '.join(added) or 'none'}.",
        ],
        [panel],
        known,
        meaning,
    )


def least_squares(quick: bool = False) -> ProbeResult:
    """v = k W + noise with random unit keys: |S - W|^2 after t tokens, delta rule (LMS) and MesaNet (RLS)."""
    K, V, draws = 8, 4, 40 if quick else 200
    times = [10, 30, 100, 300] if quick else [10, 30, 100, 300, 1000, 3000]
    rng = np.random.default_rng(0)
    T = times[-1]
    k = rng.standard_normal((draws, T, 1, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    W = rng.standard_normal((draws, 1, K, V))
    v = np.einsum("dthk,dhkv->dthv", k, W) + rng.standard_normal((draws, T, 1, V))
    strengths = (1.0, 0.5, 0.1)
    errors = {
        f"delta_rule, beta {b:g}": _errors(times, W, lambda s, S, b=b: _lms(k[:, s], v[:, s], b, S)) for b in strengths
    }
    errors["mesa_net"] = _errors(times, W, lambda s, S: _rls(k[:, s], v[:, s], S))
    limits = {f"delta_rule, beta {b:g}": b * K * V / (2 - b) for b in strengths}
    rows = [(n, *e, limits.get(n, K * K * V / T)) for n, e in errors.items()]
    table = Table(
        f"mean of |S - W|^2 over {draws} draws, K = {K}, V = {V}, noise 1",
        ("memory", *(f"t = {t}" for t in times), "theory, last t"),
        rows,
    )
    slope = float(np.polyfit(np.log(times[-3:]), np.log(errors["mesa_net"][-3:]), 1)[0])
    worst = max(abs(errors[n][-1] / limits[n] - 1) for n in limits if n != "delta_rule, beta 0.1")
    panel = Panel("error of the learned map", "tokens", "|S - W|^2", [Curve(n, times, e) for n, e in errors.items()])
    best = min(errors, key=lambda n: errors[n][-1])
    known = (
        f"after {T:,} samples the squared error is {errors[best][-1]:.3g} for {listed([best])}, "
        + ", ".join(f"{y[-1]:.3g} for {listed([n])}" for n, y in errors.items() if n != best)
        + "."
    )
    meaning = (
        f"{listed([best])} is the best estimate of a map that stays the same; it does not mean that it is for "
        "a map that changes, which is not tested here."
    )
    return ProbeResult(
        "least-squares",
        "How accurately is a noisy linear map estimated after t samples?",
        [table],
        [
            f"The delta rule stops at a noise floor that grows with beta: {_floor(errors, strengths)} at t = {T}; "
            f"beta K V / (2 - beta) agrees within {100 * worst:.0f} % for beta 0.5 and 1.",
            f"MesaNet's error keeps falling, like t^{slope:.2f}, to {errors['mesa_net'][-1]:.3g} at t = {T} "
            f"(K^2 V / t = {K * K * V / T:.3g}).",
        ],
        [panel],
        known,
        meaning,
    )


def _floor(errors: dict[str, list[float]], strengths: tuple[float, ...]) -> str:
    return ", ".join(f"{errors[f'delta_rule, beta {b:g}'][-1]:.3g} at beta {b:g}" for b in strengths)


def _errors(times: list[int], W: np.ndarray, advance: Callable[..., Any]) -> list[float]:
    """Mean square error at each time; advance(slice, state) -> (state, estimate)."""
    state, begin, errors = None, 0, []
    for t in times:
        state, S = advance(slice(begin, t), state)
        begin = t
        errors.append(float(np.mean(np.sum((S - W) ** 2, axis=(1, 2, 3)))))
    return errors


def _lms(k: np.ndarray, v: np.ndarray, beta: float, state: Any) -> tuple[Any, np.ndarray]:
    """Delta rule: least mean squares."""
    S = la.delta_rule(None, k, v, np.full(k.shape[:-1], beta), state=state).state
    return S, S


def _rls(k: np.ndarray, v: np.ndarray, state: Any) -> tuple[Any, np.ndarray]:
    """MesaNet: recursive least squares."""
    K = k.shape[-1]
    one, ridge = np.ones(k.shape[:-1]), np.full((1, K), 1e-6)
    state = la.mesa_net(None, k, v, 0 * one, one, ridge, state=state).state
    return state, np.linalg.solve(state.Z + 1e-6 * np.eye(K), state.S)
