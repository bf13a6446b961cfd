"""A core outside the package: every property of the catalog's functions, its formulas, its errors."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import dispatch
from linattn_np.call.replay import plans as replay
from tests.call import test_calls, test_layouts, test_pullback, test_replay, test_replay_vjp, test_stored_states
from tests.cases import cases_of, draw
from tests.cores import gated_mean as example
from tests.cores.gated_mean import GatedMean, MeanState, gated_mean
from tests.properties import test_bits, test_catalog, test_libraries, test_nan, test_numerics, test_sequences
from tests.properties.of_any import properties
from tests.test_docs import blocks

ROOT = Path(__file__).parents[2]


def loop(x, g, scale=None, state=None):
    """S_t = e^{g_t} S_{t-1} + x_t, n_t = e^{g_t} n_{t-1} + 1, out_t = scale S_t / n_t on (B, T, H, V)."""
    B, T, H, V = x.shape
    S, n = (np.zeros((B, H, V)), np.zeros((B, H))) if state is None else (y.copy() for y in state)
    out = np.zeros(x.shape)
    for b, t, h in np.ndindex(B, T, H):
        S[b, h] = np.exp(g[b, t, h]) * S[b, h] + x[b, t, h]
        n[b, h] = np.exp(g[b, t, h]) * n[b, h] + 1
        out[b, t, h] = (1.0 if scale is None else scale) * S[b, h] / n[b, h]
    return out, (S, n)


(CASE,) = cases_of(gated_mean, loop)
EVERY = properties(CASE, test_catalog, test_sequences, test_bits, test_nan, test_numerics, test_libraries, test_calls,
                   test_layouts, test_pullback, test_replay, test_replay_vjp, test_stored_states)  # fmt: skip


@pytest.mark.parametrize(("test", "keywords"), EVERY)
def test_property(test, keywords, request):
    if "monkeypatch" in test.__code__.co_varnames[: test.__code__.co_argcount]:
        keywords = keywords | {"monkeypatch": request.getfixturevalue("monkeypatch")}
    test(CASE, **keywords)


def test_there_are_properties():
    assert len({p.values[0] for p in EVERY}) >= 40


def test_in_every_library(library):
    test_libraries.check_both(library, CASE, library.dtypes[-1], T=5 if library.quick else 1)


def drawn(T=9, **sizes):
    return draw(CASE, T=T, B=(2,), H=2, V=3, **sizes)


def test_without_decay_it_is_the_mean():
    x, _ = drawn()
    out = gated_mean(x["x"], 0 * x["g"])
    mean = np.cumsum(x["x"], axis=1) / np.arange(1, 10)[:, None, None]
    assert la.testing.relative_error(out, mean) <= 1e-14


def test_influence_matrix():
    """A_ij = e^{g_i + ... + g_{j+1}} / n_i: rows of weights that sum to 1."""
    x, _ = drawn()
    A = la.influence_matrix(gated_mean, **x)
    assert la.testing.relative_error(np.einsum("bhij,bjhe->bihe", A, x["x"]), gated_mean(**x)) <= 1e-14
    assert np.abs(A.sum(axis=-1) - 1).max() <= 1e-14


def test_explain():
    x, state = drawn()
    found = la.explain(gated_mean, **x, state=state, scale=2.0)
    assert (found.backend, found.reason, found.form) == ("reference", "the only backend", "recurrent form")
    assert (found.operations_per_token, found.operations) == (9, 9 * 2 * 9 * 2)
    assert found.bytes == 8 * (2 * x["x"].size + x["g"].size + state.S.size + state.n.size)
    assert la.explain(gated_mean, **x, backend="reference").reason == "requested"


@pytest.mark.parametrize("overwrite", [False, True])
def test_rows_of_a_pool(overwrite):
    x, state = drawn()
    pool = MeanState(np.zeros((5, *state.S.shape[1:])), np.ones((5, *state.n.shape[1:])))
    rows = np.array([3, 1])
    for part, own in zip(pool, state, strict=True):
        part[rows] = own
    before = MeanState(*(y.copy() for y in pool))
    expected, end = gated_mean(**x, state=state, return_state=True)
    out, found = gated_mean(**x, state=pool, state_rows=rows, overwrite_state=overwrite, return_state=True)
    np.testing.assert_array_equal(out, expected)
    for part, old, last, given in zip(pool, before, end, found, strict=True):
        np.testing.assert_array_equal(part[[0, 2, 4]], old[[0, 2, 4]])
        np.testing.assert_array_equal(part[rows], last if overwrite else old[rows])
        np.testing.assert_array_equal(given[rows] if overwrite else given, last)


def test_calls_are_replayed(monkeypatch):
    """One signature, one plan for out and one for the pullback; no argument is checked again."""
    from linattn_np.call import vjp

    sets = [drawn(seed=seed) for seed in range(2)]
    replay.clear()
    expected = [gated_mean(**x, state=S) for x, S in sets]
    grads = [la.vjp(gated_mean, **x, state=S)[1](x["x"]) for x, S in sets]
    assert replay.count() == 2
    for module in (dispatch, vjp):
        monkeypatch.setattr(module, "prepare", None)
    for (x, S), out, d in zip(sets, expected, grads, strict=True):
        np.testing.assert_array_equal(gated_mean(**x, state=S), out)
        np.testing.assert_array_equal(la.vjp(gated_mean, **x, state=S)[1](x["x"]).g, d.g)


BAD = {
    "g has shape (2, 9, 2, 1), expected (B, T, H) = (2, 9, 2)": lambda x, S: {"g": x["g"][..., None]},
    "x has shape (3,), expected (..., T, H, V)": lambda x, S: {"x": np.ones(3)},
    "g is missing, expected the arrays x, g": lambda x, S: {"g": None},
    "state is a ndarray, expected (S, n) as a MeanState": lambda x, S: {"state": S.S},
    "state is a tuple of 3, expected two arrays (S, n) as a MeanState": lambda x, S: {"state": (*S, S.n)},
    "state.n has shape (2, 2, 3), expected (B, H) = (2, 2)": lambda x, S: {"state": (S.S, S.S)},
    "state.n has dtype float16, expected float32 or float64": lambda x, S: {"state": (S.S, S.n.astype(np.float16))},
    "backend is 'numba', expected None or one of 'reference'": lambda x, S: {"backend": "numba"},
    "state_rows without a state, expected state to be the pool (P, H, V)": lambda x, S: {"state_rows": [0, 1]},
}


@pytest.mark.parametrize(("message", "change"), BAD.items(), ids=BAD)
def test_bad_input(message, change):
    x, state = drawn()
    with pytest.raises((TypeError, ValueError)) as error:
        gated_mean(**{**x, **change(x, state)})
    assert str(error.value) == f"gated_mean: {message}"


def test_what_has_no_meaning_for_it():
    x, state = drawn()
    with pytest.raises(TypeError, match="read: state is a MeanState, expected one that queries read"):
        la.read(x["x"], state)
    _, pullback = la.vjp(gated_mean, **x, state=state, return_state=True)
    with pytest.raises(TypeError, match="gated_mean: dstate is a ndarray"):
        pullback(x["x"], state.S)


def test_read_asks_the_core_of_the_state(monkeypatch):
    """A core whose states can be read: out_t = scale q_t S, one channel a query; la.read has the rest."""

    def read(self, plan, q, state):
        def pullback(dout):
            dS = plan.xp.sum(plan.scale * q * dout, axis=-3)
            dq = plan.xp.sum(plan.scale * dout * state.S[..., None, :, :], axis=-1, keepdims=True)
            return dq, MeanState(dS, 0 * state.n)

        return plan.scale * q * state.S[..., None, :, :], pullback

    monkeypatch.setattr(GatedMean, "read", read)
    monkeypatch.setattr(GatedMean, "readable", lambda self, state: state)
    x, state = drawn()
    q = x["x"][..., :1]
    found = la.read(q, state, scale=2.0)
    np.testing.assert_array_equal(found, 2.0 * q * state.S[:, None])
    moved = la.read(np.moveaxis(q, 1, 2), state, scale=2.0, layout="heads_first")
    np.testing.assert_array_equal(np.moveaxis(moved, 1, 2), found)
    la.testing.check_vjp(la.read, q, state, scale=2.0)
    with pytest.raises(ValueError, match=r"read: state.n has shape \(2, 2, 3\), expected \(B, H\) = \(2, 2\)"):
        la.read(q, MeanState(state.S, state.S))


PAGE = ROOT / "docs" / "internals" / "adding_a_core.md"


@pytest.mark.skipif(not PAGE.is_file(), reason="an installed package has no pages")
def test_the_page_shows_this_core():
    """Every function and class of the page is that of the example, to the letter."""
    here = definitions(Path(example.__file__).read_text())
    shown = definitions("\n".join(source for _, source in blocks(PAGE)))
    assert {name: text for name, text in shown.items() if name in here} == here


def definitions(source: str) -> dict[str, str]:
    """The functions, classes and constants of a module by name, as text."""
    found = {}
    for node in ast.parse(source).body:
        name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else getattr(node, "name", "")
        if name:
            found[name] = ast.get_source_segment(source, node)
    return found
