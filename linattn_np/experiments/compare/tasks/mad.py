"""The six tasks of MAD: Poli et al., arXiv 2403.17844. Compression is asked by position, in the same sequence."""

from __future__ import annotations

import numpy as np

from .task import Batch, Draw, Task, distinct, unlabelled

NOISE = 16


def _same(name: str, vocabulary: int, T: int, chance: float, draw: Draw) -> Task:
    return Task(name, vocabulary, draw, {f"{T} tokens": draw}, chance, T)


def recall(V: int = 16, T: int = 128) -> Task:
    """Pairs of a mapping that each sequence draws; the label of a key that was seen before is its value."""
    return _same("mad_recall", V, T, 2 / V, lambda rng, B: pairs(rng, B, T, V, 0.0))


def noisy(V: int = 16, T: int = 128) -> Task:
    """The same with tokens of noise between them, a fifth of all."""
    return _same("mad_noisy", V + NOISE, T, 2 / V, lambda rng, B: pairs(rng, B, T, V, 0.2))


def pairs(rng: np.random.Generator, B: int, T: int, V: int, noise: float) -> Batch:
    """Keys are tokens below V / 2, values those below V, noise the tokens above."""
    ids, labels = unlabelled(B, T)
    n, rows = V // 2, np.arange(B)
    value, seen = n + rng.integers(n, size=(B, n)), np.zeros((B, n), bool)
    waiting = np.full(B, -1)  # the key whose value comes next
    for t in range(T):
        key = rng.integers(n, size=B)
        is_noise = (waiting < 0) & (rng.random(B) < noise / (1 - noise / 2))
        begins = (waiting < 0) & ~is_noise
        ids[:, t] = np.where(
            waiting >= 0, value[rows, waiting], np.where(is_noise, V + rng.integers(NOISE, size=B), key)
        )
        known = begins & seen[rows, key]
        labels[known, t] = value[rows, key][known]
        seen[rows[begins], key[begins]] = True
        waiting = np.where(begins, key, -1)
    return ids, labels


def fuzzy(V: int = 16, T: int = 128, longest: int = 3) -> Task:
    """Keys and values are motifs of 1 to 3 tokens; the labels of a key that was seen before are its value."""
    n = V // 2

    def draw(rng: np.random.Generator, B: int) -> Batch:
        ids, labels = unlabelled(B, T)
        for row, label in zip(ids, labels, strict=True):
            lengths = rng.integers(1, longest + 1, (2, n))
            # the first token tells keys apart, as the last one of a prefix code would
            keys = [np.concatenate([[i], rng.integers(n, size=lengths[0, i] - 1)]) for i in range(n)]
            values = [n + rng.integers(n, size=m) for m in lengths[1]]
            t, seen = 0, set[int]()
            while t < T:
                i = int(rng.integers(n))
                motif = np.concatenate([keys[i], values[i]])[: T - t]
                row[t : t + len(motif)] = motif
                if i in seen:
                    first = len(keys[i]) - 1
                    answers = values[i][: max(0, min(len(values[i]), T - t - first))]
                    label[t + first : t + first + len(answers)] = answers
                seen.add(i)
                t += len(motif)
        return ids, labels

    return _same("mad_fuzzy", V, T, 2 / V, draw)


def memory(V: int = 256, T: int = 32) -> Task:
    """A mapping that is the same in all sequences, and no value is shown: it is learned into the parameters."""
    value = V // 2 + np.random.default_rng(0).permutation(V // 2)

    def draw(rng: np.random.Generator, B: int) -> Batch:
        ids = rng.integers(V // 2, size=(B, T))
        return ids, value[ids]

    return _same("mad_memory", V, T, 2 / V, draw)


def compression(V: int = 16, T: int = 32) -> Task:
    """n random tokens, then their places: the label of a place is its token."""
    n = T // 2

    def draw(rng: np.random.Generator, B: int) -> Batch:
        ids, labels = unlabelled(B, T)
        words, order = rng.integers(V, size=(B, n)), distinct(rng, B, n, n)
        ids[:, :n], ids[:, n:] = words, V + order
        labels[:, n:] = np.take_along_axis(words, order, axis=1)
        return ids, labels

    return _same("mad_compression", V + n, T, 1 / V, draw)


def copying(V: int = 16, T: int = 256, count: int = 16) -> Task:
    """Some tokens among blanks, then a mark: they are copied in their order."""
    blank, mark = V, V + 1

    def draw(rng: np.random.Generator, B: int) -> Batch:
        ids, labels = unlabelled(B, T)
        words, places = rng.integers(V, size=(B, count)), np.sort(distinct(rng, B, count, T - count), axis=1)
        ids[:] = blank
        np.put_along_axis(ids, places, words, axis=1)
        ids[:, -count:], labels[:, -count:] = mark, words
        return ids, labels

    return _same("mad_copying", V + 2, T, 1 / V, draw)
