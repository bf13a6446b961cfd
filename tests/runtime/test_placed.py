"""Arrays between the kernels of a plan share a buffer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("numba")
record = pytest.importorskip("linattn_np.runtime.pieces.record")


def random_case(seed):
    rng = np.random.default_rng(seed)
    arrays = [np.empty(int(n), np.uint8) for n in rng.integers(0, 3, 12) * rng.integers(1, 9000, 12) * 8]
    launches = [{int(n) for n in rng.integers(-3, 15, rng.integers(1, 5))} for _ in range(20)]
    return arrays, launches


@pytest.mark.parametrize("seed", range(30))
def test_arrays_that_are_alive_together_lie_apart(seed):
    arrays, launches = random_case(seed)
    places, size = record.placed(arrays, launches)
    own = {n: [i for i, taken in enumerate(launches) if n in taken] for n in range(len(arrays))}
    for n, m in itertools.combinations([n for n, at in own.items() if at], 2):
        if own[n][0] <= own[m][-1] and own[m][0] <= own[n][-1]:
            assert places[n] + arrays[n].nbytes <= places[m] or places[m] + arrays[m].nbytes <= places[n]
    assert all(at + x.nbytes <= size for n, (at, x) in enumerate(zip(places, arrays, strict=True)) if own[n])
    assert all(at % 64 == 0 for at in places)


def test_a_place_is_taken_again():
    arrays = [np.empty(1 << 10, np.uint8) for _ in range(4)]
    assert record.placed(arrays, [{0, 1}, {1, 2}, {2, 3}]) == ([0, 1 << 10, 0, 1 << 10], 2 << 10)
