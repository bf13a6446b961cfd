"""exp as a limit of feature maps, and identities up to a norm of the output (text 002): 3.27 to 3.32."""

from math import factorial

import numpy as np
import pytest

import linattn_np as la
from tests.formulas.feature_maps import compound, gauss_hermite, taylor
from tests.formulas.one_head import A, agree, data, pull, rows, run, tri

D = data(K=2)
T, V = D.T, D.V
rng = np.random.default_rng(1)
q, k = rng.uniform(-0.7, 0.7, (2, T, 2))
v, g, dout = D.v, D.g, D.dout
z = q @ k.T
EXP = taylor(18)
v_one = np.hstack([v, np.ones((T, 1))])


def below_diagonal_solve(X, right):
    """(I + X)^-1 right for a strictly lower X."""
    return np.linalg.solve(np.eye(T) + X, right)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 18])
def test_3_27_taylor_features(n):
    assert taylor(n)[0](q).shape == (T, (n + 1) * (n + 2) // 2)
    kernel = A(la.linear_attention, q, k, v, feature_map=taylor(n))
    agree(kernel, tri(sum(z**p / factorial(p) for p in range(n + 1))))
    largest = np.abs(tri(z)).max()
    bound = largest ** (n + 1) * np.exp(largest) / factorial(n + 1)
    assert np.abs(kernel - tri(np.exp(z))).max() <= bound + 1e-14


def test_3_27_two_terms():
    agree(A(la.linear_attention, q, k, v, feature_map=taylor(2)), tri(1 + z + z**2 / 2))
    agree(A(la.linear_attention, q, k, v, feature_map=EXP), tri(np.exp(z)), 1e-14)


def test_3_28_linear_attention_becomes_softmax():
    P = tri(np.exp(z)) / rows(tri(np.exp(z)).sum(1))
    agree(run(la.linear_attention, q, k, v, feature_map=EXP, normalize=True), P @ v)
    wide = run(la.linear_attention, q, k, v_one, feature_map=EXP)
    agree(wide[:, :V] / wide[:, V:], P @ v)
    dz = P * (dout @ v.T - rows(np.sum(dout * (P @ v), axis=1)))
    grads = pull(la.linear_attention, q, k, v, dout=dout, feature_map=EXP, normalize=True)
    agree(grads.q, dz @ k)
    agree(grads.k, dz.T @ q)
    agree(grads.v, P.T @ dout)


def test_3_28_decay_becomes_a_bias_of_the_logits():
    features = EXP[0]
    b = np.cumsum(g)
    weights = tri(np.exp(z + rows(b) - b))
    wide = run(la.simple_gla, features(q), features(k), v_one, g)
    agree(wide[:, :V] / wide[:, V:], weights @ v / rows(weights.sum(1)))
    # the rows of the softmax alone: logits + b_i - b_j
    grads = pull(la.simple_gla, features(q), features(k), v, g, dout=dout)
    dz = weights * (dout @ v.T)
    agree(EXP[1](q, grads.q), dz @ k)
    agree(EXP[1](k, grads.k), dz.T @ q)
    db = dz.sum(1) - dz.sum(0)
    agree(grads.g, np.cumsum(db[::-1])[::-1])


def test_3_28_the_delta_rule_solves_with_exp():
    features = EXP[0]
    reads, erases = tri(np.exp(z)), np.tril(np.exp(k @ k.T), -1)
    agree(run(la.delta_rule, features(q), features(k), v, D.one), reads @ below_diagonal_solve(erases, v))
    gated = (reads * D.Gamma) @ below_diagonal_solve(erases * D.Gamma, v)
    agree(run(la.gated_delta_rule, features(q), features(k), v, g, D.one), gated)


def test_3_29_compound_interest():
    away_from_zero = (np.abs(z) > 0.1) & (D.M > 0)
    for n in (10, 20):
        kernel = A(la.linear_attention, q, k, v, feature_map=compound(n))
        agree(kernel, tri((1 + z / n) ** n))
        leading = z**2 * np.exp(z) / (2 * n)
        ratio = ((np.exp(z) - kernel) / leading)[away_from_zero]
        assert np.abs(ratio - 1).max() < 1 / n


def test_3_30_random_features_are_as_exact_as_predicted():
    draws, channels, tokens = 64, 4, 12
    draw = np.random.default_rng(3)
    Q, P = 0.25 * draw.standard_normal((2, tokens, channels))
    lower = np.tri(tokens) > 0
    predicted = np.mean(np.exp(np.sum((Q[:, None] + P) ** 2, axis=-1))[lower] - 1)
    apart = np.sum((Q[:, None] - P) ** 2, axis=-1)[lower]
    predicted_waves = np.mean((1 + np.exp(-2 * apart)) / 2 - np.exp(-apart))
    for m in (64, 1024):
        w = draw.standard_normal((draws, m, channels))

        def positive(x, w=w, m=m):
            return np.exp(np.einsum("td,nmd->ntm", x, w) - np.sum(x**2, axis=1)[:, None] / 2) / np.sqrt(m)

        def waves(x, w=w, m=m):
            angle = np.einsum("td,nmd->ntm", x, w)
            return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1) / np.sqrt(m)

        def kernel(features):
            """A of each draw: the output for v = I."""
            values = np.broadcast_to(np.eye(tokens)[:, None], (draws, tokens, 1, tokens))
            return la.linear_attention(features(Q)[:, :, None], features(P)[:, :, None], values)[:, :, 0]

        relative = (kernel(positive) / np.exp(Q @ P.T) - 1)[:, lower]
        assert abs(np.sqrt(np.mean(relative**2) * m / predicted) - 1) < 0.1
        assert abs(relative.mean()) < 5 * np.sqrt(predicted / (m * draws))
        wrong = kernel(waves)[:, lower] - np.exp(-apart / 2)
        assert abs(np.sqrt(np.mean(wrong**2) * m / predicted_waves) - 1) < 0.1


