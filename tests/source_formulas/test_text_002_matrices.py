"""The matrix A of each variant, out = A v (text 002, its table): 3.1 to 3.12."""

import numpy as np
import pytest

import linattn_np as la
from tests.source_formulas.one_head import A, agree, data, decayed_gram, pull, rows, run, tri

EVERY_CALL = {
    "linear_attention": ("q", "k", "v"),
    "simple_gla": ("q", "k", "v", "g"),
    "gla": ("q", "k", "v", "gk"),
    "rwkv6": ("q", "k", "v", "gk", "u"),
    "delta_rule": ("q", "ku", "v", "beta"),
    "gated_delta_rule": ("q", "ku", "v", "g", "beta"),
    "comba": ("q", "ku", "v", "pu", "g", "beta"),
    "kda": ("q", "ku", "v", "gk", "beta"),
    "dplr": ("q", "ku", "v", "gk", "ku", "kb_less"),
    "rwkv7": ("q", "ku", "v", "gk", "ku", "kb_less"),
    "iplr": ("q", "ku", "v", "ku", "kb_less"),
    "retention": ("q", "k", "v", "rate"),
    "lightning_attention": ("q", "k", "v", "slope"),
    "mamba2": ("v", "beta", "rate", "k", "q"),
}


@pytest.fixture(params=[(12, 5, 3), (65, 5, 3), (33, 16, 7)], ids=str)
def D(request):
    D = data(*request.param)
    D.pu = D.p / np.linalg.norm(D.p, axis=1, keepdims=True)
    D.kb_less = -rows(D.beta) * D.ku / 2
    D.rate, D.slope = np.array(-0.2), np.array(0.2)
    D.bk = np.cumsum(D.gk, axis=0)
    D.B = np.diag(D.beta)
    return D


def inverse_times(X, right):
    """(I + X)^-1 right for a strictly lower X, by forward substitution."""
    solved = np.array(right, dtype=float)
    for i in range(len(X)):
        solved[i] -= X[i, :i] @ solved[:i]
    return solved


def check(D, fn, arrays, matrix):
    """A is the matrix, the call gives A v, and its pullback gives A^T dout for v."""
    agree(A(fn, *arrays), matrix)
    agree(run(fn, *arrays), matrix @ D.v)
    agree(pull(fn, *arrays, dout=D.dout).v, matrix.T @ D.dout)


@pytest.mark.parametrize("name", EVERY_CALL)
def test_3_1_the_scale_is_absorbed_by_q(D, name):
    fn, scale, query = getattr(la, name), 0.37, "C" if name == "mamba2" else "q"
    arrays = [getattr(D, array) for array in EVERY_CALL[name]]
    scaled = [scale * D.q if array is D.q else array for array in arrays]
    agree(run(fn, *arrays, state=D.S0, scale=scale), run(fn, *scaled, state=D.S0))
    ours = vars(pull(fn, *arrays, dout=D.dout, dstate=D.dS, state=D.S0, scale=scale))
    through = vars(pull(fn, *scaled, dout=D.dout, dstate=D.dS, state=D.S0))
    agree(ours.pop(query), scale * through.pop(query))
    for array, gradient in ours.items():
        if gradient is not None:
            agree(gradient, through[array])


def test_3_2_linear(D):
    check(D, la.linear_attention, (D.q, D.k, D.v), tri(D.q @ D.k.T))


def test_3_2_one_decay_a_token(D):
    alpha = np.exp(D.g)
    products = [[np.prod(alpha[j + 1 : i + 1]) if i >= j else 0 for j in range(D.T)] for i in range(D.T)]
    agree(D.Gamma, products)
    check(D, la.simple_gla, (D.q, D.k, D.v, D.g), D.q @ D.k.T * D.Gamma)


def test_3_2_one_decay_a_channel(D):
    matrix = decayed_gram(D.q, D.k, D.bk, D.bk)
    check(D, la.gla, (D.q, D.k, D.v, D.gk), matrix)
    for fn, gate in ((la.simple_gla, D.g), (la.gla, D.gk)):
        agree(np.diag(A(fn, D.q, D.k, D.v, gate)), np.sum(D.q * D.k, axis=1))


def test_3_3_delta_rule(D):
    q, ku, kb, v = D.q, D.ku, D.kb, D.v
    absorbed = tri(q @ kb.T) @ inverse_times(kb @ kb.T * D.M_strict, np.eye(D.T))
    check(D, la.delta_rule, (q, kb, v, D.one), absorbed)
    explicit = tri(q @ ku.T) @ inverse_times(D.B @ ku @ ku.T * D.M_strict, D.B)
    check(D, la.delta_rule, (q, ku, v, D.beta), explicit)
    agree(run(la.delta_rule, q, kb, D.vb, D.one), run(la.delta_rule, q, ku, v, D.beta))


