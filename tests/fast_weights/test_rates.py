"""Gradients of rates in compiled loops are those of array calls."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import linattn_np as la
from linattn_np.fast_weights import masks
from linattn_np.fast_weights.types import Learner, Rates

pytest.importorskip("numba")
READS = [
    (read, decayed, model) for read in ("before", "after") for decayed in (False, True) for model in ("linear", "mlp")
]
RATES = [names for n in (1, 2, 3) for names in itertools.combinations(("alpha", "mu", "beta"), n)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("has_gain", [False, True])
@pytest.mark.parametrize("names", RATES, ids="-".join)
@pytest.mark.parametrize(("read", "decayed", "model"), READS)
def test_the_transpose_of_the_recurrence(read, decayed, model, names, has_gain, dtype, monkeypatch):
    """model: of a linear one the gradients of a tile are exact, each at the weights before its token."""
    rng, f = np.random.default_rng(0), Learner(model=model, read=read, decayed=decayed)
    for n in (1, 5):
        drawn = {name: rng.uniform(0.1, 1, (2, 3, n, 1)).astype(dtype) for name in (*names, *["gain"] * has_gain)}
        rates = Rates((), **drawn)
        rows, residuals = masks.coefficients(np, f, rates, n, np.zeros(1, dtype))
        d = rng.standard_normal(rows.shape).astype(dtype)
        found = masks.coefficients_vjp(np, f, rates, residuals, d)
        with monkeypatch.context() as patch:
            patch.setattr(masks, "numpy_kernels", lambda *given: None)
            expected = masks.coefficients_vjp(np, f, rates, residuals, d)
        for name in Rates._fields[1:]:
            a, b = getattr(found, name), getattr(expected, name)
            assert (a is None) == (b is None) == (name not in drawn)
            if a is not None:
                la.testing.assert_close(a, b, eps=60)
