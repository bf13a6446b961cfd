"""Prefix-summed chunk states, the pair of forms in every dtype, the RWKV-6 loop (text 004)."""

import numpy as np
import pytest

import linattn_np as la
from tests.formulas.one_head import agree, data, explained, pull, rows, run, run_with_state

D = data()
T, K, V = D.T, D.K, D.V
q, k, v, gk, u, S0, dout, dS = D.q, D.k, D.v, D.gk, D.u, D.S0, D.dout, D.dS


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
