"""The linear algebra behind the table and the products of PaTH (text 002): 3.13 to 3.26."""

import numpy as np
import pytest

import linattn_np as la
from tests.formulas.one_head import A, agree, data, final_state, pull, rows, run, run_with_state, tri, unit

SIZES = [(12, 5, 3), (65, 5, 3), (33, 16, 7)]


@pytest.fixture(params=SIZES, ids=str)
def D(request):
    return data(*request.param)


def transition(w):
    """I - w^T w."""
    return np.eye(len(w)) - np.outer(w, w)


def explicit_products(w):
    """R[i, j] = (I - w_i^T w_i) ... (I - w_{j+1}^T w_{j+1}) for 0 <= j <= i <= T; w_1 is row 0."""
    T, K = w.shape
    R = np.zeros((T + 1, T + 1, K, K))
    for j in range(T + 1):
        R[j, j] = np.eye(K)
        for i in range(j + 1, T + 1):
            R[i, j] = transition(w[i - 1]) @ R[i - 1, j]
    return R


def test_3_13_the_errors_are_the_values_of_linear_attention(D):
    # |k|^2 <= 2
    k = D.k * np.sqrt(2) / np.linalg.norm(D.k, axis=1).max()
    U = np.zeros((D.T, D.V))
    for t in range(D.T):
        U[t] = D.v[t] - (k[t] @ k[:t].T) @ U[:t]
        before = final_state(la.delta_rule, D.q[:t], k[:t], D.v[:t], D.one[:t])
        agree(U[t], D.v[t] - k[t] @ before, 1e-11)
    agree(run(la.linear_attention, D.q, k, U), run(la.delta_rule, D.q, k, D.v, D.one), 1e-11)
    # U = (I + N)^-1 V, N = K K^T under the diagonal: dV = (I + N)^-T dU, dN = -dV U^T, dK += (dN + dN^T) K
    through = pull(la.linear_attention, D.q, k, U, dout=D.dout)
    dV = np.linalg.solve((np.eye(D.T) + np.tril(k @ k.T, -1)).T, through.v)
    dN = -np.tril(dV @ U.T, -1)
    ours = pull(la.delta_rule, D.q, k, D.v, D.one, dout=D.dout)
    agree(ours.q, through.q, 1e-11)
    agree(ours.v, dV, 1e-11)
    agree(ours.k, through.k + (dN + dN.T) @ k, 1e-11)


def test_3_14_the_inverse_less_itself(D):
    X = D.kb @ D.kb.T * D.M_strict
    inverse = np.linalg.inv(np.eye(D.T) + X)
    agree(np.eye(D.T) - inverse @ X, inverse)
    agree(A(la.delta_rule, D.q, D.kb, D.v, D.one), tri(D.q @ D.kb.T) @ (np.eye(D.T) - inverse @ X))
    lower = np.diag(1 + D.beta) + X
    agree(np.diag(np.linalg.inv(lower)), 1 / np.diag(lower))


def test_3_15_gated_delta_rule_is_comba_of_larger_values(D):
    alpha, q, k, v, S0 = np.exp(D.g), D.q, D.ku, D.v, D.S0
    ours = run_with_state(la.gated_delta_rule, q, k, v, D.g, D.beta, state=S0)
    expected = run_with_state(la.comba, q, k, v / rows(alpha), k, D.g, alpha * D.beta, state=S0)
    for one, other in zip(ours, expected, strict=True):
        agree(one, other)
    given = {"dout": D.dout, "dstate": D.dS, "state": S0}
    ours = pull(la.gated_delta_rule, q, k, v, D.g, D.beta, **given)
    through = pull(la.comba, q, k, v / rows(alpha), k, D.g, alpha * D.beta, **given)
    agree(ours.q, through.q)
    agree(ours.k, through.k + through.p)
    agree(ours.v, through.v / rows(alpha))
    agree(ours.beta, alpha * through.beta)
    # d alpha / d g = alpha, in v / alpha and in alpha beta
    agree(ours.g, through.g - np.sum(through.v * v, axis=1) / alpha + alpha * D.beta * through.beta)
    agree(ours.state, through.state)


