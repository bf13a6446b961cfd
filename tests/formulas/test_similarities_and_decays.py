"""Similarities, the recurrence, decays, losses and the delta rules (text 000)."""

import numpy as np

import linattn_np as la
from tests.formulas.feature_maps import ELU_PLUS_ONE, RELU_PLUS, elu_plus_one, relu_plus
from tests.formulas.one_head import A, agree, data, explained, final_state, pull, rows, run, run_with_state, tri

D = data()
T, K, V = D.T, D.K, D.V
q, k, v, g, beta, S0, dout, dS = D.q, D.k, D.v, D.g, D.beta, D.S0, D.dout, D.dS
ku, gk, gv, M, Gamma = D.ku, D.gk, D.gv, D.M, D.Gamma
TWO_MAPS = {"feature_map": (ELU_PLUS_ONE, RELU_PLUS)}


def test_1_1_general_similarity():
    similarity = np.array([[elu_plus_one(q[i]) @ relu_plus(k[j]) for j in range(T)] for i in range(T)])
    full = run(la.linear_attention, q, k, v, normalize=True, causal=False, **TWO_MAPS)
    causal = run(la.linear_attention, q, k, v, normalize=True, **TWO_MAPS)
    agree(full, similarity @ v / rows(similarity.sum(1)))
    agree(causal, tri(similarity) @ v / rows(tri(similarity).sum(1)))


def test_1_2_its_recurrence():
    phi, varphi = elu_plus_one(q), relu_plus(k)
    for i in range(1, T + 1):
        out, (S, z) = run_with_state(la.linear_attention, q[:i], k[:i], v[:i], normalize=True, **TWO_MAPS)
        agree(S, sum(np.outer(varphi[j], v[j]) for j in range(i)))
        agree(z, varphi[:i].sum(0))
        agree(out[-1], phi[i - 1] @ S / (phi[i - 1] @ z))


def test_1_2_its_weights_average():
    weights = A(la.linear_attention, q, k, v, normalize=True, **TWO_MAPS)
    assert (weights >= 0).all()
    agree(weights.sum(1), np.ones(T))
    agree(weights @ v, run(la.linear_attention, q, k, v, normalize=True, **TWO_MAPS))


def test_1_2_the_normaliser_is_a_last_column_of_ones():
    v_one = np.hstack([v, np.ones((T, 1))])
    wide = run(la.linear_attention, q, k, v_one, **TWO_MAPS)
    above, below = wide[:, :V], wide[:, V:]
    out = run(la.linear_attention, q, k, v, normalize=True, **TWO_MAPS)
    agree(out, above / below)
    # out = above / below: dabove = dout / below, dbelow = -<dout, out> / below
    dwide = np.hstack([dout, -rows((dout * out).sum(1))]) / below
    grads = pull(la.linear_attention, q, k, v, dout=dout, normalize=True, **TWO_MAPS)
    through = pull(la.linear_attention, q, k, v_one, dout=dwide, **TWO_MAPS)
    agree(grads.q, through.q)
    agree(grads.k, through.k)
    agree(grads.v, through.v[:, :V])


def test_1_5_one_decay_for_all_tokens():
    gamma = 0.8
    i, j = np.arange(T)[:, None], np.arange(T)
    agree(A(la.retention, q, k, v, np.log(gamma)), tri(q @ k.T * gamma ** (i - j)))
    every_token = np.full(T, np.log(gamma))
    agree(run(la.retention, q, k, v, np.log(gamma), state=S0), run(la.simple_gla, q, k, v, every_token, state=S0))
    ours = pull(la.retention, q, k, v, np.log(gamma), dout=dout, dstate=dS, state=S0)
    through = pull(la.simple_gla, q, k, v, every_token, dout=dout, dstate=dS, state=S0)
    for name in ("q", "k", "v", "state"):
        agree(getattr(ours, name), getattr(through, name))
    agree(ours.g, through.g.sum())


def test_1_5_one_decay_a_token():
    agree(A(la.simple_gla, q, k, v, g), q @ k.T * Gamma)


