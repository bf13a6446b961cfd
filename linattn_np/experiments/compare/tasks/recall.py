"""Facts that are told once and queried later."""

from __future__ import annotations

import functools

import numpy as np

from ...series import help_text
from .task import Batch, Task, distinct, unlabelled

KEYS = VALUES = 32
VOCABULARY = 1 + KEYS + VALUES  # 0 is the blank
PAIRS = (4, 8, 16, 24)
BYTES = 256


def associations(rng: np.random.Generator, B: int, T: int, pairs: int, power: float = 0.01) -> Batch:
    """MQAR: k_1 v_1 ... k_n v_n, then each key once, at distances of a power law; the label of a query is its value.

    Blanks stand between the queries. Arora et al., Zoology, arXiv 2312.04927.
    """
    ids, labels = unlabelled(B, T)
    rows = np.arange(B)[:, None]
    keys, values = 1 + distinct(rng, B, pairs, KEYS), 1 + KEYS + rng.integers(VALUES, size=(B, pairs))
    ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
    places = (T - 2 * pairs) // 2
    weights = np.log(power * np.arange(1, places + 1) ** (power - 1)) + rng.gumbel(size=(B, places))
    at = 2 * pairs + 2 * np.argsort(-weights, axis=1)[:, :pairs]  # drawn without replacement, likely ones first
    ids[rows, at], labels[rows, at] = keys, values
    return ids, labels


def rebound(rng: np.random.Generator, B: int, pairs: int) -> Batch:
    """n pairs; then half of the keys with new values; then every key: the label is the latest value."""
    ids, labels = unlabelled(B, 4 * pairs)
    keys, values = 1 + distinct(rng, B, pairs, KEYS), 1 + KEYS + rng.integers(VALUES, size=(B, pairs))
    ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
    half, new = pairs // 2, values.copy()
    new[:, :half] = 1 + KEYS + rng.integers(VALUES, size=(B, half))
    ids[:, 2 * pairs : 3 * pairs : 2], ids[:, 2 * pairs + 1 : 3 * pairs : 2] = keys[:, :half], new[:, :half]
    order, rows = distinct(rng, B, pairs, pairs), np.arange(B)[:, None]
    ids[:, 3 * pairs :], labels[:, 3 * pairs :] = keys[rows, order], new[rows, order]
    return ids, labels


def mqar(T: int = 64, pairs: int = 8) -> Task:
    """Queries of `pairs` facts."""
    draw = functools.partial(associations, T=T, pairs=pairs)
    return Task("mqar", VOCABULARY, draw, {f"{pairs} pairs": draw}, 1 / VALUES, T)


def capacity(T: int = 96) -> Task:
    """Facts of numbers that vary: how many are recalled."""
    each = {f"{pairs} pairs": functools.partial(associations, T=T, pairs=pairs) for pairs in PAIRS}
    return Task("capacity", VOCABULARY, lambda rng, B: associations(rng, B, T, int(rng.choice(PAIRS))), each,
                1 / VALUES, T)  # fmt: skip


def rebinding(pairs: int = 8) -> Task:
    """An abrupt change: keys that are bound anew."""
    draw = functools.partial(rebound, pairs=pairs)
    return Task("rebinding", VOCABULARY, draw, {f"{pairs} pairs": draw}, 1 / VALUES, 4 * pairs)


# a needle in a haystack, of bytes

SENTENCES = b"The lamp is warm. The road is long. The tea is sweet. Off we walk. "
TOLD, ASKED = b" The secret of %s is %s. ", b" What is the secret of %s? It is %s"
NAMES = [
    first + b"-" + last for first in (b"tall", b"calm", b"rapid", b"noisy") for last in (b"river", b"needle", b"age")
]


@functools.cache
def haystack(level: int, tests: bool) -> np.ndarray:
    """Level 1: a few sentences again and again; 2 and 3: text, another one for tests."""
    if level == 1:
        return np.frombuffer(SENTENCES * 40, np.uint8)
    text = np.frombuffer(help_text().encode(), np.uint8)
    return text[len(text) // 2 :] if tests else text[: len(text) // 2]


def told(rng: np.random.Generator, B: int, T: int, level: int, tests: bool) -> Batch:
    """A fact at a random place of a text, and the question; the labels are the bytes of the answer."""
    hay, count = haystack(level, tests), 16 if level == 3 else 5
    letters = b"0123456789abcdef" if level == 3 else b"0123456789"
    ids, labels = unlabelled(B, T)
    for ids_b, labels_b in zip(ids, labels, strict=True):
        name, answer = NAMES[rng.integers(len(NAMES))], bytes(rng.choice(list(letters), count).tolist())
        needle, question = (np.frombuffer(form % (name, answer), np.uint8) for form in (TOLD, ASKED))
        start = int(rng.integers(len(hay) - T))
        rest = T - len(needle) - len(question) + 1
        depth = int(rng.integers(rest + 1))
        text = hay[start : start + rest]
        whole = np.concatenate([text[:depth], needle, text[depth:], question])
        ids_b[:], labels_b[-count:] = whole[:-1], whole[-count:]
    return ids, labels


def needle(level: int, T: int = 192) -> Task:
    """Answers of 5 digits, of 16 hexadecimal digits at level 3; tests of the same and of twice the length."""
    each = {f"{n} tokens": functools.partial(told, T=n, level=level, tests=True) for n in (T, 2 * T)}
    return Task(f"needle{level}", BYTES, functools.partial(told, T=T, level=level, tests=False), each,
                1 / 16 if level == 3 else 1 / 10, T)  # fmt: skip
