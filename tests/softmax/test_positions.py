"""Caches at positions: as of calls on the tokens before them, in as many slots as the final one; gradients."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from tests.call.test_states_at import check_gradients, is_equal, random_like, with_gradients
from tests.cases import GROWING, cases_of, cotangents, draw, parts, parts_like, tokens
from tests.softmax.test_cache import SOFTMAX, every_case

HOWS = ({"backend": "reference"}, {"backend": "chunks", "chunk_size": 16}, {"backend": "numba"})
ALL = [case for fn in GROWING for case in cases_of(fn)]
SLOTS = ("k", "v", "b")  # parts with an axis of slots


def same(found, n, axis, one):
    """Whether position n of `found` is the cache `one`, whose slots are fewer: no token was forgotten."""
    L = one.v.shape[-3]
    for name, x in found._asdict().items():
        y, own = np.take(x, n, axis=axis), getattr(one, name)
        if name in SLOTS:
            own, y, rest = (own, *np.split(y, [L], axis=axis))
            assert not rest.any(), name
        assert la.testing.relative_error(y, own) <= 1e-12, name


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_of_prefixes(case, how):
    arrays, state = draw(case, T=30)
    positions, options = [0, 1, 7, 29, 30], case.options | how
    found = case.fn(**arrays, **options, state=state, return_states_at=positions, return_state=True)
    assert is_equal((found.out, found.state), tuple(case.fn(**arrays, **options, state=state, return_state=True)))
    assert "pieces" not in la.explain(case.fn, **arrays, **options, return_states_at=positions).reason
    if "window" not in options:
        for n, p in enumerate(positions):
            given = tokens(case, arrays, 0, p) | ({} if case.causal else {"q": arrays["q"]})
            same(found.states, n, 1, case.fn(**given, **options, state=state, return_state=True).state)
    for n, p in enumerate(positions):  # what follows a position
        rest = tokens(case, arrays, p, 30) | ({} if case.causal else {"q": arrays["q"]})
        begin = parts_like(state, [np.take(x, n, axis=1) for x in found.states])
        out = case.fn(**rest, **options, state=begin)
        assert la.testing.relative_error(out, found.out[:, p if case.causal else 0 :]) <= 1e-12
    check_gradients(case, arrays | {"state": state}, how | {"return_state": True, "return_states_at": positions})


@every_case
def test_of_packed_sequences(case):
    """Position 0 is of the first sequence, an offset of the sequence that ends there."""
    offsets, positions = [0, 3, 3, 30, 40], [0, 1, 3, 20, 30, 33, 40]
    arrays, state = draw(case, B=(1,), T=40, N=4)
    options = {"cu_seqlens": offsets, "return_state": True, "return_states_at": positions}
    found = case.fn(**arrays, **case.options, state=state, **options)
    for n, p in enumerate(positions):
        s = max(n for n, start in enumerate(offsets[:-1]) if start < p) if p else 0
        begin = parts_like(state, [x[s : s + 1] for x in state])
        one = case.fn(**tokens(case, arrays, offsets[s], p), **case.options, state=begin, return_state=True)
        same(found.states, n, 0, parts_like(state, [x[0] for x in one.state]))
    check_gradients(case, arrays | {"state": state}, options)


@every_case
def test_without_a_state_in_reverse_and_at_no_position(case):
    arrays, _ = draw(case, T=12)
    found = case.fn(**arrays, **case.options, return_states_at=[4, 12], return_state=True)
    for x, y in zip(found.states, found.state, strict=True):
        np.testing.assert_array_equal(x[:, 1], y)
    backwards = {n: x[:, ::-1] if case.on_tokens(n) else x for n, x in arrays.items()}
    turned = case.fn(**backwards, **case.options, return_states_at=[0, 8], return_state=True, reverse=True)
    for x, y in zip(found.states, turned.states, strict=True):
        np.testing.assert_array_equal(x[:, ::-1], y)
    check_gradients(case, arrays, {"return_state": True, "return_states_at": [4, 11]})
    result, grads = with_gradients(case, arrays, return_states_at=[], return_state=True)
    for x, y in zip(result.states, result.state, strict=True):
        assert x.shape == (2, 0, *y.shape[1:])
    assert all(np.isfinite(d).all() for d in grads.values())


@every_case
def test_gradients_through_positions_alone(case):
    """A cotangent of zeros for out and the final state is none."""
    arrays, state = draw(case, T=12)
    (out, end, states), pullback = la.vjp(case.fn, **arrays, state=state, return_states_at=5, return_state=True)
    d, (dout, dend) = random_like(states), cotangents((np.zeros_like(out), end))
    none = pullback(dout * 0, parts_like(end, [x * 0 for x in dend]), d)
    alone = pullback(None, None, d)
    for x, y in zip(parts(tuple(none)), parts(tuple(alone)), strict=True):
        np.testing.assert_array_equal(x, y)


@every_case
def test_a_cache_that_is_overwritten_keeps_its_slots(case):
    arrays, state = draw(case, T=9)
    expected = case.fn(**arrays, **case.options, state=state, return_states_at=[2, 9])
    own = parts_like(state, [x.copy() for x in state])
    out, end, states = case.fn(**arrays, **case.options, state=own, return_states_at=[2, 9], return_state=True,
                               overwrite_state=True)  # fmt: skip
    assert all(x is y for x, y in zip(end, own, strict=True))
    np.testing.assert_array_equal(out, expected.out)
    for x, y in zip(states, own, strict=True):
        assert la.testing.relative_error(x[:, 1], y) <= 1e-14
    p, L = 8, state.v.shape[1]  # token 1 of the call is the ninth: 7 are in the cache
    assert la.testing.relative_error(states.v[:, 0, p % L], expected.states.v[:, 0, p]) <= 1e-14


def test_repeated_calls_and_a_bias():
    replay.clear()
    calls = [draw(SOFTMAX, T=9, dtype=np.float32, seed=n) for n in range(3)]
    options = {"return_states_at": [3, 9], "return_state": True}
    first = [la.softmax_attention(**arrays, state=state, **options) for arrays, state in calls]
    for (arrays, state), result in zip(calls, first, strict=True):
        replay.clear()
        assert is_equal(tuple(la.softmax_attention(**arrays, state=state, **options)), tuple(result))
    arrays = calls[0][0]
    bias = np.ones((2, 9, 2, 9), np.float32)
    (_, _, states), pullback = la.vjp(la.softmax_attention, **arrays, bias=bias, **options)
    assert is_equal(states, la.softmax_attention(**arrays, **options).states)
    grads = pullback(None, None, random_like(states))
    np.testing.assert_array_equal(grads.v[:, 3:], random_like(states).v[:, 1, 3:])
    assert not grads.bias.any()


def test_fewer_queries():
    q = np.ones((2, 4, 1, 3))
    with pytest.raises(ValueError) as error:
        la.softmax_attention(q[:, 2:], q, q, return_states_at=[2])
    assert str(error.value) == ("softmax_attention: return_states_at with fewer queries than tokens, expected as many")
