"""Levels as heads of one call of the core, as CUDA calls compute them: here in NumPy's array calls and float64."""

from __future__ import annotations

from types import SimpleNamespace

import array_api_compat.numpy as xp
import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state import core, policy
from linattn_np.matrix_state.readouts.levels import heads, loops
from linattn_np.matrix_state.types import Inputs
from linattn_np.ops.levels import LevelHeads, spread
from linattn_np.testing import relative_error

every_variant = pytest.mark.parametrize(
    "fn", [la.log_linear_gla, la.log_linear_gated_delta_rule], ids=lambda fn: fn.__name__
)


def of_levels(x, plan, first, count):
    """The inputs of heads (h, l) of a call without erase, as the definition takes them."""
    at = LevelHeads(first, count, plan.sequences[0].stop, None)

    def each(y, weight="one"):
        flat = y.reshape(-1, *y.shape[-2:])
        flat = np.repeat(flat, x.v.shape[-2] // flat.shape[1], axis=1)
        return spread(xp, flat, at, weight, np.float64).reshape(*y.shape[:-2], -1, y.shape[-1])

    return Inputs(each(x.q), each(x.k), each(x.v, "writes"), each(x.g, "keeps")), plan._replace(returns_state=False)


def twin_forward(x, plan, first, count):
    """What levels_wgmma.cu computes, NaN where it stores nothing."""
    y = core.forward("twin", *of_levels(x, plan, first, count), None, "chunks")[0]
    return _apart(y, first, count)[0]


def twin_backward(x, plan, first, count, dy):
    given, plan = of_levels(x, plan, first, count)
    residuals = core.forward("twin", given, plan, None, "chunks")[2]
    d, _ = core.backward(residuals, dy, None)
    (dq, _), (_, dk), (_, dv) = (_apart(y, first, count) for y in (d.q, d.k, d.v))
    return Inputs(dq, dk, dv, np.where(np.isfinite(given.g), d.g, 0))


def _apart(y, first, count):
    """y with NaN in first halves, and in second halves."""
    at = np.arange(y.shape[1])[:, None] >> (first - 1 + np.arange(count)) & 1 == 1
    at = np.tile(at, (1, y.shape[2] // count))[..., None]
    return np.where(at, y, np.nan), np.where(at, np.nan, y)


@pytest.fixture(params=["the core's call", "passes"])
def as_heads(monkeypatch, request):
    """Calls of more than four tokens go so."""
    calls = []
    own = request.param == "passes"
    takes_one = lambda x, plan: own and x.beta is None and plan.sequences[0].row is None  # noqa: E731
    module = SimpleNamespace(takes=takes_one, forward=twin_forward, backward=twin_backward)
    monkeypatch.setattr(heads, "passes", lambda: module)

    def takes(fn, x, plan, wanted):
        if wanted == "reference" or max(s.stop - s.start for s in plan.sequences) <= policy.SHORT_ARRAY:
            return False
        calls.append(fn)
        return True

    monkeypatch.setattr(heads, "takes", takes)
    monkeypatch.setattr(loops, "takes", lambda *how: False)
    monkeypatch.setattr(loops, "is_short", lambda *how: False)
    return calls


def drawn(fn, T, levels=12, **sizes):
    x = la.testing.sample(fn, np.random.default_rng(0), **{"B": (2,), "T": T, "H": 2, "K": 5, "V": 9} | sizes)
    return x | {"lam": x["lam"][..., :levels]}


def results(fn, x, with_state=True, **options):
    """Outputs, and the gradients of cotangents of all of them."""
    found, pull = la.vjp(fn, **x, return_state=with_state, **options)
    out, state = found if with_state else (found, None)
    rng = np.random.default_rng(1)
    dout = rng.standard_normal(out.shape)
    dstate = None if state is None else state._replace(S=rng.standard_normal(state.S.shape))
    grads = pull(dout, dstate)
    outs = [out] if state is None else [out, state.S, state.position]
    return outs + [y.S if hasattr(y, "S") else y for y in grads if y is not None]


def check(fn, x, calls, **options):
    found, expected = results(fn, x, **options), results(fn, x, backend="reference", **options)
    assert calls
    assert len(found) == len(expected)
    for y, z in zip(found, expected, strict=True):
        assert y.shape == z.shape
        assert relative_error(y, z) < 1e-12


@pytest.mark.parametrize("T", [5, 63, 64, 65, 128, 192, 300])
@every_variant
def test_it_is_the_definition(fn, T, as_heads):
    check(fn, drawn(fn, T), as_heads, with_state=False)
    check(fn, drawn(fn, T), as_heads)


@pytest.mark.parametrize("first", [11, 64, 100, 192])
@every_variant
def test_from_a_state(fn, first, as_heads):
    """Gradients of it too; of one in the middle of a chunk, of one at an end of chunks."""
    state = fn(**drawn(fn, first), return_state=True, backend="reference").state
    for T in (6, 70, 160):
        check(fn, drawn(fn, T) | {"state": state}, as_heads)


@every_variant
def test_no_more_levels_than_are_needed(fn, as_heads):
    """All tokens end in the last level of the state, which `lam` has no weight of."""
    check(fn, drawn(fn, 256, levels=9), as_heads)


@every_variant
def test_ragged(fn, as_heads):
    x = drawn(fn, 300, B=(1,))
    check(fn, x, as_heads, cu_seqlens=np.array([0, 3, 3, 67, 300]))
    state = fn(**drawn(fn, 70, B=(4,)), return_state=True, backend="reference").state
    check(fn, x | {"state": state}, as_heads, cu_seqlens=np.array([0, 3, 3, 67, 300]))


@pytest.mark.parametrize("sizes", [{"H": 4, "Hk": 2}, {"H": 2, "Hq": 4, "Hk": 2}, {"H": 3, "Hq": 1, "Hk": 1}], ids=str)
@every_variant
def test_heads_that_share(fn, sizes, as_heads):
    check(fn, drawn(fn, 150, **sizes), as_heads)


@every_variant
def test_few_levels_at_once(fn, as_heads, monkeypatch):
    monkeypatch.setattr(policy, "LEVEL_BYTES", 1)
    check(fn, drawn(fn, 600), as_heads)


@every_variant
def test_a_dstate_that_was_not_announced(fn, as_heads):
    """The final state is computed when its cotangent comes."""
    x = drawn(fn, 200)
    _, pull = la.vjp(fn, **x)
    shape = fn(**x, return_state=True).state.S.shape
    dS = np.random.default_rng(2).standard_normal(shape)
    given = la.LevelState(dS, np.full(2, 200))
    expected = la.vjp(fn, **x, backend="reference")[1](None, given)
    for y, z in zip(pull(None, given), expected, strict=True):
        assert (y is None and z is None) or relative_error(y, z) < 1e-12


@every_variant
def test_writing_alone(fn, as_heads):
    x = drawn(fn, 200) | {"q": None}
    state = fn(**x).state
    assert relative_error(state.S, fn(**x, backend="reference").state.S) < 1e-13


@every_variant
def test_too_few_levels_are_an_error(fn, as_heads):
    with pytest.raises(ValueError, match="lam has 6 levels, expected at least 7 for 33 tokens"):
        fn(**drawn(fn, 33, levels=6))
    assert fn(**drawn(fn, 32, levels=6)).shape[1] == 32
