"""Replay of calls of the CUDA step, against a twin of its kernel: no GPU."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import dispatch
from linattn_np.call import vjp as call_vjp
from linattn_np.matrix_state.types import Decay, EraseKey
from linattn_np.runtime.cuda import constants, launch
from tests.cases import has_plain_state, passes_through
from tests.matrix_state.cuda.step_twin import recorded_plans, stub
from tests.matrix_state.cuda.token import host

AGAIN = [fn for fn in la.VARIANTS if passes_through(fn) and not fn.spec.micro_steps]

launched, public, arrays_of, doubling = host.launched, host.public, host.arrays_of, host.doubling


@pytest.mark.parametrize("fn", AGAIN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("how", ["out", "pair", "in place", "turned", "step", "pool"])
def test_the_second_call_is_made_again(public, fn, how):
    """Other numbers at other places, the same result as NumPy's; and the checks were not gone through again."""
    rng = np.random.default_rng(5)
    for seed in range(4):
        arrays, state = arrays_of(fn, seed=seed), rng.standard_normal((2, 4, 8, 4)).astype(np.float32)
        options = {"state": state, "return_state": how != "out"}
        expected = fn(**arrays, **options)
        mine = {n: stub(np.moveaxis(x, 1, 2) if how == "turned" and x.ndim > 2 else x) for n, x in arrays.items()}
        options["state"] = S = stub(state)
        if how == "pool":
            options["state"] = S = stub(np.concatenate([state, state + 1, state[::-1]])[[3, 0, 2, 1, 4, 5]])
            options |= {"state_rows": stub(np.array([1, 3])), "overwrite_state": True}
            expected = fn(**arrays, state=np.asarray(S)[[1, 3]], return_state=True)
        if how == "in place":
            options["overwrite_state"] = True
        if how == "turned":
            options["layout"] = "heads_first"
        if how == "step":
            mine = {n: stub(x[:, 0]) if x.ndim > 2 else x for n, x in mine.items()}
        before = np.asarray(S).copy()
        result = la.step(fn, **mine, **options) if how == "step" else fn(**mine, **options)
        assert len(recorded_plans()) == 1
        out, end = (result, None) if how == "out" else result
        expected, expected_end = (expected, None) if how == "out" else expected
        assert out.shape == ((2, 4, 4) if how == "step" else out.shape)
        out = np.moveaxis(out, 1, 2) if how == "turned" else out[:, None] if how == "step" else out
        assert np.abs(out - expected).max() < 1e-5
        if how in ("in place", "pool"):
            assert end is S
        else:
            assert np.array_equal(S, before)
        if how == "pool":
            assert np.abs(S[[1, 3]] - expected_end).max() < 1e-5
            assert np.array_equal(np.asarray(S)[[0, 2, 4, 5]], before[[0, 2, 4, 5]])
        elif end is not None:
            assert np.abs(end - expected_end).max() < 1e-5


@pytest.mark.parametrize("layout", ["time_first", "heads_first"])
def test_vjp_is_made_again(public, monkeypatch, layout):
    """Forward and pullback: new numbers at new places, nothing checked or planned again; other cotangents are."""
    doubling(monkeypatch)
    rng, real = np.random.default_rng(5), dispatch.prepare
    for seed in range(3):
        arrays = arrays_of(la.gated_delta_rule, seed=seed)
        expected = la.gated_delta_rule(**arrays)
        state = stub(np.zeros((2, 4, 8, 4), np.float32))
        expected = np.moveaxis(expected, 1, 2) if layout == "heads_first" else expected
        mine = {n: stub(np.moveaxis(x, 1, 2) if layout == "heads_first" else x) for n, x in arrays.items()}
        dout = stub(rng.standard_normal(expected.shape, dtype=np.float32))
        dstate = stub(rng.standard_normal(state.shape, dtype=np.float32))
        if seed == 1:
            monkeypatch.setattr(call_vjp, "prepare", None)
        out, pull = la.vjp(la.gated_delta_rule, **mine, state=state, layout=layout)
        assert np.abs(out - expected).max() < 1e-5
        for _ in range(2):
            grads = pull(dout, dstate)
            for n, x in mine.items():
                assert np.array_equal(getattr(grads, n), 2 * (dout if n == "v" else x)), n
            assert np.array_equal(grads.state, 2 * dstate)
        assert len(recorded_plans()) == 1
    with pytest.raises(TypeError):  # prepare is not there
        pull(None, dstate)
    monkeypatch.setattr(call_vjp, "prepare", real)
    with pytest.raises(ValueError, match="dout has shape"):
        pull(dout[..., :2], dstate)


@pytest.mark.parametrize("capturing", [False, True])
def test_a_published_decay_is_made_once(public, monkeypatch, capturing):
    """But for one that belongs to a graph; calls of other sizes have their own."""
    monkeypatch.setattr(launch.cupy().cuda.runtime, "streamIsCapturing", lambda ptr: capturing)
    for H in (4, 2, 4, 2):
        arrays = arrays_of(la.retention, T=2, H=H, Hk=H)
        out = la.retention(**{n: stub(x) for n, x in arrays.items()})
        assert np.abs(out - la.retention(**arrays)).max() < 1e-5
    assert len(constants._cached) == len(recorded_plans()) == (0 if capturing else 2)


def test_a_pullback_that_computes_on_the_way_goes_the_whole_way(public, monkeypatch):
    """And so does the forward before it: it would be gone through twice."""
    monkeypatch.setattr(launch, "capability", lambda: 80)
    monkeypatch.setattr(launch, "shared_limit", lambda: 0)  # no kernel of chunks fits
    for seed in range(3):
        arrays = arrays_of(la.gated_delta_rule, T=2, seed=seed)
        out, pull = la.vjp(la.gated_delta_rule, **{n: stub(x) for n, x in arrays.items()})
        right, right_pull = la.vjp(la.gated_delta_rule, **arrays)
        assert np.abs(out - right).max() < 1e-5
        for mine, theirs in zip(pull(stub(np.ones_like(right))), right_pull(np.ones_like(right)), strict=True):
            assert mine is None or np.abs(mine - theirs).max() < 1e-4
        assert [list(x.pullbacks.values()) for x in recorded_plans()] == [[None]]


@pytest.mark.parametrize(
    "fn",
    [
        fn
        for fn in la.VARIANTS
        if fn.spec.decay is Decay.VECTOR
        and has_plain_state(fn.spec)
        and fn.spec.change.erase_key is not EraseKey.PRODUCT
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("state", [False, True])
def test_gradients_that_array_calls_compute_are_computed_every_time(public, fn, state):
    """The forward of a few tokens is a kernel, its adjoint is not: nothing of it may be taken for a launch."""
    for seed in range(3):
        arrays = arrays_of(fn, T=3, seed=seed)
        S = {"state": np.full((2, 4, 8, 4), 0.5, np.float32)} if state else {}
        _, pull = la.vjp(fn, **{n: stub(x) for n, x in (arrays | S).items()})
        out, right_pull = la.vjp(fn, **arrays, **S)
        dout = np.random.default_rng(seed).standard_normal(out.shape, dtype=np.float32)
        for mine, theirs in zip(pull(stub(dout)), right_pull(dout), strict=True):
            assert mine is theirs is None or np.abs(mine - theirs).max() < 1e-4