def test_3_15_gated_delta_rule_is_the_delta_rule_of_rescaled_values():
    D = data()
    a, q, k, v = np.exp(np.cumsum(D.g)), D.q, D.ku, D.v
    assert D.g.sum() >= -20
    out, S = run_with_state(la.gated_delta_rule, q, k, v, D.g, D.beta, state=D.S0)
    plain, plain_S = run_with_state(la.delta_rule, rows(a) * q, k, v / rows(a), D.beta, state=D.S0)
    agree(out, plain)
    agree(S, a[-1] * plain_S)
    ours = pull(la.gated_delta_rule, q, k, v, D.g, D.beta, dout=D.dout, dstate=D.dS, state=D.S0)
    through = pull(la.delta_rule, rows(a) * q, k, v / rows(a), D.beta, dout=D.dout, dstate=a[-1] * D.dS, state=D.S0)
    agree(ours.q, rows(a) * through.q)
    agree(ours.k, through.k)
    agree(ours.v, through.v / rows(a))
    agree(ours.beta, through.beta)
    agree(ours.state, through.state)
    # a_t d/da_t is the gradient of the running sum of g at t; each g_t is in the sums from t on
    dlog_a = a * np.sum(q * through.q, axis=1) - np.sum(v * through.v, axis=1) / a
    dlog_a[-1] += np.sum(D.dS * S)
    agree(ours.g, np.cumsum(dlog_a[::-1])[::-1], 1e-11)


@pytest.mark.parametrize("T", [12, 33])
def test_3_16_closed_form_of_the_product(T):
    D = data(T)
    w = D.w if T == 12 else unit(D.w)
    R = explicit_products(w)
    for j in range(T + 1):
        for i in range(j, T + 1):
            W = w[j:i]
            N = np.eye(i - j) + np.tril(W @ W.T, -1)
            agree(R[i, j], np.eye(D.K) - W.T @ np.linalg.solve(N, W), 1e-11)
    for i in range(1, T + 1):
        nothing = np.zeros((i, D.K))
        out, state = run_with_state(la.delta_rule, D.q[:i], w[:i], nothing, D.one[:i], state=np.eye(D.K))
        agree(state, R[i, 0], 1e-11)
        agree(out[-1], D.q[i - 1] @ R[i, 0], 1e-11)


def test_3_19_beta_is_absorbed_by_its_root(D):
    root, q, k, v = rows(np.sqrt(D.beta)), D.q, D.ku, D.v
    ours = run_with_state(la.delta_rule, q, k, v, D.beta, state=D.S0)
    for one, other in zip(ours, run_with_state(la.delta_rule, q, root * k, root * v, D.one, state=D.S0), strict=True):
        agree(one, other)
    given = {"dout": D.dout, "dstate": D.dS, "state": D.S0}
    ours = pull(la.delta_rule, q, k, v, D.beta, **given)
    through = pull(la.delta_rule, q, root * k, root * v, D.one, **given)
    agree(ours.q, through.q)
    agree(ours.k, root * through.k)
    agree(ours.v, root * through.v)
    agree(ours.beta, (np.sum(k * through.k, axis=1) + np.sum(v * through.v, axis=1)) / (2 * root[:, 0]))
    agree(ours.state, through.state)


def test_3_20_several_keys_a_token():
    n, D = 3, data()
    wide = data(D.T * n)
    q, k, v, beta = D.q, wide.ku.reshape(D.T, n, -1), wide.v.reshape(D.T, n, -1), wide.beta.reshape(D.T, n)
    S, out = D.S0, []
    for t in range(D.T):
        S = np.exp(D.g[t]) * S
        for m in range(n):
            S = S + beta[t, m] * np.outer(k[t, m], v[t, m] - k[t, m] @ S)
        out.append(q[t] @ S)
    g_first, q_last = np.zeros((D.T, n)), np.zeros((D.T, n, D.K))
    g_first[:, 0], q_last[:, -1] = D.g, q
    expanded = (q_last.reshape(-1, D.K), wide.ku, wide.v, g_first.ravel(), wide.beta)
    many, state = run_with_state(la.gated_delta_rule, *expanded, state=D.S0)
    agree(many[n - 1 :: n], np.array(out))
    agree(state, S)
    matrix = A(la.gated_delta_rule, *expanded)[n - 1 :: n]
    one_head = (q[:, None], k[:, :, None], v[:, :, None], beta[..., None], D.g[:, None])
    ours = la.delta_product(*one_head, scale=1, state=D.S0[None], return_state=True)
    agree(ours.out[:, 0], np.array(out))
    agree(ours.state[0], S)
    agree(la.influence_matrix(la.delta_product, *one_head, scale=1)[0], matrix)


def test_3_21_rotation_and_a_constant_are_a_complex_decay():
    D = data(K=4)
    theta, gamma = np.array([0.3, 1.1]), 0.85
    angle = np.arange(D.T)[:, None] * theta
    q, k = (x[:, 0::2] + 1j * x[:, 1::2] for x in (D.q, D.k))

    def with_rotation(pairs):
        """Pair x_1 + i x_2 times e^(i theta t), as real channels again."""
        pairs = pairs * np.exp(1j * angle)
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(D.T, 4)

    h, out = np.zeros((2, D.V), complex), []
    for t in range(D.T):
        h = gamma * np.exp(1j * theta)[:, None] * h + np.outer(k[t].conj(), D.v[t])
        out.append((q[t] @ h).real)
    agree(run(la.retention, with_rotation(q), with_rotation(k), D.v, np.log(gamma)), np.array(out))
    rotated, state = run_with_state(la.retnet, D.q, D.k, D.v, np.log(gamma), theta=theta)
    agree(rotated, np.array(out))
    agree(state[0::2] - 1j * state[1::2], h)  # in the frame of the last token
    distance = np.arange(D.T)[:, None] - np.arange(D.T)
    matrix = (q[:, None] * k.conj() * (gamma * np.exp(1j * theta)) ** np.maximum(distance, 0)[..., None]).sum(-1).real
    agree(A(la.retnet, D.q, D.k, D.v, np.log(gamma), theta=theta), tri(matrix))


