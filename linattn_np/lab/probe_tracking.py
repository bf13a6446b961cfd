"""State tracking without training: permutations by Householder steps, parity by one channel."""

from __future__ import annotations

from typing import Any

import numpy as np

import linattn_np as la

from .found import Curve, Found, Panel, Table, word

THINGS = 5


def words(rng: np.random.Generator, T: int, n: int = THINGS) -> tuple[np.ndarray, np.ndarray]:
    """(swaps (T, n - 1, 2) that make a random permutation each, the thing in each place after each, (T, n))."""
    swaps, places, history = np.zeros((T, n - 1, 2), int), np.arange(n), np.zeros((T, n), int)
    for t in range(T):
        wanted, now = rng.permutation(n), list(range(n))
        for place in range(n - 1):
            other = now.index(wanted[place])
            now[place], now[other] = now[other], now[place]
            swaps[t, place] = place, other
        places = places[wanted]
        history[t] = places
    return swaps, history


def track(swaps: np.ndarray, dtype: Any, exact: bool, n: int = THINGS) -> tuple[np.ndarray, np.ndarray]:
    """(which thing the state says stands in the first place at every token, last state) of a word of swaps (T, m, 2).

    A swap is the step I - beta k^T k: k = e_i - e_j, beta = 1 where exact; else k = (e_i - e_j) / sqrt 2, beta = 2.
    """
    T, m, _ = swaps.shape
    k = np.eye(n)[swaps[..., 0]] - np.eye(n)[swaps[..., 1]]  # 0 where a thing stays
    beta = np.full((T, m, 1), 1.0 if exact else 2.0, dtype)
    k = (k if exact else k / np.sqrt(2)).astype(dtype)[:, :, None]
    q = np.tile(np.eye(n, dtype=dtype)[0], (T, 1, 1))
    out, S = la.delta_product(q, k, 0 * k, beta, state=np.eye(n, dtype=dtype)[None], scale=1, return_state=True)
    return out[:, 0].argmax(-1), S[0]


def parity(beta: float, bits: np.ndarray, dtype: Any) -> tuple[float, float]:
    """(share of tokens with the sign of (-1)^{ones so far}, |S| at the end): one channel, S <- (1 - beta bit) S."""
    one = np.ones((len(bits), 1, 1), dtype)
    out = la.delta_rule(one, one, 0 * one, (beta * bits).astype(dtype)[:, None], state=one[:1], scale=1)[:, 0, 0]
    odd = np.cumsum(bits) % 2 == 1
    return float(np.mean(np.where(odd, out < 0, out > 0))), abs(float(out[-1]))


def probe(quick: bool = False) -> Found:
    """The tables of both."""
    rng = np.random.default_rng(0)
    T = 2000 if quick else 100_000
    swaps, history = words(rng, T)
    lengths = [n for n in (100, 1000, 10_000, 100_000) if n <= T]
    rows, curves = [], []
    swap = {True: "e_i - e_j, beta 1", False: "unit keys, beta 2"}
    ways = [(f"{m} step{'s' * (m > 1)}, {np.dtype(d).name}, {swap[e]}", m, d, e)
            for m, d, e in ((4, np.float64, True), (4, np.float64, False), (4, np.float32, False),
                            (2, np.float64, True), (1, np.float64, True))]  # fmt: skip
    right_of = {}
    for label, m, dtype, exact in ways:
        said, S = track(swaps[:, :m], dtype, exact)
        right = said == history[:, 0]
        off = float(np.abs(S - np.eye(THINGS)[history[-1]]).max())
        right_of[m, dtype, exact] = float(right.mean())
        rows.append((label, *(float(right[:n].mean()) for n in lengths), off))
        curves.append(Curve(label, lengths, [float(right[:n].mean()) for n in lengths]))
    cycle = np.array([[[0, 1], [1, 2]]] * 3)
    M = [track(cycle[:n], np.float64, True, 3)[1] for n in (1, 2, 3)]
    is_cycle = np.array_equal(M[2], np.eye(3)) and not any(np.array_equal(x, np.eye(3)) for x in M[:2])
    bits = rng.integers(0, 2, T)
    strengths = (0.5, 1.0, 1.5, 1.9, 2.0)
    signs = {(b, d, n): parity(b, bits[:n], d) for b in strengths for d in (np.float32, np.float64)
             for n in (100, T)}  # fmt: skip
    g = -rng.uniform(0, 1, (50, 1, THINGS))
    ones = np.ones((50, 1, THINGS))
    S = la.gla(None, ones, 0 * ones, g, state=np.eye(THINGS)[None]).state[0]
    aside = float(np.abs(S - np.diag(np.diag(S))).max())
    tables = [
        Table(f"a random permutation of {THINGS} things a token: share of tokens whose first place is right",
              ("state", *(f"T = {n}" for n in lengths), "last state off by"), rows),
        Table("parity of a bit stream: share of tokens with the right sign",
              ("beta", "float32, T = 100", f"float32, T = {T}", "float64, T = 100", f"float64, T = {T}",
               "size at the end, float64"),
              [(b, *(signs[b, d, n][0] for d in (np.float32, np.float64) for n in (100, T)), signs[b, np.float64, T][1])
               for b in strengths]),
    ]  # fmt: skip
    panel = Panel("a permutation a token", "tokens", "share right", curves, log="x")
    sentences = _sentences(right_of, signs, strengths, T, is_cycle, aside)
    question = "Can a state follow a word of permutations, and the parity of bits, with vectors set by hand?"
    return Found("tracking", question, tables, sentences, [panel])


def _sentences(right: dict, signs: dict, strengths: tuple, T: int, is_cycle: bool, aside: float) -> list[str]:
    exact, narrow = right[4, np.float64, True], right[4, np.float32, False]
    lasting = [b for b in strengths if signs[b, np.float64, 100][0] == 1]
    to_the_end = [b for b in strengths if signs[b, np.float64, T][0] == 1]
    sizes = ", ".join(f"{word(signs[b, np.float64, T][1])} for {b:g}" for b in lasting)
    return [
        f"DeltaProduct with 4 steps a token had the first of {THINGS} things right after {100 * exact:.4g} % of {T} "
        f"permutations (float32, unit keys: {100 * narrow:.4g} %); "
        f"with 2 steps {100 * right[2, np.float64, True]:.3g} %, "
        f"with 1 step {100 * right[1, np.float64, True]:.3g} %; guessing would be {100 / THINGS:.3g} %.",
        "Two Householder steps in one token are a cycle of three: three tokens are the identity, one and two are not."
        if is_cycle else "Two steps did not make a cycle of three.",
        f"Parity of 100 bits is right everywhere for beta in {_listed(lasting)} and of {T} bits in float64 for "
        f"{_listed(to_the_end)}. The size that carries the sign is at the end {sizes}.",
        f"A diagonal decay leaves a diagonal state diagonal (largest entry beside it {aside:g}): it permutes nothing.",
    ]


def _listed(values: list[float]) -> str:
    return "{" + ", ".join(f"{b:g}" for b in values) + "}"
