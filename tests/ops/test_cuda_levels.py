"""Levels of log-linear attention as heads by CUDA kernels, emulated here, or on a GPU, against array calls."""

from __future__ import annotations

import array_api_compat.numpy as xp
import ml_dtypes
import numpy as np
import pytest

from linattn_np.ops import levels
from linattn_np.ops.levels import LevelHeads
from tests.cuda.emulation import device, emulated  # noqa: F401

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROUNDING = {BFLOAT16: 2.0**-8, np.dtype(np.float16): 2.0**-11, np.dtype(np.float32): 1e-6}
dtypes = pytest.mark.parametrize("dtype", ROUNDING, ids=str)
WEIGHTS = ("writes", "reads", "keeps", "one")


def drawn(tokens, H, *sizes, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal((tokens, H, *sizes)).astype(dtype)


def places(first, count, tokens, given):
    """Two sequences of one length, or the positions of tokens of which the first is far from 0."""
    positions = np.arange(tokens, dtype=np.int64) + 125 if given else None
    return LevelHeads(first, count, tokens // 2, positions)


def on(where, at):
    return at if at.positions is None else at._replace(positions=where.bring(at.positions))


def check(found, expected, dtype, sums=1):
    """Within the rounding of the result and of a sum in float32; the same infinities."""
    found, expected = np.asarray(found).astype(np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    assert np.array_equal(np.isinf(found), np.isinf(expected))
    finite = np.isfinite(expected)
    largest = max(1.0, np.abs(expected[finite]).max(initial=0))
    assert np.abs(found[finite] - expected[finite]).max(initial=0) <= sums * ROUNDING[np.dtype(dtype)] * largest


SIZES = {
    1: (np.float32, 7, 3),
    16: (BFLOAT16, 7, 3),
    72: (np.float16, 7, 1),
    5: (BFLOAT16, 1, 4),
    40: (np.float32, 7, 2),
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("width", SIZES)
def test_spread_and_gather(device, weight, width, given):  # noqa: F811
    (dtype, first, count), tokens, H, n = SIZES[width], 150, 2, 12
    x, base = drawn(tokens, H, width, dtype=dtype), drawn(tokens, H, width, dtype=dtype, seed=1)
    lam, y = drawn(tokens, H, n, dtype=dtype, seed=2), drawn(tokens, H * count, width, dtype=dtype, seed=3)
    at = places(first, count, tokens, given)
    there, double = (device.bring(z) for z in (x, base, lam, y)), (z.astype(np.float64) for z in (x, base, lam, y))
    (x_, base_, lam_, y_), (x, base, lam, y) = there, double
    found = levels.spread(device.xp, x_, on(device, at), weight, np.dtype(dtype), lam_)
    check(device.see(found), levels.spread(xp, x, at, weight, np.float64, lam), dtype)
    found = levels.gather(device.xp, y_, on(device, at), weight, np.dtype(dtype), lam_, base_)
    check(device.see(found), levels.gather(xp, y, at, weight, np.float64, lam, base), dtype)
    assert device.launched is None or [one[1] for one in device.launched] == ["spread", "gather"]


@dtypes
@pytest.mark.parametrize(("width", "given"), [(64, True), (72, False), (7, True)])
def test_dots_with_what_was_read(device, width, given, dtype):  # noqa: F811
    tokens, H, count, n = 150, 2, 6, 10  # levels 5 to 10, the last without a weight
    x, other = drawn(tokens, H, width, dtype=dtype), drawn(tokens, H * count, width, dtype=dtype, seed=1)
    lam, before = drawn(tokens, H, n, dtype=dtype, seed=2), drawn(tokens, H, n, dtype=np.float32, seed=3)
    at, dlam = places(5, count, tokens, given), device.bring(before)
    dots = (device.bring(other), dlam)
    levels.spread(device.xp, device.bring(x), on(device, at), "reads", np.dtype(dtype), device.bring(lam), dots)
    expected = before.astype(np.float64)
    levels.spread(xp, x.astype(float), at, "reads", np.float64, lam.astype(float), (other.astype(float), expected))
    check(device.see(dlam), expected, np.float32, 4)
    assert not np.array_equal(expected, before)


@dtypes
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("n", [3, 7, 9, 17])
def test_weights_inside_a_chunk(device, n, given, dtype):  # noqa: F811
    """And where `lam` has levels for a few positions only."""
    tokens, H = (8, 2) if n == 3 else (141, 1)
    at = LevelHeads(0, 1, 4, None) if n == 3 else places(0, 1, tokens, given)
    A, lam, d = (drawn(tokens, H, w, dtype=dtype, seed=w) for w in (64, n, 65))
    d = d[..., :64].copy()
    to, there = on(device, at), [device.bring(z) for z in (A, lam, d)]
    A, lam, d = (z.astype(np.float64) for z in (A, lam, d))
    check(device.see(levels.weigh(device.xp, there[0], to, there[1])), levels.weigh(xp, A, at, lam), dtype)
    for y, z, kind in zip(levels.weigh_vjp(device.xp, there[0], to, there[1], there[2]),
                          levels.weigh_vjp(xp, A, at, lam, d), (dtype, np.float32), strict=True):  # fmt: skip
        check(device.see(y), z, kind, 4)


def test_each_is_the_transpose_of_the_other():
    """In float64, by the definition of levels."""
    tokens, H, D, n = 130, 2, 3, 9
    x, y = drawn(tokens, H, D, dtype=float), drawn(tokens, H * 2, D, dtype=float, seed=1)
    lam, at = drawn(tokens, H, n, dtype=float, seed=2), LevelHeads(7, 2, tokens, None)
    for weight in ("writes", "reads", "one"):
        ahead = np.vdot(y, levels.spread(xp, x, at, weight, np.float64, lam))
        assert abs(ahead - np.vdot(levels.gather(xp, y, at, weight, np.float64, lam), x)) < 1e-11
    p = np.arange(tokens)
    A = levels.weigh(xp, np.ones((tokens, H, 64)), at, lam)
    for t in (0, 1, 63, 64, 129):
        own = [lam[t, 1, int(t ^ j).bit_length()] for j in p[t // 64 * 64 : t + 1]]
        assert np.array_equal(A[t, 1], own + [0.0] * (64 - len(own)))


def test_nothing_is_read_where_a_weight_is_zero(device):  # noqa: F811
    """NaN there reaches nothing."""
    x = drawn(256, 1, 8, dtype=np.float32)
    at, lam = LevelHeads(7, 1, 256, None), drawn(256, 1, 9, dtype=np.float32)
    second = np.arange(256) % 128 >= 64
    for weight, unread in (("writes", second), ("reads", ~second), ("keeps", np.arange(256) % 128 == 0)):
        bad = device.bring(np.where(unread[:, None, None], np.float32(np.nan), x))
        for made in (levels.spread, levels.gather):
            y = device.see(made(device.xp, bad, at, weight, np.dtype(np.float32), device.bring(lam)))
            assert not np.isnan(y).any(), (weight, made)