def test_1_5_one_decay_a_channel():
    channel = gk[0]
    i, j = np.arange(T)[:, None], np.arange(T)
    powers = np.exp(np.where((i >= j)[..., None], (i - j)[..., None] * channel, -np.inf))
    agree(A(la.retention, q, k, v, channel), np.einsum("id,jd,ijd->ij", q, k, powers))
    every_token = np.tile(channel, (T, 1))
    ours = run_with_state(la.retention, q, k, v, channel, state=S0)
    for one, other in zip(ours, run_with_state(la.gla, q, k, v, every_token, state=S0), strict=True):
        agree(one, other)
    ours = pull(la.retention, q, k, v, channel, dout=dout, dstate=dS, state=S0)
    through = pull(la.gla, q, k, v, every_token, dout=dout, dstate=dS, state=S0)
    for name in ("q", "k", "v", "state"):
        agree(getattr(ours, name), getattr(through, name))
    agree(ours.g, through.g.sum(0))


def test_1_5_mamba2_is_a_decay_a_token():
    x, dt, rate = v, beta, np.array(-0.3)
    ours = run_with_state(la.mamba2, x, dt, rate, k, q, state=S0)
    through = run_with_state(la.simple_gla, q, k, rows(dt) * x, dt * rate, state=S0)
    for one, other in zip(ours, through, strict=True):
        agree(one, other)
    ours = pull(la.mamba2, x, dt, rate, k, q, dout=dout, dstate=dS, state=S0)
    through = pull(la.simple_gla, q, k, rows(dt) * x, dt * rate, dout=dout, dstate=dS, state=S0)
    agree(ours.C, through.q)
    agree(ours.B, through.k)
    agree(ours.x, rows(dt) * through.v)
    agree(ours.A, dt @ through.g)
    agree(ours.dt, rate * through.g + (x * through.v).sum(1))
    agree(ours.state, through.state)


def walk_with_full_gate(G):
    S, out = S0, []
    for t in range(T):
        S = np.exp(G[t]) * S + np.outer(k[t], v[t])
        out.append(q[t] @ S)
    return np.array(out), S


def test_1_6_a_full_gate_of_equal_entries():
    out, S = run_with_state(la.simple_gla, q, k, v, g, state=S0)
    full_out, full_S = walk_with_full_gate(g[:, None, None] * np.ones((T, K, V)))
    agree(out, full_out)
    agree(S, full_S)


def test_1_6_a_full_gate_that_is_an_outer_sum():
    out, S = run_with_state(la.gla, q, k, v, gk, gv=gv, state=S0)
    full_out, full_S = walk_with_full_gate(gk[:, :, None] + gv[:, None, :])
    agree(out, full_out)
    agree(S, full_S)


def test_1_6_equal_channels_are_one_decay():
    wide = np.tile(rows(g), K)
    ours = pull(la.simple_gla, q, k, v, g, dout=dout, dstate=dS, state=S0)
    through = pull(la.gla, q, k, v, wide, dout=dout, dstate=dS, state=S0)
    agree(run(la.simple_gla, q, k, v, g, state=S0), run(la.gla, q, k, v, wide, state=S0))
    for name in ("q", "k", "v", "state"):
        agree(getattr(ours, name), getattr(through, name))
    agree(ours.g, through.g.sum(1))


def gradient(loss, S):
    """Central differences with step 1, exact for a quadratic."""
    G = np.zeros_like(S)
    for place in np.ndindex(S.shape):
        step = np.zeros_like(S)
        step[place] = 1
        G[place] = (loss(S + step) - loss(S - step)) / 2
    return G


q1, k1, v1 = q[:1], k[:1], v[:1]
rate, gamma = np.array([0.7]), 0.8
log_gamma = np.log([gamma])


def square_loss(S):
    return np.sum((k1 @ S - v1) ** 2) / 2


def test_1_7_a_step_from_the_decayed_state():
    start = gamma * S0
    agree(
        final_state(la.gated_delta_rule, q1, k1, v1, log_gamma, rate, state=S0),
        start - rate * gradient(square_loss, start),
    )


def test_1_7_a_proximal_step():
    # argmin |S - S0|^2 + rate |k S - v|^2: (I + rate k^T k) S = S0 + rate k^T v
    nearest = np.linalg.solve(np.eye(K) + rate * k1.T @ k1, S0 + rate * k1.T @ v1)
    agree(final_state(la.delta_rule, q1, k1, v1, rate / (1 + rate * np.sum(k1**2)), state=S0), nearest)


