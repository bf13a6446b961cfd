"""One token with keys of over 256 channels on arrays that look like CuPy's: a launch for each block of them."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import dispatch, replay
from linattn_np.matrix_state import policy
from tests.cases import parts
from tests.matrix_state.cuda.deferred import test_calls as calls
from tests.matrix_state.cuda.deferred import test_vjp as gradients
from tests.matrix_state.cuda.step_twin import stub
from tests.matrix_state.cuda.token import host as step_calls

launched, public, fired = step_calls.launched, step_calls.public, calls.fired
B, H, V = 2, 4, 8
MAPPED = {"normalize": True, "feature_map": "elu+1"}
CALLS = {  # a function, options, channels, and the launches of a repeated call
    "gla 520": (la.gla, {}, 520, 3), "linear_attention 264": (la.linear_attention, {}, 264, 2),
    "linear_attention mean 300": (la.linear_attention, MAPPED, 300, 2), "retention 257": (la.retention, {}, 257, 2),
}  # fmt: skip


def drawn(fn, options, K, seed=0):
    """Arrays of one token by name, and a state, in NumPy."""
    rng = np.random.default_rng(seed)
    one, before = (
        {
            n: x.astype(np.float32)
            for n, x in la.testing.sample(fn, rng, B=(B,), T=T, H=H, Hk=H, Hq=H, K=K, V=V, optional=False).items()
        }
        for T in (1, 3)
    )
    return one, fn(**before, **options, return_state=True)[1]


def test_the_calls_are_wider_than_the_kernel():
    assert all(K > policy.WIDEST_CUDA for *_, K, _ in CALLS.values())


@pytest.mark.parametrize("how", ["new", "in place", "step"])
@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_is_its_launches(public, monkeypatch, fired, name, how):
    fn, options, K, count = CALLS[name]
    arrays, state = drawn(fn, options, K)
    expected, end = fn(**arrays, **options, state=state, return_state=True)
    replay.clear()
    bits = []
    for n in range(2):
        if n:
            monkeypatch.setattr(dispatch, "prepare", None)
        out, last, own = calls.called(fn, arrays, options, state, how)
        for x, y in zip([out, *last], [expected, *parts(end)], strict=True):
            assert x.shape == y.shape
            assert np.abs(x - y).max() <= 2e-5 * max(1, np.abs(y).max())
        if how == "in place":
            assert all(x is y for x, y in zip(last, own, strict=True))
        bits.append([np.asarray(x).tobytes() for x in (out, *last)])
    assert bits[0] == bits[1]
    assert fired == [count]


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_numpys(public, monkeypatch, name):
    fn, options, K, _ = CALLS[name]
    arrays, state = drawn(fn, options, K)
    rng = np.random.default_rng(1)
    result = fn(**arrays, **options, state=state, return_state=True)
    douts = [rng.standard_normal(x.shape).astype(np.float32) for x in (result[0], *parts(result[1]))]
    expected, expected_grads = gradients.pulled(fn, arrays, options, state, douts)
    replay.clear()
    for n in range(3):
        if n == 2:
            monkeypatch.setattr(gradients.vjp, "prepare", None)
        found, grads = gradients.pulled(
            fn, {n: stub(x) for n, x in arrays.items()}, options, calls.moved(state), list(map(stub, douts))
        )
        for x, y in zip([*found, *gradients.flat(grads)], [*expected, *gradients.flat(expected_grads)], strict=True):
            assert x.shape == y.shape
            assert np.abs(x - y).max() <= 1e-4 * max(1, np.abs(y).max())


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_on_a_gpu(cp, name):
    """Against NumPy in float64; the same bits from a first call, a replayed one, in place, and alone."""
    fn, options, K, _ = CALLS[name]
    arrays, state = drawn(fn, options, K)
    own = lambda S, how: type(S)(*map(how, S)) if isinstance(S, tuple) else how(S)  # noqa: E731
    expected, end = fn(
        **{n: x.astype(np.float64) for n, x in arrays.items()},
        **options,
        return_state=True,
        state=own(state, lambda S: S.astype(np.float64)),
    )
    there, before = {n: cp.asarray(x) for n, x in arrays.items()}, own(state, cp.asarray)
    replay.clear()
    found = [fn(**there, **options, state=before, return_state=True) for _ in range(2)]
    found.append(fn(**there, **options, state=own(before, cp.copy), return_state=True, overwrite_state=True))
    first = {n: x[:1] if x.shape[:2] == (B, 1) else x for n, x in there.items()}
    alone, end_alone = fn(**first, **options, state=own(before, lambda S: S[:1]), return_state=True)
    each = [[out.get(), *(S.get() for S in parts(last))] for out, last in found]
    for x, y in zip(each[0], [expected, *parts(end)], strict=True):
        assert np.abs(x - y).max() <= 2e-5 * max(1, np.abs(y).max())
    for x, *others, y in zip(*each, [alone.get(), *(S.get() for S in parts(end_alone))], strict=True):
        assert all(x.tobytes() == z.tobytes() for z in others)
        assert np.array_equal(x[:1], y)
