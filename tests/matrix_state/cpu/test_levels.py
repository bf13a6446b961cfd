"""States by levels in compiled loops: the definition, by array calls; in place, replayed, and where levels are few."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

import linattn_np as la
from linattn_np.call.replay import plans
from linattn_np.testing import relative_error

VARIANTS = (la.log_linear_gla, la.log_linear_gated_delta_rule)
HEADS = {"equal": (2, 2, 2), "shared keys": (1, 1, 2), "shared values": (4, 2, 2), "shared k": (2, 1, 2)}
every_variant = pytest.mark.parametrize("fn", VARIANTS, ids=lambda fn: fn.__name__)


def drawn(fn, T, B=(2,), K=5, V=9, heads=(2, 2, 2), levels=9):
    x = la.testing.sample(fn, np.random.default_rng(0), B=B, T=T, H=max(heads), K=K, V=V)
    q, k, v = heads
    x["q"], x["k"] = x["q"][..., :q, :].copy(), x["k"][..., :k, :].copy()
    for name in x.keys() - {"q", "k"}:
        x[name] = (x[name][..., :v] if name in ("g", "beta") else x[name][..., :v, :]).copy()
    return x | {"lam": x["lam"][..., :levels]}


def results(fn, x, backend, **options):
    """(out, S, position), and the gradients for cotangents of both."""
    (out, state), pullback = la.vjp(fn, **x, backend=backend, return_state=True, **options)
    rng = np.random.default_rng(1)
    grads = pullback(rng.standard_normal(out.shape), state._replace(S=rng.standard_normal(state.S.shape)))
    return [out, *state], [d for d in (*grads[:-1], *(grads.state or ())) if d is not None]


def assert_equal(fn, x, **options):
    found, expected = (results(fn, x, backend, **options) for backend in ("numba", "reference"))
    assert (
        max(relative_error(*pair) for each in zip(found, expected, strict=True) for pair in zip(*each, strict=True))
        < 1e-13
    )


@pytest.mark.parametrize("T", [1, 15, 16, 17, 33, 64])
@every_variant
def test_levels_are_the_definition(fn, T):
    """From a state in the middle of a block, and from none."""
    x, first = drawn(fn, T), {n: y[:, :11] for n, y in drawn(fn, 16).items()}
    assert_equal(fn, x)
    assert_equal(fn, x, state=fn(**first, return_state=True).state)


@pytest.mark.parametrize("heads", HEADS)
@every_variant
def test_heads_that_share(fn, heads):
    x = drawn(fn, 20, heads=HEADS[heads])
    assert_equal(fn, x, state=fn(**x, return_state=True).state)


@pytest.mark.parametrize(("K", "V"), [(1, 1), (7, 60), (64, 100), (33, 130)])
@every_variant
def test_widths(fn, K, V):
    x = drawn(fn, 5, K=K, V=V)
    assert_equal(fn, x, state=fn(**x, return_state=True).state)


@every_variant
def test_ragged_batches_of_short_and_long_sequences(fn):
    x = drawn(fn, 3 + 0 + 64 + 80, B=(1,))
    assert_equal(fn, x, cu_seqlens=np.array([0, 3, 3, 67, 147]))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@every_variant
def test_other_dtypes_and_strides(fn, dtype):
    x = {n: y.astype(dtype) for n, y in drawn(fn, 7).items()}
    strided = {n: np.repeat(y, 2, axis=-1)[..., ::2] for n, y in x.items()}
    for one, other in zip(results(fn, x, "numba"), results(fn, strided, "numba"), strict=True):
        for y, z in zip(one, other, strict=True):
            np.testing.assert_array_equal(y, z)
    wide = {n: y.astype(np.float64) for n, y in x.items()}
    errors = [*map(relative_error, results(fn, x, "numba")[0], results(fn, wide, "numba")[0])]
    assert max(errors) < 4 * np.finfo(dtype).eps


def test_gradients_are_central_differences():
    fn, x = la.log_linear_gated_delta_rule, drawn(la.log_linear_gated_delta_rule, 21, B=(1,), K=4, V=3)
    state, rng = fn(**drawn(fn, 6, B=(1,), K=4, V=3), return_state=True).state, np.random.default_rng(2)
    (out, end), pullback = la.vjp(fn, **x, state=state, return_state=True)
    dout, dS = rng.standard_normal(out.shape), rng.standard_normal(end.S.shape)
    grads = pullback(dout, end._replace(S=dS))

    def value(y, S):
        out, end = fn(**y, state=state._replace(S=S), return_state=True)
        return np.vdot(dout, out) + np.vdot(dS, end.S)

    for name in (*x, "state"):
        y = state.S if name == "state" else x[name]
        d = rng.standard_normal(y.shape)
        moved = [y + e * d for e in (1e-6, -1e-6)]
        along = [value(x, y) if name == "state" else value(x | {name: y}, state.S) for y in moved]
        exact = np.vdot(grads.state.S if name == "state" else getattr(grads, name), d)
        assert abs((along[0] - along[1]) / 2e-6 - exact) < 1e-7 * (1 + abs(exact)), name


@pytest.mark.parametrize("threads", [1, 2])
@every_variant
def test_a_replayed_call_with_too_few_levels_raises_and_leaves_the_state(fn, threads):
    """Levels are counted by the kernels: the position of a state is no part of the signature."""
    x = {n: y.astype(np.float32) for n, y in drawn(fn, 8, B=(4,), K=64, V=64, levels=5).items()}
    state = fn(**x, return_state=True).state
    keywords = x | {"overwrite_state": True, "return_state": True, "num_threads": threads}
    plans.clear()
    for count in (1, 2):
        own = type(state)(*(y.copy() for y in state))
        assert (fn(**keywords, state=own).state.position == 16).all()
        assert plans.count() == 1, count
    assert la.explain(fn, **keywords, state=state).replay == "replayed"
    before = type(own)(*(y.copy() for y in own))
    with pytest.raises(ValueError, match=f"{fn.__name__}: lam has 5 levels, expected at least 6 for 24 tokens"):
        fn(**keywords, state=own)
    for y, z in zip(own, before, strict=True):
        np.testing.assert_array_equal(y, z)


@pytest.mark.parametrize("T", [1, 64])
@every_variant
def test_a_vjp_is_replayed_whole(fn, T):
    x = {n: y.astype(np.float32) for n, y in drawn(fn, T, B=(1,)).items()}
    state = fn(**x, return_state=True).state
    plans.clear()
    for _ in range(2):
        out, pullback = la.vjp(fn, **x, state=state)
        grads = pullback(np.ones_like(out))
    (plan,) = plans.by_key.values()
    assert plan.replayable
    plans.clear()
    expected = la.vjp(fn, **x, state=state)[1](np.ones_like(out))
    for d, e in zip((*grads[:-1], *grads.state), (*expected[:-1], *expected.state), strict=True):
        np.testing.assert_array_equal(d, e)