def test_3_30_gaussian_quadrature_of_the_random_features():
    one_q, one_k, features = q[:, :1], k[:, :1], gauss_hermite(60)
    weights = tri(np.exp(one_q @ one_k.T))
    agree(A(la.linear_attention, one_q, one_k, v, feature_map=features), weights)
    P = weights / rows(weights.sum(1))
    agree(run(la.linear_attention, one_q, one_k, v, feature_map=features, normalize=True), P @ v)
    dz = P * (dout @ v.T - rows(np.sum(dout * (P @ v), axis=1)))
    grads = pull(la.linear_attention, one_q, one_k, v, dout=dout, feature_map=features, normalize=True)
    agree(grads.q, dz @ one_k)
    agree(grads.k, dz.T @ one_q)


def rms_norm(x, axis=-1):
    return x / np.sqrt(np.mean(x**2, axis=axis, keepdims=True))


def test_3_31_a_norm_a_head_cancels_the_denominator():
    Q, P = np.random.default_rng(2).standard_normal((2, T, 2, 4))
    values = np.random.default_rng(4).standard_normal((T, 2, V))
    above = la.linear_attention(Q, P, values, feature_map="elu+1")
    out = la.linear_attention(Q, P, values, feature_map="elu+1", normalize=True)
    agree(rms_norm(above), rms_norm(out))
    together = (rms_norm(x, axis=(-2, -1)) for x in (above, out))
    first, second = together
    assert np.abs(first - second).max() > 0.1 * np.abs(second).max()


def test_3_31_of_softmax_too():
    agree(
        rms_norm(run(la.linear_attention, q, k, v, feature_map=EXP)),
        rms_norm(tri(np.exp(z)) @ v / rows(tri(np.exp(z)).sum(1))),
    )


def test_3_32_a_norm_forgets_positive_scales():
    out = rms_norm(run(la.linear_attention, q, k, v))
    agree(rms_norm(run(la.linear_attention, q, k, 3.7 * v)), out)
    agree(rms_norm(run(la.linear_attention, rows(np.exp(g)) * q, k, v)), out)
