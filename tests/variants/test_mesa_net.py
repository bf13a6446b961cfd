"""mesa_net: the fit that it is, conjugate gradients and their stopping rule, singular systems, one token at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import check_vjp, relative_error
from tests.cases import parts

T, H, K, V = 40, 2, 6, 3
CG = {"solver": "conjugate_gradients"}


def drawn(seed=0, T=T, B=(2,), K=K, V=V, ridge="T H K", **sizes):
    x = la.testing.sample(la.mesa_net, np.random.default_rng(seed), B=B, T=T, H=H, K=K, V=V, **sizes)
    return x if ridge == "T H K" else x | {"ridge": np.random.default_rng(seed + 1).uniform(0.5, 1.5, (H, K))}


def results(x, dout=None, state=None, **options):
    """out, both states and every gradient."""
    found, pullback = la.vjp(la.mesa_net, **x, state=state, return_state=True, **options)
    dout = np.cos(np.arange(found.out.size)).reshape(found.out.shape) if dout is None else dout
    return parts(found) + parts(pullback(dout.astype(found.out.dtype), found.state))


@pytest.mark.parametrize("ridge", ["T H K", "H K"])
@pytest.mark.parametrize("chunk_size", [1, 7, None, "parallel"])
def test_conjugate_gradients_become_the_exact_solution(ridge, chunk_size):
    x = drawn(ridge=ridge)
    state = la.testing.sample_state(la.mesa_net, np.random.default_rng(2), (2,), {}, H=H, K=K, V=V)
    expected = results(x, state=state, chunk_size=chunk_size)
    for backend in ("numba", "chunks") if chunk_size != "parallel" else ("chunks",):
        found = results(x, state=state, chunk_size=chunk_size, backend=backend, **CG, iterations=60, tolerance=0.0)
        for a, b in zip(found, expected, strict=True):
            assert relative_error(a, b) <= 1e-12


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("g", "ridge"), [(-0.1, 1.0), (-0.01, 1.0), (-0.01, 0.25)])
@pytest.mark.parametrize("backend", ["numba", "chunks"])
def test_the_default_reaches_a_millionth_of_the_exact_solution(g, ridge, dtype, backend):
    """Unit keys, decays and ridges as they are published, and slower ones: outputs and gradients."""
    rng, T, K = np.random.default_rng(0), 300, 32
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.standard_normal((2, 1, T, H, K)))
    x = {"q": q, "k": k, "v": rng.standard_normal((1, T, H, 8)), "g": rng.uniform(2 * g, 0, (1, T, H)),
         "beta": rng.uniform(0, 1, (1, T, H)), "ridge": np.full((H, K), ridge)}  # fmt: skip
    rounded = {n: y.astype(dtype) for n, y in x.items()}
    expected = results({n: y.astype(np.float64) for n, y in rounded.items()})
    found = results(rounded, **CG, backend=backend)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) <= 1e-6 + 50 * np.finfo(dtype).eps * (dtype == np.float32)


@pytest.mark.parametrize("backend", ["numba", "chunks"])
@pytest.mark.parametrize("tolerance", [0.3, 1e-3, 1e-6])
def test_a_row_stops_at_its_own_residual(tolerance, backend):
    """V = K and values that make S the identity: out is x, and q - x (Z + ridge) its residual."""
    K, rng = 12, np.random.default_rng(0)
    x = drawn(B=(), T=30, K=K, V=K)
    Z = la.testing.sample_state(la.mesa_net, rng, (), {}, H=H, K=K, V=K).Z
    state = la.SolvedState(np.broadcast_to(np.eye(K), (H, K, K)), Z)
    x = x | {"v": np.zeros_like(x["v"]), "g": np.zeros_like(x["g"])}
    options = CG | {"iterations": 100, "tolerance": tolerance, "backend": backend}
    found = la.mesa_net(**x, state=state, **options)
    formed = Z[None] + np.cumsum(x["beta"][..., None, None] * x["k"][..., :, None] * x["k"][..., None, :], axis=0)
    residual = x["q"] - np.einsum("thk,thkj->thj", found, formed) - found * x["ridge"]
    share = np.linalg.norm(residual, axis=-1) / np.linalg.norm(x["q"], axis=-1)
    assert share.max() <= tolerance * (1 + 1e-6)
    assert share.max() > 1e-3 * tolerance  # and not much later
    alone = la.mesa_net(**{n: y[:11] for n, y in x.items()}, state=state, **options)
    assert relative_error(alone, found[:11]) <= 1e-13  # the rows beside it do not make it stop


@pytest.mark.parametrize("backend", ["numba", "chunks"])
@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-4), (np.float64, 1e-12)])
@pytest.mark.parametrize("seed", [0, 1, 2, 7])
def test_a_row_that_has_converged_stays(seed, dtype, bound, backend):
    """More iterations than there are digits, forward and backward."""
    x = {n: y.astype(dtype) for n, y in drawn(seed, T=64, B=(1,), K=8, V=8).items()}
    expected = results({n: y.astype(np.float64) for n, y in x.items()})
    more = [results(x, **CG, iterations=n, tolerance=0.0, backend=backend) for n in (100, 300)]
    for a, b, c in zip(*more, expected, strict=True):
        assert relative_error(a, c) <= bound
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("backend", ["numba", "chunks"])
def test_gradients_of_iterations_by_central_differences(backend):
    check_vjp(la.mesa_net, **drawn(B=(1,), T=9, K=5), **CG, backend=backend, iterations=60, tolerance=0.0)


@pytest.mark.parametrize("backend", ["numba", "chunks"])
def test_iterations_are_the_most_there_are(backend):
    x, errors = drawn(K=24), []
    exact = la.mesa_net(**x)
    for n in (1, 4, 8, 16):
        errors.append(relative_error(la.mesa_net(**x, **CG, iterations=n, tolerance=0.0, backend=backend), exact))
    assert errors[0] > 1e-2
    assert all(b < a / 3 for a, b in itertools.pairwise(errors))
    one = la.mesa_net(**x | {"q": 0 * x["q"]}, **CG, backend=backend)
    assert not one.any()


@pytest.mark.parametrize("options", [{}, CG], ids=["exact", "conjugate gradients"])
def test_a_ridge_of_zero_is_an_error_where_a_system_is_singular(options):
    x = drawn(B=(), T=9, K=6, ridge="H K")
    x["ridge"][1] = 0
    with pytest.raises(
        ValueError,
        match="mesa_net: the system of token 0, head 1 is singular: ridge is 0 in channels "
        "that the keys so far do not span, expected ridge > 0 there",
    ):
        la.mesa_net(**x, **options)
    x["ridge"][1, :5] = 1  # one channel is left, which every key reaches
    assert np.isfinite(la.mesa_net(**x, **options)).all()
    x["k"] = x["k"].copy()
    x["k"][:4, 1, 5] = 0  # but not the first four
    with pytest.raises(ValueError, match="the system of token 0, head 1 is singular"):
        la.mesa_net(**x, **options)
    la.mesa_net(**x | {"q": None}, **options, return_state=True)  # nothing is solved


@pytest.mark.parametrize("options", [{}, CG | {"iterations": 200, "tolerance": 1e-13}], ids=["exact", "CG"])
def test_a_ridge_of_zero_fits_exactly_once_the_keys_span(options):
    """v = k W without noise: from K independent keys on every query reads q W."""
    rng, K = np.random.default_rng(0), 4
    x = drawn(B=(), T=12, K=K, ridge="H K") | {"ridge": np.zeros((H, K))}
    W = rng.standard_normal((K, V))
    x["v"] = x["k"] @ W
    _, state = la.mesa_net(**{n: y if n == "ridge" else y[:K] for n, y in x.items()} | {"q": None}, return_state=True)
    later = {n: y if n == "ridge" else y[K:] for n, y in x.items()}
    out = la.mesa_net(**later, state=state, **options)
    assert relative_error(out, later["q"] @ W) <= 1e-10
    grads = la.vjp(la.mesa_net, **later, state=state, **options)[1](np.ones_like(out))
    assert relative_error(grads.q, np.broadcast_to(W.sum(-1), grads.q.shape)) <= 1e-10
    assert abs(grads.beta).max() <= 1e-10  # every pair lies on the fit, whatever its weight


def test_overflow_is_an_error_not_an_infinity():
    x = drawn(B=(), T=4)
    x["k"] = 1e30 * x["k"]
    with pytest.raises(ValueError, match="mesa_net: a system is singular in the numbers of its dtype"):
        la.mesa_net(**x)


HEADS = [{}, {"Hk": 1}, {"Hq": 1, "Hk": 1}, {"Hq": 1}, {"Hq": 4}]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("options", [{}, {"cu_seqlens": [0, 0, 3, 35, 36, 70, 70]}], ids=["batch", "ragged"])
def test_compiled_iterations_are_the_array_calls(heads, options):
    x = drawn(B=(1,), T=70, **heads)
    lead = (6,) if options else (1,)
    state = la.testing.sample_state(la.mesa_net, np.random.default_rng(2), lead, {}, H=H, K=K, V=V)
    solver = CG | {"iterations": 5, "tolerance": 1e-2}
    expected = results(x, state=state, backend="chunks", **solver, **options)
    for a, b in zip(results(x, state=state, backend="numba", **solver, **options), expected, strict=True):
        assert relative_error(a, b) <= 1e-11


def test_threads_do_not_show(monkeypatch):
    x = {n: y.astype(np.float32) for n, y in drawn(T=300, K=32, V=8).items()}
    one = results(x, **CG, num_threads=1)
    for a, b in zip(one, results(x, **CG, num_threads=3), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"ridge": np.full((H, K), -0.5)}, ValueError, "mesa_net: ridge has an entry -0.5, expected none below 0"),
        ({"solver": "lu"}, ValueError, "mesa_net: solver is 'lu', expected None, 'exact' or 'conjugate_gradients'"),
        ({"iterations": 0}, ValueError, "mesa_net: iterations is 0, expected a whole number from 1"),
        ({"tolerance": 1}, ValueError, "mesa_net: tolerance is 1, expected a number >= 0 and < 1"),
        (
            {"state": np.zeros((2, H, K, V))},
            TypeError,
            "mesa_net: state is a ndarray, expected (S, Z) as a SolvedState",
        ),
        (
            {"state": (np.zeros((2, H, K, V)), np.zeros((2, H, K, V)))},
            ValueError,
            "mesa_net: state.Z has shape (2, 2, 6, 3), expected (B, H, K, K) = (2, 2, 6, 6)",
        ),
    ],
)
def test_bad_input_is_named(given, error, text):
    with pytest.raises(error) as raised:
        la.mesa_net(**drawn() | given)
    assert str(raised.value) == text


def test_a_solved_state_is_not_read_without_a_ridge():
    _, state = la.mesa_net(**drawn(), return_state=True)
    with pytest.raises(TypeError, match="read: state is a SolvedState, expected one that is read without a ridge"):
        la.read(drawn()["q"], state)


@pytest.mark.parametrize("form", [{"chunk_size": 1}, {"backend": "chunks"}, {"backend": "numba"}], ids=str)
def test_gradients_where_the_given_Z_is_not_symmetric(form):
    """x solves with Z + diag(ridge), its cotangent with the transpose: here they are two matrices."""
    rng = np.random.default_rng(0)
    x = la.testing.sample(la.mesa_net, rng, B=(2,), T=7, H=2, K=3, V=2)
    state = la.testing.sample_state(la.mesa_net, rng, (2,), {}, H=2, K=3, V=2)
    turn = rng.standard_normal(state[1].shape)
    state = type(state)(state[0], state[1] + 0.5 * (turn - turn.swapaxes(-1, -2)))
    check_vjp(la.mesa_net, **x, state=state, **form)


def test_a_singular_system_is_named_by_its_token_and_head():
    """Of the whole packed row, of all heads of states."""
    x = la.testing.sample(la.mesa_net, np.random.default_rng(0), B=(1,), T=9, H=4, Hq=2, Hk=2, K=1, V=2)
    x["ridge"] = np.ones((1, 9, 4, 1))
    for token, head in ((0, 0), (4, 1), (6, 2), (8, 3)):
        ridge, beta = x["ridge"].copy(), x["beta"].copy()
        ridge[0, token, head] = 0.0
        beta[0, :, head] = 0.0  # the head's keys are never written
        with pytest.raises(ValueError, match=f"the system of token {token}, head {head} is singular"):
            la.mesa_net(**x | {"ridge": ridge, "beta": beta}, cu_seqlens=[0, 4, 9])


@pytest.mark.parametrize("options", [{}, CG], ids=["exact", "conjugate gradients"])
def test_a_replayed_call_raises_the_same_errors_and_leaves_the_state(options):
    """Kernels look at the ridge, and at exact solutions: at numbers, which are no part of the signature."""
    x = {n: y.astype(np.float32) for n, y in drawn(B=(), T=3, K=6, ridge="H K").items()}
    state = la.mesa_net(**x, return_state=True).state
    keywords = options | {"overwrite_state": True, "return_state": True}
    own = type(state)(*(S.copy() for S in state))
    for _ in range(2):
        la.mesa_net(**x, **keywords, state=own)
    assert la.explain(la.mesa_net, **x, **keywords, state=own).replay == "replayed"
    zero = type(state)(*(np.zeros_like(S) for S in state))
    wrong = [("ridge has an entry -1, expected none below 0", {"ridge": -np.ones_like(x["ridge"])}, own),
             ("the system of token 0, head 0 is singular", {"ridge": 0 * x["ridge"]}, zero)]  # fmt: skip
    if not options:
        equal = {"k": np.ones_like(x["k"]), "g": 0 * x["g"], "beta": np.ones_like(x["beta"])}
        lost = equal | {"ridge": np.full_like(x["ridge"], 1e-30)}  # by rounding
        wrong.append(("a system is singular in the numbers of its dtype", lost, zero))
    for words, more, given in wrong:
        before = [S.copy() for S in given]
        with pytest.raises(ValueError, match=f"mesa_net: {words}"):
            la.mesa_net(**x | more, **keywords, state=given)
        for S, S_before in zip(given, before, strict=True):
            np.testing.assert_array_equal(S, S_before)
    x["ridge"][:, 0] = 0  # which the keys span
    np.testing.assert_array_equal(la.mesa_net(**x, **options, state=state), la.mesa_net(**x, **options, state=state))


@pytest.mark.parametrize("options", [{}, CG], ids=["exact", "conjugate gradients"])
@pytest.mark.parametrize("T", [1, 40])
def test_a_vjp_is_replayed_whole(T, options):
    from linattn_np.call.replay import plans

    x = {n: y.astype(np.float32) for n, y in drawn(B=(1,), T=T, K=6).items()}
    state = la.mesa_net(**x, return_state=True).state
    plans.clear()
    both = []
    for _ in range(2):
        out, pullback = la.vjp(la.mesa_net, **x, **options, state=state)
        both.append([out, *(grads := pullback(np.ones_like(out)))[:-1], *grads.state])
    (plan,) = plans.by_key.values()
    assert plan.replayable
    for y, z in zip(*both, strict=True):
        np.testing.assert_array_equal(y, z)
