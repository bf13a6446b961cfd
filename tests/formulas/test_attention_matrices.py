"""The matrix A of each variant, out = A v (text 002, its table): 3.1 to 3.12."""

import numpy as np
import pytest

import linattn_np as la
from tests.formulas.one_head import A, agree, data, decayed_gram, pull, rows, run, tri

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


# the rest of the family, each in closed form


def test_3_2_other_decays_of_the_same_matrix(D):
    distance = np.maximum(np.arange(D.T)[:, None] - np.arange(D.T), 0)
    products = D.q @ D.k.T
    constant = tri(products * np.exp(-0.2 * distance))
    check(D, la.retention, (D.q, D.k, D.v, np.array(-0.2)), constant)
    check(D, la.lightning_attention, (D.q, D.k, D.v, np.array(0.2)), constant)
    steps = np.exp(np.minimum(rows(np.cumsum(D.beta)) - np.cumsum(D.beta), 1e300) * -0.2 * D.M)
    agree(A(la.mamba2, D.v, D.beta, np.array(-0.2), D.k, D.q), tri(products * steps) * D.beta)
    agree(A(la.hgrn2, D.q, D.v, D.gk), decayed_gram(D.q, 1 - np.exp(D.gk), D.bk, D.bk))


def test_3_12_decaying_fast_weights(D):
    matrices = A(la.dfw, D.q, D.k, D.v, D.gk, gv=D.gv)
    for e in range(D.V):
        b = D.bk + rows(np.cumsum(D.gv[:, e]))
        agree(matrices[e], decayed_gram(D.q, D.k, b, b))


def test_3_3_longhorn(D):
    strength = np.diag(D.beta / (1 + D.beta * np.sum(D.k**2, axis=1)))
    erased = inverse_times(strength @ D.k @ D.k.T * D.M_strict, strength)
    check(D, la.longhorn, (D.q, D.k, D.v, D.beta), tri(D.q @ D.k.T) @ erased)


@pytest.mark.parametrize("name", ["dplr", "rwkv7", "iplr"])
def test_3_5_any_rank_one_map_entry_by_entry(name):
    """A_ij = q_i M_i ... M_{j+1} k_j, M_t = diag(e^{g_t}) + b_t^T a_t."""
    D = data()
    a, b = -D.ku, rows(D.beta) * D.ku / 2
    gate = np.zeros((D.T, D.K)) if name == "iplr" else D.gk
    matrix = np.zeros((D.T, D.T))
    for i in range(D.T):
        for j in range(i + 1):
            x = D.k[j]
            for t in range(j + 1, i + 1):
                x = np.exp(gate[t]) * x + b[t] * (a[t] @ x)
            matrix[i, j] = D.q[i] @ x
    check(D, getattr(la, name), (D.q, D.k, D.v, *(() if name == "iplr" else (D.gk,)), a, b), matrix)


KERNELS = {
    "performer": lambda q, k: la.feature_maps.favor_plus()[0](q) @ la.feature_maps.favor_plus()[0](k).T,
    "based": lambda q, k: 1 + q @ k.T / q.shape[1] ** 0.5 + (q @ k.T) ** 2 / (2 * q.shape[1]),
    "rebased": lambda q, k: np.square(normed(q) @ normed(k).T) / q.shape[1],
    "rfa": lambda q, k: la.feature_maps.random_fourier()[0](q) @ la.feature_maps.random_fourier()[0](k).T,
}


def normed(x):
    return (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_1_1_kernels_and_their_rows_that_add_up_to_one(D, name):
    kernel = tri(KERNELS[name](D.q, D.k))
    check(D, getattr(la, name), (D.q, D.k, D.v), kernel / rows(kernel.sum(axis=1)))
    agree(A(getattr(la, name), D.q, D.k, D.v, normalize=False), kernel)


def test_1_1_a_gate_of_kernel_attention(D):
    kernel = KERNELS["rfa"](D.q, D.k) * D.Gamma * (1 - np.exp(D.g))
    check(D, la.rfa, (D.q, D.k, D.v, D.g), kernel / rows(kernel.sum(axis=1)))


def test_slots_are_two_matrices_and_a_softmax(D):
    """A_ij = sum_m p_im s_jm e^{b_im - b_jm}, p the softmax of the same matrix of q, k and s."""
    M = 4
    s, gs = D.beta[:, None] * np.linspace(0.1, 0.4, M), D.g[:, None] * np.linspace(0.5, 2, M)
    b = np.cumsum(gs, axis=0)
    between = np.exp(np.where(D.M[..., None] > 0, b[:, None] - b, -np.inf))
    logits = np.einsum("ij,jm,ijm->im", D.q @ D.k.T, s, between)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    check(D, la.gsa, (D.q, D.k, D.v, s, gs), np.einsum("im,jm,ijm->ij", p, s, between))
    averaged = np.exp(D.q[:, :M])  # of any logits: here some of the queries
    sums = np.cumsum(averaged, axis=0)
    logits = np.einsum("ij,jm,im->im", tri(D.q @ D.k.T), averaged, 1 / sums)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    check(D, la.abc, (D.q, D.k, D.v, D.q[:, :M]), tri(np.einsum("im,jm->ij", p / sums, averaged)))


def test_every_variant_has_its_matrix():
    """No initial state, linear in the values: out = A v, for every such function of the library."""
    rng = np.random.default_rng(0)
    for fn in (fn for fn in la.VARIANTS if fn.spec.change.linear):
        x = la.testing.sample(fn, rng, B=(), T=9, H=2, K=6, V=3)
        matrix, v = la.influence_matrix(fn, **x), x[fn.spec.change.value]
        if fn.spec.row_axes == 1:  # no heads
            matrix, v = matrix[None], v[:, None]
        flat = np.moveaxis(v, -2, 0).reshape(len(matrix), -1, 3)
        made = np.einsum("heij,hje->ihe" if matrix.ndim == 4 else "hij,hje->ihe", matrix, flat)
        out = fn(**x)
        agree(made.reshape(out.shape), out)
