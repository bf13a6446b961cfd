"""`linattn bench`: its measurements and its sentences agree."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

import linattn_np as la
from linattn_np.experiments.bench.command import add_arguments, run
from linattn_np.experiments.bench.measure import Row, crossover, softmax_attention, vectors
from linattn_np.experiments.bench.report import sentences, table


def test_softmax_attention_is_the_definition():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 300, 2, 4))  # more than a block of rows
    logits = np.einsum("bihk,bjhk->bhij", q, k) / 2
    weights = np.exp(np.where(np.tri(300, dtype=bool), logits, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    assert np.allclose(softmax_attention(q, k, v), np.einsum("bhij,bjhv->bihv", weights, v), rtol=0, atol=1e-12)


@pytest.mark.parametrize("fn", [fn for fn in la.VARIANTS if fn.spec.row_axes == 2], ids=lambda fn: fn.__name__)
def test_vectors_come_from_the_series_and_are_causal(fn):
    series = np.random.default_rng(0).standard_normal((40, 2))
    changed = series.copy()
    changed[30:] += 1
    one, other = vectors(fn, series, 40, 2, 8), vectors(fn, changed, 40, 2, 8)
    assert np.isfinite(fn(**one)).all()
    assert all(np.array_equal(x[:, :30], other[n][:, :30]) for n, x in one.items() if x.ndim > 2)
    assert any(not np.array_equal(x, other[n]) for n, x in one.items()) or fn.spec.micro_steps


@pytest.mark.parametrize(
    ("ours", "theirs", "expected", "outside"),
    [
        ([1, 2, 4], [0.5, 2, 8], 200, False),
        ([1, 2, 4], [2, 8, 32], 100, True),  # faster at the first length
        ([8, 16, 32], [1, 4, 16], 800, True),  # extrapolated
        ([8, 16, 64], [1, 2, 8], np.inf, True),  # never
        ([8, 16, 63], [1, 2, 8], np.inf, True),  # a length far beyond the measured ones is not named
    ],
)
def test_crossover(ours, theirs, expected, outside):
    T = (100, 200, 400)
    row, softmax = (Row("f", "chunks", seconds=dict(zip(T, map(float, s), strict=True))) for s in (ours, theirs))
    at, is_outside = crossover(row, softmax)
    assert at == pytest.approx(expected, rel=1e-6)
    assert is_outside == outside


def test_words_and_cells():
    row = Row("f", "chunks", 2.0, {100: 1.0, 200: 2.0}, {100: 1.0, 200: 2.0}, 1 << 20)
    softmax = Row("softmax attention", "", 1.0, {100: 2.0, 200: 8.0}, {100: 1.0, 200: 2.0}, 1 << 21)
    exactness, speed, memory = sentences([row], softmax, "a series", "1 CPU thread")
    assert "2 eps of float32 (f, chunks)" in exactness
    assert speed.startswith("On 1 CPU thread, at T = 200, the fastest was f, chunks: 2,000 ms where")
    assert "4 times as fast; it is faster from T = 100 on, the shortest measured, or earlier" in speed
    assert "1 MiB of arrays" in memory
    columns, cells = table([row], softmax)
    assert [len(columns)] * 2 == list(map(len, cells))
    slow = Row("f", "chunks", float("nan"), {100: 8.0, 200: 16.0}, {100: 1.0, 200: 2.0})
    exactness, speed, _ = sentences([slow], softmax, "a series", "1 CPU thread")
    assert "too long for a comparison" in exactness
    assert "2 times as slow; it is faster from about T = 400 on (extrapolated)" in speed


def command(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(list(map(str, words))))


def test_the_command(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((200, 2)).cumsum(0))
    where = ("--out", tmp_path / "out")
    size = ("--lengths", "32,64", 1000, "--heads", 1, "--width", 8, "--variant", "delta_rule", "--variant", "gla")
    assert command(tmp_path / "x.npy", *size, *where) == 0
    printed = capsys.readouterr().out
    assert printed.index("eps of float32") < printed.index("softmax attention  ")
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [row["function"] for row in found["rows"]] == ["delta_rule"] * 3 + ["gla"] * 3 + ["softmax attention"]
    assert all(row["error_eps"] < 100 and set(row["seconds"]) == {"32", "64"} for row in found["rows"])
    assert (tmp_path / "out" / "bench.png").read_bytes()[:4] == b"\x89PNG"
    assert found["threads"] == 1
    assert command(tmp_path / "x.npy", "--lengths", 500, *where) == 2
    assert "x.npy has 200 samples, expected 500 or more" in capsys.readouterr().err
    assert command(tmp_path / "missing.npy", *where) == 2
