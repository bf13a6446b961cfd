"""Preconditioned delta rules: the plain rules where all factors are 1, sums of squares, grouped heads, bad options."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.ops.preconditioner import Bounds, Keys, preconditioned, preconditioned_vjp
from linattn_np.runtime.shapes import sequences
from linattn_np.testing import relative_error, sample, sample_state

PLAIN = {la.preconditioned_gated_delta_rule: la.gated_delta_rule, la.preconditioned_kda: la.kda}
SIZES = {"H": 4, "K": 5, "V": 3}
every_rule = pytest.mark.parametrize("fn", PLAIN, ids=lambda fn: fn.__name__)


def draw(fn, T=37, **sizes):
    return sample(fn, np.random.default_rng(0), B=(2,), T=T, **SIZES | sizes)


@every_rule
@pytest.mark.parametrize("backend", ["reference", "chunks", "numba"])
def test_factors_of_one_give_the_plain_rule_with_its_gradients(fn, backend):
    x = draw(fn)
    same = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    (out, end), pullback = la.vjp(fn, **x, span=1, return_state=True, backend=backend)
    (other, S), plain = la.vjp(PLAIN[fn], **same, return_state=True, backend=backend)
    np.testing.assert_allclose(out, other, rtol=0, atol=1e-14)
    np.testing.assert_allclose(end.S, S, rtol=0, atol=1e-14)
    grads, expected = pullback(out), plain(out)
    for name in same:
        assert relative_error(getattr(grads, name), getattr(expected, name)) < 1e-13
    assert not np.any(grads.center)


@every_rule
def test_a_channel_that_keys_use_more_writes_less(fn):
    x = draw(fn)
    x["k"] = np.abs(x["k"]) * [4.0, 1, 1, 1, 1]
    x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    _, end = fn(**x, return_state=True)
    assert (end.A[..., :1] > end.A[..., 1:]).all()
    _, far = fn(**x | {"beta": np.zeros_like(x["beta"])}, return_state=True)
    np.testing.assert_array_equal(far.A, end.A)  # what the state holds does not matter
    np.testing.assert_array_equal(far.S, 0 * far.S)


@pytest.mark.parametrize("center", ["least", "most"])
def test_factors_lie_between_the_bounds(center):
    fn, at = la.preconditioned_gated_delta_rule, {"least": -30.0, "most": 30.0}[center]
    x = draw(fn) | {"center": np.full(4, at), "beta": np.ones((2, 37, 4))}
    x["g"] = np.full_like(x["g"], -np.inf)  # the state is the last token's write
    _, end = fn(**x, return_state=True)
    factors = end.S / (x["k"][:, -1, :, :, None] * x["v"][:, -1, :, None, :])
    assert ((factors > 1 / 1.5) & (factors < 1.5)).all()
    assert (factors > 1.4).all() if at > 0 else (factors < 1 / 1.4).all()


@every_rule
@pytest.mark.parametrize("backend", ["chunks", "numba"])
def test_gradients_with_grouped_keys_a_state_and_ragged_sequences(fn, backend):
    x = {n: y if n == "center" else y[:1] for n, y in draw(fn, Hk=2).items()}
    state = sample_state(fn, np.random.default_rng(1), (4,), {}, **SIZES)
    la.testing.check_vjp(fn, **x, state=state, cu_seqlens=[0, 0, 10, 11, 37], backend=backend)


@pytest.mark.parametrize("T", [0, 1, 6, 70])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_pass_equals_array_calls(T, dtype, monkeypatch):
    rng, H, K = np.random.default_rng(T), 4, 5
    k = rng.standard_normal((2, T, 2, K)).astype(dtype)
    x = Keys(k, *(rng.uniform(*r, (2, T, H)).astype(dtype) for r in ((-1, 0), (0, 1))), np.zeros(H, dtype))
    how = Bounds(np, tuple(sequences(T, None)), 1.5, 1e-6, np.dtype(dtype))
    begin, dw, dend = (rng.uniform(0.5, 2, s).astype(dtype) for s in ((2, H, K), (2, T, H, K), (2, H, K)))

    def both_ways():
        grads, dbegin = preconditioned_vjp(how, x, begin, dw, dend)
        return *preconditioned(how, x, begin), *grads, dbegin

    found = both_ways()
    monkeypatch.setattr("linattn_np.ops.preconditioner._kernels", lambda *given: None)
    expected = both_ways()
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        la.testing.assert_close(a, b, eps=60)


@every_rule
@pytest.mark.parametrize("options", [{"span": 0.9}, {"span": np.inf}, {"eps": 0.0}, {"eps": "x"}], ids=str)
def test_bounds_that_are_none_are_errors(fn, options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"{fn.__name__}: {name} is .*, expected a finite number"):
        fn(**draw(fn), **options)


def test_keys_without_use_are_not_divided_by_zero():
    fn = la.preconditioned_gated_delta_rule
    x = draw(fn) | {"beta_square": np.zeros((2, 37, 4))}
    out, pullback = la.vjp(fn, **x)
    assert all(np.isfinite(y).all() for y in (out, *(d for d in pullback(out) if d is not None)))
