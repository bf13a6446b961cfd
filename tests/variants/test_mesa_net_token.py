"""mesa_net of one token by conjugate gradients: a form of its own, the same bits alone, among others and repeated."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from linattn_np.testing import check_vjp, relative_error
from tests.test_entered_modules import entered

CG = {"solver": "conjugate_gradients", "iterations": 60, "tolerance": 0.0}
WIDTHS = [6, 64, 70, 200]  # less than a block of columns, a whole one, and two with a rest


def drawn(K, T=1, B=2, H=2, dtype=np.float32, **heads):
    rng = np.random.default_rng(K)
    x = la.testing.sample(la.mesa_net, rng, B=(B,), T=T, H=H, K=K, V=5, **heads)
    state = la.testing.sample_state(la.mesa_net, rng, (B,), {}, H=H, K=K, V=5)
    return {n: y.astype(dtype) for n, y in x.items()}, la.SolvedState(*(y.astype(dtype) for y in state))


def called(x, state, **options):
    return la.mesa_net(**x, state=state, return_state=True, **CG, **options)


def same(found, expected):
    for a, b in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("heads", [{}, {"H": 4, "Hq": 2, "Hk": 2}, {"Hq": 4}, {"Hk": 1}], ids=str)
@pytest.mark.parametrize("K", WIDTHS)
@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 2e-4), (np.float64, 1e-12)])
def test_it_is_the_exact_solution(K, heads, dtype, bound):
    x, state = drawn(K, dtype=dtype, **heads)
    exact = {n: y.astype(np.float64) for n, y in x.items()}
    begin = la.SolvedState(*(y.astype(np.float64) for y in state))
    for ridge in (x["ridge"], x["ridge"][0, 0]):
        for S, Z in ((state, begin), (None, None)):
            found = called(x | {"ridge": ridge}, S)
            expected = la.mesa_net(**exact | {"ridge": ridge.astype(np.float64)}, state=Z, return_state=True)
            for a, b in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
                assert relative_error(a, b) <= bound


@pytest.mark.parametrize("K", WIDTHS)
def test_alone_in_a_batch_and_among_others_it_has_the_same_bits(K):
    x, _ = drawn(K, T=8, B=1)
    lengths = [0, 1, 4, 5, 5, 6, 8]  # offsets: sequences of 1, 3, 1, 0, 1 and 2 tokens
    many = la.testing.sample_state(la.mesa_net, np.random.default_rng(1), (6,), {}, H=2, K=K, V=5)
    many = la.SolvedState(*(y.astype(np.float32) for y in many))
    ragged = called(x, many, cu_seqlens=lengths)
    at = called(x, many, cu_seqlens=lengths, return_states_at=[1, 4, 6])[2]
    for n, (start, stop) in enumerate(itertools.pairwise(lengths)):
        if stop - start != 1:
            continue
        one = {m: y[:, start:stop] for m, y in x.items()}
        begin = la.SolvedState(*(y[n : n + 1] for y in many))
        alone = called(one, begin)
        same(alone, (ragged[0][:, start:stop], (y[n : n + 1] for y in ragged[1])))
        twice = called({m: np.concatenate([y, y]) for m, y in one.items()},
                       la.SolvedState(*(np.concatenate([y, y]) for y in begin)))  # fmt: skip
        same(alone, (twice[0][1:], (y[1:] for y in twice[1])))
        if stop in (1, 6):
            for end, found in zip(alone[1], at, strict=True):
                np.testing.assert_array_equal(end[0], found[[1, 4, 6].index(stop)])


@pytest.mark.parametrize("K", WIDTHS)
def test_a_repeated_call_has_the_bits_of_the_first(K, monkeypatch):
    x, state = drawn(K)
    monkeypatch.setenv("LINATTN_NUM_THREADS", "1")  # else some are shared out to threads
    replay.clear()
    first = called(x, state)
    overwritten = [la.SolvedState(*(y.copy() for y in state)) for _ in range(3)]
    in_place = [called(x, S, overwrite_state=True) for S in overwritten[:2]]
    same(called(x, state), first)
    in_place.append(called(x, overwritten[2], overwrite_state=True))
    for S, found in zip(overwritten, in_place, strict=True):
        assert found[1].S is S.S
        assert found[1].Z is S.Z
        same(found, first)


def test_strided_and_read_only_arrays_have_the_bits_of_dense_ones():
    x, state = drawn(64, H=2)
    expected = called(x, state)
    spread = {n: np.repeat(y, 2, axis=-1)[..., ::2] for n, y in x.items()}
    S, Z = (np.repeat(y, 2, axis=-2)[..., ::2, :] for y in state)
    for y in (*spread.values(), S, Z):
        y.flags.writeable = False
    for _ in range(3):
        same(called(spread, la.SolvedState(S, Z)), expected)
    for _ in range(3):
        S, Z = (np.repeat(y, 2, axis=-2)[..., ::2, :] for y in state)
        found = called(spread, la.SolvedState(S, Z), overwrite_state=True)
        assert found[1].Z is Z
        same(found, expected)


def test_a_state_that_shares_memory_with_an_input_is_as_on_copies():
    x, state = drawn(64, B=1, H=1)
    expected = called(x, state)
    for name in ("q", "k"):
        for _ in range(3):  # the last of these calls would be a replay
            S, Z = (y.copy() for y in state)
            own = x | {name: Z[:, :, 5:6]}
            wanted = called({n: y.copy() for n, y in own.items()}, la.SolvedState(S.copy(), Z.copy()))
            same(called(own, la.SolvedState(S, Z), overwrite_state=True), wanted)
    memory = np.zeros((1, 1, 2, 64, 64), np.float32)  # S and Z in turn: rows of one are between those of the other
    x, state = la.testing.sample(la.mesa_net, np.random.default_rng(0), B=(1,), T=1, H=1, K=64, V=64), None
    x = {n: y.astype(np.float32) for n, y in x.items()}
    for _ in range(3):
        S, Z = memory[:, :, 0], memory[:, :, 1]
        S[...], Z[...] = 0.5, np.eye(64)
        wanted = called(x, la.SolvedState(S.copy(), Z.copy()))
        same(called(x, la.SolvedState(S, Z), overwrite_state=True), wanted)
    assert not np.array_equal(expected[0], wanted[0])


def test_a_ridge_that_is_not_positive_is_looked_at_by_every_call():
    x, state = drawn(64)
    for _ in range(3):
        called(x, state)
    with pytest.raises(ValueError, match="mesa_net: ridge has an entry -1, expected none below 0"):
        called(x | {"ridge": -np.ones_like(x["ridge"])}, state)


def test_not_a_number_stays_in_its_head():
    x, state = drawn(64)
    expected = called(x, state)
    for name in ("q", "k"):
        y = x[name].copy()
        y[0, 0, 1, 3] = np.nan
        found = called(x | {name: y}, state)
        assert np.isnan(found[0][0, 0, 1]).all()
        np.testing.assert_array_equal(found[0][1], expected[0][1])
        np.testing.assert_array_equal(found[0][0, 0, 0], expected[0][0, 0, 0])


@pytest.mark.parametrize("K", [3, 9])
def test_gradients(K):
    x, state = drawn(K, dtype=np.float64)
    check_vjp(la.mesa_net, **x, state=state, **CG)


@pytest.mark.parametrize("T", [1, 5])
def test_a_repeated_call_replays_the_kernels_of_the_core(T):
    """The least entry of ridge is looked at before the core, which a recorded call enters no more."""
    x, state = drawn(6, T)
    for _ in range(2):
        called(x, state)
    found = entered(lambda: called(x, state))
    assert not [name for name in found if name.startswith("matrix_state/cpu/")]
    x["ridge"][0, 0, 1, 2] = -1
    with pytest.raises(ValueError, match="mesa_net: ridge has an entry -1, expected none below 0"):
        called(x, state)
