"""vjp of one token with a change of variables on arrays that look like CuPy's."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import replay, vjp
from linattn_np.matrix_state.cuda import calls as cuda_calls
from linattn_np.matrix_state.cuda import step as cuda_step
from linattn_np.matrix_state.types import Erase
from tests.cases import parts
from tests.matrix_state.cuda.deferred import test_calls as calls
from tests.matrix_state.cuda.step import host as step_calls
from tests.matrix_state.cuda.step_twin import stub

launched, public = step_calls.launched, step_calls.public
CALLS = calls.CALLS
# the backward of mesa_net solves by array calls, and the gradient of a rotated state is computed by them
DEFERRED = [name for name, (fn, *_) in CALLS.items()
            if "solver" not in fn.spec.options.defaults and "theta" not in fn.spec.arrays]


def pulled(fn, arrays, more, state, douts):
    """(result, gradients) of a vjp with a state; douts: cotangents of the output and the parts of the state."""
    result, pull = la.vjp(fn, **arrays, **more, state=state, return_state=True)
    dstate = type(state)(*douts[1:]) if isinstance(state, tuple) else douts[1]
    return [result[0], *parts(result[1])], pull(douts[0], dstate)


def flat(grads):
    return [y for x in grads for y in parts(x) if y is not None]


@pytest.mark.parametrize("name", DEFERRED)
def test_gradients_are_numpys(public, monkeypatch, name):
    """The core's own gradients by the definition; what is around it by kernels of array calls."""
    monkeypatch.setattr(cuda_calls, "backward", cuda_step.backward)
    full, real = [], vjp._in_full
    monkeypatch.setattr(vjp, "_in_full", lambda *given: full.append(given[1]) or real(*given))
    fn, options, _ = CALLS[name]
    arrays, more, state = calls.drawn(fn, options, 0)
    rng = np.random.default_rng(1)
    result = fn(**arrays, **more, state=state, return_state=True)
    douts = [rng.standard_normal(x.shape).astype(np.float32) for x in (result[0], *parts(result[1]))]
    expected, expected_grads = pulled(fn, arrays, more, state, douts)
    full.clear()
    found, grads = pulled(fn, {n: stub(x) for n, x in arrays.items()}, more, calls.moved(state), list(map(stub, douts)))
    assert len(full) == 1  # the pullback was deferred too
    for x, y in zip([*found, *flat(grads)], [*expected, *flat(expected_grads)], strict=True):
        assert x.shape == y.shape
        assert np.abs(x - y).max() <= 3e-5 * max(1, np.abs(y).max())


GATED = [name for name, (fn, *_) in CALLS.items() if fn.spec.erase is Erase.DELTA and "g" in fn.spec.arrays]


@pytest.mark.parametrize("name", GATED)
def test_a_repeated_vjp_is_its_launches(public, monkeypatch, name):
    """The same bits, with nothing checked or planned again."""
    fn, options, _ = CALLS[name]
    arrays, more, state = calls.drawn(fn, options, 0)
    rng = np.random.default_rng(1)
    douts = [rng.standard_normal(x.shape).astype(np.float32) for x in fn(**arrays, **more, state=state,
                                                                         return_state=True)]
    step_calls.doubling(monkeypatch)
    bits = []
    replay.clear()
    for n in range(3):
        if n == 2:
            monkeypatch.setattr(vjp, "prepare", None)
        mine = {n: stub(x) for n, x in arrays.items()}
        found, grads = pulled(fn, mine, more, calls.moved(state), list(map(stub, douts)))
        bits.append([np.asarray(x).tobytes() for x in (*found, *flat(grads))])
    assert bits[0] == bits[1] == bits[2]


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
