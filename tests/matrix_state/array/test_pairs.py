"""causal=False in the order with fewer operations, (Q K^T) V or Q (K^T V): values, gradients, bits, explain."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import linattn_np as la
from tests.cases import CASES, draw, naive, parts, with_gradients, worst

PARALLEL = [c for c in CASES if not c.causal and "g" not in c.given]
BACKENDS = ("reference", "chunks", "numba", None)
LENGTHS = (3, 60, 0, 5, 90)  # of packed sequences: with K = V = 32, up to 32 tokens go by pairs


def operations_of(T, Tq, K, V):
    """(by pairs, by the state) of one head."""
    return 2 * Tq * T * (K + V), 2 * (T + Tq) * K * V


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("case", PARALLEL, ids=str)
def test_every_query_with_every_key_is_the_loop(case, has_state):
    for heads in ({"H": 2}, {"Hq": 4, "H": 2}, {"Hq": 1, "Hk": 1, "H": 2}):
        arrays, state = draw(case, T=6, Tq=2, K=24, V=20, **heads)
        state = state if has_state else None
        expected = naive(case, arrays, state)[0]
        for backend in BACKENDS:
            options = {**case.options, "state": state, "backend": backend}
            assert la.explain(case.fn, **arrays, **options).form == "parallel form"
            assert la.testing.relative_error(case.fn(**arrays, **options), expected) <= 1e-12


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("case", PARALLEL, ids=str)
def test_gradients_are_those_of_the_other_order(case, has_state):
    for heads in ({"H": 2}, {"Hq": 4, "H": 2}, {"Hq": 1, "Hk": 1, "H": 2}):
        arrays, state = draw(case, T=6, Tq=2, K=24, V=20, **heads)
        results = []
        for chunk_size in (None, 16):  # a chunk size: the order of the state
            out, pullback = la.vjp(case.fn, **arrays, **case.options, state=state if has_state else None,
                                   chunk_size=chunk_size)  # fmt: skip
            dout = np.random.default_rng(1).standard_normal(out.shape)
            results.append([out, *parts(pullback(dout))])
        for found, expected in zip(*results, strict=True):
            assert la.testing.relative_error(found, expected) <= 1e-11


@pytest.mark.parametrize("case", PARALLEL, ids=str)
def test_a_state_that_is_returned_is_computed_too(case):
    """Few tokens and one query: even so (Q K^T) V is less work."""
    arrays, _ = draw(case, T=2, Tq=1, K=24, V=20)
    la.testing.check_vjp(case.fn, **arrays, **case.options, step=2e-6)
    error, what = worst(with_gradients(case, arrays), with_gradients(case, arrays, chunk_size=1))
    assert error <= 1e-11, what


def test_the_gradient_of_a_state_that_was_not_returned():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 4, 2, 16))
    dstate = rng.standard_normal((2, 16, 16))
    for dout in (None, v):
        grads = [la.vjp(la.linear_attention, q, k, v, causal=False, **how)[1](dout, dstate)
                 for how in ({}, {"chunk_size": 1})]  # fmt: skip
        for a, b in zip(*map(parts, grads), strict=True):
            assert la.testing.relative_error(a, b) <= 1e-12


@pytest.mark.parametrize(("T", "Tq"), [(30, 30), (33, 33), (64, 20), (20, 64), (500, 16), (1, 1), (40, 0), (0, 4)])
def test_explain_names_both_counts_and_takes_the_smaller(T, Tq):
    K, V, B, H = 32, 32, 3, 2
    arrays = np.ones((B, Tq, H, K)), np.ones((B, T, H, K)), np.ones((B, T, H, V))
    by_pairs, by_state = (B * H * n for n in operations_of(T, Tq, K, V))
    how = la.explain(la.linear_attention, *arrays, causal=False)
    assert f"(Q K^T) V takes {by_pairs:,} operations, Q (K^T V) {by_state:,}" in how.reason
    assert how.operations == min(by_pairs, by_state)
    assert (how.form == "parallel form") == (by_pairs < by_state)
    returned = la.explain(la.linear_attention, *arrays, causal=False, return_state=True)
    assert returned.operations == min(by_pairs + 2 * B * T * H * K * V, by_state)


@pytest.mark.parametrize("options", [{}, {"normalize": True, "feature_map": "elu+1"}], ids=str)
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("return_state", [False, True])
def test_a_packed_sequence_has_the_bits_it_has_alone(options, has_state, return_state):
    """Short sequences go by pairs, long ones by the state, in one call; and in a batch."""
    rng, offsets = np.random.default_rng(0), np.cumsum([0, *LENGTHS])
    q, k, v = rng.standard_normal((3, 1, offsets[-1], 4, 32)).astype(np.float32)
    S = rng.uniform(0.5, 1, (len(LENGTHS), 4, 32, 33)).astype(np.float32)

    def state_of(rows):
        if not has_state:
            return None
        return la.NormalisedState(S[rows][..., :-1], S[rows][..., -1]) if options else S[rows][..., :-1]

    def computed(arrays, rows, d, **more):
        result, pullback = la.vjp(la.linear_attention, *arrays, **options, **more, state=state_of(rows), causal=False,
                                  return_state=return_state)  # fmt: skip
        dstate = state_of(rows) if return_state and has_state else None
        return parts(result if return_state else (result,)), parts(pullback(d, dstate))

    packed, grads = computed((q, k, v), slice(None), v, cu_seqlens=offsets)
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        one = [x[:, a:b] for x in (q, k, v)]
        twice = [np.concatenate([x, x]) for x in one]
        for arrays, rows in ((one, slice(n, n + 1)), (twice, [n, n])):
            found = computed(arrays, rows, arrays[2])
            for whole, alone in zip([*packed, *grads], found[0] + found[1], strict=True):
                part = whole[:, a:b] if whole.shape[0] == 1 else whole[n : n + 1]
                np.testing.assert_array_equal(part[0], alone[0])
