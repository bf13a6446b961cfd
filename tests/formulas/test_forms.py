"""Prefix-summed chunk states, the pair of forms in every dtype, the RWKV-6 loop (text 004)."""

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from tests.formulas.one_head import agree, data, explained, pull, rows, run, run_with_state, tri

D = data()
T, K, V = D.T, D.K, D.V
q, k, v, gk, u, S0, dout, dS = D.q, D.k, D.v, D.gk, D.u, D.S0, D.dout, D.dS


@pytest.mark.parametrize("C", [1, 3, 4, 12])
def test_5_2_prefix_summed_chunk_states(C):
    Q, P, X = (x.reshape(T // C, C, -1) for x in (q, k, v))
    KV = P.swapaxes(1, 2) @ X
    S = np.cumsum(KV, axis=0) - KV
    out = Q @ S + tri(Q @ P.swapaxes(1, 2)) @ X
    agree(run(la.linear_attention, q, k, v, chunk_size=C), out.reshape(T, V))
    if C == 4:
        agree(S[2], k[:8].T @ v[:8])


def test_5_2_padding_changes_nothing():
    padded = [np.concatenate([x, 0 * x[:4]]) for x in (q, k, v)]
    out, state = run_with_state(la.linear_attention, *padded, chunk_size=8)
    agree(out[:T], run(la.linear_attention, q, k, v))
    agree(state, k.T @ v)


def test_5_3_the_limits_of_the_chunk_form():
    agree(run(la.linear_attention, q, k, v, chunk_size=T), tri(q @ k.T) @ v)
    S = np.cumsum(k[:, :, None] * v[:, None, :], axis=0)
    agree(run(la.linear_attention, q, k, v, chunk_size=1), np.stack([q[t] @ S[t] for t in range(T)]))


@pytest.mark.parametrize(("L", "C", "d"), [(1024, 64, 100), (192, 64, 128), (128, 64, 128), (512, 16, 64)])
def test_5_3_chunks_are_cheaper_than_the_square_beyond_their_length_and_width(L, C, d):
    chunks, square = L * explained(la.linear_attention, L, d, d, chunk_size=C).operations_per_token, 4 * L**2 * d
    assert chunks == 4 * L * C * d + 4 * L * d**2
    assert (chunks < square) == (C + d < L)
    assert (chunks == square) == (C + d == L)
    if (L, C, d) == (1024, 64, 100):
        assert (chunks, square) == (67_174_400, 419_430_400)
    if (L, C, d) == (192, 64, 128):
        assert chunks == square == 18_874_368


@pytest.mark.parametrize(
    ("dtype", "bound"), [(np.float64, 16), (np.float32, 8), (np.float16, 2), (ml_dtypes.bfloat16, 2)]
)
def test_5_4_parallel_against_chunks(dtype, bound):
    B, H, L, channels = 4, 4, 1024, 100
    arrays = np.random.default_rng(0).standard_normal((3, B, H, L, channels)).astype(dtype)
    options = {"scale": channels**-0.5, "layout": "heads_first"}
    parallel = la.linear_attention(*arrays, chunk_size="parallel", **options)
    chunks = la.linear_attention(*arrays, chunk_size=64, **options)
    assert parallel.dtype == chunks.dtype == dtype
    parallel, chunks = parallel.astype(np.float64), chunks.astype(np.float64)
    largest = np.abs(parallel).max()
    assert 100 < largest < 200
    assert np.abs(parallel - chunks).max() <= bound * float(ml_dtypes.finfo(dtype).eps) * largest


def test_5_5_the_loop():
    B, H = 2, 3
    rng = np.random.default_rng(0)
    r, key, value = (rng.standard_normal((B, H, T, width)) for width in (K, K, V))
    w, bonus = -rng.uniform(0.05, 0.7, (B, H, T, K)), rng.standard_normal((H, K))
    h0 = rng.standard_normal((B, H, K, V))
    out, state = la.rwkv6(r, key, value, w, bonus, scale=1, state=h0, layout="heads_first", return_state=True)
    h, expected = h0, np.zeros((B, H, T, V))
    for t in range(T):
        kv = key[:, :, t, :, None] * value[:, :, t, None, :]
        expected[:, :, t] = np.sum((h + bonus[..., None] * kv) * r[:, :, t, :, None], axis=-2)
        h = np.exp(w[:, :, t, :, None]) * h + kv
    agree(out, expected)
    agree(state, h)


def test_5_5_bonus_one_and_no_decay_is_linear_attention():
    arrays = (q, k, v, np.zeros((T, K)), np.ones(K))
    ours = run_with_state(la.rwkv6, *arrays, state=S0)
    for one, other in zip(ours, run_with_state(la.linear_attention, q, k, v, state=S0), strict=True):
        agree(one, other)
    ours = pull(la.rwkv6, *arrays, dout=dout, dstate=dS, state=S0)
    through = pull(la.linear_attention, q, k, v, dout=dout, dstate=dS, state=S0)
    for name in ("q", "k", "v", "state"):
        agree(getattr(ours, name), getattr(through, name))


def test_5_5_no_bonus_reads_before_it_writes():
    S = np.concatenate([S0[None], S0 + np.cumsum(k[:, :, None] * v[:, None, :], axis=0)])
    out = run(la.rwkv6, q, k, v, np.zeros((T, K)), np.zeros(K), state=S0)
    agree(out, np.stack([q[t] @ S[t] for t in range(T)]))


def test_5_5_queries_one_step_back():
    back = np.concatenate([q[1:], np.zeros((1, K))])
    forward = np.concatenate([q[:1] @ S0, run(la.gla, back, k, v, gk, state=S0)[:-1]])
    agree(run(la.rwkv6, q, k, v, gk, u, state=S0), forward + rows(np.sum(q * u * k, axis=1)) * v)
    ours = pull(la.rwkv6, q, k, v, gk, u, dout=dout, dstate=dS, state=S0)
    dback = np.concatenate([dout[1:], np.zeros((1, V))])
    through = pull(la.gla, back, k, v, gk, dout=dback, dstate=dS, state=S0)
    own = rows(np.sum(dout * v, axis=1))
    agree(ours.q, np.concatenate([dout[:1] @ S0.T, through.q[:-1]]) + own * u * k)
    agree(ours.k, through.k + own * u * q)
    agree(ours.v, through.v + rows(np.sum(q * u * k, axis=1)) * dout)
    agree(ours.g, through.g)
    agree(ours.u, np.sum(own * q * k, axis=0))
    agree(ours.state, through.state + np.outer(q[0], dout[0]))
