"""Functions of numbers in compiled loops, within a few ulp of longdouble over their whole range."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from linattn_np.ops.cpu import numbers
from linattn_np.runtime.pieces.piece import JIT, piece
from tests.ops.sheets import Sheet, run

pytestmark = pytest.mark.skipif(not JIT, reason="Numba is switched off: they are NumPy's")
FUNCTIONS = {"expm1": np.expm1, "log": np.log, "log1p": np.log1p, "tanh": np.tanh,
             "sigmoid": lambda x: 1 / (1 + np.exp(-x))}  # fmt: skip


def over_numbers(name):
    """A kernel of one function."""
    function = getattr(numbers, name)

    def all_of(w: Sheet):
        for i in range(len(w.f)):
            w.h[i] = function(w.f[i])

    all_of.__name__ = all_of.__qualname__ = f"all_of_{name}"
    return piece(all_of)


KERNELS = {name: over_numbers(name) for name in FUNCTIONS} if JIT else {}
each = pytest.mark.parametrize("name", FUNCTIONS)
dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@each
@dtypes
def test_within_two_ulp(name, dtype):
    rng = np.random.default_rng(0)
    sizes = [1e-30, 1e-8, 1e-4, 1e-2, 0.3, 1, 10, 80]
    x = np.concatenate([s * rng.standard_normal(100) for s in sizes] + [[0.0, -0.5, -1 + 1e-6, 0.5]])
    x = x[np.abs(x) < 87].astype(dtype)
    w = run(KERNELS[name], dtype, {"m": len(x)}, f=x)
    with np.errstate(all="ignore"):
        exact = FUNCTIONS[name](x.astype(np.longdouble))
    some = np.isfinite(exact) & (exact != 0)
    assert np.array_equal(w.h[~some], exact[~some].astype(dtype), equal_nan=True)
    assert (np.abs(w.h[some] - exact[some]) <= 2 * np.finfo(dtype).eps * np.abs(exact[some])).all()


@each
@dtypes
def test_at_the_ends(name, dtype):
    x = np.array([-np.inf, np.inf, np.nan, 0.0, -1.0], dtype)
    w = run(KERNELS[name], dtype, {"m": len(x)}, f=x)
    with np.errstate(all="ignore"):
        exact = FUNCTIONS[name](x.astype(np.float64))
    np.testing.assert_allclose(w.h, exact, rtol=4 * np.finfo(dtype).eps, atol=0)