def test_3_4_gated_delta_rule(D):
    q, ku, kb, v = D.q, D.ku, D.kb, D.v
    first = tri(q @ kb.T) @ inverse_times(kb @ kb.T * D.M_strict, np.eye(D.T)) * D.Gamma
    second = (q @ kb.T * D.Gamma) @ inverse_times(kb @ kb.T * D.Gamma_strict, np.eye(D.T))
    agree(first, second)
    check(D, la.gated_delta_rule, (q, kb, v, D.g, D.one), second)
    explicit = (q @ ku.T * D.Gamma) @ inverse_times(D.B @ ku @ ku.T * D.Gamma_strict, D.B)
    check(D, la.gated_delta_rule, (q, ku, v, D.g, D.beta), explicit)
    agree(A(la.gated_delta_rule, q, ku, v, D.g, D.beta), A(la.delta_rule, q, ku, v, D.beta) * D.Gamma)


def test_3_5_kimi_delta_attention(D):
    reads, erases = decayed_gram(D.q, D.ku, D.bk, D.bk), decayed_gram(D.ku, D.ku, D.bk, D.bk, diagonal=-1)
    check(D, la.kda, (D.q, D.ku, D.v, D.gk, D.beta), reads @ inverse_times(D.B @ erases, D.B))


@pytest.mark.parametrize("name", ["delta_rule", "gated_delta_rule", "kda"])
def test_3_5_entry_by_entry(name):
    D = data()
    gate = {"delta_rule": np.zeros((D.T, D.K)), "gated_delta_rule": np.tile(rows(D.g), D.K), "kda": D.gk}[name]
    gates = {"delta_rule": (), "gated_delta_rule": (D.g,), "kda": (D.gk,)}[name]
    matrix = np.zeros((D.T, D.T))
    for i in range(D.T):
        for j in range(i + 1):
            product = np.eye(D.K)
            for t in range(j + 1, i + 1):
                product = (np.eye(D.K) - D.beta[t] * np.outer(D.ku[t], D.ku[t])) @ np.diag(np.exp(gate[t])) @ product
            matrix[i, j] = D.beta[j] * D.q[i] @ product @ D.ku[j]
    agree(A(getattr(la, name), D.q, D.ku, D.v, *gates, D.beta), matrix)


def test_3_6_comba(D):
    b = np.cumsum(D.g)
    undecayed = np.exp(np.where(D.M_strict > 0, rows(b - D.g) - b, -np.inf))
    agree(undecayed, D.Gamma_strict / rows(np.exp(D.g)))
    matrix = (D.q @ D.ku.T * D.Gamma) @ inverse_times(D.B @ (D.pu @ D.ku.T * undecayed), D.B)
    check(D, la.comba, (D.q, D.ku, D.v, D.pu, D.g, D.beta), matrix)


def test_3_7_rwkv6(D):
    before = decayed_gram(D.q, D.k, D.bk - D.gk, D.bk, diagonal=-1)
    check(D, la.rwkv6, (D.q, D.k, D.v, D.gk, D.u), before + np.diag(np.sum(D.q * D.u * D.k, axis=1)))


def test_3_12_a_decay_of_the_values_gives_a_matrix_a_channel(D):
    matrices = A(la.gla, D.q, D.k, D.v, D.gk, gv=D.gv)
    out = run(la.gla, D.q, D.k, D.v, D.gk, gv=D.gv)
    for e in range(D.V):
        channel = A(la.gla, D.q, D.k, D.v, D.gk + rows(D.gv[:, e]))
        agree(matrices[e], channel)
        agree(out[:, e], channel @ D.v[:, e])
    ours = pull(la.gla, D.q, D.k, D.v, D.gk, gv=D.gv, dout=D.dout)
    channels = [
        pull(la.gla, D.q, D.k, D.v[:, e : e + 1], D.gk + rows(D.gv[:, e]), dout=D.dout[:, e : e + 1])
        for e in range(D.V)
    ]
    agree(ours.q, sum(c.q for c in channels))
    agree(ours.k, sum(c.k for c in channels))
    agree(ours.g, sum(c.g for c in channels))
    agree(ours.gv, np.stack([c.g.sum(1) for c in channels], axis=1))
    agree(ours.v, np.hstack([c.v for c in channels]))
