"""States at positions, and causal calls with fewer queries than tokens: forward, gradients, ragged, every variant."""

from __future__ import annotations

import pickle

import array_api_strict
import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import relative_error
from tests.call.test_bad_input import sentence
from tests.cases import CASES, PLAIN, cotangents, draw, of_matrices, parts, parts_like, tokens

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_variant = pytest.mark.parametrize("case", [c for c in PLAIN if c.causal], ids=str)
T = 21
TIGHT = 1e-11


def worst(found, expected):
    found, expected = parts(found), parts(expected)
    assert [x.shape for x in found] == [x.shape for x in expected]
    return max((relative_error(x, y) for x, y in zip(found, expected, strict=True)), default=0.0)


def at(states, n, axis=1):
    return parts_like(states, [np.take(S, n, axis=axis) for S in parts(states)])


def named(grads):
    return {f"{n}.{i}": y for n, d in grads._asdict().items() if d is not None for i, y in enumerate(parts((d,)))}


@every_case
@pytest.mark.parametrize("positions", [[0, 4, 16, 21], [], 8], ids=str)
def test_states_are_those_of_calls_that_end_there(case, positions):
    arrays, state = draw(case, T=T)
    out, end = case.fn(**arrays, **case.options, state=state, return_state=True)
    found = case.fn(**arrays, **case.options, state=state, return_states_at=positions)
    assert found._fields == ("out", "state", "states")
    assert found.state is None
    assert worst(found.out, out) < TIGHT
    for n, p in enumerate([8, 16] if positions == 8 else positions):
        first = {n: x for n, x in tokens(case, arrays, 0, p).items() if case.causal or n != case.spec.change.query}
        query = {} if case.causal else {case.spec.change.query: None}
        _, expected = case.fn(**first, **query, **case.options, state=state, return_state=True)
        assert worst(at(found.states, n), expected) < TIGHT
    if not positions:
        assert all(S.shape[1] == 0 for S in parts(found.states))
    both = case.fn(**arrays, **case.options, state=state, return_states_at=positions, return_state=True)
    assert worst(both.state, end) < TIGHT
    assert all(np.array_equal(x, y) for x, y in zip(parts(both.states), parts(found.states), strict=True))
    assert type(pickle.loads(pickle.dumps(found))) is type(found)


OFFSETS = [0, 0, 3, 9, 9, 21, 21]
POSITIONS = [2, 3, 7, 12, 17, 21]
OWNERS = [(1, 2), (1, 3), (2, 4), (4, 3), (4, 8), (4, 12)]  # (sequence, its tokens up to there)


@every_variant
@pytest.mark.parametrize("given", [False, True])
def test_packed_sequences(case, given):
    """Positions of the packed row; a sequence that ends at one, empty sequences."""
    arrays, state = draw(case, B=(1,), T=T, N=len(OFFSETS) - 1)
    more = {**case.options, "state": state if given else None, "return_state": True, "cu_seqlens": OFFSETS}
    (out, end), back = la.vjp(case.fn, **arrays, **more)
    result, pullback = la.vjp(case.fn, **arrays, **more, return_states_at=POSITIONS)
    assert worst((result.out, result.state), (out, end)) < TIGHT
    plain = case.fn(**arrays, **more, return_states_at=POSITIONS)
    assert worst(tuple(plain), tuple(result)) == 0
    for n, (s, count) in enumerate(OWNERS):
        own = tokens(case, arrays, OFFSETS[s], OFFSETS[s] + count)
        S = at(state, [s], 0) if given else None
        _, expected = case.fn(**own, **case.options, state=S, return_state=True)
        assert worst(at(result.states, [n], 0), expected) < TIGHT
    dout, dstate = cotangents((out, end))
    found, expected = named(pullback(dout, dstate)), named(back(dout, dstate))
    assert max(relative_error(found[n], expected[n]) for n in expected) < 1e-10


