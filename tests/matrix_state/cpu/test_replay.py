"""A chunked call like one before it: the same bits, whatever the arrays, and every check where more may differ."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llvmlite")

import linattn_np as la
from linattn_np.call import replay

T = 70


def arrays(seed, dtype=np.float32, H=3, K=8, V=16):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((2, T, H, d)).astype(dtype) for d in (K, K, V))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return [q, k, v, -rng.uniform(0, 1, (2, T, H)).astype(dtype), rng.uniform(0, 2, (2, T, H)).astype(dtype)]


def afresh(*given, **options):
    """The call as if it were the first."""
    known = dict(replay.plans)
    replay.clear()
    try:
        return la.gated_delta_rule(*given, backend="numba", return_state=True, **options)
    finally:
        replay.clear()
        replay.plans.update(known)


LAYOUTS = {
    "plain": lambda x: x,
    "backwards": lambda x: x[:, ::-1].copy()[:, ::-1],
    "every second": lambda x: np.repeat(x, 2, axis=-1)[..., ::2] if x.ndim == 4 else x,
    "heads first in memory": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "one batch row for all": lambda x: np.broadcast_to(x[:1], x.shape),
    "half": lambda x: x.astype(np.float16),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("state", [False, True])
def test_the_same_bits_as_a_first_call(layout, state):
    for seed in range(3):
        given = [LAYOUTS[layout](x) for x in arrays(seed)]
        S = np.random.default_rng(seed).standard_normal((2, 3, 8, 16)).astype(np.float32) if state else None
        expected = afresh(*given, state=S)
        found = la.gated_delta_rule(*given, state=S, backend="numba", return_state=True)
        assert found.out.dtype == expected.out.dtype
        assert (found.out == expected.out).all()
        assert (found.state == expected.state).all()
        assert (la.gated_delta_rule(*given, state=S, backend="numba") == expected.out).all()


def test_a_state_is_overwritten_in_place_and_elsewhere():
    for seed in range(3):
        given, state = arrays(seed), np.full((2, 3, 8, 16), 0.5, np.float32)
        expected = afresh(*given, state=state)
        found = la.gated_delta_rule(*given, state=state, overwrite_state=True, return_state=True, backend="numba")
        assert found.state is state
        assert (state == expected.state).all()
        assert (found.out == expected.out).all()


def test_a_state_that_shares_memory_with_an_input_is_not_written_while_it_is_read():
    given, state = arrays(0), np.full((2, 3, 8, 16), 0.5, np.float32)
    la.gated_delta_rule(*given, state=state, overwrite_state=True, backend="numba")
    for seed in range(2):
        given = arrays(seed)
        expected = afresh(*given, state=given[2].reshape(-1)[: 2 * 3 * 8 * 16].reshape(2, 3, 8, 16).copy())
        state = given[2].reshape(-1)[: 2 * 3 * 8 * 16].reshape(2, 3, 8, 16)
        out = la.gated_delta_rule(*given, state=state, overwrite_state=True, backend="numba")
        assert (out == expected.out).all()
        assert (state == expected.state).all()


def test_misaligned_arrays():
    given = arrays(0)
    for _ in range(2):
        expected = afresh(*given)
        buffer = np.zeros(given[0].nbytes + 1, np.uint8)
        misaligned = buffer[1:].view(np.float32).reshape(given[0].shape)
        misaligned[...] = given[0]
        assert (la.gated_delta_rule(misaligned, *given[1:], backend="numba") == expected.out).all()
        assert (la.gated_delta_rule(*given, backend="numba") == expected.out).all()


def test_bad_input_is_refused_after_good_input():
    given = arrays(0)
    la.gated_delta_rule(*given, backend="numba")
    with pytest.raises(ValueError, match="gated_delta_rule: beta has shape"):
        la.gated_delta_rule(*given[:4], given[4][:, :1], backend="numba")
    with pytest.raises(TypeError, match="beta"):
        la.gated_delta_rule(*given[:4], given[4].astype(int), backend="numba")


def test_a_doubtful_layout_is_warned_of_every_time():
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 40, 4)).astype(np.float32)
    for _ in range(3):
        with pytest.warns(UserWarning, match="heads_first"):
            la.linear_attention(q, k, v, backend="numba")
