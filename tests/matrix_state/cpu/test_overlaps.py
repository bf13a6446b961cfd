"""Where a final state may be written: not where anything else lies, and in no place twice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("numba")

import linattn_np as la
from linattn_np.runtime.memory import overlaps_itself, place_of

B, H, K, V = 2, 3, 4, 5
FORMS = {"tokens": 5, "chunks": 40}
every_form = pytest.mark.parametrize("T", FORMS.values(), ids=FORMS)
as_strided = np.lib.stride_tricks.as_strided


def drawn(T, B=B, seed=0):
    x = la.testing.sample(la.gated_delta_rule, np.random.default_rng(seed), B=(B,), T=T, H=H, K=K, V=V, optional=False)
    return {n: y.astype(np.float32) for n, y in x.items()}


def states(count, seed=1):
    return np.random.default_rng(seed).standard_normal((count, H, K, V)).astype(np.float32)


def places(y):
    """Where each number of y lies, in bytes from the first."""
    index = np.indices(y.shape).reshape(y.ndim, -1)
    return np.array(y.strides) @ index


def test_no_two_numbers_at_one_place():
    """Against every number's place, for all strides of three axes."""
    buffer = np.zeros(200, np.float32)
    for shape in ((2, 2, 3), (2, 1, 3), (1, 3, 2)):
        for strides in itertools.product((0, 1, 2, 3, 4, 5, 6, 8), (0, 1, 2, 3, 4, 6), (1, 2, 4, 6)):
            y = as_strided(buffer, shape, [4 * n for n in strides])
            spread = bool((np.diff(np.sort(places(y))) >= 4).all())
            assert overlaps_itself(place_of(y)) is not spread, (shape, strides)
    for order in itertools.permutations(range(4)):  # any order of axes, either direction, rows apart
        y = np.zeros([(2, 3, 4, 5)[n] for n in order], np.float32).transpose(np.argsort(order))
        assert y.shape == (2, 3, 4, 5)
        assert not overlaps_itself(place_of(y))
        assert not overlaps_itself(place_of(y[:, ::-1, :, ::-1]))
        assert not overlaps_itself(place_of(y[:, ::2, 1:3, ::2]))


@every_form
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", ["one for sequences", "one for heads", "heads that overlap", "rows that overlap"])
def test_states_that_overlap_one_another(kind, again, T):
    """An error, also after a call of the same shapes; nothing is written."""
    x, size = drawn(T), np.dtype(np.float32).itemsize
    buffer = states(8).ravel()
    dense = size * np.array([H * K * V, K * V, V, 1])
    strides = {
        "one for sequences": dense * [0, 1, 1, 1],
        "one for heads": dense * [1, 0, 1, 1],
        "heads that overlap": dense - [0, size, 0, 0],
        "rows that overlap": dense - [0, 0, size, 0],
    }[kind]
    options = {"overwrite_state": True, "return_state": True, "backend": "numba"}
    if again:
        la.gated_delta_rule(**drawn(T, seed=3), state=states(B), **options)
    own = buffer.copy()
    with pytest.raises(ValueError, match="state has elements that share memory"):
        la.gated_delta_rule(**x, state=as_strided(own, (B, H, K, V), strides), **options)
    assert (own == buffer).all()


@every_form
def test_rows_of_a_pool_that_overlap_or_come_twice(T):
    x = drawn(T)
    pool = states(6)
    expected = la.gated_delta_rule(**x, state=pool[[4, 1]], return_state=True)
    mine = pool.copy()
    out = la.gated_delta_rule(**x, state=mine, state_rows=[4, 1], overwrite_state=True)
    assert (out == expected.out).all()
    assert (mine[[4, 1]] == expected.state).all()
    assert (mine[[0, 2, 3, 5]] == pool[[0, 2, 3, 5]]).all()
    for rows in ([4, 4], np.array([1, 1])):
        mine = pool.copy()
        with pytest.raises(ValueError, match=r"state_rows is \[(4, 4|1, 1)\], expected no row twice"):
            la.gated_delta_rule(**x, state=mine, state_rows=rows, overwrite_state=True)
        assert (mine == pool).all()
    own = pool.copy()
    half = as_strided(own, (11, H, K, V), (pool.strides[0] // 2, *pool.strides[1:]))  # row n: half of the next
    with pytest.raises(ValueError, match="state has elements that share memory"):
        la.gated_delta_rule(**x, state=half, state_rows=[2, 6], overwrite_state=True)
    assert (own == pool).all()


@every_form
@pytest.mark.parametrize("name", ["v", "g", "k"])
def test_a_pool_that_an_input_lies_in(name, T):
    """The rows are taken out before anything is written, and put back when nothing is read any more."""
    x = drawn(T)
    pool = np.concatenate([states(6).ravel(), x[name].ravel()])
    mine = pool[-x[name].size - 2 * H * K * V :]  # two states, the input behind them
    shared = pool[-x[name].size :].reshape(x[name].shape)
    shifted = as_strided(mine, (2, H, K, V), (4 * (H * K * V + 7), 4 * K * V, 4 * V, 4))  # the second reaches into it
    begin = shifted.copy()
    right = la.gated_delta_rule(**x | {name: shared.copy()}, state=begin[[1, 0]], return_state=True)
    out = la.gated_delta_rule(**x | {name: shared}, state=shifted, state_rows=[1, 0], overwrite_state=True)
    assert (out == right.out).all()
    assert (shifted[[1, 0]] == right.state).all()