@pytest.mark.parametrize("case", [c for c in of_matrices(PLAIN) if c.causal], ids=str)
@pytest.mark.parametrize("Tq", [0, 1, 6, 20])
def test_fewer_queries_are_the_last_ones(case, Tq):
    arrays, state = draw(case, T=T)
    query = case.spec.change.query
    fewer = arrays | {query: arrays[query][:, T - Tq :]}
    out, end = case.fn(**arrays, **case.options, state=state, return_state=True)
    found, last = case.fn(**fewer, **case.options, state=state, return_state=True)
    assert found.shape[1] == Tq
    assert worst((found, last), (out[:, T - Tq :], end)) < TIGHT
    assert worst(case.fn(**fewer, **case.options, state=state), found) == 0
    _, pullback = la.vjp(case.fn, **fewer, **case.options, state=state, return_state=True)
    whole, back = la.vjp(case.fn, **arrays, **case.options, state=state, return_state=True)
    dout, dstate = cotangents(whole)
    dout[:, : T - Tq] = 0
    expected, found = named(back(dout, dstate)), named(pullback(dout[:, T - Tq :], dstate))
    for name, d in expected.items():
        d = d[:, T - Tq :] if name == f"{query}.0" else d
        assert relative_error(found[name], d) < 1e-10, name


def drawn(**sizes):
    case = next(c for c in PLAIN if c.fn is la.gated_delta_rule)
    return draw(case, T=T, **sizes)


def test_heads_first_and_other_libraries():
    arrays, state = drawn()
    expected = la.gated_delta_rule(**arrays, state=state, return_states_at=6, return_state=True)
    turned = {n: np.moveaxis(x, 1, 2) for n, x in arrays.items()}
    options = {"layout": "heads_first", "state": state, "return_states_at": np.array([6, 12, 18]), "return_state": True}
    found, pullback = la.vjp(la.gated_delta_rule, **turned, **options)
    assert worst(tuple(found), (np.moveaxis(expected.out, 1, 2), *expected[1:])) == 0
    grads = pullback(found.out, found.state, found.states)
    assert {n: getattr(grads, n).shape for n in turned} == {n: x.shape for n, x in turned.items()}
    fewer = turned | {"q": turned["q"][:, :, -4:]}
    assert worst(la.gated_delta_rule(**fewer, layout="heads_first", state=state), found.out[:, :, -4:]) < TIGHT
    strict = {n: array_api_strict.asarray(x) for n, x in arrays.items()}
    theirs, back = la.vjp(la.gated_delta_rule, **strict, return_states_at=[0, 6], backend="chunks")
    plain, own = la.vjp(la.gated_delta_rule, **arrays, return_states_at=[0, 6], backend="chunks")
    assert relative_error(np.asarray(theirs.states), plain.states) < TIGHT
    assert not np.asarray(theirs.states)[:, 0].any()
    expected = own(plain.out, None, plain.states)
    for d, e in zip(parts(tuple(back(theirs.out, None, theirs.states))), parts(tuple(expected)), strict=True):
        assert relative_error(np.asarray(d), e) < TIGHT


def test_states_in_place_and_in_a_pool():
    arrays, state = drawn()
    expected = la.gated_delta_rule(**arrays, state=state, return_states_at=[0, 6], return_state=True)
    own = state.copy()
    found = la.gated_delta_rule(**arrays, state=own, return_states_at=[0, 6], return_state=True, overwrite_state=True)
    assert found.state is own
    assert worst(tuple(found), tuple(expected)) == 0
    pool = np.zeros((5, *state.shape[1:]))
    pool[[3, 1]] = state
    before = pool.copy()
    found = la.gated_delta_rule(**arrays, state=pool, state_rows=[3, 1], return_states_at=[0, 6], return_state=True)
    assert worst(tuple(found), tuple(expected)) == 0
    assert np.array_equal(pool, before)
    found = la.gated_delta_rule(**arrays, state=pool, state_rows=[3, 1], return_states_at=[0, 6], overwrite_state=True)
    assert found.state is None
    assert worst((found.out, pool[[3, 1]]), tuple(expected)[:2]) == 0


def test_few_tokens_of_many_heads_raise_no_warning():
    x = np.ones((1, 32, 40, 4))
    assert la.linear_attention(x, x, x, return_states_at=[2]).states.shape == (1, 1, 40, 4, 4)


