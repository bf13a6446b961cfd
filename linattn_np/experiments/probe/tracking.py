"""State tracking without learning: permutations by Householder steps, parity by one channel."""

from __future__ import annotations

from typing import Any

import numpy as np

import linattn_np as la

from .result import Curve, Panel, ProbeResult, Table, cell

ITEMS = 5
STRENGTHS = (0.5, 1.0, 1.5, 1.9, 2.0)
CASES = (
    (4, np.float64, True),
    (4, np.float64, False),
    (4, np.float32, False),
    (2, np.float64, True),
    (1, np.float64, True),
)  # fmt: skip  (steps per token, dtype, exact)


def words(rng: np.random.Generator, T: int, n: int = ITEMS) -> tuple[np.ndarray, np.ndarray]:
    """T random permutations: (swaps (T, n - 1, 2) that compose each, items by position after each (T, n))."""
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


def track(swaps: np.ndarray, dtype: Any, exact: bool, n: int = ITEMS) -> tuple[np.ndarray, np.ndarray]:
    """(item read from the first position after every token, last state) for swaps (T, m, 2).

    A swap is the step I - beta k^T k: k = e_i - e_j, beta = 1 if exact; else k = (e_i - e_j) / sqrt 2, beta = 2.
    """
    T, m, _ = swaps.shape
    k = np.eye(n)[swaps[..., 0]] - np.eye(n)[swaps[..., 1]]  # 0 for an item that stays
    beta = np.full((T, m, 1), 1.0 if exact else 2.0, dtype)
    k = (k if exact else k / np.sqrt(2)).astype(dtype)[:, :, None]
    q = np.tile(np.eye(n, dtype=dtype)[0], (T, 1, 1))
    identity = np.eye(n, dtype=dtype)[None]
    found = la.delta_product(q, k, np.zeros_like(k), beta, state=identity, scale=1, return_state=True)
    return found.out[:, 0].argmax(-1), found.state[0]


def parity(beta: float, bits: np.ndarray, dtype: Any) -> tuple[float, float]:
    """(fraction of tokens with the sign (-1)^{number of ones}, |S| at the end): one channel, S <- (1 - beta bit) S."""
    one = np.ones((len(bits), 1, 1), dtype)
    out = la.delta_rule(one, one, 0 * one, (beta * bits).astype(dtype)[:, None], state=one[:1], scale=1)[:, 0, 0]
    odd = np.cumsum(bits) % 2 == 1
    return float(np.mean(np.where(odd, out < 0, out > 0))), abs(float(out[-1]))


def probe(quick: bool = False) -> ProbeResult:
    """Permutations, parity, and two exact statements."""
    rng = np.random.default_rng(0)
    T = 2000 if quick else 100_000
    table, panel, right = _permutations(*words(rng, T))
    bits = rng.integers(0, 2, T)
    signs = {(b, d, n): parity(b, bits[:n], d) for b in STRENGTHS for d in (np.float32, np.float64) for n in (100, T)}
    g = -rng.uniform(0, 1, (50, 1, ITEMS))
    ones = np.ones((50, 1, ITEMS))
    S = la.gla(None, ones, 0 * ones, g, state=np.eye(ITEMS)[None]).state[0]
    off_diagonal = float(np.abs(S - np.diag(np.diag(S))).max())
    sentences = _sentences(right, signs, STRENGTHS, T, _makes_a_cycle(), off_diagonal)
    question = "Can a state follow a word of permutations, and the parity of bits, with vectors set by hand?"
    known, meaning = _summary(right, signs, T)
    return ProbeResult("tracking", question, [table, _parity_table(signs, T)], sentences, [panel], known, meaning)


def _summary(right: dict, signs: dict, T: int) -> tuple[str, str]:
    """Who can do it, what that means."""
    shares = {m: right[m, np.float64, True] for m in (4, 2, 1)}
    steps = ", ".join(f"{m} step{'s' * (m > 1)} a token for {100 * share:.3g} %" for m, share in shares.items())
    to_the_end = [b for b in STRENGTHS if signs[b, np.float64, T][0] == 1]
    known = (
        f"the first of {ITEMS} items is right with {steps} of {T:,} permutations (chance: {100 / ITEMS:.3g} %), "
        f"the parity of {T:,} bits to the end for beta in {_listed(to_the_end)}."
    )
    able = " or ".join(str(m) for m, share in shares.items() if share == 1) or "none"
    return known, (
        f"of 4, 2 and 1 Householder steps a token, {able} can follow every permutation of {ITEMS} items "
        "with vectors set by hand; it does not mean that training finds such vectors."
    )


