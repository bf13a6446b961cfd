"""Streams of any length from a file: pieces with a state between them, stopped and resumed to the bit."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import relative_error

pytest.importorskip("numba")

PIECE, WIDTH = 1 << 16, 8
LENGTHS = [0, 1, 10_007, pytest.param(10_000_019, marks=pytest.mark.slow)]  # the last two are primes


def of_rows(rows):
    """Queries, keys, values (T, 1, 3), a log decay and a strength (T, 1) from rows (T, 8) of numbers."""
    v, k = rows[:, None, :3], rows[:, None, 3:6]
    k = k / np.sqrt(1 + np.sum(k * k, axis=-1, keepdims=True))  # shorter than 1
    return {"q": k + v, "k": k, "v": v, "g": -np.abs(rows[:, 6:7]), "beta": 1 / (1 + np.exp(-rows[:, 7:]))}


FUNCTIONS = {  # x: the arrays of a piece
    "scan": (la.scan, lambda x: (x["g"] * np.ones(3, x["v"].dtype), x["v"][:, 0]), {"log": True}),
    "hgrn": (la.hgrn, lambda x: (x["v"][:, 0], x["g"] * np.ones(3, x["v"].dtype)), {}),
    "simple_gla": (la.simple_gla, lambda x: (x["q"], x["k"], x["v"], x["g"]), {}),
    "gated_delta_rule": (la.gated_delta_rule, lambda x: (x["q"], x["k"], x["v"], x["g"], x["beta"]), {}),
    "kda": (la.kda, lambda x: (x["q"], x["k"], x["v"], x["g"][..., None] + 0 * x["k"], x["beta"]), {}),
}


def written(path, T, seed=0):
    """A memory-mapped file of T rows in 16 bits, drawn a piece at a time."""
    rows = np.lib.format.open_memmap(path, "w+", np.float16, (T, WIDTH)) if T else np.zeros((0, WIDTH), np.float16)
    for n, start in enumerate(range(0, T, PIECE)):
        rows[start : start + PIECE] = np.random.default_rng([seed, n]).standard_normal((min(PIECE, T - start), WIDTH))
    if T:
        rows.flush()
        rows = np.load(path, mmap_mode="r")
    return rows


def followed(name, rows, dtype, piece, state=None):
    """The state after all rows, read and computed piece by piece, and the last output."""
    fn, arrays, options = FUNCTIONS[name]
    for a in range(0, max(len(rows), 1), piece):
        x = of_rows(np.asarray(rows[a : a + piece], dtype))
        out, state = fn(*arrays(x), **options, state=state, return_state=True, num_threads=1)
    return state, out[-1:]


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_stream_that_is_stopped_and_resumed(name, T, tmp_path):
    """To the bit from the states of a file; the end is that of float64; a short stream is one call."""
    rows, piece = written(tmp_path / "rows.npy", T), PIECE if T > PIECE else 1000
    state, out = followed(name, rows, np.float32, piece)
    if (start := T // piece // 2 * piece) > 0:
        np.savez(tmp_path / "checkpoint.npz", state=followed(name, rows[:start], np.float32, piece)[0], start=start)
        with np.load(tmp_path / "checkpoint.npz") as saved:
            again = followed(name, rows[int(saved["start"]) :], np.float32, piece, saved["state"])
        assert np.array_equal(again[0], state)
        assert np.array_equal(again[1], out)
    exact, exact_out = followed(name, rows, np.float64, piece)
    assert max(relative_error(state, exact), relative_error(out, exact_out)) <= 50 * 2.0**-23
    if T <= PIECE:
        whole, whole_out = followed(name, rows, np.float64, max(T, 1))
        assert max(relative_error(exact, whole), relative_error(exact_out, whole_out)) <= 1e-13
