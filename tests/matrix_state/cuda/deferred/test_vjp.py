"""vjp of one token with a change of variables on arrays that look like CuPy's."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import replay, vjp
from tests.cases import parts
from tests.matrix_state.cuda.deferred import test_calls as calls
from tests.matrix_state.cuda.step_twin import stub
from tests.matrix_state.cuda.token import host as step_calls

launched, public, fired = step_calls.launched, step_calls.public, calls.fired
CALLS = calls.CALLS


def pulled(fn, arrays, more, state, douts):
    """(result, gradients) of a vjp with a state; douts: cotangents of the output and the parts of the state."""
    result, pull = la.vjp(fn, **arrays, **more, state=state, return_state=True)
    dstate = type(state)(*douts[1:]) if isinstance(state, tuple) else douts[1]
    return [result[0], *parts(result[1])], pull(douts[0], dstate)


def flat(grads):
    return [y for x in grads for y in parts(x) if y is not None]


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_numpys(public, monkeypatch, name):
    """By kernels of array calls; a repeated vjp is its launches: the same bits, nothing checked or planned again."""
    full, real = [], vjp._in_full
    monkeypatch.setattr(vjp, "_in_full", lambda *given: full.append(given[1]) or real(*given))
    fn, options, _ = CALLS[name]
    arrays, more, state = calls.drawn(fn, options, 0)
    rng = np.random.default_rng(1)
    result = fn(**arrays, **more, state=state, return_state=True)
    douts = [rng.standard_normal(x.shape).astype(np.float32) for x in (result[0], *parts(result[1]))]
    expected, expected_grads = pulled(fn, arrays, more, state, douts)
    replay.clear()
    bits = []
    for n in range(3):
        full.clear()
        if n == 2:
            monkeypatch.setattr(vjp, "prepare", None)
        found, grads = pulled(
            fn, {n: stub(x) for n, x in arrays.items()}, more, calls.moved(state), list(map(stub, douts))
        )
        assert len(full) == (n == 0)  # the pullback was deferred too
        for x, y in zip([*found, *flat(grads)], [*expected, *flat(expected_grads)], strict=True):
            assert x.shape == y.shape
            assert np.abs(x - y).max() <= 3e-5 * max(1, np.abs(y).max())
        bits.append([np.asarray(x).tobytes() for x in (*found, *flat(grads))])
    assert bits[0] == bits[1] == bits[2]


def there(arrays, state, douts, rows=slice(None)):
    """Arrays like CuPy's, of some sequences."""
    cut = lambda x: stub(x[rows] if x.shape[0] == calls.B else x)  # noqa: E731
    own = type(state)(*map(cut, state)) if isinstance(state, tuple) else cut(state)
    return {n: cut(x) for n, x in arrays.items()}, own, list(map(cut, douts))


@pytest.mark.parametrize("name", ["mlstm -", "rfa -", "linear_attention mean", "gated_delta_rule raw"])
def test_sums_of_sums_are_computed_by_the_same_launch(public, fired, name):
    """Sums that others read are stored by the block of their head; a sequence alone has the bits it has in a batch."""
    fn, options, _ = CALLS[name]
    arrays, more, state = calls.drawn(fn, options, 0, 128)
    rng = np.random.default_rng(1)
    result = fn(**arrays, **more, state=state, return_state=True)
    douts = [rng.standard_normal(x.shape).astype(np.float32) for x in (result[0], *parts(result[1]))]
    _, expected = pulled(fn, arrays, more, state, douts)
    replay.clear()
    for _ in range(2):
        x, own, given = there(arrays, state, douts)
        _, grads = pulled(fn, x, more, own, given)
        for y, z in zip(flat(grads), flat(expected), strict=True):
            assert np.abs(y - z).max() <= 3e-5 * max(1, np.abs(z).max())
    assert fired == [1, 1 + ("A_log" in options)]  # whose gradient is a sum over sequences
    x, own, given = there(arrays, state, douts, slice(1, 2))
    alone = pulled(fn, x, more, own, given)[1]
    for field in grads._fields:
        for y, z in zip(parts((getattr(alone, field),)), parts((getattr(grads, field),)), strict=True):
            if y is not None and z.shape[0] == calls.B:
                assert np.array_equal(y[0], z[1])


def test_heads_that_share_keys_have_launches_of_their_own(public):
    """What a block of one head cannot sum."""
    fn, rng = la.gated_delta_rule, np.random.default_rng(0)
    x = step_calls.arrays_of(fn, 1, 4, 2, 128, 128, 0)
    S = rng.standard_normal((2, 4, 128, 128)).astype(np.float32)
    douts = [rng.standard_normal((2, 1, 4, 128)).astype(np.float32), S[::-1].copy()]
    _, expected = pulled(fn, x, {"qk_l2norm": True}, S, douts)
    _, grads = pulled(fn, {n: stub(y) for n, y in x.items()}, {"qk_l2norm": True}, stub(S), list(map(stub, douts)))
    for y, z in zip(flat(grads), flat(expected), strict=True):
        assert np.abs(y - z).max() <= 3e-5 * max(1, np.abs(z).max())


def test_an_axis_of_one_element_has_any_stride(public, monkeypatch):
    """An array flipped along one token is that array: the same kernels compute the same bits."""
    fn, (x, S) = la.gated_delta_rule, (step_calls.arrays_of(la.gated_delta_rule), np.ones((2, 4, 8, 4), np.float32))
    dout = np.ones((2, 1, 4, 4), np.float32)
    full, real = [], vjp._in_full
    monkeypatch.setattr(vjp, "_in_full", lambda *given: full.append(given[1]) or real(*given))
    bits = []
    for flipped in (False, True):
        replay.clear()
        own = [stub(y)[:, ::-1] if flipped else stub(y) for y in (*x.values(), dout)]
        assert not flipped or own[0].strides[1] < 0
        grads = la.vjp(fn, *own[:-1], state=stub(S))[1](own[-1])
        bits.append([np.asarray(y).tobytes() for y in flat(grads)])
    assert bits[0] == bits[1]
    assert len(full) == 2  # the pullbacks were deferred too


@pytest.mark.gpu
@pytest.mark.parametrize("D", [8, 128])
@pytest.mark.parametrize("name", CALLS)
def test_on_a_gpu(cp, name, D):
    """Against NumPy in float64; the same bits from a first pullback and a replayed one."""
    fn, options, _ = CALLS[name]
    arrays, more, state = calls.drawn(fn, options, 0, D)
    rng, own = np.random.default_rng(1), lambda S, how: type(S)(*map(how, S)) if isinstance(S, tuple) else how(S)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}, own(state, lambda S: S.astype(np.float64))
    result = fn(**wide[0], **more, state=wide[1], return_state=True)
    douts = [rng.standard_normal(x.shape).astype(np.float32) for x in (result[0], *parts(result[1]))]
    expected, expected_grads = pulled(fn, wide[0], more, wide[1], [d.astype(np.float64) for d in douts])
    there, before = {n: cp.asarray(x) for n, x in arrays.items()}, own(state, cp.asarray)
    given = [*map(cp.asarray, douts)]
    replay.clear()
    each = []
    for _ in range(3):
        found, grads = pulled(fn, there, more, before, given)
        each.append([x.get() for x in (*found, *flat(grads))])
    for x, y in zip(each[0], [*expected, *flat(expected_grads)], strict=True):
        assert np.abs(x - y).max() <= 1e-4 * max(1, np.abs(y).max())
    for x, *others in zip(*each, strict=True):
        assert all(x.tobytes() == z.tobytes() for z in others)
