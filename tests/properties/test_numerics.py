"""Gates, keys and strengths at their worst: nothing overflows, all is defined, errors are a few eps.

The bound is 50 eps times a growth factor, relative to the largest entry of each array.

    1         everywhere but where named: e^g <= 1 and |1 - beta |k|^2| <= 1 never enlarge a rounding error
    sqrt(T)   beta = 2 on equal unit keys: I - 2 k^T k keeps the length of every error, so the errors of T tokens add
              up like a random walk
    T         a phase of T tokens is T times as large as that of one; the normaliser on equal keys: out is one average
              whatever q is, and the gradient of q is a difference of two sums of T terms that is of the size of one
              term

A gradient of a gate is a sum of products x . dx of tokens before and after it, and those may cancel: it is measured
against the largest of these products.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from tests.cases import (
    CASES,
    PLAIN,
    call,
    cotangents,
    draw,
    enumerate_parts,
    in_dtype,
    is_count,
    kind_like,
    naive,
    pairwise,
    parts,
    parts_like,
    with_arrays,
    with_gradients,
)

T = 80
LOWEST = float(np.finfo(np.float32).min)
GATES = {
    "mixed": (0.0, -1e-3, -5.0, -50.0, -np.inf, -1e30, LOWEST),
    "mild": (0.0, -1e-3),
    "nothing fades": (0.0,),
    "all is forgotten": (-np.inf,),
    "resets among zeros": (0.0,) * 15 + (-np.inf,),
}
FORMS = ({"chunk_size": 1}, {"chunk_size": 16}, {"chunk_size": 64}, {"chunk_size": "parallel"})
LOG_DECAYS = ("g", "gv", "A", "slopes")
GATED = (*LOG_DECAYS, "dt", "dt_bias", "center")  # arrays whose gradient is a sum over pairs, or over all tokens
SAMPLE = PLAIN + [c for c in CASES if c.normalised or c.given.get("g") == "H K"]


def adversarial(case, gates, beta=None, equal=False, seed=0, dtype=np.float32):
    """Arrays whose log decays are drawn from `gates`, whose beta is one number, whose keys may all be equal."""
    rng = np.random.default_rng(seed)
    arrays, state = draw(case, T=T, H=2, K=16, V=8, B=(1,), seed=seed, dtype=np.float32)
    for name, x in arrays.items():
        if name in LOG_DECAYS:
            g = rng.choice(np.array(gates, np.float32), x.shape)
            g = np.maximum(g, np.float32(-1e30)) if name == "A" else g  # dt A is a number, 0 A too
            arrays[name] = -g if name == "slopes" else g
        if name == "beta" and beta is not None:
            arrays[name] = np.full_like(x, beta)
        if equal and name in (case.spec.change.key, "p", "a", "b"):
            arrays[name] = np.broadcast_to(x[:, :1], x.shape).copy()
    wide = {n: in_dtype(x, dtype) if isinstance(x, np.ndarray) else x for n, x in arrays.items()}
    return wide, parts_like(state, [in_dtype(S, dtype) for S in parts(state)])


def widened(x):
    return in_dtype(x, np.float64) if isinstance(x, np.ndarray) else x


def growth(case, beta, equal, chunk_size=1):
    """By what errors of rounding grow. The inverse of a triangle of twos has T numbers a row.

    Reflections by one key do not grow it where all products of equal keys are equal, as in compiled loops; products of
    BLAS (one chunk of all tokens) depend on their places.
    """
    if (case.normalised and equal) or "theta_log" in case.given:
        return T
    return (T if chunk_size == "parallel" else math.sqrt(T)) if equal and beta == strongest(case) else 1


def strongest(case):
    """The largest strength whose erase does not grow: keys that write are up to `span` times as long."""
    return 2 / case.options.get("span", 1.5) if "center" in case.spec.arrays else 2


def check(found, expected, arrays, bound, averages=False):
    """Errors relative to the largest entry; the gradient of a gate to the largest product too.

    averages: out is one, and its gradients by q and k are differences of values from it: 0 where one key is seen alone.
    """
    products = max(
        [
            np.abs((arrays[n] * expected["d" + n]).sum(-1)).max()
            for n in arrays
            if n not in (*GATED, "theta") and "d" + n in expected and arrays[n].ndim == 4
        ],
        default=0.0,
    )
    for name, x in found.items():
        assert np.isfinite(x).all(), name
        size = np.abs(expected[name]).max(initial=0.0)
        if name == "dtheta":  # t times the product of each token
            size = max(size, T * products)
        if name.removeprefix("d") in GATED or (averages and name in ("dq", "dk")):
            size = max(size, products)
        error = np.abs(x - expected[name]).max(initial=0.0)
        assert error <= bound * (size or 1.0), (name, error / (size or 1.0), bound)


def worst_cases():
    """(case, gates, equal keys); one kind of gates where there is no gate."""
    for case in SAMPLE:
        for gates in GATES if set(LOG_DECAYS) & case.given.keys() else ("nothing fades",):
            for equal in (False, True):
                if not equal or gates in ("mixed", "mild", "nothing fades"):
                    yield pytest.param(case, gates, equal, id=f"{case}-{gates}" + "-equal keys" * equal)


@pytest.mark.parametrize(("case", "gates", "equal"), list(worst_cases()))
def test_float32_against_float64_on_the_same_numbers(case, gates, equal):
    for beta in (0, strongest(case) / 2, strongest(case)) if "beta" in case.given else (None,):
        arrays, state = adversarial(case, GATES[gates], beta, equal)
        wide = {n: widened(x) for n, x in arrays.items()}
        wide_state = parts_like(state, [widened(S) for S in parts(state)])
        d = cotangents(call(case, arrays, state=state))
        wide_d = (widened(d[0]), parts_like(d[1], [widened(S) for S in parts(d[1])]))
        expected = with_gradients(case, wide, wide_d, state=wide_state, chunk_size=1)
        averages = case.normalised and "g" in case.given
        for form in FORMS:
            bound = 50 * growth(case, beta, equal, form["chunk_size"])
            found = with_gradients(case, arrays, d, state=state, **form)
            assert all(x.dtype == kind_like(x, np.float32) or is_count(n) for n, x in found.items())
            check(found, expected, wide, bound * 2.0**-23, averages)
            check(
                with_gradients(case, wide, wide_d, state=wide_state, **form), expected, wide, bound * 2.0**-52, averages
            )


@pytest.mark.parametrize("gates", ["mixed", "mild"])
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_float64_against_the_loop(case, gates):
    arrays, state = adversarial(case, GATES[gates], strongest(case) if "beta" in case.given else None, dtype=np.float64)
    out, end = naive(case, arrays, state)
    expected = {"out": out} | dict(enumerate_parts("state", end))
    for form in FORMS:
        out, end = call(case, arrays, state=state, **form)
        for name, x in ({"out": out} | dict(enumerate_parts("state", end))).items():
            assert np.abs(x - expected[name]).max() <= 1e-12 * np.abs(expected[name]).max(), (name, form)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: str(f["chunk_size"]))
@pytest.mark.parametrize("case", [c for c in PLAIN if c.given.keys() & {"g", "gv"}], ids=str)
def test_a_reset_has_no_gradient(case, form):
    """d e^g / dg = e^g = 0."""
    arrays, state = draw(case, T=40, H=3)
    for name in {"g", "gv"} & case.given.keys():
        shape = arrays[name].shape
        closed = np.random.default_rng(3).random(shape) < 0.2
        closed.reshape(-1)[0] = True
        arrays[name] = np.where(closed, -np.inf, arrays[name])
        grads = with_gradients(case, arrays, state=state, **form)
        assert (grads["d" + name][closed] == 0).all()
        assert (grads["d" + name][~closed] != 0).any()


@pytest.mark.parametrize("form", FORMS, ids=lambda f: str(f["chunk_size"]))
@pytest.mark.parametrize(
    "case",
    [c for c in PLAIN if "g" in c.given and c.on_tokens("g") and not c.looks_back and "g_square" not in c.given],
    ids=str,
)
def test_nothing_comes_back_across_a_reset(case, form):
    """With g_t = -inf, tokens before t get exactly no gradient from tokens after t.

    But where an erase vector reads the state before it fades: that looks across a reset. Sums of squared keys have a
    decay of their own.
    """
    t = 21
    arrays, state = draw(case, T=40)
    arrays["g"] = arrays["g"].copy()
    arrays["g"][:, t] = -np.inf
    result, pullback = la.vjp(case.fn, **arrays, **case.options, state=state, return_state=True, **form)
    dout, dstate = cotangents(result)
    dout[:, : t + 1] = 0
    grads = pullback(dout, dstate)
    for name in case.given:
        if case.on_tokens(name):
            assert not getattr(grads, name)[:, :t].any(), name
    assert not any(d.any() for d in parts(grads.state))
    assert getattr(grads, case.spec.change.value)[:, t:].any()


@pytest.mark.parametrize(
    ("case", "form", "dtype"),
    pairwise(CASES, [{}, {"chunk_size": 1}, {"chunk_size": "parallel"}], [np.float16, ml_dtypes.bfloat16]),
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_sixteen_bits_are_storage_only(case, dtype, form):
    """The float32 call on the same numbers, rounded once: to the bit, gradients too; states are float32."""
    arrays, state = draw(case, T=19, dtype=dtype)
    state = parts_like(state, [in_dtype(S, np.float32) for S in parts(state)])
    wide = {n: in_dtype(x, np.float32) if isinstance(x, np.ndarray) else x for n, x in arrays.items()}
    dout, dstate = cotangents(call(case, arrays, state=state))
    assert dout.dtype == kind_like(dout, dtype)
    found = with_gradients(case, arrays, (dout, dstate), state=state, **form)
    expected = with_gradients(case, wide, (in_dtype(dout, np.float32), dstate), state=state, **form)
    for name, x in expected.items():
        own = np.int64 if is_count(name) else np.float32 if "state" in name else dtype
        assert found[name].dtype == kind_like(x, own), name
        np.testing.assert_array_equal(found[name], x.astype(found[name].dtype), name)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_one_float64_array_makes_the_call_float64(case):
    """out has v's dtype, each gradient its own array's; the arithmetic is that of the widest."""
    arrays, state = draw(case, T=19, dtype=np.float32)
    one = case.spec.change.key or next(n for n in case.given if n != case.spec.change.value)
    arrays[one] = arrays[one].astype(np.float64)
    found = with_gradients(case, arrays, state=state)
    wide = {n: widened(x) for n, x in arrays.items()}
    wider = lambda x: parts_like(x, [widened(S) for S in parts(x)])  # noqa: E731
    d = tuple(wider(x) for x in cotangents(call(case, arrays, state=state)))
    expected = with_gradients(case, wide, d, state=wider(state))
    for name, x in expected.items():
        own = {"out": arrays[case.spec.change.value], "state": x, "dstate": parts(state)[0]}
        kind = name.split(".")[0]
        dtype = (own[kind] if kind in own else arrays[name.removeprefix("d")]).dtype
        dtype = np.int64 if is_count(name) else dtype
        dtype = kind_like(x, dtype)
        assert found[name].dtype == dtype, name
        np.testing.assert_array_equal(found[name], x.astype(dtype), name)


@pytest.mark.parametrize("how", [{"backend": "reference"}, {"backend": "chunks", "chunk_size": 16},
                                 {"backend": "chunks", "chunk_size": "parallel"}, {"backend": "numba"},
                                 {"backend": "numba", "chunk_size": 1}], ids=str)  # fmt: skip
@pytest.mark.parametrize("decay", ["SCALAR", "VECTOR"])
def test_a_state_that_is_larger_than_its_decay_is_small(decay, how):
    """e^-400 of 1e200 is a number: a log decay far below what float32 knows is not cut off in float64."""
    K, T = 2, 20
    zeros = np.zeros((1, T, 1, K))
    fn, g = with_arrays("q k v g", decay=decay), np.zeros((1, T, 1) if decay == "SCALAR" else (1, T, 1, K))
    g[:, 3], g[:, 17] = -400.0, -200.0
    S = np.full((1, 1, K, K), 1e200)
    out, end = fn(np.ones_like(zeros), zeros, zeros, g, state=S, return_state=True, scale=1.0, **how)
    np.testing.assert_allclose(end, S * np.exp(-400.0) * np.exp(-200.0), rtol=1e-12)
    np.testing.assert_allclose(
        out[0, [2, 3, 16, 17], 0, 0], K * 1e200 * np.array([1, np.exp(-400), np.exp(-400), np.exp(-600)]), rtol=1e-12
    )
