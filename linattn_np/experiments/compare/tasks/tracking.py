"""A state that every token changes: parity, arithmetic, permutations. Grazzi et al., arXiv 2411.12537."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from .task import Batch, Task

TRAINED, TESTED = 40, (40, 128, 256)  # tokens
Words = Callable[[np.random.Generator, int, int], Batch]  # (rng, B, T)


def _task(name: str, vocabulary: int, words: Words, chance: float) -> Task:
    """Training on 3 to 40 tokens, tests of more: labels behind the length have no loss."""

    def draw(rng: np.random.Generator, B: int) -> Batch:
        return words(rng, B, TRAINED)

    def tests(T: int) -> Callable[[np.random.Generator, int], Batch]:
        return lambda rng, B: words(rng, B, T)

    return Task(name, vocabulary, draw, {f"{T} tokens": tests(T) for T in TESTED}, chance, TRAINED)


def parity() -> Task:
    """Whether the number of ones so far is odd."""

    def words(rng: np.random.Generator, B: int, T: int) -> Batch:
        bits = rng.integers(2, size=(B, T))
        return bits, np.cumsum(bits, axis=1) % 2

    return _task("parity", 2, words, 1 / 2)


def arithmetic(m: int = 5) -> Task:
    """The value so far of digits with + - * between them, modulo 5; products come first, as in the papers."""

    def words(rng: np.random.Generator, B: int, T: int) -> Batch:
        ids, labels = rng.integers(m, size=(B, T)), np.full((B, T), -100)
        ids[:, 1::2] = m + rng.integers(3, size=(B, T // 2))
        total, term = np.zeros(B, np.int64), ids[:, 0]
        labels[:, 0] = term
        for t in range(2, T, 2):
            op, x = ids[:, t - 1] - m, ids[:, t]
            total = np.where(op == 2, total, total + term)
            term = np.select([op == 0, op == 1], [x, -x], term * x)
            total, term = total % m, term % m
            labels[:, t] = (total + term) % m
        return ids, labels

    return _task("arithmetic", m + 3, words, 1 / m)


def permutations(n: int, swaps: bool = False) -> Task:
    """The product of all permutations of n items so far; labels are permutations, and so are tokens.

    swaps: tokens exchange two items or none.
    """
    each = np.array(list(itertools.permutations(range(n))))
    number = {tuple(p): i for i, p in enumerate(each.tolist())}
    product = np.array([[number[tuple(q[p].tolist())] for q in each] for p in each])  # of p after q
    tokens = np.flatnonzero((each != np.arange(n)).sum(axis=1) <= 2) if swaps else np.arange(len(each))

    def words(rng: np.random.Generator, B: int, T: int) -> Batch:
        ids = rng.choice(tokens, size=(B, T))
        labels = ids.copy()
        for t in range(1, T):
            labels[:, t] = product[ids[:, t], labels[:, t - 1]]
        return ids, labels

    return _task(f"s{n}_swaps" if swaps else f"s{n}", len(each), words, 1 / len(each))
