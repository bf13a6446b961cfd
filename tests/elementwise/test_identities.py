"""The recurrences as what else they are: convolutions, sums in log space, pieces of a stream."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import relative_error


def convolved(kernel, x):
    """sum_j kernel_j x_{t-j} of (T, D) arrays, through a Fourier transform of twice the length."""
    n = 2 * len(x)
    return np.fft.ifft(np.fft.fft(kernel, n, axis=0) * np.fft.fft(x, n, axis=0), axis=0)[: len(x)]


def test_s4d_is_a_convolution():
    """Its kernel is 2 Re sum_n C_n (e^{dt A_n} - 1) / A_n e^{j dt A_n}."""
    x = la.testing.sample(la.s4d, np.random.default_rng(0), B=(), T=101, K=4, V=3)
    A = -np.exp(x["A_log"]) + 1j * x["A_imag"]
    z = np.exp(x["dt_log"])[:, None] * A
    powers = np.exp(np.arange(101)[:, None, None] * z)
    kernel = 2 * (x["C"] * (np.exp(z) - 1) / A * powers).sum(-1).real
    expected = convolved(kernel, x["x"]).real + x["D"] * x["x"]
    assert relative_error(la.s4d(**x), expected) <= 1e-12


def test_lru_is_a_convolution():
    x = la.testing.sample(la.lru, np.random.default_rng(0), B=(), T=101, V=3)
    z = -np.exp(x["nu_log"]) + 1j * np.exp(x["theta_log"])
    expected = convolved(np.exp(np.arange(101)[:, None] * z), np.exp(x["gamma_log"]) * x["x"])
    assert relative_error(la.lru(**x), expected) <= 1e-12


def test_min_gru_in_log_space():
    """The paper's form for positive candidates: log h_t = a*_t + logcumsumexp(log x + log z - a*)."""
    x = la.testing.sample(la.min_gru, np.random.default_rng(0), B=(), T=40, V=3)
    x["x"] = np.exp(x["x"])
    decays = np.cumsum(-np.logaddexp(0, x["z"]), axis=0)
    inputs = np.log(x["x"]) - np.logaddexp(0, -x["z"])
    expected = np.exp(decays + np.logaddexp.accumulate(inputs - decays, axis=0))
    assert relative_error(la.min_gru(**x), expected) <= 1e-12


@pytest.mark.parametrize("shift", [-1e4, -800.0, 0.0, 800.0, 1e4])
def test_rwkv4_does_not_depend_on_a_number_added_to_all_keys(shift):
    """Sums of e^{k} would be 0 or infinite."""
    x = la.testing.sample(la.rwkv4, np.random.default_rng(0), T=30, V=3)
    expected = la.rwkv4(**x)
    moved = x | {"k": x["k"] + shift}
    out, state = la.rwkv4(**moved, return_state=True)
    assert relative_error(out, expected) <= 1e-11
    again = la.rwkv4(**moved, state=state)
    assert np.isfinite(again).all()
    la.testing.check_vjp(la.rwkv4, **moved)


def test_rg_lru_keeps_the_variance_of_its_inputs():
    """Of independent inputs of variance 1 and open gates."""
    T, D = 4000, 64
    rng = np.random.default_rng(0)
    x, r = rng.standard_normal((T, D)), rng.standard_normal((T, D))
    h = la.rg_lru(x, r, np.full((T, D), 40.0), np.full(D, -4.0))
    assert abs(h[500:].var() - 1) < 0.05


def test_the_gate_of_rg_lru_may_be_shut():
    """a = 1 exactly: the input does not enter, gradients are numbers."""
    x = la.testing.sample(la.rg_lru, np.random.default_rng(0), T=5, V=3)
    x["r"][:, 2] = -1e4
    out, pullback = la.vjp(la.rg_lru, **x)
    np.testing.assert_array_equal(out[:, 2], out[:, 1])
    assert all(np.isfinite(d).all() for d in pullback(out) if d is not None)


PRIME = 10007


def stream(total, piece, D=3, seed=0):
    """The last state of a stream that is computed piece by piece, and the sum of the outputs."""
    state, sums = np.zeros(D), np.zeros(D)
    for start in range(0, total, piece):
        count = min(piece, total - start)
        rng = np.random.default_rng([seed, start // piece])
        a, x = rng.uniform(-1, 1, (count, D)), rng.standard_normal((count, D))
        out, state = la.scan(a, x, state=state, return_state=True)
        sums += out.sum(axis=0)
    return state, sums


def test_a_stream_in_pieces_is_the_whole():
    """A prime number of tokens, in pieces of a length that does not divide it; `stream` takes any number."""
    state, sums = stream(PRIME, 1000)
    parts = [np.random.default_rng([0, n]) for n in range(11)]
    counts = [min(1000, PRIME - 1000 * n) for n in range(11)]
    drawn = [(rng.uniform(-1, 1, (n, 3)), rng.standard_normal((n, 3))) for rng, n in zip(parts, counts, strict=True)]
    a, x = (np.concatenate(each) for each in zip(*drawn, strict=True))
    out, end = la.scan(a, x, return_state=True)
    assert relative_error(state, end) <= 1e-13
    assert relative_error(sums, out.sum(axis=0)) <= 1e-11