def test_no_queries():
    arrays, state = drawn()
    found = la.gated_delta_rule(**arrays | {"q": None}, state=state, return_states_at=7)
    assert found.out is None
    expected = la.gated_delta_rule(**arrays, state=state, return_states_at=7)
    assert worst(found.states, expected.states) == 0


ERRORS = [
    (0, TypeError, "return_states_at is 0, expected a whole number from 1, or positions"),
    (True, TypeError, "return_states_at is True, expected a whole number from 1, or positions"),
    ([1.5], TypeError, "return_states_at is [1.5], expected a whole number from 1, or positions"),
    ([-1], TypeError, "return_states_at is [-1], expected a whole number from 1, or positions"),
    ([22], ValueError, "return_states_at is [22], expected positions from 0 to T = 21 in increasing order"),
    ([3, 3], ValueError, "return_states_at is [3, 3], expected positions from 0 to T = 21 in increasing order"),
]


@pytest.mark.parametrize(("positions", "error", "text"), ERRORS, ids=str)
def test_errors_of_positions(positions, error, text):
    arrays, _ = drawn()
    for call in (la.gated_delta_rule, lambda **x: la.vjp(la.gated_delta_rule, **x)):
        with pytest.raises(error, match=sentence(f"gated_delta_rule: {text}")):
            call(**arrays, return_states_at=positions)


def test_other_errors():
    arrays, state = drawn()
    fn = la.gated_delta_rule
    with pytest.raises(ValueError, match=sentence("gated_delta_rule: q has shape (2, 22, 2, 5), expected ...")):
        fn(**arrays | {"q": np.ones((2, T + 1, 2, 5))})
    one = {n: x[:1] for n, x in arrays.items()}
    with pytest.raises(ValueError, match=sentence("gated_delta_rule: q has shape (1, 6, 2, 5), expected ...")):
        fn(**one | {"q": one["q"][:, :6]}, cu_seqlens=[0, T])
    with pytest.raises(TypeError, match="influence_matrix: q is None"):
        la.influence_matrix(fn, **arrays | {"q": None})
    result, pullback = la.vjp(fn, **arrays, return_states_at=7)
    for given, text in (
        ((result.out[1:],), "dout has shape (1, 21, 2, 3), expected (2, 21, 2, 3)"),
        ((None, state[1:]), "dstate has shape (1, 2, 5, 3), expected (2, 2, 5, 3)"),
        ((None, None, state), "dstates has shape (2, 2, 5, 3), expected (2, 3, 2, 5, 3)"),
    ):
        with pytest.raises(ValueError, match=sentence(f"gated_delta_rule: {text}")):
            pullback(*given)
    with pytest.raises(TypeError, match="expected dout, dstate or dstates"):
        pullback()
    with pytest.raises(ValueError, match="return_states_at with cu_seqlens and causal=False"):
        la.linear_attention(*(np.ones((1, 4, 2, 3)),) * 3, cu_seqlens=[0, 4], causal=False, return_states_at=2)
    arrays["k"][0, 3] += 1
    with pytest.raises(RuntimeError, match="gated_delta_rule: k was changed in place"):
        pullback(result.out)


def test_the_influence_of_fewer_queries():
    arrays, _ = drawn()
    A = la.influence_matrix(la.gated_delta_rule, **arrays)
    found = la.influence_matrix(la.gated_delta_rule, **arrays | {"q": arrays["q"][:, -5:]})
    assert relative_error(found, A[:, :, -5:]) < TIGHT


def test_explain_says_how_many_pieces():
    whole, fewer = la.explain(la.gla, *_of_gla()), la.explain(la.gla, *_of_gla(5))
    assert "pieces" not in whole.reason
    assert fewer.bytes < whole.bytes
    assert "in 2 pieces" in fewer.reason
    assert "in 5 pieces" in la.explain(la.gla, *_of_gla(5), return_states_at=6).reason


def _of_gla(Tq=T):
    x = np.ones((1, T, 2, 4))
    return x[:, :Tq], x, x, -x
