"""Functions of numbers in compiled loops, within a few ulp of longdouble over their whole range."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("numba")

import linattn_np as la
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


GATES = {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    "log_sigmoid": lambda x: np.minimum(x, 0) - np.log1p(np.exp(-np.abs(x))),
}


@pytest.mark.parametrize("name", GATES)
@dtypes
def test_gates_of_vectors_are_within_two_eps(name, dtype):
    x = np.concatenate([s * np.random.default_rng(0).standard_normal(1001) for s in (1e-20, 1e-3, 1, 10, 40)])
    x = x[np.abs(x) < 87].astype(dtype)
    exact = GATES[name](x.astype(np.longdouble))
    assert (np.abs(getattr(la.nn, name)(x) - exact) <= 2 * np.finfo(dtype).eps * np.abs(exact)).all()


@pytest.mark.parametrize("name", GATES)
@dtypes
def test_gates_of_vectors_at_the_ends(name, dtype):
    x = np.array([-np.inf, -1e30, -800, 800, 1e30, np.inf, np.nan, -0.0], dtype)
    with np.errstate(all="ignore"):
        exact = GATES[name](x.astype(np.float64))
        np.testing.assert_allclose(getattr(la.nn, name)(x), exact, rtol=4 * np.finfo(dtype).eps, atol=0)


@dtypes
def test_gelu_is_as_exact_as_its_exponent(dtype):
    x = np.concatenate([np.linspace(-12, 12, 4001), [0, 1e-20, -1e-5]]).astype(dtype)
    exact = np.array([y * math.erfc(-y * math.sqrt(0.5)) / 2 for y in x.astype(np.float64)])
    error = np.abs(la.nn.gelu(x).astype(np.float64) - exact)
    assert (error <= 4 * np.finfo(dtype).eps * (1 + x * x / 2) * np.abs(exact)).all()
