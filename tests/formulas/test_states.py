"""Reading without writing, longer keys than queries, splits and chunks that hand a state over (text 003)."""

import numpy as np
import pytest

import linattn_np as la
from tests.formulas.one_head import agree, data, final_state, pull, run, run_with_state

D = data()
T, K, V = D.T, D.K, D.V
q, k, ku, v, g, gk, beta, S0, dout, dS = D.q, D.k, D.ku, D.v, D.g, D.gk, D.beta, D.S0, D.dout, D.dS
LONG = data(17)


def read(queries, state):
    """scale 1, one head."""
    return la.read(queries[:, None], state[None], scale=1)[:, 0]


def written_state(fn, *arrays, **options):
    """The state of a call without queries, which has no output."""
    out, state = run_with_state(fn, None, *arrays, **options)
    assert out is None
    return state


def test_4_1_one_query():
    state = written_state(la.linear_attention, k, v)
    agree(read(q[:1], state), (q[:1] @ k.T) @ v)
    agree(read(q[:1], state), q[:1] @ (k.T @ v))


def test_4_2_queries_after_all_keys():
    Q, dO = q[:5], dout[:5]
    state = written_state(la.linear_attention, LONG.k, LONG.v)
    agree(read(Q, state), (Q @ LONG.k.T) @ LONG.v)
    agree(read(Q, state), run(la.linear_attention, Q, LONG.k, LONG.v, causal=False))
    _, read_back = la.vjp(la.read, Q[:, None], state[None], scale=1)
    grads = read_back(dO[:, None])
    through = pull(la.linear_attention, None, LONG.k, LONG.v, dstate=grads.state[0])
    together = pull(la.linear_attention, Q, LONG.k, LONG.v, dout=dO, causal=False)
    agree(grads.q[:, 0], together.q)
    agree(through.k, together.k)
    agree(through.v, together.v)


@pytest.mark.parametrize("gated", [False, True])
def test_4_3_the_last_query_sees_the_last_key(gated):
    Lq, Lkv = 5, LONG.T
    Q, dO = q[:Lq], dout[:Lq]
    fn, mask = (la.simple_gla, LONG.Gamma) if gated else (la.linear_attention, LONG.M)
    mask = mask[-Lq:]
    head, tail = slice(None, Lkv - Lq), slice(Lkv - Lq, None)
    gates = (LONG.g,) if gated else ()
    first = (LONG.k[head], LONG.v[head], *(x[head] for x in gates))
    last = (LONG.k[tail], LONG.v[tail], *(x[tail] for x in gates))
    S = written_state(fn, *first)
    agree(run(fn, Q, *last, state=S), (Q @ LONG.k.T * mask) @ LONG.v)
    late = pull(fn, Q, *last, dout=dO, state=S)
    early = pull(fn, None, *first, dstate=late.state)
    dA = dO @ LONG.v.T * mask
    agree(late.q, dA @ LONG.k)
    agree(np.concatenate([early.k, late.k]), dA.T @ Q)
    agree(np.concatenate([early.v, late.v]), (Q @ LONG.k.T * mask).T @ dO)


SPLITS = {
    "linear_attention": (q, k, v),
    "simple_gla": (q, k, v, g),
    "gla": (q, k, v, gk),
    "delta_rule": (q, ku, v, beta),
    "gated_delta_rule": (q, ku, v, g, beta),
    "kda": (q, ku, v, gk, beta),
    "comba": (q, ku, v, ku, g, beta),
}


@pytest.mark.parametrize("a", [0, 3, 7, 12])
def test_4_6_states_add(a):
    whole = final_state(la.linear_attention, q, k, v)
    agree(whole, k[:a].T @ v[:a] + final_state(la.linear_attention, q[a:], k[a:], v[a:]))
    whole = final_state(la.simple_gla, q, k, v, g)
    before = final_state(la.simple_gla, q[:a], k[:a], v[:a], g[:a])
    agree(whole, np.exp(g[a:].sum()) * before + final_state(la.simple_gla, q[a:], k[a:], v[a:], g[a:]))
    whole = final_state(la.gated_delta_rule, q, ku, v, g, beta)
    before = final_state(la.gated_delta_rule, q[:a], ku[:a], v[:a], g[:a], beta[:a])
    after = final_state(la.gated_delta_rule, q[a:], ku[a:], v[a:], g[a:], beta[a:])
    nothing = np.zeros((T - a, K))
    P = final_state(la.gated_delta_rule, q[a:], ku[a:], nothing, g[a:], beta[a:], state=np.eye(K))
    agree(whole, P @ before + after)


@pytest.mark.parametrize("chunk_size", [1, 4, "parallel"])
@pytest.mark.parametrize("name", ["simple_gla", "gla", "gated_delta_rule", "kda"])
def test_4_6_minus_infinity_starts_anew(name, chunk_size):
    fn, reset = getattr(la, name), 5
    arrays = [x.copy() for x in SPLITS[name]]
    arrays[3][reset] = -np.inf
    late = [x[reset:] for x in arrays]
    out, state = run_with_state(fn, *arrays, state=S0, chunk_size=chunk_size)
    alone, state_alone = run_with_state(fn, *late, chunk_size=chunk_size)
    agree(out[reset:], alone)
    agree(state, state_alone)
    seen_late = np.where(np.arange(T)[:, None] < reset, 0, dout)
    grads = pull(fn, *arrays, dout=seen_late, dstate=dS, state=S0, chunk_size=chunk_size)
    alone = pull(fn, *late, dout=dout[reset:], dstate=dS, chunk_size=chunk_size)
    assert (grads.state == 0).all()
    assert (grads.g[reset] == 0).all()
    for array in set(vars(grads)) - {"state"}:
        gradient = getattr(grads, array)
        if gradient is not None:
            assert (gradient[:reset] == 0).all()
            agree(gradient[reset:], getattr(alone, array))
