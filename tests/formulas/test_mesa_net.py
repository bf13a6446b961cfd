"""MesaNet (text 002): 3.11, 3.36, 3.37, and its behaviour with repeated keys and with noise, 6.3 and 6.4."""

import numpy as np
import pytest

import linattn_np as la
from tests.formulas.one_head import A, agree, data, final_state, rows, run, tri, unit

D = data()
T, K, V = D.T, D.K, D.V
q, k, ku, v, g, beta, one, Gamma = D.q, D.k, D.ku, D.v, D.g, D.beta, D.one, D.Gamma
ridge = np.random.default_rng(8).uniform(0.3, 2.0, K)


def systems(keys, Lambda=ridge):
    """H_i + Lambda of every token, H_i = sum_{j <= i} beta_j Gamma_ij k_j^T k_j."""
    return np.einsum("ij,jd,je->ide", Gamma * beta, keys, keys) + np.diag(Lambda)


def test_3_11_the_attention_matrix():
    X = np.linalg.solve(systems(k), q[..., None])[..., 0]
    agree(A(la.mesa_net, q, k, v, g, beta, ridge), tri(X @ k.T) * Gamma * beta)


def test_3_36_the_state_minimises_the_regularised_loss():
    for t in (0, 4, T - 1):
        W = fit(ku[: t + 1], v[: t + 1], g[: t + 1], beta[: t + 1], ridge)
        weights = (Gamma * beta)[t, : t + 1]
        slope = ku[: t + 1].T @ (rows(weights) * (ku[: t + 1] @ W - v[: t + 1])) + rows(ridge) * W
        assert abs(slope).max() < 1e-13


def fit(keys, values, g, beta, ridge):
    """(H + Lambda)^-1 G after the last token: the read-out of unit vectors without a further write."""
    nothing = np.zeros(K)
    state = final_state(la.mesa_net, None, keys, values, g, beta, ridge)
    return run(la.mesa_net, np.eye(K), np.eye(K), np.zeros((K, V)), nothing, nothing, ridge, state=state)


def test_3_36_recursive_least_squares():
    """The delta rule with a matrix for its strength: P k^T / (1 + k P k^T)."""
    P, S, out = np.diag(1 / ridge), np.zeros((K, V)), []
    for t in range(T):
        gain = P @ k[t] / (1 + k[t] @ P @ k[t])
        S = S + np.outer(gain, v[t] - k[t] @ S)
        P = P - np.outer(gain, k[t] @ P)
        out.append(q[t] @ S)
    agree(run(la.mesa_net, q, k, v, 0 * one, one, ridge), out)


def test_3_37_a_large_ridge_is_gated_linear_attention():
    L = 1e7
    found = L * run(la.mesa_net, q, ku, v, g, beta, L * np.ones(K))
    agree(found, run(la.simple_gla, q, ku, rows(beta) * v, g), 1e-6)


def test_3_37_a_small_ridge_is_the_pseudo_inverse():
    H, G = systems(k, np.zeros(K)), np.einsum("ij,jd,je->ide", Gamma * beta, k, v)
    expected = np.einsum("id,ide->ie", q, np.linalg.pinv(H, rcond=1e-10) @ G)
    errors = [abs(run(la.mesa_net, q, k, v, g, beta, L * np.ones(K)) - expected).max() for L in (1e-4, 1e-5)]
    assert errors[0] < 1e-2 * abs(expected).max()
    assert 0.08 < errors[1] / errors[0] < 0.12  # linear in the ridge


@pytest.mark.parametrize("L", [0.1, 1.0])
def test_3_37_orthonormal_keys(L):
    keys = np.linalg.qr(np.random.default_rng(0).standard_normal((K, K)))[0]
    found = run(la.mesa_net, q[:K], keys, v[:K], 0 * one[:K], one[:K], L * np.ones(K))
    agree(found, run(la.linear_attention, q[:K], keys, v[:K]) / (1 + L))


def test_3_37_a_ridge_of_each_token():
    each = np.random.default_rng(9).uniform(0.3, 2.0, (T, K))
    x = np.stack([np.linalg.solve(systems(k, each[t])[t], q[t]) for t in range(T)])
    arrays = [y[:, None] for y in (q, k, v, g, beta, each)]
    out, pullback = la.vjp(la.mesa_net, *arrays)
    agree(out[:, 0], (tri(x @ k.T) * Gamma * beta) @ v)
    grads = pullback(D.dout[:, None])
    agree(grads.ridge, -x[:, None] * grads.q)  # -x_t (.) y_t, and dq_t = y_t


@pytest.mark.parametrize("c", [1.0, 0.6])
def test_6_3_a_key_written_twice_reads_the_mean(c):
    """(c v1 + v2) / (1 + c + L): the delta rule answers v2 alone."""
    L, key = 0.5, unit(np.arange(1.0, K + 1))
    twice = np.stack([key, key])
    found = run(la.mesa_net, twice, twice, v[:2], np.log([1.0, c]), one[:2], L * np.ones(K))[1]
    agree(found, (c * v[0] + v[1]) / (1 + c + L))
    agree(run(la.delta_rule, twice, twice, v[:2], one[:2])[1], v[1])


def test_6_4_noise_is_averaged_away():
    """v = k W + noise: E |S - W|^2 = K^2 V / T, where the delta rule stays at K V."""
    rng, K, V, T, draws = np.random.default_rng(0), 8, 4, 2000, 40
    k = unit(rng.standard_normal((draws, T, 1, K)))
    W = rng.standard_normal((draws, K, V))
    v = k @ W[:, None] + rng.standard_normal((draws, T, 1, V))
    gates = {"g": np.zeros((draws, T, 1)), "beta": np.ones((draws, T, 1))}
    ridge = np.full((1, K), 1e-6)
    _, state = la.mesa_net(None, k, v, **gates, ridge=ridge, return_state=True)
    read = {"k": np.zeros((draws, K, 1, K)), "v": np.zeros((draws, K, 1, V)), "g": np.zeros((draws, K, 1)),
            "beta": np.zeros((draws, K, 1))}  # fmt: skip
    found = la.mesa_net(np.broadcast_to(np.eye(K)[:, None], (draws, K, 1, K)), **read, ridge=ridge, state=state)
    mesa = np.mean(np.sum((found[:, :, 0] - W) ** 2, axis=(1, 2)))
    delta = la.delta_rule(None, k, v, gates["beta"], return_state=True).state
    assert abs(mesa / (K**2 * V / T) - 1) < 0.15
    assert abs(np.mean(np.sum((delta[:, 0] - W) ** 2, axis=(1, 2))) / (K * V) - 1) < 0.15
