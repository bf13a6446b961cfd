"""Memory of large results: given to the next one when nothing refers to it any more, bounded, freed on demand."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

import linattn_np as la
from linattn_np.runtime.pieces import memory

SHAPE, KIND = (600, 1024), np.dtype(np.float32)


@pytest.fixture(autouse=True)
def _empty():
    memory.pool.clear()
    yield
    memory.pool.clear()


def held():
    return sum(y.size for blocks in memory.pool._free.values() for y in blocks.values())


def test_a_new_result_has_the_memory_of_one_that_is_gone():
    x = memory.empty(SHAPE, KIND)
    place = memory.address(x)
    view = x[3:, ::2]
    del x
    assert memory.address(memory.empty(SHAPE, KIND)) != place  # a view keeps it
    del view
    y = memory.empty((1024, 599), KIND)
    assert memory.address(y) == place
    assert y.flags.c_contiguous
    assert y.flags.writeable
    assert place % memory.PAGE == 0


def test_memory_of_another_size_is_not_taken():
    x = memory.empty(SHAPE, KIND)
    del x
    assert memory.empty((300, 1024), KIND).base.size <= 300 * 1024 * 4 * 9 / 8


def test_no_more_than_a_bound_is_held_and_clear_cache_frees_it():
    results = [memory.empty((1 << 20, 4), KIND) for _ in range(8)]  # 16 MiB each
    assert held() == 0
    del results
    assert 0 < held() <= memory.POOLED
    la.clear_cache()
    assert held() == 0


def test_results_of_calls_do_not_share_memory_while_they_live():
    x = np.ones(SHAPE, np.float32)
    first, second = la.nn.silu(x), la.nn.sigmoid(x)
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(first, second)
