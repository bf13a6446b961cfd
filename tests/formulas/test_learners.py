"""Losses and optimisers that are recurrences (text 002): 3.33 to 3.38, inner model k S, loss 1/2 |k S - v|^2."""

import numpy as np
import pytest

import linattn_np as la
from tests.formulas.one_head import agree, data, rows, run, run_with_state, tri

D = data()
T, K, V = D.T, D.K, D.V
q, k, ku, v, g, beta, S0 = D.q, D.k, D.ku, D.v, D.g, D.beta, D.S0
eta = np.random.default_rng(6).uniform(0.1, 0.9, T)


def gradient(t, S):
    """Of 1/2 |k_t S - v_t|^2."""
    return np.outer(ku[t], ku[t] @ S - v[t])


def descend(batch, S):
    """Steps of size eta_t, each gradient at the state its mini-batch starts from."""
    out = []
    for t in range(T):
        if t % batch == 0:
            start = S
        S = S - eta[t] * gradient(t, start)
        out.append(q[t] @ S)
    return np.array(out), S


def both_agree(ours, expected_pair):
    for one, other in zip(ours, expected_pair, strict=True):
        agree(one, other)


def test_3_33_a_batch_of_one_token():
    both_agree(run_with_state(la.delta_rule, q, ku, v, eta, state=S0), descend(1, S0))


def test_3_33_a_batch_of_all_tokens():
    errors = rows(eta) * (v - ku @ S0)
    both_agree(run_with_state(la.linear_attention, q, ku, errors, state=S0), descend(T, S0))
    both_agree(run_with_state(la.linear_attention, q, ku, rows(eta) * v), descend(T, 0 * S0))


@pytest.mark.parametrize("batch", [4, 5])
def test_3_34_the_dual_form(batch):
    S, dual, calls = S0, [], []
    state = S0
    for first in range(0, T, batch):
        b = slice(first, first + batch)
        E = ku[b] @ S - v[b]
        dual.append(q[b] @ S - tri(q[b] @ ku[b].T) @ (rows(eta[b]) * E))
        S = S - ku[b].T @ (rows(eta[b]) * E)
        errors = rows(eta[b]) * (v[b] - ku[b] @ state)
        out, state = run_with_state(la.linear_attention, q[b], ku[b], errors, state=state)
        calls.append(out)
    both_agree((np.concatenate(calls), state), (np.concatenate(dual), S))
    both_agree((np.concatenate(calls), state), descend(batch, S0))


def titans(momentum, rate, forget, S, frozen=False):
    """P_t = momentum_t P_{t-1} - rate_t grad, S_t = (1 - forget_t) S_{t-1} + P_t, loss |k S - v|^2."""
    P, start, out = np.zeros_like(S), S, []
    for t in range(T):
        P = momentum[t] * P - rate[t] * 2 * gradient(t, start if frozen else S)
        S = (1 - forget[t]) * S + P
        out.append(q[t] @ S)
    return np.array(out), S


def test_3_35_titans_without_momentum():
    nothing = np.zeros(T)
    both_agree(run_with_state(la.delta_rule, q, ku, v, 2 * eta, state=S0), titans(nothing, eta, nothing, S0))
    forget = np.random.default_rng(7).uniform(0, 0.5, T)
    ours = run_with_state(la.comba, q, ku, v, ku, np.log1p(-forget), 2 * eta, state=S0)
    both_agree(ours, titans(nothing, eta, forget, S0))


def test_3_35_titans_with_momentum_alone():
    c = 0.8
    expected = titans(np.full(T, c), eta, np.zeros(T), np.zeros((K, V)), frozen=True)
    # sum_{m=0}^{t-j} c^m = (1 - c c^(t-j)) / (1 - c): writes less their decay
    written = 2 * rows(eta) * v
    unfaded = run_with_state(la.linear_attention, q, ku, written)
    faded = run_with_state(la.retention, q, ku, written, np.log(c))
    both_agree([(one - c * other) / (1 - c) for one, other in zip(unfaded, faded, strict=True)], expected)


def test_3_37_orthonormal_keys_need_no_erasing():
    keys = np.linalg.qr(k[:K])[0]
    both_agree(
        run_with_state(la.linear_attention, q[:K], keys, v[:K]),
        run_with_state(la.delta_rule, q[:K], keys, v[:K], np.ones(K)),
    )


def test_3_38_the_neumann_series_ends():
    B = beta[:, None] * np.tril(ku @ ku.T, -1)
    term, U = rows(beta) * v, np.zeros((T, V))
    for _ in range(T):
        U = U + term
        term = -B @ term
    assert (np.linalg.matrix_power(B, T) == 0).all()
    agree(run(la.linear_attention, q, ku, U), run(la.delta_rule, q, ku, v, beta))


def test_3_38_one_solve_serves_all_query_heads():
    queries = np.random.default_rng(9).standard_normal((T, 4, K))
    U = np.linalg.solve(np.eye(T) + np.tril(ku @ ku.T, -1), v)
    out = la.delta_rule(queries, ku[:, None], v[:, None], np.ones((T, 1)), scale=1)
    for h in range(4):
        agree(out[:, h], tri(queries[:, h] @ ku.T) @ U)
