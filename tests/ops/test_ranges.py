"""Quiet and loud rows: a norm and its gradient are numbers wherever the true values are, squares in range or not."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.ops import norms
from linattn_np.ops.cpu import gated_norm as compiled
from linattn_np.ops.gated_norm import GatedNorm, gated_rms_norm, gated_rms_norm_vjp
from linattn_np.testing import relative_error

FACTORS = [(np.float32, f) for f in (1e-30, 1e-20, 1e18, 1e30)] + [(np.float64, f) for f in (1e-170, 1e170)]
BOUND = {np.float32: 2e-6, np.float64: 1e-14}
wide = np.longdouble
scaled = pytest.mark.parametrize(("dtype", "factor"), FACTORS)


def drawn(dtype, factor, D=6):
    """x times the factor; y, dy and a weight."""
    rng = np.random.default_rng(0)
    x, *rest = rng.standard_normal((3, 4, D))
    return [(factor * x).astype(dtype), *(y.astype(dtype) for y in rest), rng.standard_normal(D).astype(dtype)]


def agree(found, expected, dtype):
    for a, b in zip(found, expected, strict=True):
        assert np.isfinite(a).all()
        assert relative_error(a, b) <= BOUND[dtype]


NORMS = {
    f"{name} {eps}": (
        lambda x, dy, name=name, eps=eps: (
            getattr(norms, name)(np, x, eps), getattr(norms, name + "_vjp")(np, x, dy, eps)))
    for name in ("unit", "rms_norm", "layer_norm") for eps in (0.0, 1e-6)
}  # fmt: skip


@scaled
@pytest.mark.parametrize("fn", NORMS.values(), ids=NORMS)
def test_norms(fn, dtype, factor):
    x, dy, *_ = drawn(dtype, factor)
    agree(fn(x, dy), fn(x.astype(wide), dy.astype(wide)), dtype)


GATED = [GatedNorm(0.0), GatedNorm(1e-6, "sigmoid", group=3), GatedNorm(1e-5, "silu", True, 2)]
LOOPS = {"arrays": (lambda *a: gated_rms_norm(np, *a), lambda *a: gated_rms_norm_vjp(np, *a)),
         "loops": (compiled.gated_rms_norm, compiled.gated_rms_norm_vjp)}  # fmt: skip


@scaled
@pytest.mark.parametrize("how", GATED, ids=str)
@pytest.mark.parametrize("pair", LOOPS.values(), ids=LOOPS)
def test_gated_norms(pair, how, dtype, factor):
    x, gate, dy, weight = drawn(dtype, factor)
    exact = [y.astype(wide) for y in (x, gate, weight)]
    expected = gated_rms_norm(np, *exact, how), *gated_rms_norm_vjp(np, *exact, how, dy.astype(wide))
    agree((pair[0](x, gate, weight, how), *pair[1](x, gate, weight, how, dy)), expected, dtype)


def test_gated_norms_of_zeros_are_zeros():
    x, weight = np.zeros((2, 3, 6)), np.ones(6)
    for fn, _ in LOOPS.values():
        np.testing.assert_array_equal(fn(x[0], x[1] + 1, weight, GatedNorm(0.0)), 0)


CALLS = {"delta_rule": {"qk_l2norm": True}, "gated_delta_rule": {"qk_l2norm": True}, "kda": {"qk_l2norm": True},
         "rfa": {}, "rebased": {}}  # fmt: skip
# quiet rows of rebased are small against the eps of its norm
SIZES = [(name, *size) for name in CALLS for size in FACTORS if name != "rebased" or size[1] > 1]


@pytest.mark.parametrize(("name", "dtype", "factor"), SIZES)
@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_calls_with_normed_queries_and_keys_do_not_depend_on_their_size(backend, name, dtype, factor):
    """out(f q, f k) = out(q, k), and the gradients are 1 / f times: f a power of 2."""
    fn, f = getattr(la, name), dtype(2.0 ** round(np.log2(factor)))
    x = la.testing.sample(fn, np.random.default_rng(1), B=(2,), T=5, H=2, K=4, V=3)
    x = {n: y.astype(dtype) for n, y in x.items()}
    if name == "rebased":  # eps does not count at either size
        x |= {n: 2.0**12 * y for n, y in x.items() if n in ("q", "k")}
    options = CALLS[name] | {"backend": backend}
    found = [la.vjp(fn, **x | {n: s * x[n] for n in ("q", "k")}, **options) for s in (dtype(1), f)]
    grads = [pull(np.ones_like(out)) for out, pull in found]
    bound = 1e-4 if dtype is np.float32 else 1e-12
    assert relative_error(found[1][0], found[0][0]) <= bound
    for n in x:
        by = f if n in ("q", "k") else dtype(1)
        assert relative_error(by * getattr(grads[1], n), getattr(grads[0], n)) <= bound
