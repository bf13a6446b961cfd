"""Numbers rounded to 16 bits in compiled code: NumPy's and ml_dtypes' bits."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")
from linattn_np.ops.cpu import formulas as numba_stored
from linattn_np.runtime import arrays as namespace

KINDS = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]
both = pytest.mark.parametrize("kind", KINDS, ids=str)


def numbers(kind):
    """Any bits, every number of the kind and what lies on and beside the middle of two, in float32."""
    every = np.arange(2**16, dtype=np.uint16).view(kind).astype(np.float32)
    with np.errstate(all="ignore"):
        middle = ((every.astype(np.float64) + np.roll(every, -1)) / 2).astype(np.float32)
        beside = [np.nextafter(middle, np.float32(s)) for s in (-np.inf, np.inf)]
    bits = np.random.default_rng(0).integers(0, 2**32, 100_003, dtype=np.uint32)
    return np.concatenate([bits.view(np.float32), every, middle, *beside])


@both
def test_the_bits_of_a_cast(kind):
    x = numbers(kind)
    with np.errstate(all="ignore"):
        expected = x.astype(kind)
    found = namespace.cast(np, x, kind)
    assert found.dtype == kind
    assert np.array_equal(found.view(np.uint16), expected.view(np.uint16))


@both
@pytest.mark.parametrize("n", [0, 1, 3, 17, 64])
def test_nothing_past_the_last(kind, n):
    x, to = np.arange(n, dtype=np.float32), np.full(n + 2, 7, kind)
    numba_stored.put(to[1:-1], x)
    assert np.array_equal(to, [7, *x, 7])


@both
def test_arrays_that_lie_apart(kind):
    x, to = np.arange(24, dtype=np.float32).reshape(4, 6), np.zeros((4, 12), kind)
    numba_stored.put(to[:, ::2], x)
    assert np.array_equal(to[:, ::2], x)
    assert not to[:, 1::2].any()
    numba_stored.put(to[:, :6], x.astype(np.float64))
    assert np.array_equal(to[:, :6], x)
    assert sys.modules[namespace.COMPILED] is numba_stored
    assert namespace.cast(np, x.T, kind).strides == x.astype(kind).T.strides
