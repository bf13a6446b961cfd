"""Token streams: a haystack with one needle for tests, windows of prose with needles for learning."""

import random
from dataclasses import dataclass

import numpy as np

from .needles import draw_needle, question, statement
from .text import Corpus

LEVELS = {1: "repeated sentences, 7-digit number", 2: "real prose, 7-digit number", 3: "real prose, uuid4"}
ANSWER_TOKENS = {1: 7, 2: 7, 3: 36}
SHORTEST = 128  # fits statement, question, twice the value and some haystack
APART = 60  # least number of prose tokens between a statement and its question in a training window


@dataclass(frozen=True)
class Streams:
    """One stream per depth; the answer is the last `answer_tokens` tokens of each."""

    ids: np.ndarray  # (B, T)
    needle_at: np.ndarray  # (B,) position of the first character of the fact value
    answer_tokens: int


def build_streams(corpus: Corpus, seed: int, level: int, length: int, depths: list[float]) -> Streams:
    """haystack[:c] + statement + value + haystack[c:] + question + value, exactly T tokens, c = depth len(haystack)."""
    rng = random.Random(f"{seed} {level} {length}")
    rows = [needle_stream(corpus, rng, level, length, depth) for depth in depths]
    ids, needle_at = zip(*rows, strict=True)
    return Streams(np.stack(ids), np.array(needle_at), ANSWER_TOKENS[level])


def needle_stream(corpus: Corpus, rng: random.Random, level: int, length: int, depth: float) -> tuple[np.ndarray, int]:
    """One stream (T,) and the position of its stated value."""
    fact, query, value = needle_ids(corpus, rng, "uuid" if level == 3 else "number")
    hay = haystack(corpus, rng, level, length - len(fact) - len(query) - 2 * len(value))
    cut = round(depth * len(hay))
    ids = np.concatenate([hay[:cut], fact, value, hay[cut:], query, value])
    return ids, cut + len(fact)


def needle_ids(corpus: Corpus, rng: random.Random, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids of statement, question and value of a new needle."""
    needle = draw_needle(rng, kind)
    texts = statement(kind, needle.key), question(kind, needle.key), needle.value
    fact, query, value = (corpus.vocabulary.encode(text) for text in texts)
    return fact, query, value


def haystack(corpus: Corpus, rng: random.Random, level: int, size: int) -> np.ndarray:
    """The repeated sentences (level 1), or a window of the haystack text at a random offset, wrapped around."""
    if size < 1:
        raise ValueError(f"streams need at least {SHORTEST} tokens")
    if level == 1:
        return np.resize(corpus.sentences, size)
    start = rng.randrange(len(corpus.haystack))
    return np.take(corpus.haystack, np.arange(start, start + size), mode="wrap")


def training_windows(
    corpus: Corpus, prose: np.ndarray, rng: random.Random, batch: int, length: int, needles: int
) -> np.ndarray:
    """Windows (batch, length + 1) of prose; in each, `needles` facts are stated once and queried once later."""
    return np.stack([training_window(corpus, prose, rng, length + 1, needles) for _ in range(batch)])


def training_window(corpus: Corpus, prose: np.ndarray, rng: random.Random, size: int, needles: int) -> np.ndarray:
    """A window of `size` tokens, including the statements and questions of its needles."""
    facts = [needle_ids(corpus, rng, rng.choice(("number", "uuid"))) for _ in range(needles)]
    size -= sum(len(fact) + len(query) + 2 * len(value) for fact, query, value in facts)
    start = rng.randrange(len(prose) - size)
    window = prose[start : start + size]
    inserts: list[tuple[int, np.ndarray]] = []
    for fact, query, value in facts:
        fact_at = rng.randrange(size - APART)
        query_at = rng.randrange(fact_at + APART, size)
        inserts += [(fact_at, np.concatenate([fact, value])), (query_at, np.concatenate([query, value]))]
    inserts.sort(key=lambda insert: insert[0])
    places = [place for place, _ in inserts]
    parts = np.split(window, places)
    mixed = [parts[0]]
    for (_, words), part in zip(inserts, parts[1:], strict=True):
        mixed += [words, part]
    return np.concatenate(mixed)
