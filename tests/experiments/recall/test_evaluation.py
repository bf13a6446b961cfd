"""Evaluation of memories: retrieval, its limits, and the parts of a vote."""

from dataclasses import replace

import numpy as np
import pytest

from linattn_np.experiments.recall.codes import load_codes
from linattn_np.experiments.recall.evaluation import KNOWN, CellJob, Score, memory_votes, probe_cell, read_streams
from linattn_np.experiments.recall.gates import SHIPPED, load_gate_sets
from linattn_np.experiments.recall.streams import build_streams
from linattn_np.experiments.recall.text import load_corpus

DEPTHS = tuple(i / 10 for i in range(11))
SEEDS = range(3)


def probe(level: int, length: int, memories: tuple[str, ...], seeds=SEEDS) -> dict[str, float]:
    """Whole answers right by memory, facts gates."""
    gates = load_gate_sets(["facts"])
    found: dict[str, list[Score]] = {}
    for seed in seeds:
        for score in probe_cell(CellJob(seed, level, length, DEPTHS, memories, gates)):
            found.setdefault(score.memory, []).append(score)
    return {memory: float(np.mean([score.exact for score in scores])) for memory, scores in found.items()}


@pytest.mark.parametrize(("level", "length"), [(1, 512), (1, 4096), (2, 512), (2, 4096), (3, 512), (3, 2048)])
def test_softmax_finds_the_needle_everywhere(level, length):
    assert probe(level, length, ("softmax",))["softmax"] >= 0.95


def test_under_repetition_the_delta_rule_keeps_and_adding_does_not():
    right = probe(1, 4096, ("mamba2", "delta"))
    assert right["delta"] >= 0.85
    assert right["mamba2"] <= 0.15


def test_a_memory_that_learns_nothing_runs_once_and_the_others_for_each_gate_set():
    gates = load_gate_sets(SHIPPED)
    job = CellJob(0, 2, 256, (0.0, 1.0), ("linear", "softmax", "delta", "kda"), gates)
    runs = [(score.gates, score.memory) for score in probe_cell(job)]
    learned = [(name, memory) for name in SHIPPED for memory in ("delta", "kda")]
    assert runs == [(None, "linear"), (None, "softmax"), *learned]


@pytest.mark.parametrize("name", KNOWN)
def test_votes_of_the_needle_and_of_the_rest_add_up(name):
    corpus, codes = load_corpus(), load_codes(0)
    streams = build_streams(corpus, 0, 3, 700, [0.0, 0.4, 1.0])
    reading = read_streams(streams, corpus.classes, codes.values, codes.contexts(streams.ids), 1)
    gates = load_gate_sets(["mixed"])["mixed"][0]
    logits = gates[name].logits if name in gates else {}
    votes, _ = memory_votes(KNOWN[name], logits, reading)
    rest = reading.values.copy()
    rest[1] -= rest[-1]
    others, _ = memory_votes(KNOWN[name], logits, replace(reading, values=rest))
    np.testing.assert_allclose(others[1] + votes[-1], votes[1], atol=2e-5)
    assert np.abs(votes[-1]).max() > 1e-4


def test_linear_attention_gives_the_needle_its_whole_vote():
    job = CellJob(0, 2, 512, DEPTHS, ("linear",), {})
    (score,) = probe_cell(job)
    assert score.signal == pytest.approx(1, abs=0.1)
    assert 0.1 < score.noise < 0.4
    assert len(score.exact) == len(score.characters) == len(DEPTHS)
