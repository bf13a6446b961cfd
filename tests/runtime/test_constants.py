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


EQUAL = {"T": 8, "H": 2, "K": 8, "V": 2}  # H R V = K = T: arrays of other shapes have as many numbers


def test_a_key_stands_for_one_array(monkeypatch):
    """Calls of all variants do not find each other's constants, whichever came first."""
    once, found = constants.HostConstants.once, {}

    def compared(self, key, make):
        y = np.array(make())
        same = found.setdefault(key, (y.shape, y.dtype, y.tobytes()))
        assert same == (y.shape, y.dtype, y.tobytes()), key
        return once(self, key, make)

    monkeypatch.setattr(constants.HostConstants, "once", compared)
    rng = np.random.default_rng(0)
    for fn in la.VARIANTS:
        options = next(o for o in fn.samples.options if o.get("causal", True))
        for lead, how in (((2,), {}), ((1,), {"cu_seqlens": [0, 3, 3, 8]})):
            x = la.testing.sample(fn, rng, B=lead, **EQUAL)
            if "mimo_x" in x:
                x.pop("mimo_z")  # ones in its place
            result, pullback = la.vjp(fn, **x, **options, **how, return_state=True)
            pullback(result.out)
    assert len(found) > 20
