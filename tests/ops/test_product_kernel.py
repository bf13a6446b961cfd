"""Products of two arrays in 16 bits by their kernels, on a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from linattn_np.ops.cuda import product

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.gpu
def test_products_and_gradients():
    cp = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    x, y, dz, add = (cp.asarray(rng.standard_normal((3, 7, 2, 40)).astype(BFLOAT16)) for _ in range(4))
    assert product.takes(x, y, dz, add)
    wide = [np.asarray(a.get()).astype(np.float32) for a in (x, y, dz, add)]
    found = [
        product.product(cp, x, y),
        *product.product_vjp(cp, x, y, dz, add),
        product.product_vjp(cp, x, y, dz, None)[0],
    ]
    right = [wide[0] * wide[1], wide[2] * wide[1] + wide[3], wide[2] * wide[0], wide[2] * wide[1]]
    for a, b in zip(found, right, strict=True):
        assert np.abs(np.asarray(a.get()).astype(np.float32) - b).max() <= np.abs(b).max() * 2**-8
