"""Slots, memories with decays of key channels and of value channels, against NumPy in float64 on the same inputs."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state.types import Readout
from tests.matrix_state.cuda.device_arrays import error, typed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
WITH_SLOTS = [fn for fn in la.VARIANTS if fn.spec.readout is Readout.SLOTS]
BOUND = 1.5e-2  # of the norm: two memories in 16 bits, the first one's errors in an exponent


def draw(fn, dtype, T=200, heads=(2, 2, 2), K=128, V=128, M=64):
    rng, (Hq, Hk, H) = np.random.default_rng(0), heads
    n = rng.standard_normal
    arrays = {"q": n((2, T, Hq, K)), "k": n((2, T, Hk, K)), "v": n((2, T, H, V))}
    arrays["s"] = n((2, T, H, M)) if fn is la.abc else rng.uniform(0, 0.2, (2, T, H, M))
    arrays = {name: x.astype(typed(dtype)) for name, x in arrays.items()}
    return arrays, n((2, T, H, V)).astype(typed(dtype))


def compare(cp, fn, bound, dtype="bfloat16", options=None, **how):
    arrays, dout = draw(fn, dtype, **how)
    options = options or {}
    if "cu_seqlens" in options:
        arrays, dout = {n: x[:1] for n, x in arrays.items()}, dout[:1]
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    assert la.explain(fn, **there, **options).backend == "cuda"
    result, pull = la.vjp(fn, **there, return_state=True, **options)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    expected, right = la.vjp(fn, **wide, return_state=True, **options)
    assert error(result.out, expected.out) < bound
    for found, want in zip(result.state, expected.state, strict=True):
        assert error(found, want) < bound
    grads, want = pull(cp.asarray(dout)), right(dout.astype(np.float64))
    for name in arrays:
        assert error(getattr(grads, name), getattr(want, name)) < 2 * bound, name


@pytest.mark.parametrize("fn", WITH_SLOTS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"heads": (1, 1, 2)},
        {"K": 64, "V": 40, "M": 128},
        {"options": {"cu_seqlens": [0, 5, 5, 70, 200]}},
        {"T": 1100, "heads": (1, 1, 1)},
    ],
    ids=str,
)
def test_output_states_and_gradients(cp, fn, how):
    compare(cp, fn, BOUND, **how)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float16", 4e-3)])
def test_other_dtypes_go_token_by_token(cp, dtype, bound):
    compare(cp, la.gsa, bound, dtype)
