"""Products of rows on a CPU."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans
from linattn_np.ops import rows
from linattn_np.runtime import blas

rng = np.random.default_rng(0)
x, W = rng.standard_normal((3, 5, 8)).astype(np.float32), rng.standard_normal((8, 6)).astype(np.float32)
LABELS = np.zeros((3, 5), np.int64)
MODEL = la.layers.language_model(8, D=8, layers=1, heads=2, hidden=4)
PARAMS = MODEL.loss.init(rng)
CALLS = {
    "linear": lambda: la.nn.linear(x, W),
    "linear, backward": lambda: la.vjp(la.nn.linear, x, W)[1](x[..., :6]),
    "cross_entropy of hidden states": lambda: la.nn.cross_entropy(x, LABELS, weight=W),
    "a model": lambda: MODEL.logits(PARAMS, LABELS),
    "a loss, backward": lambda: la.vjp(MODEL.loss, PARAMS, LABELS, LABELS)[1](1.0),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("K", "M"), [(24, 77), (128, 300)])
def test_the_place_of_a_row_does_not_change_its_bits_in_blas(K, M, dtype):
    """They do in products of 64 rows: of AVX2 in float32, of AVX-512 in float64 (OpenBLAS 0.3.31)."""
    row, wide = rng.standard_normal((1, K)).astype(dtype), rng.standard_normal((K, M)).astype(dtype)
    (only,) = {y.tobytes() for y in rows.times(np, np.repeat(row, 200, 0), wide, compiled=False)}
    np.testing.assert_allclose(np.frombuffer(only, dtype), (row @ wide)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_blas_has_one_thread_where_products_are_of_few_rows(call, monkeypatch):
    """Threads of BLAS waited for each other for milliseconds where a product takes microseconds."""
    matmul, limited = np.matmul, []

    def watched(*given, **options):
        limited.append(blas._inside > 0)
        return matmul(*given, **options)

    monkeypatch.setattr(rows, "_loops", lambda *arrays: None)  # as on a processor without vector registers
    monkeypatch.setattr(plans, "by_key", {})
    monkeypatch.setattr(rows.np, "matmul", watched)
    call()
    assert limited
    assert all(limited)
    assert blas._inside == 0
