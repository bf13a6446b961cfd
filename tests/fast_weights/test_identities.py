"""Learners that are recurrences of other cores."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import relative_error
from linattn_np.variants.shared.learners import MILD
from tests.fast_weights.learner import call_of
from tests.naive import NAIVE

rng = np.random.default_rng(0)
T, H, K, V = 23, 2, 5, 3
Q, KEYS, VALUES = (rng.standard_normal((2, T, H, n)) / n**0.5 for n in (K, K, V))
ETA, MU = rng.uniform(0.1, 0.9, (2, 2, T, H))
G = -rng.uniform(0.0, 0.7, (2, T, H))
W = rng.standard_normal((H, K, V))
START = np.broadcast_to(W, (2, H, K, V))
both = pytest.mark.parametrize("backend", ["reference", "chunks"])


def learnt(backend, W=W, q=Q, k=KEYS, v=VALUES, **given):
    """(out, W_T)."""
    out, end = call_of(**given)(q, k, v, eta=ETA, W=W, backend=backend, scale=1.0)
    return out, W + end.W


def check(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y) <= 1e-12


@both
def test_squared_error_token_by_token_is_the_delta_rule(backend):
    found = learnt(backend, loss="l2", mini_batch=1)
    check(found, la.delta_rule(Q, KEYS, VALUES, ETA, state=START, return_state=True, scale=1.0))


@both
def test_squared_error_in_one_mini_batch_from_zero_is_linear_attention(backend):
    found = learnt(backend, W=0 * W, loss="l2", mini_batch=T)
    check(found, la.linear_attention(Q, KEYS, ETA[..., None] * VALUES, return_state=True, scale=1.0))


@both
@pytest.mark.parametrize("mini_batch", [1, 4, T])
def test_dot_product_is_linear_attention(backend, mini_batch):
    found = learnt(backend, loss="dot", mini_batch=mini_batch)
    given = {"state": START, "return_state": True, "scale": 1.0}
    check(found, la.linear_attention(Q, KEYS, ETA[..., None] * VALUES, **given))


@both
@pytest.mark.parametrize("mini_batch", [1, 4, T])
def test_dot_product_with_decay_is_simple_gla(backend, mini_batch):
    found = learnt(backend, loss="dot", mini_batch=mini_batch, g=G)
    given = {"state": START, "return_state": True, "scale": 1.0}
    check(found, la.simple_gla(Q, KEYS, ETA[..., None] * VALUES, G, **given))


@both
def test_squared_error_with_decay_is_comba(backend):
    """The gradient is that of the weights before the decay."""
    found = learnt(backend, loss="l2", mini_batch=1, g=G)
    check(found, la.comba(Q, KEYS, VALUES, KEYS, G, ETA, state=START, return_state=True, scale=1.0))


@both
@pytest.mark.parametrize("loss", ["dot", "l2"])
def test_reading_before_is_reading_after_of_the_token_before(backend, loss):
    out = learnt(backend, loss=loss, mini_batch=1, g=G, read="before")[0]
    later = np.concatenate([Q[:, 1:], Q[:, :1]], axis=1)  # the query of the next token
    other = learnt(backend, loss=loss, mini_batch=1, g=G, q=later)[0]
    assert relative_error(out[:, 1:], other[:, :-1]) <= 1e-12
    assert relative_error(out[:, :1], np.einsum("bthk,hkv->bthv", Q[:, :1], W)) <= 1e-12


@both
def test_no_momentum_and_no_decay_are_plain_descent(backend):
    found = learnt(backend, loss="l2", mini_batch=4, mu=0 * MU, g=0 * G)
    check(found, learnt(backend, loss="l2", mini_batch=4))


@both
def test_a_linear_memory_of_titans_learns_twice_the_gradient(backend):
    arrays = {"eta": 0.1 * ETA, "mu": MU, "g": G, "W": W}
    out, end = la.titans_linear(Q, KEYS, VALUES, **arrays, mini_batch=4, backend=backend, return_state=True)
    other, last = call_of(loss="l2", mini_batch=4, mu=MU, g=G)(
        Q, KEYS, VALUES, eta=0.2 * ETA, W=W, scale=1.0, backend=backend
    )
    check((out, end.W, end.W_momentum), (other, last.W, last.W_slot0))


def test_one_chunk_that_is_not_full_reads_the_initial_weights():
    x = la.testing.sample(la.lact, np.random.default_rng(1), T=9)
    out = la.lact(**x, mini_batch=10)
    y = np.einsum("bthk,hkm->bthm", x["q"], x["A"])
    u = np.einsum("bthk,hkm->bthm", x["q"], x["B"])
    assert relative_error(out, np.einsum("bthm,hmv->bthv", y / (1 + np.exp(-y)) * u, x["W"])) <= 1e-12


def test_columns_keep_their_lengths():
    x = la.testing.sample(la.lact, np.random.default_rng(1), T=12)
    end = la.lact(**x, mini_batch=4, return_state=True).state
    for name in ("A", "B", "W"):
        length = np.linalg.norm(x[name], axis=-2)
        assert np.abs(np.linalg.norm(x[name] + getattr(end, name), axis=-2) / length - 1).max() <= 2e-4
        assert np.abs(getattr(end, name)).max() > 0.1


@pytest.mark.parametrize("muon", ["keller", MILD])
def test_atlas_with_muon_is_its_loop(muon):
    x = la.testing.sample(la.atlas, np.random.default_rng(1), T=9) | {"eta": np.ones((2, 9, 2))}
    options = {"mini_batch": 4, "window": 3, "muon": muon}
    out, end = la.atlas(**x, **options, return_state=True)
    expected, state = NAIVE["atlas"](**x, **options)
    assert max(relative_error(a, b) for a, b in zip((out, *end), (expected, *state), strict=True)) <= 1e-9


def test_a_window_that_is_as_long_as_the_mini_batch_adds_all_gradients():
    """With one mini-batch for all tokens, no decay and no momentum: W_t = W_0 - eta sum_{i <= t} (t - i + 1) G_i."""
    x = la.testing.sample(la.atlas, np.random.default_rng(1), T=5, B=(1,), H=1)
    ones = np.ones((1, 5, 1))
    x |= {"eta": 0.01 * ones, "share": ones, "mu": 0 * ones, "g": 0 * ones}
    end = la.atlas(**x, mini_batch=9, window=5, muon=None, return_state=True).state
    given = {n: x[n] for n in ("q", "k", "v", "W1", "W2", "mu", "g")}
    times = np.arange(5.0, 0.0, -1.0)[:, None] * x["eta"]
    other = la.titans(**given, eta=times, mini_batch=9, return_state=True).state
    check((end.W1, end.W2), (other.W1, other.W2))


@pytest.mark.parametrize("backend", ["reference", "chunks", "numba"])
@pytest.mark.parametrize("predict", ["decayed", "previous"])
def test_corrections_without_momentum_are_the_gated_delta_rule_and_comba(backend, predict):
    eta = np.full(ETA.shape, 0.5)
    state = la.MomentumState(START, rng.standard_normal(START.shape))
    out, end = la.momentum_delta_rule(Q, KEYS, VALUES, G, ETA, 0 * MU, eta, state=state, return_state=True,
                                      predict=predict, backend=backend)  # fmt: skip
    given = {"state": START, "return_state": True}
    if predict == "decayed":
        expected = la.gated_delta_rule(Q, KEYS, VALUES, G, eta * ETA, **given)
    else:
        expected = la.comba(Q, KEYS, VALUES, KEYS, G, eta * ETA, **given)
    check((out, end.S), expected)


@pytest.mark.parametrize("backend", ["reference", "chunks", "numba"])
def test_the_momentum_delta_rule_is_a_linear_memory_of_titans(backend):
    out, end = la.momentum_delta_rule(Q, KEYS, VALUES, G, np.ones(ETA.shape), MU, 0.2 * ETA, predict="previous",
                                      return_state=True, scale=1.0, backend=backend)  # fmt: skip
    arrays = {"eta": 0.1 * ETA, "mu": MU, "g": G, "W": 0 * W}
    other, last = la.titans_linear(Q, KEYS, VALUES, **arrays, mini_batch=1, return_state=True)
    check((out, end.S, end.M), (other, last.W, last.W_momentum))


@pytest.mark.parametrize("backend", ["chunks", "numba"])
def test_repeated_keys_and_equal_rates_are_exact(backend):
    """alpha = mu: a double pole of the coefficients; equal unit keys: the solve of a delta rule."""
    k = np.broadcast_to(KEYS[:1, :1] / np.linalg.norm(KEYS[:1, :1], axis=-1, keepdims=True), (2, 130, H, K))
    v = np.random.default_rng(2).standard_normal((2, 130, H, V))
    rate = np.full((2, 130, H), 0.7)
    arrays = k, k, v, np.log(rate), rate, rate
    expected = la.momentum_delta_rule(*arrays, backend="reference")
    assert relative_error(la.momentum_delta_rule(*arrays, backend=backend), expected) <= 1e-12