def test_1_8_spellings_of_the_gated_delta_rule():
    S = other = S0
    for t in range(T):
        alpha, kt, vt = np.exp(g[t]), ku[t : t + 1], v[t : t + 1]
        S = alpha * (np.eye(K) - beta[t] * kt.T @ kt) @ S + beta[t] * kt.T @ vt
        other = alpha * other + beta[t] * kt.T @ (vt - kt @ (alpha * other))
    state = final_state(la.gated_delta_rule, q, ku, v, g, beta, state=S0)
    agree(state, S)
    agree(state, other)


def test_1_8_as_a_low_rank_transition():
    # alpha (I - beta k^T k) = alpha I + b^T a with a = k, b = -alpha beta k
    alpha, wide = rows(np.exp(g)), np.tile(rows(g), K)
    write, value = -alpha * rows(beta) * ku, rows(beta) * v
    for low_rank in (la.dplr, la.rwkv7):
        ours = run_with_state(la.gated_delta_rule, q, ku, v, g, beta, state=S0)
        for one, other in zip(ours, run_with_state(low_rank, q, ku, value, wide, ku, write, state=S0), strict=True):
            agree(one, other)
        ours = pull(la.gated_delta_rule, q, ku, v, g, beta, dout=dout, dstate=dS, state=S0)
        through = pull(low_rank, q, ku, value, wide, ku, write, dout=dout, dstate=dS, state=S0)
        agree(ours.q, through.q)
        agree(ours.state, through.state)
        agree(ours.v, rows(beta) * through.v)
        agree(ours.k, through.k + through.a - alpha * rows(beta) * through.b)
        written = np.sum(alpha * ku * through.b, axis=1)
        agree(ours.beta, np.sum(v * through.v, axis=1) - written)
        agree(ours.g, through.g.sum(1) - beta * written)


def test_1_8_undecayed_as_a_low_rank_transition():
    write, value = -rows(beta) * ku, rows(beta) * v
    agree(run(la.iplr, q, ku, value, ku, write, state=S0), run(la.delta_rule, q, ku, v, beta, state=S0))
    ours = pull(la.delta_rule, q, ku, v, beta, dout=dout, dstate=dS, state=S0)
    through = pull(la.iplr, q, ku, value, ku, write, dout=dout, dstate=dS, state=S0)
    agree(ours.k, through.k + through.a - rows(beta) * through.b)
    agree(ours.beta, np.sum(v * through.v, axis=1) - np.sum(ku * through.b, axis=1))
    agree(ours.v, rows(beta) * through.v)
    agree(ours.state, through.state)


def test_1_9_the_delta_rule_unrolled():
    def factors(first):
        """(I - beta_T k_T^T k_T) ... (I - beta_first k_first^T k_first), later factors on the left."""
        product = np.eye(K)
        for t in range(first, T):
            product = (np.eye(K) - beta[t] * np.outer(ku[t], ku[t])) @ product
        return product

    written = sum(factors(i + 1) @ (beta[i] * np.outer(ku[i], v[i])) for i in range(T))
    agree(final_state(la.delta_rule, q, ku, v, beta, state=S0), factors(0) @ S0 + written)
    agree(final_state(la.delta_rule, q, ku, np.zeros((T, K)), beta, state=np.eye(K)), factors(0))


def test_1_10_a_token_costs_products_of_vectors_with_matrices():
    K, V = 100, 60
    assert explained(la.linear_attention, T, K, V, chunk_size=1).operations_per_token == 4 * K * V
    assert explained(la.delta_rule, T, K, V, chunk_size=1).operations_per_token == 6 * K * V


def test_1_10_chunks_of_the_delta_rule():
    C, K, V = 64, 100, 60
    # K K^T and Q K^T, A U, C (C - 1) V to solve, then k S, q S and k^T u
    products = 2 * (2 * C * K) + 2 * C * V + (C - 1) * V + 3 * (2 * K * V)
    assert products == 4 * C * K + (3 * C - 1) * V + 6 * K * V
    assert explained(la.delta_rule, 1024, K, V, chunk_size=C).operations_per_token == products
    assert explained(la.delta_rule, 1024, 100, 100, chunk_size=C).operations_per_token == 104_700


def test_1_10_nothing_is_cubic_in_the_width():
    for fn in (la.linear_attention, la.delta_rule, la.gated_delta_rule):
        counts = [explained(fn, 1024, d, d, chunk_size=64).operations_per_token for d in (1024, 2048, 4096)]
        assert counts[1] <= 4 * counts[0]
        assert counts[2] <= 4 * counts[1]
