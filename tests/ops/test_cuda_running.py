"""Running sums in log space and running maxima along tokens by CUDA kernels; emulated here, or on a GPU."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from linattn_np.ops.shares import Shares, shares, shares_vjp
from linattn_np.ops.stabiliser import gauge
from linattn_np.runtime.shapes import Sequence
from tests.cuda.emulation import device, emulated  # noqa: F401

INF = np.inf
DTYPES = [(np.float32, np.float32, 1e-5), (ml_dtypes.bfloat16, np.float32, 1e-5), (np.float64, np.float64, 1e-12)]
BATCHES = [(2, T, None) for T in (1, 5, 31, 33, 150)] + [(1, 90, (0, 40, 40, 41, 90))]
batches = pytest.mark.parametrize(("B", "T", "offsets"), BATCHES, ids=str)


def sequences_of(offsets, T):
    if offsets is None:
        return [Sequence(None, 0, T)]
    return [Sequence(n, a, b) for n, (a, b) in enumerate(itertools.pairwise(offsets))]


def logits(rng, shape, dtype):
    """Of a slot that gets nothing, and of one that begins late; large ones and steps up."""
    s = 3 * rng.standard_normal(shape)
    s[..., 0] = -INF
    s[:, : shape[1] // 2, :, 1] = -INF
    s[..., 2] += np.linspace(-60, 60, shape[1])[:, None]
    return s.astype(dtype)


def shares_in_float64(s, N_0, sequences):
    """By the recurrence, token by token, with a running maximum."""
    share, g, N = (np.zeros(s.shape) for _ in range(3))
    for q in sequences:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            z = np.log(np.maximum(N_0 if q.row is None else N_0[q.row], 0))
            for t in range(q.start, q.stop):
                now = np.logaddexp(z, s[:, t])
                some = now > -INF
                share[:, t] = np.where(some, np.exp(s[:, t] - np.where(some, now, 0)), 0)
                g[:, t] = np.where(some, z - now, 0)
                N[:, t] = np.exp(now)
                z = now
    return share, g, N


def gradients_in_float64(s, N_0, sequences, dshare, dg):
    """By the transpose of each token's step, from the last one back."""
    share, g, _ = shares_in_float64(s, N_0, sequences)
    ds, dN = np.zeros(s.shape), np.zeros(N_0.shape)
    for q in sequences:
        dz = np.zeros((s.shape[0], *s.shape[2:]))  # of log N after the token
        for t in reversed(range(q.start, q.stop)):
            before = np.exp(g[:, t])  # its share of the sum
            ds[:, t] = share[:, t] * (dshare[:, t] * before - dg[:, t] + dz)
            dz = before * dz - before * share[:, t] * dshare[:, t] + dg[:, t] * share[:, t]
        own = dN if q.row is None else dN[q.row : q.row + 1]
        N = N_0 if q.row is None else N_0[q.row : q.row + 1]
        own[...] = np.where(N > 0, dz / np.where(N > 0, N, 1), 0)
    return ds, dN


@pytest.mark.parametrize(("dtype", "wide", "bound"), DTYPES, ids=str)
@batches
def test_shares(device, B, T, offsets, dtype, wide, bound):  # noqa: F811
    rng, sequences = np.random.default_rng(0), sequences_of(offsets, T)
    s = logits(rng, (B, T, 3, 14), dtype)
    N_0 = rng.uniform(0, 2, (B if offsets is None else len(sequences), 3, 14)).astype(wide)
    N_0[..., ::3] = 0
    exact = shares_in_float64(s.astype(np.float64), N_0.astype(np.float64), sequences)
    found = shares(device.xp, device.bring(s), device.bring(N_0), sequences, np.dtype(wide))
    for x, y in zip(found[:3], exact, strict=True):
        np.testing.assert_allclose(device.see(x), y, rtol=bound, atol=bound)
    dshare, dg = (rng.standard_normal(s.shape).astype(wide) for _ in range(2))
    given = Shares(*(device.bring(x.astype(wide)) for x in exact), device.bring(N_0))
    ds, dN_0 = shares_vjp(device.xp, given, device.bring(dshare), device.bring(dg), sequences)
    expected = gradients_in_float64(s.astype(np.float64), N_0.astype(np.float64), sequences, dshare, dg)
    for x, y in ((ds, expected[0]), (dN_0, expected[1])):
        np.testing.assert_allclose(device.see(x), y, rtol=30 * bound, atol=30 * bound * max(1, np.abs(y).max()))
    if device.launched is not None:
        assert [entry for _, entry, *_ in device.launched if entry != "formula"] == ["shares", "shares_vjp"]


def test_shares_of_one_token(device):  # noqa: F811
    """Of numbers, of nothing yet, of a slot that stays empty, of NaN."""
    s = np.array([[[[0.3, -2.0, 50.0, -INF, -INF, np.nan, 1.0]]]], np.float32)
    N = np.array([[[2.0, 0.0, 1e-3, 0.5, 0.0, 1.0, np.nan]]], np.float32)
    found = shares(device.xp, device.bring(s), device.bring(N), [Sequence(None, 0, 1)], np.dtype(np.float32))
    e = np.exp(s.astype(np.float64))
    total = N.astype(np.float64)[:, None] + e
    with np.errstate(divide="ignore", invalid="ignore"):
        share, g = np.where(total == 0, 0, e / total), np.where(total == 0, 0, np.log(N[:, None] / total))
    for x, y in ((found.share, share), (found.g, g), (found.N, total)):
        np.testing.assert_allclose(device.see(x), y, rtol=1e-5, atol=1e-7)


@batches
def test_the_gauge(device, B, T, offsets):  # noqa: F811
    """Against the recurrence token by token; sequences in one row are as each alone."""
    rng, sequences, H = np.random.default_rng(1), sequences_of(offsets, T), 35
    a, b = -rng.uniform(0, 2, (B, T, H)), 4 * rng.standard_normal((B, T, H))
    a[:, T // 3, 0], b[:, :, 1] = -INF, -30
    m_0 = rng.standard_normal((B if offsets is None else len(sequences), H)).astype(np.float32)
    at = gauge(device.xp, *map(device.bring, (a, b, m_0)), sequences, np.dtype(np.float32))
    for q in sequences:
        before = (m_0 if q.row is None else m_0[q.row : q.row + 1]).astype(np.float64)
        for t in range(q.start, q.stop):
            faded = a[:, t] + before
            m = np.maximum(faded, b[:, t])
            m = m.astype(np.float32).astype(np.float64) if t + 1 == q.stop else m
            np.testing.assert_allclose(device.see(at.m)[:, t], m, rtol=1e-14, atol=1e-14)
            for x, y in ((at.decay, faded - m), (at.write, np.exp(b[:, t] - m)), (at.least, np.exp(-m))):
                np.testing.assert_allclose(device.see(x)[:, t], y, rtol=2e-7, atol=2e-7)
            before = m
