"""la.step: one token without a time axis is the same call as one with it, to the bit."""

from __future__ import annotations

import re

import array_api_strict
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from tests.cases import CASES, PLAIN, cotangents, draw, parts, parts_like

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_variant = pytest.mark.parametrize("case", PLAIN, ids=str)


def without_time(case, arrays, batch=1):
    """The arrays of one token without their time axis."""
    return {n: np.squeeze(x, batch) if _has_time(case, n, x, batch) else x for n, x in arrays.items()}


def _has_time(case, name, x, batch):
    return name in case.given and case.on_tokens(name) and x.ndim == batch + len(case.given[name].split())


def same(found, expected):
    assert len(parts(found)) == len(parts(expected))
    for x, y in zip(parts(found), parts(expected), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@every_case
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_step_is_a_call_of_one_token(case, dtype):
    arrays, state = draw(case, T=1, dtype=dtype)
    one, options = without_time(case, arrays), {**case.options, "return_state": True, "state": state}
    out, end = case.fn(**arrays, **options)
    for _ in range(2):  # the second one is replayed
        found = la.step(case.fn, **one, **options)
        assert found[0].shape == (*out.shape[:1], *out.shape[2:])
        same(found, (out, end))
    result, pullback = la.vjp(case.fn, **arrays, **options)
    dout, dstate = cotangents(result)
    expected = pullback(dout, dstate)
    for _ in range(2):
        result, pullback = la.vjp(la.step, case.fn, **one, **options)
        same(result, (out, end))
        grads = pullback(dout[:, 0], dstate)
        assert grads._fields == expected._fields
        same(tuple(grads), tuple(expected))
        for name, x in one.items():
            if not isinstance(x, str):
                assert getattr(grads, name).shape == x.shape


@every_case
def test_tokens_with_a_time_axis_do_not_fit_the_state(case):
    """They are a batch of (B, T), for which the state of B sequences is a wrong one."""
    arrays, state = draw(case, T=2, dtype=np.float64)
    tokens = {n: arrays[n] for n in case.given}
    for call in (la.step, lambda *x, **y: la.vjp(la.step, *x, **y)):
        with pytest.raises(ValueError, match=rf"{case.fn.__name__}: .* has shape .*, expected \(B1, B2, "):
            call(case.fn, **tokens, **case.options, **case.named, state=state)


@every_variant
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_any_number_of_batch_axes(case, batch):
    arrays, state = draw(case, B=batch, T=1)
    found = la.step(case.fn, **without_time(case, arrays, len(batch)), state=state, **case.options)
    same(found, case.fn(**arrays, state=state, **case.options))


@every_variant
def test_steps_in_place_are_the_whole(case):
    """Decoding, by la.step, of what one call of the recurrent form computes."""
    arrays, state = draw(case, T=4)
    tokens = [{n: x[:, t] if _has_time(case, n, x, 1) else x for n, x in arrays.items()} for t in range(4)]
    own = parts_like(state, [S.copy() for S in parts(state)])
    for t, one in enumerate(tokens):
        cut = {n: x[:, t : t + 1] if _has_time(case, n, x, 1) else x for n, x in arrays.items()}
        expected, state = case.fn(**cut, **case.options, state=state, return_state=True)
        found, end = la.step(case.fn, **one, **case.options, state=own, overwrite_state=True, return_state=True)
        same((found, end), (expected, state))
        assert all(x is y for x, y in zip(parts(end), parts(own), strict=True))


def test_rows_of_a_pool():
    case = next(c for c in PLAIN if c.fn is la.kda)
    arrays, state = draw(case, T=1)
    pool = np.zeros((5, *state.shape[1:]))
    pool[[3, 1]] = state
    expected, end = la.kda(**arrays, state=state, return_state=True)
    found = la.step(la.kda, **without_time(case, arrays), state=pool, state_rows=[3, 1], overwrite_state=True)
    same(found, expected)
    same(pool[[3, 1]], end)
    assert not pool[[0, 2, 4]].any()


@every_variant
def test_arrays_of_another_library(case):
    arrays, state = draw(case, T=1)
    one = without_time(case, arrays)
    theirs = {n: x if isinstance(x, str) else array_api_strict.asarray(x) for n, x in one.items()}
    own = parts_like(state, [array_api_strict.asarray(S) for S in parts(state)])
    found = la.step(case.fn, **theirs, state=own, backend="chunks", **case.options)
    assert isinstance(found, array_api_strict.asarray(0).__class__)
    expected = case.fn(**arrays, state=state, backend="chunks", **case.options)
    assert la.testing.relative_error(np.asarray(found), expected[:, 0]) < 1e-12


def test_a_repeated_step_has_a_plan_of_its_own():
    pytest.importorskip("llvmlite")
    case = next(c for c in PLAIN if c.fn is la.gla)
    arrays, state = draw(case, B=(), T=1)
    replay.clear()
    la.gla(**arrays, state=state)
    for _ in range(3):
        la.step(la.gla, **without_time(case, arrays, 0), state=state)
    assert replay.count() == 2
    replay.clear()


B, H, K, V = 2, 4, 8, 5
GOOD = {"q": np.ones((B, H, K)), "k": np.ones((B, H, K)), "v": np.ones((B, H, V)), "g": -np.ones((B, H)),
        "beta": np.ones((B, H))}  # fmt: skip
ERRORS = [
    ({"beta": np.ones((B, H, 1))}, "gated_delta_rule: beta has shape (2, 4, 1), expected (B, H) = (2, 4)"),
    ({"q": np.ones((B, 1, H, K))}, "gated_delta_rule: q has shape (2, 1, 4, 8), expected (B, Hq, K) = (2, Hq, 8)"),
    ({"v": np.ones(5)}, "gated_delta_rule: v has shape (5,), expected (..., H, V)"),
    ({"state": np.ones((1, H, K, V))},
     "gated_delta_rule: state has shape (1, 4, 8, 5), expected (B, H, K, V) = (2, 4, 8, 5)"),
    ({"nonsense": 1}, "gated_delta_rule: unknown option 'nonsense', expected one of"),
    *(({name: value}, f"step: {name} was given, expected none: a step has one token per sequence and no time axis")
      for name, value in (("cu_seqlens", [0, 1]), ("layout", "heads_first"), ("chunk_size", 1), ("chunk_size", None))),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "text"), ERRORS, ids=lambda x: str(x)[:40])
def test_errors_speak_of_the_arrays_of_the_caller(changed, text):
    for call in (la.step, lambda *a, **k: la.vjp(la.step, *a, **k)):
        with pytest.raises((TypeError, ValueError), match="^" + re.escape(text)):
            call(la.gated_delta_rule, **{**GOOD, **changed})


def test_errors_of_cotangents_and_of_the_function():
    _, pullback = la.vjp(la.step, la.gated_delta_rule, **GOOD)
    with pytest.raises(ValueError, match=re.escape("dout has shape (2, 1, 4, 5), expected (2, 4, 5)")):
        pullback(np.ones((B, 1, H, V)))
    with pytest.raises(TypeError, match=r"^step: fn is 'read', expected a variant of linattn_np"):
        la.step(la.read, GOOD["q"], np.ones((B, H, K, V)))
    with pytest.raises(TypeError, match=r"^step: fn is missing"):
        la.vjp(la.step)
