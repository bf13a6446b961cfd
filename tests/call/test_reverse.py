"""reverse=True: the recurrence from the last token to the first."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from linattn_np.testing import check_vjp, relative_error
from tests.cases import PLAIN, call, cotangents, draw, naive, one_per, parts, parts_like, with_gradients
from tests.matrix_state.cuda.step_twin import recorded_plans
from tests.matrix_state.cuda.token import host as step_calls

every_variant = pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.fn.__name__)
CELLS = one_per(lambda spec: (spec.decay, spec.erase, spec.readout, spec.micro_steps, spec.query_reads), PLAIN)
every_cell = pytest.mark.parametrize("case", CELLS, ids=lambda c: c.fn.__name__)
OFFSETS = [0, 5, 5, 12]


def turned(case, arrays, layout="time_first"):
    """The tokens in reverse order."""
    axis = {
        "time_first": lambda x, n: x.ndim - len(case.given[n].split()),
        "heads_first": lambda x, n: x.ndim - len(case.given[n].split()) + 1,
    }[layout]
    return {n: np.flip(x, axis(x, n)).copy() if n in case.given and case.on_tokens(n) else x for n, x in arrays.items()}


def same(x, y):
    return all((a == b).all() and a.shape == b.shape for a, b in zip(parts(x), parts(y), strict=True))


@every_variant
def test_tokens_in_reverse_order(case):
    """To the bit what the usual direction gives for flipped arrays; the float64 loop agrees."""
    arrays, state = draw(case)
    out, end = call(case, arrays, state=state, reverse=True)
    expected, last = call(case, turned(case, arrays), state=state)
    assert (out == expected[:, ::-1]).all()
    assert same(end, last)
    looped, _ = naive(case, turned(case, arrays), state)
    assert relative_error(out, looped[:, ::-1]) <= 1e-10


@every_cell
def test_gradients(case):
    arrays, state = draw(case)
    check_vjp(case.fn, **arrays, **case.options, state=state, reverse=True, rtol=1e-6)
    dout, dstate = cotangents(call(case, arrays, state=state))
    found = with_gradients(case, arrays, (dout, dstate), state=state, reverse=True)
    expected = with_gradients(case, turned(case, arrays), (dout[:, ::-1], dstate), state=state)
    for name, d in turned(case, {n[1:]: d for n, d in expected.items() if n[1:] in arrays}).items():
        assert (found["d" + name] == d).all(), name


@every_cell
def test_a_ragged_batch_is_each_sequence_in_reverse(case):
    arrays, states = draw(case, B=(1,), N=3)
    dout, dstate = cotangents(call(case, arrays, state=states, cu_seqlens=OFFSETS))
    result, pull = la.vjp(case.fn, **arrays, **case.options, state=states, cu_seqlens=OFFSETS, reverse=True,
                          return_state=True)  # fmt: skip
    grads = pull(dout, dstate)
    assert same(result, call(case, arrays, state=states, cu_seqlens=OFFSETS, reverse=True))
    for n, (a, b) in enumerate(itertools.pairwise(OFFSETS)):
        one = {m: x[:, a:b] if m in case.given and case.on_tokens(m) else x for m, x in arrays.items()}
        own = parts_like(states, [S[n : n + 1] for S in parts(states)])
        single, pulled = la.vjp(case.fn, **one, **case.options, state=own, reverse=True, return_state=True)
        assert relative_error(result.out[:, a:b], single.out) <= 1e-13
        for x, y in zip(parts(result.state), parts(single.state), strict=True):
            assert relative_error(x[n : n + 1], y) <= 1e-13
        d = pulled(dout[:, a:b], parts_like(dstate, [S[n : n + 1] for S in parts(dstate)]))
        for m in one:
            if case.on_tokens(m):
                assert relative_error(getattr(grads, m)[:, a:b], getattr(d, m)) <= 1e-12, m
        for x, y in zip(parts(grads.state), parts(d.state), strict=True):
            assert relative_error(x[n : n + 1], y) <= 1e-12


def test_every_library(library):
    case = next(c for c in PLAIN if c.fn is la.gated_delta_rule)
    arrays, states = draw(case, B=(1,), N=3, dtype=np.float32)
    expected = call(case, turned(case, arrays), state=states[::-1], cu_seqlens=[0, 7, 7, 12])
    there = {n: library.bring(x) for n, x in arrays.items()}
    (out, end), pull = la.vjp(la.gated_delta_rule, **there, state=library.bring(states), cu_seqlens=OFFSETS,
                              reverse=True, return_state=True)  # fmt: skip
    assert isinstance(out, library.kind)
    assert relative_error(library.see(out), expected.out[:, ::-1]) <= 1e-5
    assert relative_error(library.see(end), expected.state[::-1]) <= 1e-5
    assert library.see(pull(out, end).v).shape == arrays["v"].shape


@pytest.mark.parametrize("T", [1, 5, 70])
@pytest.mark.parametrize("layout", ["time_first", "heads_first"])
def test_repeated_calls_are_replayed(T, layout, monkeypatch):
    """Their checks run once; each call reads its own arrays, also in vjp."""
    case = next(c for c in PLAIN if c.fn is la.gated_delta_rule)
    replay.clear()
    for seed in range(3):
        arrays, state = draw(case, T=T, H=2, seed=seed, dtype=np.float32)
        if layout == "heads_first":
            arrays = {n: np.ascontiguousarray(np.moveaxis(x, 1, 2)) for n, x in arrays.items()}
        expected = la.vjp(la.gated_delta_rule, **turned(case, arrays, layout), state=state, layout=layout,
                          return_state=True)  # fmt: skip
        out, end = la.gated_delta_rule(**arrays, state=state, layout=layout, return_state=True, reverse=True)
        result, pull = la.vjp(la.gated_delta_rule, **arrays, state=state, layout=layout, return_state=True,
                              reverse=True)  # fmt: skip
        axis = 1 if layout == "time_first" else 2
        assert (out == np.flip(expected[0].out, axis)).all()
        assert (end == expected[0].state).all()
        assert same(result, (out, end))
        grads, wanted = pull(out, end), expected[1](np.flip(out, axis).copy(), end)
        assert (grads.k == np.flip(wanted.k, axis)).all()
        assert (grads.state == wanted.state).all()
        monkeypatch.setattr("linattn_np.call.reverse.prepare", None)  # not called again


def test_states_at_positions_and_fewer_queries():
    """The state at p is that of tokens p to the last; the queries are those of the first tokens."""
    case = next(c for c in PLAIN if c.fn is la.gated_delta_rule)
    arrays, state = draw(case)
    (out, end, states), pull = la.vjp(la.gated_delta_rule, **arrays, state=state, reverse=True, return_state=True,
                                      return_states_at=[0, 3, 12])  # fmt: skip
    assert (states[:, 0] == end).all()
    assert (states[:, 2] == state).all()
    later = {n: x[:, 3:] for n, x in arrays.items()}
    assert relative_error(states[:, 1], la.gated_delta_rule(**later, state=state, reverse=True, return_state=True)[1]
                          ) <= 1e-13  # fmt: skip
    dstates = np.zeros_like(states)
    dstates[:, 0] = 1
    found, expected = pull(None, None, dstates), la.vjp(la.gated_delta_rule, **arrays, state=state, reverse=True,
                                                        return_state=True)[1](None, np.ones_like(end))  # fmt: skip
    assert relative_error(found.k, expected.k) <= 1e-12
    few = arrays | {"q": arrays["q"][:, :4]}
    assert relative_error(la.gated_delta_rule(**few, state=state, reverse=True), out[:, :4]) <= 1e-12


launched, public = step_calls.launched, step_calls.public


def test_launches_on_a_device_are_replayed(public, monkeypatch):
    """On stubs of CuPy arrays: the kernels take arrays without gaps, and the recorded launches those of each call."""
    for seed in range(3):
        arrays = step_calls.arrays_of(la.gated_delta_rule, T=5, seed=seed)
        state = np.random.default_rng(seed).standard_normal((2, 4, 8, 4)).astype(np.float32)
        expected = la.gated_delta_rule(**arrays, state=state, reverse=True, return_state=True)
        there = {n: step_calls.stub(x) for n, x in arrays.items()}
        out, end = la.gated_delta_rule(**there, state=step_calls.stub(state), reverse=True, return_state=True)
        assert relative_error(np.asarray(out), expected.out) <= 1e-5
        assert relative_error(np.asarray(end), expected.state) <= 1e-5
        assert len(recorded_plans()) == 1
        if seed == 0:
            monkeypatch.setattr("linattn_np.call.dispatch.prepare", None)  # not called again


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("rows", [None, [4, 0, 2]])
def test_states_that_are_overwritten(ragged, rows):
    case = next(c for c in PLAIN if c.fn is la.kda)
    arrays, states = draw(case, B=(1,) if ragged else (3,), N=3)
    options = {"cu_seqlens": OFFSETS} if ragged else {}
    expected = call(case, arrays, state=states, reverse=True, **options)
    buffer = states.copy() if rows is None else np.zeros((6, *states.shape[1:]))
    if rows is not None:
        buffer[rows] = states
    for _ in range(2):
        own = buffer.copy()
        out, end = call(case, arrays, state=own, reverse=True, state_rows=rows, overwrite_state=True, **options)
        assert end is own
        assert relative_error(out, expected.out) <= 1e-13
        assert relative_error(own if rows is None else own[rows], expected.state) <= 1e-13
    if rows is not None:
        assert not own[[1, 3, 5]].any()
        assert same(call(case, arrays, state=buffer, reverse=True, state_rows=rows, **options), expected)


def test_both_directions_see_all_tokens():
    """The influence matrix is upper triangular, and explain says so."""
    x = la.testing.sample(la.simple_gla, np.random.default_rng(0), T=6)
    A = la.influence_matrix(la.simple_gla, **x, reverse=True)
    assert not np.tril(A, -1).any()
    assert (np.abs(np.diagonal(A, axis1=-2, axis2=-1)) > 0).all()
    assert "on tokens in reverse order" in la.explain(la.simple_gla, **x, reverse=True).reason
    with pytest.raises(TypeError, match="simple_gla: reverse is 1, expected True or False"):
        la.simple_gla(**x, reverse=1)
    with pytest.raises(ValueError, match=r"simple_gla: g has shape \(2, 6, 3\), expected"):
        la.simple_gla(**x | {"g": np.zeros((2, 6, 3))}, reverse=True)
    with pytest.raises(TypeError, match="step: reverse was given"):
        la.step(la.simple_gla, **{n: y[:, 0] for n, y in x.items()}, reverse=True)
    _, pull = la.vjp(la.simple_gla, **x, reverse=True)
    with pytest.raises(ValueError, match=r"simple_gla: dout has shape \(2, 6\), expected \(2, 6, 2, 3\)"):
        pull(np.zeros((2, 6)))
