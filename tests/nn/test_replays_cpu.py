"""Repeated calls of pieces on NumPy arrays: same bits, by recorded kernels where loops compute all of a call."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans
from linattn_np.call.replay.vjp import Forward
from linattn_np.nn.declaration import Piece
from linattn_np.nn.replays import Checked, Rechecked
from linattn_np.runtime.pieces.record import LaunchSequence
from tests.nn.table import CASES, CUTS, SMALL, Case, normal

pytest.importorskip("numba")
DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ARRAY_CALLS = {("cross_entropy", "hidden"), ("cross_entropy", "each"), ("token_shift", "plain"), ("dropout", "")}


@pytest.fixture(autouse=True)
def no_plan(monkeypatch):
    monkeypatch.setattr(plans, "by_key", {})
    monkeypatch.setattr(plans, "held", ({}, {}))


@pytest.fixture
def entered(monkeypatch):
    """The names of the calls that were checked."""
    found, real = [], Piece.entered
    monkeypatch.setattr(Piece, "entered", lambda own, given: found.append(own.name) or real(own, given))
    return found


def parts(result):
    return [y for y in (result if isinstance(result, tuple) else (result,)) if y is not None]


def given_of(case: Case, dtype, turn):
    """Arrays of a case, others in each turn."""
    arrays = {n: np.ascontiguousarray(np.roll(x, turn)).astype(dtype) for n, x in case.arrays.items()}
    return arrays | {n: np.roll(x, turn) for n, x in case.whole.items()}


def computed(case: Case, dtype, turn):
    given = given_of(case, dtype, turn)
    found = [*parts(case.fn(**given, **case.options))]
    given = given_of(case, dtype, turn)
    result, pullback = la.vjp(case.fn, **given, **case.options)
    d = [np.roll(np.cos(np.arange(y.size)), turn).reshape(y.shape).astype(y.dtype) for y in parts(result)]
    return [*found, *parts(result), *parts(pullback(*d))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.name} {c.label}".strip())
def test_a_repeated_call_has_the_same_bits_and_is_its_kernels(case, dtype, monkeypatch):
    if dtype not in ("float32", "float64") and case.label == "long":
        pytest.skip("the long one has its own bits in float32")
    found = [computed(case, DTYPES[dtype], turn) for turn in range(3)]
    kinds = {type(getattr(plan, "__self__", plan)) for plan in plans.by_key.values()}
    by_kernels = kinds <= {LaunchSequence, Rechecked, Forward} and bool(kinds)
    assert by_kernels == ((case.name, case.label) not in ARRAY_CALLS)
    assert by_kernels or kinds <= {Checked}
    assert all(plan.replayable for plan in plans.by_key.values() if type(plan) is Forward)
    monkeypatch.setattr(plans, "ENABLED", False)
    plans.by_key.clear()
    for turn, own in enumerate(found):
        for one, other in zip(own, computed(case, DTYPES[dtype], turn), strict=True):
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SMALL, ids=lambda c: f"{c.name} {c.label}".strip())
def test_a_repeated_call_with_out_is_its_kernels(case, dtype):
    def into(turn, out, how=None):
        given = given_of(case, DTYPES[dtype], turn)
        found = parts(case.fn(**given, **case.options, out=given[how] if how else out))
        assert found[0] is (given[how] if how else out)
        return found

    wanted = [parts(case.fn(**given_of(case, DTYPES[dtype], turn), **case.options)) for turn in range(3)]
    first = next(iter(case.arrays))
    in_place = wanted[0][0].shape == case.arrays[first].shape and wanted[0][0].dtype == DTYPES[dtype]
    known = set(plans.by_key)
    for how in (None, first)[: 1 + in_place]:
        for turn in range(3):
            out = np.full_like(wanted[turn][0], np.nan)
            for one, other in zip(into(turn, out, how), wanted[turn], strict=True):
                assert one.tobytes() == other.tobytes()
    kinds = [type(getattr(plan, "__self__", plan)) for key, plan in plans.by_key.items() if key not in known]
    by_kernels = kinds[:1] != [] and kinds[0] in (LaunchSequence, Rechecked)
    assert by_kernels == ((case.name, case.label) not in ARRAY_CALLS)
    assert len(kinds) == (1 + in_place if case.name != "dropout" else 0)
    assert not by_kernels or kinds[-1] in (LaunchSequence, Rechecked)


def test_out_of_a_replayed_call_is_checked():
    x, memory = normal(3, 8), np.zeros(30)
    out = memory[:24].reshape(3, 8)
    for _ in range(3):
        la.nn.rms_norm(x, out=out)
    wanted = la.nn.rms_norm(x)
    memory[3:27] = x.ravel()
    la.nn.rms_norm(memory[3:27].reshape(3, 8), out=out)  # overlaps an input
    np.testing.assert_array_equal(out, wanted)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="rms_norm: out is read-only"):
        la.nn.rms_norm(x, out=out)


@pytest.mark.parametrize("name", ["rms_norm", "silu"])
def test_an_input_that_is_read_only_is_not_written_in_place(name):
    x = normal(3, 8)
    for _ in range(3):
        getattr(la.nn, name)(x, out=x)
    before = x.copy()
    x.flags.writeable = False
    with pytest.raises(ValueError, match=f"{name}: out is read-only"):
        getattr(la.nn, name)(x, out=x)
    np.testing.assert_array_equal(x, before)


def test_a_step_with_out_is_its_kernels(entered):
    weight, state = normal(7, 4).astype(np.float32), normal(2, 3, 7).astype(np.float32)
    for turn in range(3):
        x, out = normal(2, 7 + turn)[:, :7].astype(np.float32), np.full((2, 7), np.nan, np.float32)
        x = np.ascontiguousarray(x)
        wanted = la.step(la.nn.short_conv, x, weight, state=state.copy())
        assert la.step(la.nn.short_conv, x, weight, state=state.copy(), out=out) is out
        np.testing.assert_array_equal(out, wanted)
    assert len(entered) == 2  # one with out, one without


@pytest.mark.parametrize("case", SMALL, ids=lambda c: f"{c.name} {c.label}".strip())
def test_a_repeated_call_is_not_checked_again(case, entered):
    for turn in range(2):
        computed(case, np.float32, turn)
    once = len(entered)
    computed(case, np.float32, 2)
    assert len(entered) == once or case.name == "dropout"


@pytest.mark.parametrize("how", ["pool", "state", "step", "returned", "ragged", "strided", "overlapping"])
def test_states_of_replayed_calls(how, monkeypatch):
    """Written in place, in rows of a pool, of ragged sequences; tokens in the memory of the state are read first."""

    def computed():
        D, N, found = 7, 3, []
        state = normal(6 if how == "pool" else len(CUTS) - 1 if how == "ragged" else N, 3, D).astype(np.float32)
        if how == "strided":
            state = np.ascontiguousarray(state.transpose(0, 2, 1)).transpose(0, 2, 1)
        for turn in range(4):
            x = normal(N, 4 + turn, D)[:, -2:].astype(np.float32)
            given = {"weight": normal(D, 4).astype(np.float32), "activation": "silu", "state": state}
            given |= {"return_state": True} if how == "returned" else {"overwrite_state": True}
            if how == "pool":
                given["state_rows"] = [[4, -1, 2], [2, 0, 5]][turn % 2]
            if how == "ragged":
                x, given["cu_seqlens"] = normal(1, CUTS[-1] + turn, D)[:, turn:].astype(np.float32), CUTS
            if how == "overlapping":
                x = state[:, 1:]
            result = la.step(la.nn.short_conv, x[:, 0].copy(), **given) if how == "step" else la.nn.short_conv(
                np.ascontiguousarray(x) if how != "overlapping" else x, **given)  # fmt: skip
            found += [y.copy() for y in (*parts(result), state)]
        return found

    found = computed()
    monkeypatch.setattr(plans, "ENABLED", False)
    plans.by_key.clear()
    for one, other in zip(found, computed(), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", ["ids", "labels"])
@pytest.mark.parametrize("by_vjp", [False, True])
def test_integers_of_a_replayed_call_are_checked(name, by_vjp):
    x = normal(4, 6).astype(np.float32)

    def call(numbers):
        fn = la.nn.embedding if name == "ids" else la.nn.cross_entropy
        given = {"ids": numbers, "weight": x} if name == "ids" else {"x": x, "labels": numbers}
        if not by_vjp:
            return fn(**given)
        result, pullback = la.vjp(fn, **given)
        pullback(np.ones_like(result))
        return result

    for _ in range(3):
        call(np.array([0, 1, 2, 3]))
        for wrong in (-1, 6):
            with pytest.raises(ValueError, match=f"{name} has the number {wrong}, expected 0.."):
                call(np.array([0, 1, 2, wrong]))


def test_an_input_that_changed_before_the_pullback_is_an_error():
    for _ in range(3):
        x = normal(2, 8).astype(np.float32)
        _, pullback = la.vjp(la.nn.silu, x)
        pullback(np.ones_like(x))
        x[0, 0] += 1
        with pytest.raises(RuntimeError, match="silu: x was changed in place"):
            pullback(np.ones_like(x))


def test_a_result_may_be_written_to_before_the_pullback():
    expected = []
    for n in range(4):
        x = normal(2, 8).astype(np.float32)
        y, pullback = la.vjp(la.nn.softmax, x)
        if n:
            y[...] = np.nan
        expected.append(pullback(np.cos(np.arange(16, dtype=np.float32)).reshape(2, 8)).x)
    assert all(d.tobytes() == expected[0].tobytes() for d in expected)


def test_offsets_of_the_same_number_are_other_plans():
    x, weight = normal(1, 8, 6).astype(np.float32), normal(6, 4).astype(np.float32)
    for _ in range(3):
        for cuts in ([0, 3, 8], [0, 5, 8], np.array([0, 8, 8])):
            whole = la.nn.short_conv(x, weight, cu_seqlens=cuts)
            for a, b in itertools.pairwise(cuts):
                if b > a:
                    assert whole[:, a:b].tobytes() == la.nn.short_conv(x[:, a:b].copy(), weight).tobytes()
        for wrong in ([0, 9], [0.0, 8.0], [1, 8]):
            with pytest.raises((TypeError, ValueError), match="cu_seqlens"):
                la.nn.short_conv(x, weight, cu_seqlens=wrong)


def test_explain_says_how_a_repeated_call_is_computed():
    x = normal(2, 8).astype(np.float32)
    plans.clear()
    assert la.explain(la.nn.silu, x).replay == plans.NOT_YET
    for _ in range(2):
        la.nn.silu(x)
        assert la.explain(la.nn.silu, x).replay == "replayed"
    wide = normal(8, 2**14).astype(np.float32)
    la.nn.linear(x, wide)
    assert la.explain(la.nn.linear, x, wide).replay == "replayed"
    assert la.explain(la.nn.linear, x, wide).backend == "numba"
    la.nn.linear(x, wide, backend="reference")
    assert "BLAS computes products" in la.explain(la.nn.linear, x, wide, backend="reference").replay
    assert la.explain(la.nn.swiglu, x, x).replay == "two arrays begin at one address"
