"""Evaluation: each memory reads a haystack with one needle and is queried for it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

import linattn_np as la

from .codes import load_codes
from .fixed_memories import FIXED
from .gates import GateSet
from .memories import RECURRENT, SOFTMAX, Logits, Memory, softmax_outputs
from .needles import ALPHABET, DIGITS
from .streams import Streams, build_streams
from .text import load_corpus

SEGMENT = 2048  # tokens per call; the state is passed to the next call
KNOWN = RECURRENT | FIXED
TITLE_OF = {name: memory.title for name, memory in KNOWN.items()} | {SOFTMAX: la.softmax_attention.spec.title}
TRACED_DEPTH = 0.2  # depth of the needle whose votes are separated from the others


@dataclass(frozen=True)
class CellJob:
    """One seed, level and length; all memories and gate sets read the same streams."""

    seed: int
    level: int
    length: int
    depths: tuple[float, ...]
    memories: tuple[str, ...]
    gate_sets: dict[str, GateSet]
    text: str | None = None
    backend: str | None = None


@dataclass(frozen=True)
class Score:
    """The answers of one memory in one cell, by depth, and the vote statistics of the traced needle."""

    gates: str | None  # None: no learned gates
    memory: str
    seed: int
    level: int
    length: int
    exact: list[bool]  # exact answer
    characters: list[float]  # fraction of correct characters
    signal: float | None = None  # mean contribution of the needle to the votes for the correct characters
    noise: float | None = None  # standard deviation of the votes contributed by all other tokens
    state: float | None = None  # Frobenius norm after the last token


@dataclass(frozen=True)
class Reading:
    """Vectors of the streams: contexts (B, T + 1, 1, K), values (B, T, 1, V), classes (B, T).

    The last row repeats the stream of the traced needle with all values zero but the needle's: a memory is linear in
    v, so that this row yields the needle's contribution to the votes.
    """

    contexts: np.ndarray
    values: np.ndarray
    classes: np.ndarray
    truth: np.ndarray  # (B - 1, n) ids of the answers
    traced: int  # index of the row that the last row repeats
    candidates: np.ndarray  # values of the possible answer characters


def probe_cell(job: CellJob) -> list[Score]:
    """All scores of one cell; a memory without learned gates runs once."""
    corpus = load_corpus(job.text)
    streams = build_streams(corpus, job.seed, job.level, job.length, list(job.depths))
    codes = load_codes(job.seed, job.text)
    traced = int(np.argmin(np.abs(np.array(job.depths) - TRACED_DEPTH)))
    reading = read_streams(streams, corpus.classes, codes.values, codes.contexts(streams.ids), traced)
    cell = (job.seed, job.level, job.length)
    scores = []
    for gates, name, logits in runs(job):
        if name == SOFTMAX:
            votes = softmax_votes(reading)
            scores.append(Score(gates, name, *cell, *correct(votes, reading.truth)))
            continue
        memory = KNOWN[name]
        votes, state = memory_votes(memory, logits, reading, job.backend)
        statistics = signal_and_noise(votes[traced], votes[-1], reading.truth[traced])
        size = float(np.linalg.norm(memory.matrix(logits, state)[traced]))
        scores.append(Score(gates, name, *cell, *correct(votes[:-1], reading.truth), *statistics, size))
    return scores


def runs(job: CellJob) -> Iterator[tuple[str | None, str, Logits]]:
    """Gate set, memory and logits of each run: memories without gates once, the others for each set."""
    for name in job.memories:
        if name == SOFTMAX or not KNOWN[name].start:
            yield None, name, {}
    for gates, gate_set in job.gate_sets.items():
        for name in job.memories:
            if name in gate_set[job.seed]:
                yield gates, name, gate_set[job.seed][name].logits


def tokens_read(job: CellJob) -> int:
    """Tokens that all memories of a cell read, the stream of the traced needle included."""
    return job.length * (len(job.depths) + 1) * sum(1 for _ in runs(job))


def read_streams(
    streams: Streams, classes: np.ndarray, values: np.ndarray, contexts: np.ndarray, traced: int
) -> Reading:
    """The vectors of the streams, and the traced needle's row after them."""
    n = streams.answer_tokens
    rows = np.r_[: len(streams.ids), traced]
    needle = slice(streams.needle_at[traced], streams.needle_at[traced] + n)
    v = values[streams.ids[rows]]
    v[-1] = 0
    v[-1, needle] = v[traced, needle]
    characters = len(ALPHABET) if n > 7 else len(DIGITS)
    return Reading(
        contexts=contexts[rows][:, :, None],
        values=v[:, :, None],
        classes=classes[streams.ids[rows]],
        truth=streams.ids[:, -n:],
        traced=traced,
        candidates=values[:characters],
    )


def memory_votes(
    memory: Memory, logits: Logits, reading: Reading, backend: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Votes (B, n, characters) for each character of the answer, with teacher forcing, and the last state (B, 1, K, V).

    An answer that is exact under teacher forcing is exact under greedy decoding: up to its first mistake a greedy
    decoder has seen correct characters only. Tokens before the question's last one are written without a read.
    """
    T, n = reading.classes.shape[1], reading.truth.shape[1]
    q, k, v, classes = reading.contexts[:, 1:], reading.contexts[:, :-1], reading.values, reading.classes
    first = T - n - 1  # the token whose query predicts the first character
    state = None
    for start in range(0, first, SEGMENT):
        part = slice(start, min(start + SEGMENT, first))
        _, state = memory.run(logits, classes[:, part], None, k[:, part], v[:, part], state, backend)
    part = slice(first, T)
    out, state = memory.run(logits, classes[:, part], q[:, part], k[:, part], v[:, part], state, backend)
    return out[:, :-1, 0] @ reading.candidates.T, state


def softmax_votes(reading: Reading) -> np.ndarray:
    """Votes (B - 1, n, characters) of softmax attention over the stream without its last token."""
    n = reading.truth.shape[1]
    contexts = reading.contexts[:-1, :, 0]
    out = softmax_outputs(contexts[:, -n - 1 : -1], contexts[:, :-2], reading.values[:-1, :-1, 0])
    return out @ reading.candidates.T


def correct(votes: np.ndarray, truth: np.ndarray) -> tuple[list[bool], list[float]]:
    """Exact answers and fractions of correct characters, by row."""
    same = votes.argmax(-1) == truth
    return same.all(1).tolist(), same.mean(1).tolist()


def signal_and_noise(votes: np.ndarray, from_needle: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """Mean of the needle's votes (n, characters) for the correct ones, standard deviation of the other votes."""
    signal = np.take_along_axis(from_needle, truth[:, None], 1).mean()
    return float(signal), float((votes - from_needle).std())
