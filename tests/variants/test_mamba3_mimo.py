"""Mamba-3 of any rank: the loop, gradients, one row, the order of rows, other libraries, a step in place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import linattn_np as la
from linattn_np.sampling import draw_state, sample
from linattn_np.testing import check_vjp, relative_error
from tests.naive import NAIVE

BACKENDS = ({}, {"backend": "chunks", "chunk_size": 16}, {"backend": "reference"})
ROWS = ("B", "C", "mimo_x", "mimo_o", "mimo_z")


def drawn(R, T=7, B=(2,), seed=0, **sizes):
    rng, letters = np.random.default_rng(seed), {"H": 4, "Hk": 2, "Hq": 2, "K": 6, "V": 3} | sizes
    x = sample(la.mamba3_mimo, rng, B, T=T, R=R, **letters)
    K, V, H = letters["K"], letters["V"], letters["H"]
    state = la.Mamba3State(*(rng.standard_normal((*B, H, *shape)) for shape in ((K, V), (R, K), (R, V))))
    return x, state


def assert_close(a, b, bound=1e-13):
    for x, y in zip(a, b, strict=True):
        assert relative_error(x, y) < bound


@pytest.mark.parametrize("R", [1, 2, 3, 5])
@pytest.mark.parametrize("T", [0, 1, 7, 67])
def test_any_rank_is_the_loop(R, T):
    x, state = drawn(R, T)
    out, end = NAIVE["mamba3_mimo"](**x, state=state)
    for how in BACKENDS:
        found, final = la.mamba3_mimo(**x, state=state, return_state=True, **how)
        assert_close((found, *final), (out, *end))


@pytest.mark.parametrize("R", [1, 3, 4])
def test_gradients_of_any_rank_are_central_differences(R):
    x, state = drawn(R, T=5)
    for how in BACKENDS:
        check_vjp(la.mamba3_mimo, **x, state=state, **how)


@pytest.mark.parametrize("R", [1, 3])
def test_a_ragged_batch_is_each_sequence_alone(R):
    x, state = drawn(R, T=11, B=(1,))
    states = la.Mamba3State(*(np.concatenate([S, 2 * S, -S, S]) for S in state))
    offsets = [0, 3, 3, 10, 11]
    out, end = la.mamba3_mimo(**x, state=states, return_state=True, cu_seqlens=offsets)
    heads = ("mimo_x", "mimo_o", "mimo_z", "D", "dt_bias")
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        one = {name: y if name in heads else y[:, a:b] for name, y in x.items()}
        begin = la.Mamba3State(*(S[n : n + 1] for S in states))
        alone, last = la.mamba3_mimo(**one, state=begin, return_state=True)
        assert_close((out[:, a:b], *(S[n : n + 1] for S in end)), (alone, *last))


@pytest.mark.parametrize("how", [{}, {"backend": "chunks"}], ids=str)
def test_one_row_with_vectors_of_ones_is_mamba3(how):
    """Outputs, state and gradients, with everything optional."""
    rng = np.random.default_rng(1)
    x = sample(la.mamba3, rng, T=9, H=4, Hk=2, Hq=4, K=6, V=3)
    state = draw_state(la.mamba3, rng, (2,), {"H": 4, "K": 6, "V": 3}, {})
    ones = np.ones((4, 1, 3))
    rows = {n: y[..., None, :, :] if n in ("B", "C") else y for n, y in x.items()}
    rows_of = lambda S: la.Mamba3State(S[0], S[1][..., None, :], S[2][..., None, :])  # noqa: E731
    (out, end), pull = la.vjp(la.mamba3, **x, state=state, return_state=True, **how)
    (found, final), pull_rows = la.vjp(
        la.mamba3_mimo, **rows, mimo_x=ones, mimo_o=ones, state=rows_of(state), return_state=True, **how
    )
    assert_close((found, *final), (out, *rows_of(end)), 1e-15)
    d, dend = rng.standard_normal(out.shape), la.Mamba3State(*(rng.standard_normal(S.shape) for S in end))
    grads, grads_rows = pull(d, dend), pull_rows(d, rows_of(dend))
    for name in x:
        assert relative_error(getattr(grads_rows, name).reshape(x[name].shape), getattr(grads, name)) < 1e-14
    assert_close(grads_rows.state, rows_of(grads.state), 1e-14)


def test_the_order_of_the_rows_does_not_matter():
    x, state = drawn(4)
    order = [2, 0, 3, 1]
    moved = {n: y if n not in ROWS else y[:, order] if n.startswith("mimo") else y[:, :, order] for n, y in x.items()}
    begin = la.Mamba3State(state.S, state.k[:, :, order], state.v[:, :, order])
    out, end = la.mamba3_mimo(**x, state=state, return_state=True)
    found, final = la.mamba3_mimo(**moved, state=begin, return_state=True)
    assert_close((found, *final), (out, end.S, end.k[:, :, order], end.v[:, :, order]))


@pytest.mark.parametrize("T", [1, 3])
def test_in_place_the_state_is_the_one_returned(T):
    x, state = drawn(3, T)
    for _ in range(2):  # computed, then replayed
        out, end = la.mamba3_mimo(**x, state=state, return_state=True)
        own = la.Mamba3State(*(S.copy() for S in state))
        found, final = la.mamba3_mimo(**x, state=own, overwrite_state=True, return_state=True)
        assert all(a is b for a, b in zip(own, final, strict=True))
        assert_close((found, *own), (out, *end), 1e-15)


def test_another_library_computes_the_same():
    xp = pytest.importorskip("array_api_strict")
    x, state = drawn(3)
    out, end = la.mamba3_mimo(**x, state=state, return_state=True)
    given = {n: xp.asarray(y) for n, y in x.items()}
    found, final = la.mamba3_mimo(**given, state=la.Mamba3State(*map(xp.asarray, state)), return_state=True)
    assert_close((np.asarray(found), *map(np.asarray, final)), (out, *end))
    (_, back), (_, back_there) = la.vjp(la.mamba3_mimo, **x), la.vjp(la.mamba3_mimo, **given)
    grads, there = back(out), back_there(xp.asarray(out))
    assert_close(map(np.asarray, there[:-1]), grads[:-1], 1e-12)


def test_bad_input_is_named():
    x, state = drawn(2)
    with pytest.raises(
        ValueError, match=r"mamba3_mimo: mimo_x has shape \(4, 3, 3\), expected \(H, R, V\) = \(4, 2, 3\)"
    ):
        la.mamba3_mimo(**x | {"mimo_x": np.ones((4, 3, 3))})
    with pytest.raises(ValueError, match=r"state.k has shape"):
        la.mamba3_mimo(**x, state=la.Mamba3State(state.S, state.k[:, :, :1], state.v))
    none = {n: y if n not in ROWS else y[:, :0] if n.startswith("mimo") else y[:, :, :0] for n, y in x.items()}
    with pytest.raises(ValueError, match="R = 0 rows"):
        la.mamba3_mimo(**none)
