"""A user's script, for type checkers: mypy --strict and pyright accept it and infer the stated types."""

from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import linattn_np as la

Floats = NDArray[np.float32]


def layer(q: Floats, k: Floats, v: Floats, g: Floats, beta: Floats) -> Floats:
    """Forward, with and without a state, and backward."""
    out = la.gated_delta_rule(q, k, v, g, beta, layout="time_first", qk_l2norm=True, backend="numba")
    assert_type(out, Floats)
    out, state = la.gated_delta_rule(q, k, v, g, beta, return_state=True)
    result = la.gla(q, k, v, g, return_state=True, state=state)
    assert_type(result.out, Floats)
    states = la.delta_rule(q, k, v, beta, return_states_at=16).states
    _, pullback = la.vjp(la.gated_delta_rule, q, k, v, g, beta)
    grads = pullback(np.ones_like(out))
    attended, lse = la.softmax_attention(q, k, v, return_lse=True)
    whole: Floats = la.merge(attended, lse, attended, lse).out
    assert_type(whole, Floats)
    used: Floats = grads.q + grads.beta[..., None] + states.sum()
    return used + out
