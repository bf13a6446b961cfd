"""Two-sided attention, the demonstration, the two normalisers, tiles and blocks (text 001)."""

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from tests.cases import peak_memory
from tests.formulas.one_head import A, agree, data, explained, pull, rows, run, tri

D = data()
T, K, V = D.T, D.K, D.V
q, k, v, dout = D.q, D.k, D.v, D.dout
LOG_DECAY = -0.3


def silu(x):
    return x / (1 + np.exp(-x))


def dsilu(x):
    sigmoid = 1 / (1 + np.exp(-x))
    return sigmoid * (1 + x * (1 - sigmoid))


@pytest.mark.parametrize("queries", [1, 5, T, 20])
def test_2_1_without_the_mask_the_product_is_reordered(queries):
    Q = np.random.default_rng(queries).standard_normal((queries, K))
    dO = np.random.default_rng(queries + 1).standard_normal((queries, V))
    out = run(la.linear_attention, Q, k, v, causal=False)
    agree(out, (Q @ k.T) @ v)
    agree(out, Q @ (k.T @ v))
    grads = pull(la.linear_attention, Q, k, v, dout=dO, causal=False)
    agree(grads.q, dO @ (k.T @ v).T)
    agree(grads.k, v @ (Q.T @ dO).T)
    agree(grads.v, k @ (Q.T @ dO))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_2_2_the_demonstration(dtype):
    one_to_six = np.arange(1, 7).astype(dtype)
    keys, values = np.tile(one_to_six, (4, 1)), np.ones((4, 6), dtype)
    out = run(la.linear_attention, one_to_six[None], keys, values, causal=False)
    assert out.dtype == dtype
    assert (out.astype(float) == 364).all()
    out = run(la.linear_attention, keys, keys, values)
    holds = np.array([1, 2, 4]) if dtype is ml_dtypes.bfloat16 else np.arange(1, 5)  # 273 has nine significant bits
    assert (out.astype(float)[holds - 1] == 91 * holds[:, None]).all()


def test_2_4_one_denominator_a_query():
    Q, P = np.exp(q), np.exp(k)
    out = run(la.linear_attention, Q, P, v, normalize=True, causal=False)
    agree(out, (Q @ P.T) @ v / rows(Q @ P.sum(0)))
    agree(run(la.linear_attention, Q, P, np.ones((T, V)), normalize=True, causal=False), np.ones((T, V)))
    agree(run(la.linear_attention, Q, P, np.ones((T, V)), normalize=True), np.ones((T, V)))


def test_2_5_one_denominator_a_channel():
    Q, P = np.exp(q), np.exp(k)
    out = run(la.linear_attention, Q / P.sum(0), P, v, causal=False)
    agree(out, Q @ np.diag(1 / P.sum(0)) @ (P.T @ v))
    ones = np.ones((T, V))
    agree(run(la.linear_attention, Q / P.sum(0), P, ones, causal=False), rows((Q / P.sum(0)) @ P.sum(0)) * ones)
    agree(run(la.linear_attention, Q / np.cumsum(P, 0), P, ones), rows(Q.sum(1)) * ones)
    per_query = run(la.linear_attention, Q, P, v, normalize=True, causal=False)
    assert np.abs(out - per_query).max() > 0.1 * np.abs(per_query).max()


def test_2_6_no_reordering_under_the_mask():
    masked, reordered = run(la.linear_attention, q, k, v), q @ (k.T @ v)
    assert np.abs(masked - reordered).max() > 0.1 * np.abs(reordered).max()
    agree(masked[-1], reordered[-1])


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, "parallel"])
def test_2_7_four_tokens(chunk_size):
    out = run(la.linear_attention, q[:4], k[:4], v[:4], chunk_size=chunk_size)
    for t in range(4):
        agree(out[t], q[t] @ sum(np.outer(k[j], v[j]) for j in range(t + 1)))
    first_block = np.outer(k[0], v[0]) + np.outer(k[1], v[1])
    agree(out[2], q[2] @ first_block + (q[2] @ k[2]) * v[2])
    agree(out[3], q[3] @ first_block + (q[3] @ k[2]) * v[2] + (q[3] @ k[3]) * v[3])


@pytest.mark.parametrize("B", [5, 4])
def test_2_8_tiles_of_the_left_product(B):
    Q, P = silu(q), silu(k)
    O, dQ, dP, dV = np.zeros((T, V)), np.zeros((T, K)), np.zeros((T, K)), np.zeros((T, V))
    for i in range(0, T, B):
        I = slice(i, i + B)
        for j in range(0, i + 1, B):
            J = slice(j, j + B)
            mask = tri if i == j else np.asarray
            X, dX = mask(Q[I] @ P[J].T), mask(dout[I] @ v[J].T)
            O[I] += X @ v[J]
            dQ[I] += dX @ P[J]
            dP[J] += dX.T @ Q[I]
            dV[J] += X.T @ dout[I]
    no_decay = np.array(0.0)
    agree(run(la.lightning_attention, Q, P, v, no_decay, chunk_size="parallel"), O)
    grads = pull(la.lightning_attention, Q, P, v, no_decay, dout=dout, chunk_size="parallel")
    agree(grads.q, dQ)
    agree(grads.k, dP)
    agree(grads.v, dV)
    agree(run(la.linear_attention, q, k, v, feature_map="silu", chunk_size="parallel"), O)
    grads = pull(la.linear_attention, q, k, v, dout=dout, feature_map="silu", chunk_size="parallel")
    agree(grads.q, dQ * dsilu(q))
    agree(grads.k, dP * dsilu(k))
    agree(grads.v, dV)


