"""Running maxima and sums in log space: the kernel against the definition, of batches, ragged ones, and states."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from linattn_np.ops import shares as shares_module
from linattn_np.ops import stabiliser
from linattn_np.ops.shares import shares
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