def test_3_21_xpos_is_a_decay_of_each_pair():
    D = data(K=4)
    theta, gamma = np.array([0.3, 1.1]), 0.85
    zeta = ((np.arange(2) / 2 + 0.4) / 1.4) ** (1 / 512)
    position = np.arange(D.T)[:, None]
    q, k = (x[:, 0::2] + 1j * x[:, 1::2] for x in (D.q, D.k))
    grown, shrunk = q * (zeta * np.exp(1j * theta)) ** position, k * (np.exp(1j * theta) / zeta) ** position
    matrix = (grown @ shrunk.conj().T).real * gamma ** np.maximum(position - position.T, 0)
    agree(A(la.retnet, D.q, D.k, D.v, np.log(gamma), theta=theta, xpos=True), tri(matrix))


def test_3_21_rotated_state_space_model():
    """TransXSSM in three parts is the whole: no position is handed on. Its rotation is that of mamba2's B and C."""
    D = data(T=30, K=4)
    theta, dt, rate = np.array([0.3, 1.1]), D.beta, np.array([-0.2])
    arrays = lambda s: (D.v[s, None], dt[s, None], rate, D.k[s, None], D.q[s, None])  # noqa: E731
    whole = la.transxssm(*arrays(slice(None)), theta=theta)
    state, parts = None, []
    for s in (slice(0, 1), slice(1, 17), slice(17, 30)):
        out, state = la.transxssm(*arrays(s), theta=theta, state=state, return_state=True)
        parts.append(out)
    agree(np.concatenate(parts), whole)
    angle = np.arange(D.T)[:, None] * theta

    def with_rotation(x):
        pairs = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * angle)
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(D.T, 1, 4)

    agree(la.mamba2(D.v[:, None], dt[:, None], rate, with_rotation(D.k), with_rotation(D.q)), whole)


def test_3_22_states_are_prefix_sums():
    D = data()
    written = np.einsum("td,te->tde", D.k, D.v)
    sums = np.cumsum(written, axis=0)

    def then(first, second):
        (a1, x1), (a2, x2) = first, second
        return a2 * a1, a2 * x1 + x2

    decayed = (1.0, np.zeros((D.K, D.V)))
    for t in range(D.T):
        decayed = then(decayed, (np.exp(D.g[t]), written[t]))
        upto = (D.q[: t + 1], D.k[: t + 1], D.v[: t + 1])
        agree(final_state(la.linear_attention, *upto), sums[t])
        agree(final_state(la.simple_gla, *upto, D.g[: t + 1]), decayed[1])
    pairs = [(np.exp(D.g[t]), written[t]) for t in range(D.T)]
    while len(pairs) > 1:  # by halves, any bracketing gives the same
        pairs = [then(*pairs[i : i + 2]) if i + 1 < len(pairs) else pairs[i] for i in range(0, len(pairs), 2)]
    agree(pairs[0][1], decayed[1])


@pytest.mark.parametrize("norm", [0.5, 1, 1.5, 2])
def test_3_26_products_contract(norm):
    D = data(64)
    w = np.sqrt(norm) * unit(D.w)
    for start in (0, 20, 63):
        W = w[start:]
        nothing = np.zeros((len(W), D.K))
        R = final_state(la.delta_rule, D.q[start:], W, nothing, D.one[start:], state=np.eye(D.K))
        assert np.linalg.norm(R, 2) <= 1 + 1e-12


def test_3_26_products_of_one_long_direction_explode():
    D = data(64)
    w = np.tile(np.sqrt(3) * unit(D.w[:1]), (64, 1))
    R = final_state(la.delta_rule, D.q, w, np.zeros((64, D.K)), D.one, state=np.eye(D.K))
    assert abs(np.linalg.norm(R, 2) / 2.0**64 - 1) < 1e-11


def test_explain_counts_the_maps_in_the_operations_of_a_token():
    arrays = la.testing.sample(la.householder_positions, np.random.default_rng(0), B=(3,), T=7, H=2)
    found = la.explain(la.householder_positions, **arrays)
    assert abs(found.operations_per_token * 3 * 7 * 2 - found.operations) <= 1
