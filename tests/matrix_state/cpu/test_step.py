"""The compiled recurrent form against the definition: every cell, size, stride and storage; in place and not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("numba")

import linattn_np as la
from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cpu import loops as numba_loops
from linattn_np.matrix_state.types import ReadState
from linattn_np.runtime.pieces import memory as handles
from linattn_np.runtime.shapes import sequences
from linattn_np.testing import relative_error
from tests.core_cases import CELLS, case
from tests.matrix_state.cpu.test_loops import HEADS, single, wide
from tests.runtime.test_threads import run

GATED, FREE, BONUS = ("scalar", "delta", "after"), ("vector", "free", "after"), ("vector", "none", "bonus")
OUT = 2e-6  # float32 against the float64 definition


def both(x, plan, state, module=numba_loops):
    """(out, final state), token by token."""
    return module.forward(x, plan._replace(chunk_size=1), state)[:2]


def worst(found, expected):
    return max(relative_error(a, b) for a, b in zip(found, expected, strict=True) if b is not None)


def cut(x, plan, start, stop):
    """Tokens start..stop of a call."""
    tokens = [None if y is None else y[..., start:stop, :, :] for y in x.of_tokens]
    return type(x)(*tokens, x.u), plan._replace(sequences=tuple(sequences(stop - start, None)))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_every_cell_is_the_recurrence(cell, heads):
    for T in (1, 2, 33):
        x, plan, state, *_ = case(*cell, heads=HEADS[heads], T=T)
        for start in (state, None):
            expected = both(x, plan, start, recurrence)
            assert worst(both(x, plan, start), expected) < 1e-12, T
            small, narrow, *rest = single(x, plan, *(() if start is None else (start,)))
            exact, *rest64 = wide(small, *rest)
            expected = both(exact, plan, rest64[0] if rest64 else None, recurrence)
            assert worst(both(small, narrow, rest[0] if rest else None), expected) < OUT, T


@pytest.mark.parametrize("erase", ["none", "delta", "delta undecayed", "free"])
@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
@pytest.mark.parametrize("row", [ReadState.UPDATED, ReadState.PREVIOUS])
@pytest.mark.parametrize("bonus", [False, True])
def test_both_read_orders_and_the_bonus_with_every_erase(decay, erase, row, bonus):
    x, plan, state, *_ = case(decay, erase, "after", T=7, heads=(4, 2, 2))
    plan = plan._replace(query_reads=row)
    if bonus:
        x = x._replace(u=np.random.default_rng(5).standard_normal((2, 5)))
    assert worst(both(x, plan, state), both(x, plan, state, recurrence)) < 1e-12


@pytest.mark.parametrize("K", [1, 7, 60, 64, 100, 128, 256])
@pytest.mark.parametrize("V", [1, 7, 60, 64, 100, 128, 256])
@pytest.mark.parametrize("cell", [GATED, FREE, ("outer", "none", "bonus")])
def test_awkward_widths(cell, K, V):
    x, plan, state, *_ = case(*cell, T=3, K=K, V=V, B=1)
    expected = both(x, plan, state, recurrence)
    assert worst(both(x, plan, state), expected) < 1e-12
    small, narrow, start = single(x, plan, state)
    exact, start64 = wide(small, start)
    assert worst(both(small, narrow, start), both(exact, plan, start64, recurrence)) < OUT


@pytest.mark.parametrize("cell", [GATED, FREE, BONUS])
def test_every_short_length(cell):
    for T in range(1, 34):
        x, plan, state, *_ = case(*cell, T=T, K=7, V=20)
        assert worst(both(x, plan, state), both(x, plan, state, recurrence)) < 1e-12, T


def test_a_reset_forgets_all_and_no_decay_nothing():
    x, plan, state, *_ = case("scalar", "none", "after", T=1)
    for g, kept in ((-np.inf, 0), (-1e30, 0), (0.0, 1)):
        _, end = both(x._replace(g=np.full_like(x.g, g), k=np.zeros_like(x.k)), plan, state)
        assert (end == kept * state).all()


@pytest.mark.parametrize("cell", [GATED, FREE, BONUS, ("outer", "none", "before"), ("none", "delta", "after")])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_token_by_token_is_the_whole_to_the_bit(cell, dtype):
    x, plan, state, *_ = case(*cell, T=37, K=24, V=70, dtype=dtype)
    out, end = both(x, plan, state)
    for step in (1, 5, 32):
        S, parts = state, []
        for t in range(0, 37, step):
            part, S = both(*cut(x, plan, t, min(t + step, 37)), S)
            parts.append(part)
        assert (np.concatenate(parts, axis=-3) == out).all()
        assert (end == S).all()


def test_short_sequences_of_a_ragged_batch_have_the_bits_they_have_alone():
    lengths = [0, 1, 3, policy.SHORT_CPU, policy.SHORT_CPU + 1, 40, 2, 0]
    offsets = [0, *np.cumsum(lengths).tolist()]
    x, plan, state, *_ = case("scalar", "delta", "after", T=offsets[-1], K=16, V=24, B=1, offsets=offsets)
    plan = plan._replace(chunk_size=None)
    out, end, _ = numba_loops.forward(x, plan, state)
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        alone, alone_end, _ = numba_loops.forward(*cut(x, plan, a, b), state[n : n + 1])
        assert (out[:, a:b] == alone).all()
        assert (end[n] == alone_end[0]).all()
        form = 1 if b - a <= policy.SHORT_CPU else None
        assert (numba_loops.forward(*cut(x, plan._replace(chunk_size=form), a, b), state[n : n + 1])[1] == end[n]).all()


@pytest.mark.parametrize("threads", ["2", "3"])
def test_same_bits_for_any_number_of_threads(threads, monkeypatch):
    monkeypatch.setattr(policy, "FEW_BYTES", 0)
    for heads, V in (((2, 2, 2), 100), ((1, 1, 1), 600)):
        args = case("vector", "delta", "after", T=5, K=48, V=V, B=1, heads=heads)[:3]
        monkeypatch.setenv("LINATTN_NUM_THREADS", "1")
        alone = [both(*args), both(*single(*args))]
        monkeypatch.setenv("LINATTN_NUM_THREADS", threads)
        for a, b in zip(alone, [both(*args), both(*single(*args))], strict=True):
            assert (a[0] == b[0]).all()
            assert (a[1] == b[1]).all()


# the state, in place

IN_PLACE = {"return_state": True, "overwrite_state": True, "backend": "numba"}


def arrays(T, dtype=np.float32, B=2, H=2, K=16, V=24, seed=0):
    rng = np.random.default_rng(seed)
    n = lambda *shape: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    k = n(B, T, H, K)
    given = {
        "q": n(B, T, H, K),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": n(B, T, H, V),
        "g": -rng.uniform(0, 1, (B, T, H)).astype(dtype),
        "beta": rng.uniform(0, 1, (B, T, H)).astype(dtype),
    }
    return given, n(B, H, K, V)


def test_a_state_narrower_than_the_computation():
    for turn in range(2):
        given, state = arrays(1, np.float64, seed=turn)
        narrow = state.astype(np.float32)
        expected = la.gated_delta_rule(**given, state=narrow, return_state=True, backend="reference")
        found = la.gated_delta_rule(**given, state=narrow, return_state=True, backend="numba")
        assert found.state.dtype == np.float64
        assert worst(found, expected) < 1e-12


@pytest.mark.parametrize("known", [True, False])
def test_addresses_are_found_or_asked_for(known, monkeypatch):
    monkeypatch.setattr(handles, "is_behind_the_header", lambda: known)
    for turn in range(3):
        given, state = arrays(1, seed=turn)
        given["v"] = given["v"][..., ::-1]
        expected = la.gated_delta_rule(**given, state=state, return_state=True, backend="reference")
        assert worst(la.gated_delta_rule(**given, state=state, **IN_PLACE), expected) < OUT


@pytest.mark.slow
@pytest.mark.parametrize("vectors", ["avx2", "neon", "plain"])
def test_every_width_of_a_register_is_right(vectors):
    """On any processor: the compiler cuts vectors that are too wide for it."""
    code = """
        from linattn_np.matrix_state import definition as recurrence
        from linattn_np.matrix_state.cpu import loops as numba_loops
        from linattn_np.testing import relative_error
        from tests.core_cases import CELLS, case
        worst = 0.0
        for cell in CELLS:
            for T, K, V in ((1, 3, 5), (4, 16, 33), (2, 33, 70)):
                x, plan, state, *_ = case(*cell, T=T, K=K, V=V)
                a, b = (module.forward(x, plan._replace(chunk_size=1), state) for module in (numba_loops, recurrence))
                worst = max(worst, relative_error(a[0], b[0]), relative_error(a[1], b[1]))
        print(worst)
    """
    assert float(run(code, LINATTN_VECTORS=vectors)) < 1e-12
