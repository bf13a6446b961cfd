"""Compiled Newton-Schulz iterations are those of array calls; steps that nothing reads are left out."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.fast_weights import muon
from linattn_np.fast_weights.array import chunks
from linattn_np.testing import relative_error

EPS = {"float32": np.finfo(np.float32).eps, "float64": np.finfo(np.float64).eps}
SHAPES = [(3, 5), (5, 3), (1, 1), (1, 7), (6, 6), (17, 33), (33, 17), (40, 40), (16, 70)]
LISTS = [*muon.COEFFICIENTS, ((1.875, -1.25, 0.375),), ((2.0, -1.5, 0.5),) * 7]


def by_arrays(G, name):
    table, margin = muon._numbers(name)
    return muon._by_arrays(np, G, table, margin)


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", LISTS, ids=str)
def test_compiled_iterations_are_those_of_array_calls(name, shape, dtype, monkeypatch):
    pytest.importorskip("numba")
    rng = np.random.default_rng(0)
    G, d = (rng.standard_normal((3, 2, *shape)).astype(dtype) for _ in range(2))
    X, kept = muon.newton_schulz_fwd(np, G, name)
    found = [X, muon.newton_schulz_vjp(np, G, name, d), muon.newton_schulz_vjp(np, G, name, d, kept)]
    np.testing.assert_array_equal(*found[1:])
    np.testing.assert_array_equal(X, muon.newton_schulz(np, G, name))
    assert all(y.dtype == dtype for y in found)
    expected, kept = by_arrays(G.astype(np.float64), name)
    assert relative_error(X, expected) <= 200 * EPS[dtype]
    monkeypatch.setattr(muon, "_kernel", lambda *given: None)
    exact = muon.newton_schulz_vjp(np, G.astype(np.float64), name, d.astype(np.float64), kept)
    slope = np.abs(G).max() / np.linalg.norm(G, axis=(-2, -1)).min()  # a number of one is divided by its own size
    assert np.abs(found[1] - exact).max() <= 5e3 * EPS[dtype] * max(np.abs(exact).max(), slope)


@pytest.mark.parametrize("shape", [(4, 6), (70, 16)], ids=str)
def test_a_matrix_of_zeros_or_nan_leaves_others_alone(shape):
    rng = np.random.default_rng(0)
    G, d = rng.standard_normal((2, 3, *shape))
    other = G.copy()
    other[1], other[2] = 0, np.nan
    for f in (lambda y: muon.newton_schulz(np, y, "keller"), lambda y: muon.newton_schulz_vjp(np, y, "keller", d)):
        np.testing.assert_array_equal(f(other)[0], f(G)[0])
        assert np.isfinite(f(other)[1]).all()
        assert np.isnan(f(other)[2]).all()


# large chunks


def draw(T=13):
    arrays = la.testing.sample(la.lact, np.random.default_rng(0), B=(2,), T=T, H=2, K=5, V=3)
    return arrays, {"mini_batch": 4, "muon": ((1.875, -1.25, 0.375),)}


@pytest.mark.parametrize("T", [3, 4, 12, 13])
@pytest.mark.parametrize("stacked", [False, True])
def test_the_last_step_is_left_out_where_no_state_is_returned(T, stacked):
    arrays, options = draw(T)
    options["stacked"] = stacked
    found = []
    for more in ({}, {"return_state": True}):
        result, pullback = la.vjp(la.lact, **arrays, **options, **more)
        out = result[0] if more else result
        np.testing.assert_array_equal(out, la.lact(**arrays, **options))
        found.append([out, *(d for d in pullback(np.cos(out)) if d is not None)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_gradients_do_not_depend_on_what_is_kept(monkeypatch):
    arrays, options = draw()
    found = []
    for most in (0, 600, chunks.MAX_RESIDUALS):
        monkeypatch.setattr(chunks, "MAX_RESIDUALS", most)
        out, pullback = la.vjp(la.lact, **arrays, **options)
        found += [pullback(np.cos(out)), pullback(np.cos(out))]
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            if a is not None:
                np.testing.assert_array_equal(a, b)


def test_few_steps_are_taken_where_nothing_reads_the_last(monkeypatch):
    arrays, options = draw(8)
    taken = []
    own = muon.newton_schulz_fwd
    monkeypatch.setattr("linattn_np.fast_weights.optimisers.newton_schulz_fwd",
                        lambda *given: taken.append(given) or own(*given))  # fmt: skip
    out, pullback = la.vjp(la.lact, **arrays, **options)
    pullback(out)
    assert len(taken) == 3  # one step of each matrix, forward and backward together
