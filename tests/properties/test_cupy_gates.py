"""Sums of gate gradients over tokens in float32 on a GPU: as exact as float32 adds their terms."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la

pytestmark = pytest.mark.gpu
BOUND = 1.4e-7  # of the sum of the terms' sizes, mean over draws


@pytest.mark.parametrize("fn", [la.mamba2, la.transxssm], ids=lambda fn: fn.__name__)
def test_decay_rates_in_float32(fn):
    """dA = sum of dt dg over 600 tokens, which cancel; angles of 0, with which both functions are one."""
    cp = pytest.importorskip("cupy")
    errors = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        x = la.testing.sample(la.mamba2, rng, B=(2,), T=300, H=2, K=32, V=16, optional=False)
        dout = rng.standard_normal(x["x"].shape).astype(np.float32)
        x = {n: y.astype(np.float32).astype(np.float64) for n, y in x.items()}
        q, k, v = x["C"], x["B"], x["dt"][..., None] * x["x"]
        dg = la.vjp(la.simple_gla, q, k, v, x["dt"] * x["A"], scale=1.0)[1](dout.astype(np.float64)).g
        terms = dg * x["dt"]
        more = {"theta": cp.zeros(16, np.float32)} if fn is la.transxssm else {}
        there = {n: cp.asarray(y.astype(np.float32)) for n, y in x.items()} | more
        found = la.vjp(fn, **there)[1](cp.asarray(dout)).A.get()
        errors.append(abs(found - terms.sum((0, 1))) / abs(terms).sum((0, 1)))
    assert np.mean(errors) < BOUND