def test_2_8_tiles_of_a_triangle():
    tokens, K, V = 1024, 32, 16
    call = explained(la.linear_attention, tokens, K, V, chunk_size="parallel")
    B, n = call.chunk_size, tokens // call.chunk_size
    products = n * (n + 1) // 2
    assert (B, products) == (64, 136)
    assert call.operations == products * 2 * B**2 * (K + V)


@pytest.mark.parametrize("backward", [False, True])
def test_2_8_tiles_need_memory_for_tokens_not_for_pairs(backward):
    rng = np.random.default_rng(0)

    tokens = 2048 if backward else 4096

    def peak(tokens):
        Q, P, X, dO = rng.standard_normal((4, tokens, 8))
        if backward:
            return peak_memory(lambda: pull(la.linear_attention, Q, P, X, dout=dO, chunk_size="parallel"))
        return peak_memory(lambda: run(la.linear_attention, Q, P, X, chunk_size="parallel"))

    peak(256)  # the first call fills caches
    assert peak(2 * tokens) < 2.5 * peak(tokens)


@pytest.mark.parametrize("B", [5, 4])
def test_2_9_blocks_with_a_constant_decay(B):
    decay = np.exp(LOG_DECAY)
    O, dQ, dK, dV = np.zeros((T, V)), np.zeros((T, K)), np.zeros((T, K)), np.zeros((T, V))
    KV, dKV = np.zeros((K, V)), np.zeros((K, V))
    blocks = [slice(first, min(first + B, T)) for first in range(0, T, B)]
    for I in blocks:
        n = I.stop - I.start
        i = np.arange(1, n + 1)[:, None]
        mask = tri(decay ** (i - i.T))
        O[I] = (q[I] @ k[I].T * mask) @ v[I] + decay**i * (q[I] @ KV)
        dQ[I] = (dout[I] @ v[I].T * mask) @ k[I] + decay**i * (dout[I] @ KV.T)
        KV = decay**n * KV + (decay ** (n - i) * k[I]).T @ v[I]
    for I in reversed(blocks):
        n = I.stop - I.start
        i = np.arange(1, n + 1)[:, None]
        mask = tri(decay ** (i - i.T))
        dK[I] = (dout[I] @ v[I].T * mask).T @ q[I] + decay ** (n - i) * (v[I] @ dKV.T)
        dV[I] = (q[I] @ k[I].T * mask).T @ dout[I] + decay ** (n - i) * (k[I] @ dKV)
        dKV = decay**n * dKV + (decay**i * q[I]).T @ dout[I]
    slope = np.array(-LOG_DECAY)
    agree(run(la.lightning_attention, q, k, v, slope, chunk_size=B), O)
    grads = pull(la.lightning_attention, q, k, v, slope, dout=dout, chunk_size=B)
    agree(grads.q, dQ)
    agree(grads.k, dK)
    agree(grads.v, dV)


def test_2_9_the_slope_is_minus_the_log_decay():
    slope = np.array(-LOG_DECAY)
    ours = pull(la.lightning_attention, q, k, v, slope, dout=dout, dstate=D.dS, state=D.S0)
    through = pull(la.retention, q, k, v, -slope, dout=dout, dstate=D.dS, state=D.S0)
    agree(A(la.lightning_attention, q, k, v, slope), A(la.retention, q, k, v, -slope))
    agree(ours.slopes, -through.g)
    for name in ("q", "k", "v", "state"):
        agree(getattr(ours, name), getattr(through, name))


@pytest.mark.parametrize("name", ["linear_attention", "lightning_attention"])
def test_2_10_the_mask_inside_a_block_is_triangular(name):
    changed_k, changed_v = k.copy(), v.copy()
    changed_k[2], changed_v[2] = 7, -5
    constants = [np.array(0.3)] if name == "lightning_attention" else []
    before = run(getattr(la, name), q, k, v, *constants, chunk_size=4)
    after = run(getattr(la, name), q, changed_k, changed_v, *constants, chunk_size=4)
    np.testing.assert_array_equal(after[:2], before[:2])
    assert (after[2] != before[2]).any()
    agree(run(getattr(la, name), q, k, v, *constants, chunk_size=1), before)
