"""Preconditioned keys and their gradients by CUDA kernels, against passes in float64; emulated here, or on a GPU."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from linattn_np.ops.preconditioner import Bounds, Keys, preconditioned, preconditioned_vjp
from linattn_np.runtime.shapes import sequences
from tests.cuda.emulation import device, emulated  # noqa: F401

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [(np.float32, np.float32, 1e-5), (BF16, np.float32, 1e-5), (np.float64, np.float64, 1e-12)]
BATCHES = [(2, T, None) for T in (1, 31, 33, 70)] + [(1, 70, (0, 0, 40, 41, 70))]


def drawn(dtype, wide, B, T, offsets, H=4, Hk=2, K=5):
    rng = np.random.default_rng(T)
    k = rng.standard_normal((B, T, Hk, K)).astype(dtype)
    a, b = (rng.uniform(*r, (B, T, H)).astype(dtype) for r in ((-1, 0), (0, 1)))
    a[:, T // 2, 0] = -np.inf
    x = Keys(k, a, b, rng.uniform(-1, 1, H).astype(wide))
    owners = (B if offsets is None else len(offsets) - 1, H, K)
    begin, dend = (rng.uniform(0.5, 2, owners).astype(wide) for _ in range(2))
    return x, begin, rng.standard_normal((B, T, H, K)).astype(dtype), dend


def bounds(xp, T, offsets, dtype):
    return Bounds(xp, tuple(sequences(T, None if offsets is None else list(offsets))), 1.5, 1e-6, np.dtype(dtype))


def both_ways(how, x, begin, dw, dend, stored=None):
    grads, dbegin = preconditioned_vjp(how, x, begin, dw, dend)
    return *preconditioned(how, x, begin, stored), *grads, dbegin


def assert_near(found, expected, bound):
    for y, z in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(y, np.float64), z, rtol=bound, atol=bound * max(1, np.abs(z).max()))


@pytest.mark.parametrize(("dtype", "wide", "bound"), DTYPES, ids=str)
@pytest.mark.parametrize(("B", "T", "offsets"), BATCHES, ids=str)
def test_keys_and_gradients(device, B, T, offsets, dtype, wide, bound):  # noqa: F811
    x, *more = drawn(dtype, wide, B, T, offsets)
    exact = [Keys(*(y.astype(np.float64) for y in x)), *(y.astype(np.float64) for y in more)]
    expected = both_ways(bounds(np, T, offsets, np.float64), *exact)
    given = [Keys(*map(device.bring, x)), *map(device.bring, more)]
    found = [device.see(y) for y in both_ways(bounds(device.xp, T, offsets, wide), *given)]
    assert all(y.dtype == wide for y in found)
    assert_near(found, expected, bound)
    if device.launched is not None:
        own = [entry for file, entry, *_ in device.launched if file == "ops/preconditioner.cu"]
        assert own == ["preconditioned_vjp", "preconditioned"]


@pytest.mark.parametrize("K", [1, 33, 128, 200, 257])
def test_widths(device, K):  # noqa: F811
    """Of more than 256 channels array calls are made."""
    x, *more = drawn(BF16, np.float32, 1, 9, None, H=1, Hk=1, K=K)
    exact = [Keys(*(y.astype(np.float64) for y in x)), *(y.astype(np.float64) for y in more)]
    expected = both_ways(bounds(np, 9, None, np.float64), *exact)
    given = [Keys(*map(device.bring, x)), *map(device.bring, more)]
    found = [device.see(y) for y in both_ways(bounds(device.xp, 9, None, np.float32), *given, BF16)]
    assert found[0].dtype == BF16
    assert_near(found[:1], expected[:1], 2.0**-8)
    assert_near(found[1:], expected[1:], 1e-5)


def test_what_is_not_given_is_zero(device):  # noqa: F811
    x, _, dw, dend = drawn(np.float32, np.float32, 2, 40, None)
    bring, how = device.bring, bounds(device.xp, 40, None, np.float32)
    given, zero, none = Keys(*map(bring, x)), bring(np.zeros_like(dend)), bring(np.zeros_like(dw))
    for own, all_given in (((None, None, bring(dend)), (zero, none, bring(dend))),
                           ((None, bring(dw), None), (zero, bring(dw), zero))):  # fmt: skip
        d, dbegin = preconditioned_vjp(how, given, *own)
        e, ebegin = preconditioned_vjp(how, given, *all_given)
        for y, z in zip((*d, dbegin), (*e, ebegin), strict=True):
            np.testing.assert_array_equal(device.see(y), device.see(z))


def test_sequences_of_one_row_are_as_each_alone(device):  # noqa: F811
    offsets = (0, 33, 33, 70)
    x, begin, dw, dend = drawn(np.float32, np.float32, 1, 70, offsets)
    bring = device.bring
    how = bounds(device.xp, 70, offsets, np.float32)
    d, dbegin = preconditioned_vjp(how, Keys(*map(bring, x)), *map(bring, (begin, dw, dend)))
    w, end = preconditioned(how, Keys(*map(bring, x)), bring(begin))
    for n, (i, j) in enumerate(itertools.pairwise(offsets)):
        if i == j:
            np.testing.assert_array_equal(device.see(end)[n], begin[n])
            np.testing.assert_array_equal(device.see(dbegin)[n], dend[n])
            continue
        own = Keys(*(bring(np.ascontiguousarray(y[:, i:j])) for y in x[:3]), bring(x.center))
        alone = bounds(device.xp, j - i, None, np.float32)
        rest = [bring(np.ascontiguousarray(y)) for y in (begin[n : n + 1], dw[:, i:j], dend[n : n + 1])]
        e, ebegin = preconditioned_vjp(alone, own, *rest)
        v, last = preconditioned(alone, own, rest[0])
        for y, z in ((w, v), (d.k, e.k), (d.a, e.a), (d.b, e.b)):
            np.testing.assert_array_equal(device.see(y)[:, i:j], device.see(z))
        for y, z in ((end, last), (dbegin, ebegin)):
            np.testing.assert_array_equal(device.see(y)[n], device.see(z)[0])
