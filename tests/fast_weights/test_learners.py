"""Gradients of every model, loss, optimiser and read order, and both forms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import linattn_np as la
from linattn_np.fast_weights.muon import COEFFICIENTS, newton_schulz, newton_schulz_vjp
from linattn_np.fast_weights.types import Adam, Functions, Learner, Muon
from linattn_np.ops.activations import gelu_tanh, gelu_tanh_second, gelu_tanh_vjp
from linattn_np.testing import relative_error, sample, sample_state
from tests.cases import Case, cotangents, covered, parts, parts_like, with_gradients, worst
from tests.fast_weights.learner import AXES, function_of

product = lambda *lists: list(itertools.product(*lists))  # noqa: E731
MILD = Muon(((1.875, -1.25, 0.375),))
ADAM = Adam(0.05, 0.8, 0.9, 0.5)
BODIES = [(*key, normed) for key in AXES for normed in (False, True)]
HOW = {  # optimiser, every, rates
    "descent": (None, "token", ()),
    "gain": (None, "token", ("gain",)),
    "decay": (None, "token", ("g",)),
    "momentum": (None, "token", ("mu",)),
    "momentum, decay, gain": (None, "token", ("g", "mu", "gain")),
    "Muon": (MILD, "token", ("mu",)),
    "Muon, decay, gain": (MILD, "token", ("g", "mu", "gain")),
    "Adam": (ADAM, "token", ()),
    "a step per mini-batch": (None, "mini_batch", ("mu",)),
    "Muon per mini-batch": (MILD, "mini_batch", ("mu",)),
    "Adam per mini-batch": (ADAM, "mini_batch", ()),
}


def case_of(body, loss, how, read, mini_batch, **more):
    model, biased, normed = body
    optimiser, every, rates = HOW[how]
    learner = Learner(model, loss, optimiser, mini_batch, every, read, normed, eps=0.1, **more)
    return function_of(learner, tuple(AXES[model, biased].items()), rates)


def drawn(fn, T=5, seed=0, **options):
    """(arrays, a state); means of squares are not near 0, where their root has no bounded slope."""
    rng = np.random.default_rng(seed)
    arrays = sample(fn, rng, B=(1,), T=T, H=2, K=5, V=3)
    state = sample_state(fn, rng, (1,), options, H=2, K=5, V=3)
    squares = {n: rng.uniform(0.5, 1.5, S.shape) for n, S in state._asdict().items() if n.endswith("_slot1")}
    return arrays, state._replace(**squares)


def check(fn, step=2e-5, **options):
    """The pullback against differences of fourth order along a random direction of each array."""
    arrays, state = drawn(fn, **options)
    given = {**arrays, "state": state}
    rng = np.random.default_rng(1)
    result, pullback = la.vjp(fn, **given, **options, return_state=True)
    out, end = cotangents(result)
    grads = pullback(out, end)

    def value(name, move):
        moved = parts_like(given[name], [x + d for x, d in zip(parts(given[name]), move, strict=True)])
        found = fn(**{**given, name: moved}, **options, return_state=True)
        return sum((x * d).sum() for x, d in zip(parts(found), parts((out, end)), strict=True) if x.dtype.kind == "f")

    for name, x in given.items():
        along = [rng.standard_normal(y.shape) * (y.dtype.kind == "f") for y in parts(x)]
        along = [d.astype(y.dtype) / max(1.0, np.linalg.norm(d)) if y.dtype.kind == "f" else 0 * y
                 for d, y in zip(along, parts(x), strict=True)]  # fmt: skip
        at = {n: value(name, [n * step * d if d.dtype.kind == "f" else d for d in along]) for n in (-2, -1, 1, 2)}
        numeric = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * step)
        exact = sum((y * d).sum() for y, d in zip(parts(getattr(grads, name)), along, strict=True))
        assert abs(numeric - exact) <= 1e-7 * max(1.0, abs(exact)), (name, numeric, exact)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("body", BODIES, ids=str)
def test_gradients_of_every_model_and_optimiser(body, how):
    check(case_of(body, "l2", how, "after", 3))


@pytest.mark.parametrize(("loss", "read", "mini_batch"), product(("dot", "l2"), ("before", "after"), (1, 4)))
@pytest.mark.parametrize("body", BODIES, ids=str)
def test_gradients_of_every_loss_and_read_order(body, loss, read, mini_batch):
    check(case_of(body, loss, "momentum, decay, gain", read, mini_batch))


@pytest.mark.parametrize("how", ["momentum", "Muon", "Muon per mini-batch", "gain"])
def test_gradients_with_lengths_that_return(how):
    check(case_of(("swiglu", False, False), "dot", how, "before", 3, renormed=True))


@pytest.mark.parametrize("how", [n for n in HOW if n != "Adam"])
@pytest.mark.parametrize(("body", "read"), product(BODIES, ("before", "after")), ids=str)
def test_the_chunk_form_is_the_recurrence(body, how, read):
    fn = case_of(body, "l2", how, read, 4)
    arrays, state = drawn(fn, T=19)
    case = Case(fn, {}, {}, {})
    expected = with_gradients(case, arrays, state=state, backend="reference")
    for how in covered(case, ({"backend": "chunks"}, {"backend": "numba"})):
        error, what = worst(with_gradients(case, arrays, state=state, **how), expected)
        assert error <= 1e-11, (how, what, error)


@pytest.mark.parametrize("how", ["Muon", "Adam"])
def test_steps_that_are_no_sums_have_no_dual_form(how):
    fn = case_of(("linear", False, False), "l2", how, "after", 3)
    arrays, _ = drawn(fn)
    explained = la.explain(fn, **arrays)
    assert (explained.backend, explained.form) == {
        "Muon": ("chunks", "chunk form"), "Adam": ("reference", "recurrent form")}[how]  # fmt: skip
    with pytest.raises(ValueError, match="'numba' does not cover this call: the weights of a token are no sum of"):
        fn(**arrays, backend="numba")
    if how == "Adam":
        with pytest.raises(ValueError, match="'chunks' does not cover this call: the weights of a token are no sum"):
            fn(**arrays, backend="chunks")


@pytest.mark.parametrize(("read", "muon"), product(("before", "after"), (None, MILD.coefficients)), ids=str)
@pytest.mark.parametrize(("mini_batch", "window", "most"), [(4, 3, 2), (4, 6, 64), (1, 2, 64), (16, 4, 5)])
def test_steps_of_windows_in_chunks_are_the_recurrence(mini_batch, window, most, read, muon, monkeypatch):
    monkeypatch.setattr("linattn_np.fast_weights.array.chunks.tokens_of", lambda anchor: most)
    options = {"mini_batch": mini_batch, "window": window, "read": read, "muon": muon}
    arrays, state = drawn(la.atlas, T=11, **options)
    for given in (None, state):
        expected, found = (
            with_gradients(Case(la.atlas, options, {}, {}), arrays, state=given, backend=name)
            for name in ("reference", "chunks")
        )
        error, what = worst(found, expected)
        assert error <= 1e-11, (what, error)


@pytest.mark.parametrize("read", ["before", "after"])
def test_gradients_of_atlas_with_muon(read):
    check(la.atlas, mini_batch=3, window=3, muon=MILD.coefficients, read=read)


# Newton-Schulz: polynomials and a root, whose derivative along a complex step is exact


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5), (1, 3)])
@pytest.mark.parametrize("name", [*COEFFICIENTS, MILD.coefficients], ids=str)
def test_the_transpose_of_newton_schulz(name, shape):
    rng = np.random.default_rng(0)
    G, d, c = rng.standard_normal((3, 2, *shape))
    along = newton_schulz(np, G + 1e-30j * d, name).imag / 1e-30
    exact, found = (along * c).sum(), (newton_schulz_vjp(np, G, name, c) * d).sum()
    assert abs(found - exact) <= 1e-10 * max(1, np.abs(along).max())


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_newton_schulz_brings_singular_values_near_one(name):
    G = np.random.default_rng(0).standard_normal((3, 5, 9))
    s = np.linalg.svd(newton_schulz(np, G, name), compute_uv=False)
    assert 0.6 < s.min() <= s.max() < 1.4


@pytest.mark.parametrize("optimiser", [None, MILD, ADAM])
def test_weights_of_zero_gradient_stay(optimiser):
    fn = function_of(Learner("linear", "l2", optimiser, 2, "mini_batch"), (("W", "H K V"),), ())
    arrays, _ = drawn(fn)
    arrays["eta"] = 0 * arrays["eta"]
    _, pullback = la.vjp(fn, **arrays, return_state=True)
    out, end = fn(**arrays, return_state=True)
    assert np.abs(end.W).max() <= 1e-12
    assert all(np.isfinite(d).all() for d in pullback(out) if d is not None)


@pytest.mark.parametrize("rates", [(), ("g",), ("mu",), ("g", "mu")], ids=str)
@pytest.mark.parametrize(("biased", "read"), product((False, True), ("before", "after")))
def test_gradients_at_the_weights_before_each_token_solve_a_system(biased, read, rates):
    fn = function_of(Learner("linear", "l2", None, 1, "token", read), tuple(AXES["linear", biased].items()), rates)
    arrays, state = drawn(fn, T=70)
    case = Case(fn, {}, {}, {})
    expected = with_gradients(case, arrays, state=state, backend="reference")
    for backend in ("chunks", "numba"):
        error, what = worst(with_gradients(case, arrays, state=state, backend=backend), expected)
        assert error <= 1e-11, (backend, what, error)


def test_gelu_of_any_number():
    """Warnings are errors: cubes of large numbers are not formed."""
    x = np.array([-1e300, -20.0, 20.0, 1e300])
    np.testing.assert_array_equal(gelu_tanh(np, x), [0.0, 0.0, 20.0, 1e300])
    np.testing.assert_array_equal(gelu_tanh_vjp(np, x, np.ones(4)), [0.0, 0.0, 1.0, 1.0])
    np.testing.assert_array_equal(gelu_tanh_second(np, x), np.zeros(4))


# a model and a loss of the caller


def cube_root_free(w, x):
    """y = x W + (x W)^2 / 4."""
    z = x @ w[0]
    return z + z * z / 4


def own_vjp(w, x, dy):
    z = x @ w[0]
    dz = dy * (1 + z / 2)
    return (x.swapaxes(-1, -2) @ dz,), dz @ w[0].swapaxes(-1, -2)


def own_vjp_vjp(w, x, dy, c):
    z, t = x @ w[0], x @ c[0]  # <c, dW> = sum t dy (1 + z / 2)
    dz = t * dy / 2
    dx = (dy * (1 + z / 2)) @ c[0].swapaxes(-1, -2) + dz @ w[0].swapaxes(-1, -2)
    return (x.swapaxes(-1, -2) @ dz,), dx, t * (1 + z / 2)


HUBER = (lambda y, v: (y - v) / np.sqrt(1 + (y - v) ** 2), lambda y, v, de: _huber(y, v, de))


def _huber(y, v, de):
    d = de / (1 + (y - v) ** 2) ** 1.5
    return d, -d


@pytest.mark.parametrize("how", ["momentum, decay, gain", "Muon", "Adam per mini-batch"])
def test_a_model_and_a_loss_of_the_caller(how):
    optimiser, every, rates = HOW[how]
    own = Functions(cube_root_free, own_vjp, own_vjp_vjp)
    fn = function_of(Learner(own, HUBER, optimiser, 3, every), (("W", "H K V"),), rates)
    check(fn)
    arrays, _ = drawn(fn)
    assert la.explain(fn, **arrays).others["chunks"]


def test_a_model_without_a_second_transpose_has_no_backward():
    own = Functions(cube_root_free, own_vjp)
    fn = function_of(Learner(own, "l2", None, 3), (("W", "H K V"),), ())
    arrays, _ = drawn(fn)
    out, pullback = la.vjp(fn, **arrays)
    with pytest.raises(TypeError, match="f_vjp_vjp"):
        pullback(out)


def test_a_model_of_the_caller_is_the_named_one():
    linear = Functions(
        lambda w, x: x @ w[0],
        lambda w, x, dy: ((x.swapaxes(-1, -2) @ dy,), dy @ w[0].swapaxes(-1, -2)),
        lambda w, x, dy, c: ((None,), dy @ c[0].swapaxes(-1, -2), x @ c[0]),
    )
    fns = [function_of(Learner(model, "l2", None, 3), (("W", "H K V"),), ("mu",)) for model in (linear, "linear")]
    arrays, state = drawn(fns[1], T=11)
    found, expected = (with_gradients(Case(fn, {}, {}, {}), arrays, state=state) for fn in fns)
    error, what = worst(found, expected)
    assert error <= 1e-12, (what, error)
    assert relative_error(found["out"], expected["out"]) <= 1e-13
