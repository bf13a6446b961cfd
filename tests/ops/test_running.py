"""Running maxima and sums in log space: the kernel against the definition, of batches, ragged ones, and states."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from linattn_np.ops import shares as shares_module
from linattn_np.ops import stabiliser
from linattn_np.ops.shares import shares, shares_vjp
from linattn_np.ops.stabiliser import gauge
from linattn_np.runtime.shapes import Sequence

WHOLE = (Sequence(None, 0, 7),)
RAGGED = (Sequence(0, 0, 3), Sequence(1, 3, 3), Sequence(2, 3, 7))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("sequences", "lead", "states"), [(WHOLE, (2,), (2,)), (RAGGED, (1,), (3,)), (WHOLE, (), ())])
def test_a_running_maximum(sequences, lead, states, dtype):
    rng = np.random.default_rng(0)
    a, b, m_0 = -rng.random((*lead, 7, 3)), 3 * rng.standard_normal((*lead, 7, 3)), rng.standard_normal((*states, 3))
    m_0 = m_0.astype(dtype)
    at = gauge(np, a, b, m_0, sequences, np.dtype(dtype), positions=(2,))
    for s in sequences:
        before = (m_0 if s.row is None else m_0[s.row]).astype(np.float64)
        for t in range(s.start, s.stop):
            faded = a[..., t, :] + before
            m = np.maximum(faded, b[..., t, :])
            m = m.astype(dtype).astype(np.float64) if t in (s.stop - 1, 1) else m
            assert np.array_equal(at.m[..., t, :], m)
            for y, exact in ((at.decay, faded - m), (at.write, np.exp(b[..., t, :] - m)), (at.least, np.exp(-m))):
                np.testing.assert_allclose(y[..., t, :], exact, rtol=4 * np.finfo(dtype).eps, atol=0)
            before = m


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("sequences", "lead", "states"), [(WHOLE, (2,), (2,)), (RAGGED, (1,), (3,))])
@pytest.mark.parametrize("M", [5, 200])
def test_shares_of_a_running_sum(sequences, lead, states, M, dtype):
    rng = np.random.default_rng(0)
    s = (2 * rng.standard_normal((*lead, 7, 3, M))).astype(dtype)
    s[..., :2, 0, 0], s[..., 3:, 1, 1] = -np.inf, -np.inf
    N_0 = rng.random((*states, 3, M)).astype(dtype)
    N_0[..., 0, 0] = 0
    at = shares(np, s, N_0, sequences, np.dtype(dtype))
    with np.errstate(all="ignore"):
        for q in sequences:
            N = (N_0 if q.row is None else N_0[q.row]).astype(np.float64)
            for t in range(q.start, q.stop):
                e, before, N = np.exp(s[..., t, :, :].astype(np.float64)), N, N + np.exp(s[..., t, :, :].astype(float))
                share, g = np.where(N > 0, e / N, 0), np.where(N > 0, np.log(before / N), 0)
                for y, exact in ((at.share, share), (at.g, g), (at.N, N)):
                    np.testing.assert_allclose(y[..., t, :, :], exact, rtol=16 * np.finfo(dtype).eps,
                                               atol=4 * np.finfo(dtype).eps)  # fmt: skip
            np.testing.assert_allclose(np.broadcast_to(at.after(q), N.shape), N, rtol=16 * np.finfo(dtype).eps)


def test_kernels_equal_array_calls(monkeypatch):
    rng = np.random.default_rng(0)
    a, b, s = -rng.random((2, 7, 3)), rng.standard_normal((2, 7, 3)), rng.standard_normal((2, 7, 3, 4))
    compute = [lambda: gauge(np, a, b, b[:, 0], WHOLE, np.dtype(float), (2,))[3:],
               lambda: shares(np, s, s[:, 0] ** 2, WHOLE, np.dtype(float))[:3]]  # fmt: skip
    found = [f() for f in compute]
    for module in (stabiliser, shares_module):
        monkeypatch.setattr(module, "numpy_kernels", lambda xp, *arrays: None)
    for f, each in zip(compute, found, strict=True):
        for x, y in zip(f(), each, strict=True):
            np.testing.assert_allclose(y, x, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("sequences", "lead", "states"), [(WHOLE, (2,), (2,)), (RAGGED, (1,), (3,)), (WHOLE, (), ())])
@pytest.mark.parametrize("M", [5, 200])
def test_the_transpose_of_shares_is_that_of_each_step(sequences, lead, states, M, dtype):
    rng = np.random.default_rng(0)
    s = (2 * rng.standard_normal((*lead, 7, 3, M))).astype(dtype)
    s[..., :2, 0, 0], s[..., 3:, 1, 1] = -np.inf, -np.inf
    N_0 = rng.random((*states, 3, M)).astype(dtype)
    N_0[..., 0, 0] = 0
    at = shares(np, s, N_0, sequences, np.dtype(dtype))
    dshare, dg = rng.standard_normal((2, *s.shape)).astype(dtype)
    ds, dN_0 = shares_vjp(np, at, dshare, dg, sequences)
    assert (ds.shape, dN_0.shape) == (s.shape, N_0.shape)
    for q in sequences:
        one = (slice(None),) * len(states) if q.row is None else q.row
        N, dz = N_0[one].astype(np.float64), np.zeros(np.broadcast_shapes(N_0[one].shape, (*lead[:-1], 3, M)))
        for t in reversed(range(q.start, q.stop)):
            w, e, dw, own = (y[..., t, :, :].astype(np.float64) for y in (at.share, np.exp(at.g), dshare, dg))
            exact = w * (e * dw - own + dz)
            dz = e * dz - w * (e * dw - own)
            np.testing.assert_allclose(ds[..., t, :, :], exact.reshape(ds[..., t, :, :].shape), rtol=0,
                                       atol=32 * np.finfo(dtype).eps)  # fmt: skip
        exact = np.where(N > 0, dz.reshape(N.shape) / np.where(N > 0, N, 1), 0)
        np.testing.assert_allclose(dN_0[one], exact, rtol=64 * np.finfo(dtype).eps, atol=64 * np.finfo(dtype).eps)


@pytest.mark.parametrize(("sequences", "lead", "states"), [(WHOLE, (2,), (2,)), (RAGGED, (1,), (3,)), (WHOLE, (), ())])
def test_the_transpose_of_a_running_maximum_goes_where_it_is_attained(sequences, lead, states):
    rng = np.random.default_rng(0)
    a, b, m_0 = -rng.random((*lead, 7, 3)), 3 * rng.standard_normal((*lead, 7, 3)), rng.standard_normal((*states, 3))
    b[..., 1] = -50  # m_0 stays the largest
    at = gauge(np, a, b, m_0, sequences, np.dtype(np.float64))
    dm = rng.standard_normal(m_0.shape)
    da, db, dm_0 = stabiliser.last_vjp(np, at, sequences, dm)
    expected = [stabiliser.last_maximum_vjp(np, *(y[..., q.start : q.stop, :] for y in (a, b, at.m)),
                                          *(stabiliser.row(y, q) for y in (m_0, dm))) for q in sequences]  # fmt: skip
    for q, (ea, eb, e0) in zip(sequences, expected, strict=True):
        np.testing.assert_array_equal(da[..., q.start : q.stop, :], ea)
        np.testing.assert_array_equal(db[..., q.start : q.stop, :], eb)
        np.testing.assert_array_equal(stabiliser.row(dm_0, q), e0.reshape(stabiliser.row(dm_0, q).shape))