def _permutations(swaps: np.ndarray, history: np.ndarray) -> tuple[Table, Panel, dict[Any, float]]:
    """Table and curves of the fraction of correct tokens, and that fraction by case."""
    T = len(history)
    lengths = [n for n in (100, 1000, 10_000, 100_000) if n <= T]
    rows, curves, right_of = [], [], {}
    for m, dtype, exact in CASES:
        pair = "e_i - e_j, beta 1" if exact else "unit keys, beta 2"
        label = f"{m} step{'s' * (m > 1)}, {np.dtype(dtype).name}, {pair}"
        answers, S = track(swaps[:, :m], dtype, exact)
        right = answers == history[:, 0]
        shares = [float(right[:n].mean()) for n in lengths]
        right_of[m, dtype, exact] = float(right.mean())
        rows.append((label, *shares, float(np.abs(S - np.eye(ITEMS)[history[-1]]).max())))
        curves.append(Curve(label, lengths, shares))
    table = Table(f"a random permutation of {ITEMS} items per token: fraction of tokens with the correct first item",
                  ("state", *(f"T = {n}" for n in lengths), "error of the last state"), rows)  # fmt: skip
    return table, Panel("one permutation per token", "tokens", "fraction correct", curves, log="x"), right_of


def _makes_a_cycle() -> bool:
    """Whether two Householder steps per token form a cycle of three: the third token, and no earlier one, is I."""
    cycle = np.array([[[0, 1], [1, 2]]] * 3)
    M = [track(cycle[:n], np.float64, True, 3)[1] for n in (1, 2, 3)]
    return np.array_equal(M[2], np.eye(3)) and not any(np.array_equal(x, np.eye(3)) for x in M[:2])


def _parity_table(signs: dict[Any, tuple[float, float]], T: int) -> Table:
    rows = [(b, *(signs[b, d, n][0] for d in (np.float32, np.float64) for n in (100, T)), signs[b, np.float64, T][1])
            for b in STRENGTHS]  # fmt: skip
    columns = ("beta", "float32, T = 100", f"float32, T = {T}", "float64, T = 100", f"float64, T = {T}",
               "norm at the end, float64")  # fmt: skip
    return Table("parity of a bit stream: fraction of tokens with the correct sign", columns, rows)


def _sentences(right: dict, signs: dict, strengths: tuple, T: int, is_cycle: bool, off_diagonal: float) -> list[str]:
    exact, narrow = right[4, np.float64, True], right[4, np.float32, False]
    lasting = [b for b in strengths if signs[b, np.float64, 100][0] == 1]
    to_the_end = [b for b in strengths if signs[b, np.float64, T][0] == 1]
    sizes = ", ".join(f"{cell(signs[b, np.float64, T][1])} for {b:g}" for b in lasting)
    return [
        f"DeltaProduct with 4 steps per token reads the correct first of {ITEMS} items after {100 * exact:.4g} % of "
        f"{T} permutations (float32, unit keys: {100 * narrow:.4g} %); "
        f"with 2 steps {100 * right[2, np.float64, True]:.3g} %, "
        f"with 1 step {100 * right[1, np.float64, True]:.3g} %; the chance level is {100 / ITEMS:.3g} %.",
        "Two Householder steps in one token form a cycle of three: three tokens are the identity, one and two are not."
        if is_cycle
        else "Two steps did not form a cycle of three.",
        f"The parity of 100 bits is correct at every token for beta in {_listed(lasting)}, that of {T} bits in float64 "
        f"for {_listed(to_the_end)}. |S| at the end is {sizes}.",
        f"A diagonal decay leaves a diagonal state diagonal (largest off-diagonal entry {off_diagonal:g}): it permutes "
        "nothing.",
    ]


def _listed(values: list[float]) -> str:
    return "{" + ", ".join(f"{b:g}" for b in values) + "}"
