"""Constant arrays of a call are computed once."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.runtime import constants
from linattn_np.runtime.constants import constant_array, host_constants
from linattn_np.variants.no_erase.retention import published_decays


@pytest.fixture(autouse=True)
def own_constants():
    host_constants.clear()
    yield
    host_constants.clear()


def numbers(n, key="numbers"):
    return constant_array(np, (key, n), "cpu", lambda: np.arange(float(n)))


def test_a_constant_is_computed_once_and_read_only():
    first = numbers(5)
    assert numbers(5) is first
    assert np.array_equal(first, np.arange(5.0))
    with pytest.raises(ValueError):
        first[0] = 1


def test_a_view_becomes_a_constant_of_its_own_memory():
    whole = np.arange(12.0)
    y = constant_array(np, "every other", "cpu", lambda: whole[::2])
    whole[:] = 0
    assert np.array_equal(y, [0, 2, 4, 6, 8, 10])
    assert y.flags.c_contiguous


def test_all_constants_together_are_bounded(monkeypatch):
    monkeypatch.setattr(constants, "MOST_BYTES", 100)
    oldest, latest = numbers(8), numbers(7)
    assert numbers(7) is latest
    assert numbers(8) is not oldest


def test_clear_cache_forgets_constants():
    y = numbers(5)
    la.clear_cache()
    assert numbers(5) is not y


def test_published_decays_are_computed_once():
    first, second = (published_decays(np, 3, np.dtype("float32"), "cpu") for _ in range(2))
    assert first is second
