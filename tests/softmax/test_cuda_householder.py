"""householder_positions by CUDA kernels of both cores against NumPy in float64; new memory is full of NaN."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la

from . import test_cuda
from .test_cuda import both, cp  # noqa: F401

fn = la.householder_positions
BOUND = {"bfloat16": 1.2e-2, "float16": 2e-3, "float32": 5e-5}  # of the norm; what cancels is compared with its terms
pytestmark = pytest.mark.gpu


def draw(T, *, B=1, heads=(2, 2, 2), widths=(128, 128), beta="random", dtype="bfloat16"):
    """(arrays by name, cotangent of the output); w is rounded, of nearly unit length."""
    arrays, dout = test_cuda.draw(fn, T, B=B, heads=heads, widths=widths, dtype=dtype)
    rng, shape = np.random.default_rng(T + 1), arrays["k"].shape
    w = rng.standard_normal(shape)
    arrays["w"] = (w / np.linalg.norm(w, axis=-1, keepdims=True)).astype(arrays["k"].dtype)
    strengths = 0.05 * rng.random(shape[:-1])
    arrays["beta"] = (strengths if beta == "random" else np.full(shape[:-1], beta)).astype(np.float32)
    return arrays, dout


def bound_of(T, beta, dtype):
    """That of a chunk; reflections forget nothing, and so independent errors of all chunks of 64 tokens add up."""
    return BOUND[dtype] * (np.sqrt(1 + T / 64) if beta == 2.0 else 1.0)


def check(cp, T, options=None, **drawn):  # noqa: F811
    """The output and every gradient."""
    (arrays, dout), options = draw(T, **drawn), options or {}
    exact = both(fn, {n: x.astype(np.float64) for n, x in arrays.items()}, dout.astype(np.float64), **options)
    found = both(fn, {n: cp.asarray(x) for n, x in arrays.items()}, cp.asarray(dout), backend="cuda", **options)
    size = np.sqrt(np.mean(np.square(exact["dv"])))
    for n, x in exact.items():
        y = cp.asnumpy(found[n]).astype(np.float64)
        assert y.shape == x.shape, n
        least = 0 if n in ("out", "dv") else 0.1 * size * np.sqrt(x.size)
        bound = bound_of(T, drawn.get("beta"), drawn.get("dtype", "bfloat16"))
        assert np.linalg.norm(y - x) <= bound * max(np.linalg.norm(x), least), n


@pytest.mark.parametrize("T", [1, 2, 16, 63, 64, 65, 129, 1000])
def test_lengths(cp, T):  # noqa: F811
    check(cp, T, B=2)


@pytest.mark.parametrize("beta", [0.05, 1.0, 2.0])
def test_strengths(cp, beta):  # noqa: F811
    check(cp, 520, beta=beta)


@pytest.mark.parametrize("widths", [(64, 64), (64, 128), (128, 64), (40, 72), (7, 13)])
def test_widths(cp, widths):  # noqa: F811
    check(cp, 200, widths=widths)


@pytest.mark.parametrize("heads", [(4, 2, 2), (2, 2, 4), (2, 4, 4), (6, 1, 1)])
def test_grouped_heads(cp, heads):  # noqa: F811
    check(cp, 300, heads=heads, B=2)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes(cp, dtype):  # noqa: F811
    check(cp, 300, dtype=dtype, widths=(64, 64))


@pytest.mark.parametrize("options", [{"window": 70}, {"cu_seqlens": [0, 40, 40, 300, 520]}], ids=str)
def test_options(cp, options):  # noqa: F811
    check(cp, 520, options)


def test_halves(cp):  # noqa: F811
    """Two calls with the state handed over are one."""
    arrays = draw(400, beta=2.0)[0]
    exact, bound = fn(**{n: x.astype(np.float64) for n, x in arrays.items()}), bound_of(400, 2.0, "bfloat16")
    first, second = ({n: cp.asarray(x[:, at]) for n, x in arrays.items()} for at in (slice(0, 250), slice(250, None)))
    out, state = fn(**first, return_state=True)
    found = cp.asnumpy(cp.concatenate([out, fn(**second, state=state)], axis=1)).astype(np.float64)
    assert np.linalg.norm(found - exact) <= bound * np.linalg.norm(exact)


def test_same_bits(cp):  # noqa: F811
    """Of more than 16 tokens: fewer are mapped token by token where they are alone."""
    test_cuda.check_same_bits(cp, fn, *draw(700, heads=(4, 2, 2)), [0, 130, 130, 150, 420, 700])


@pytest.mark.parametrize("first", [1, 70, 333])
def test_causality_to_the_bit(cp, first):  # noqa: F811
    test_cuda.check_causality(cp, fn, draw(500)[0], draw(501)[0], first)
