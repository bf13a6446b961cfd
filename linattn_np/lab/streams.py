"""Streams of tokens: a haystack with one needle to test in, windows of prose with needles to learn from."""

import random
from dataclasses import dataclass

import numpy as np

from .needles import draw_needle, question, statement
from .text import Corpus

LEVELS = {
    1: "repeated sentences, 7-digit number",
    2: "real prose, 7-digit number",
    3: "real prose, uuid4",
}
ANSWER_TOKENS = {1: 7, 2: 7, 3: 36}
SHORTEST = 128  # statement, question and twice the value fit, with some haystack around them
APART = 60  # least number of prose tokens between a statement and its question in a window to learn from


@dataclass(frozen=True)
class Streams:
    """One stream a depth; the answer is the last `answer_tokens` tokens of each."""

    ids: np.ndarray  # (B, T)
    needle_at: np.ndarray  # (B,) position of the first character of the stated value
    answer_tokens: int


def build_streams(corpus: Corpus, seed: int, level: int, length: int, depths: list[float]) -> Streams:
    """haystack[:c] + statement + value + haystack[c:] + question + value, exactly T tokens, c = depth x haystack."""
    rng = random.Random(f"{seed} {level} {length}")
    rows = [needle_stream(corpus, rng, level, length, depth) for depth in depths]
    ids, needle_at = zip(*rows, strict=True)
    return Streams(np.stack(ids), np.array(needle_at), ANSWER_TOKENS[level])


def needle_stream(corpus: Corpus, rng: random.Random, level: int, length: int, depth: float) -> tuple[np.ndarray, int]:
    """One stream (T,) and the position of its stated value."""
    stated, asked, value = needle_ids(corpus, rng, "uuid" if level == 3 else "number")
    hay = haystack(corpus, rng, level, length - len(stated) - len(asked) - 2 * len(value))
    cut = round(depth * len(hay))
    ids = np.concatenate([hay[:cut], stated, value, hay[cut:], asked, value])
    return ids, cut + len(stated)


def needle_ids(corpus: Corpus, rng: random.Random, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids of statement, question and value of a fresh needle."""
    needle = draw_needle(rng, kind)
    texts = statement(kind, needle.key), question(kind, needle.key), needle.value
    stated, asked, value = (corpus.vocabulary.encode(text) for text in texts)
    return stated, asked, value


def haystack(corpus: Corpus, rng: random.Random, level: int, size: int) -> np.ndarray:
    """The repeated sentences (level 1) or a window of the haystack text at a random place, wrapped at its end."""
    if size < 1:
        raise ValueError(f"streams need at least {SHORTEST} tokens")
    if level == 1:
        return np.resize(corpus.sentences, size)
    start = rng.randrange(len(corpus.haystack))
    return np.take(corpus.haystack, np.arange(start, start + size), mode="wrap")


def training_windows(
    corpus: Corpus, prose: np.ndarray, rng: random.Random, batch: int, length: int, needles: int
) -> np.ndarray:
    """Windows (batch, length + 1) of prose; in each, `needles` facts are stated once and asked once later."""
    return np.stack([training_window(corpus, prose, rng, length + 1, needles) for _ in range(batch)])


def training_window(corpus: Corpus, prose: np.ndarray, rng: random.Random, size: int, needles: int) -> np.ndarray:
    """A window of `size` tokens, statements and questions of its needles counted in."""
    facts = [needle_ids(corpus, rng, rng.choice(("number", "uuid"))) for _ in range(needles)]
    size -= sum(len(stated) + len(asked) + 2 * len(value) for stated, asked, value in facts)
    start = rng.randrange(len(prose) - size)
    window = prose[start : start + size]
    inserts: list[tuple[int, np.ndarray]] = []
    for stated, asked, value in facts:
        said_at = rng.randrange(size - APART)
        asked_at = rng.randrange(said_at + APART, size)
        inserts += [(said_at, np.concatenate([stated, value])), (asked_at, np.concatenate([asked, value]))]
    inserts.sort(key=lambda insert: insert[0])
    places = [place for place, _ in inserts]
    parts = np.split(window, places)
    mixed = [parts[0]]
    for (_, words), part in zip(inserts, parts[1:], strict=True):
        mixed += [words, part]
    return np.concatenate(mixed)
