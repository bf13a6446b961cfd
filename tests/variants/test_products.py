"""Changes of variables by declaration: products and their transposes, a variant without queries, erase vectors."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import array_api_compat.numpy as xp
import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.dispatch import public
from linattn_np.call.replay import plans as replay
from linattn_np.matrix_state.types import Decay, Erase, Inputs
from linattn_np.products import products
from linattn_np.spec import ArgSpec, Call, Samples, VariantSpec
from linattn_np.testing import check_vjp, relative_error, sample
from tests.call import test_calls, test_layouts, test_pullback, test_replay, test_replay_vjp, test_stored_states
from tests.cases import cases_of
from tests.naive import NAIVE
from tests.properties import (
    test_bits,
    test_catalog,
    test_influence,
    test_libraries,
    test_nan,
    test_numerics,
    test_sequences,
)
from tests.properties.of_any import properties

FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"chunk_size": 1},
    {"chunk_size": 16},
    {"chunk_size": "parallel"},
    {"backend": "chunks"},
    {"backend": "reference"},
)
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def variant(change, axes, samples=None, optional=(), **kind):
    """A public function of these arrays."""
    arrays = {name: ArgSpec(x, "", optional=name in optional) for name, x in axes.items()}
    spec = VariantSpec("variant", "", "", "", arrays, change, **kind)

    @public(spec, samples)
    def variant(*arrays: Any, **options: Any) -> Any:
        """Of the spec."""

    return variant


QKV = {"q": "T Hq K", "k": "T Hk K", "v": "T H V"}


# a variant without queries: h_t = e^{g_t} h_{t-1} + x_t, one channel of keys that is 1

HGRN = variant(products(q=(), k=(), v="x", gv="g"), {"x": "T H V", "g": "T H V"}, Samples({"g": "log decay"}),
               scaled=False)  # fmt: skip


def hgrn_loop(x, g, state):
    """(out, last state) of (..., T, H, V) and (..., H, V)."""
    out, h = np.empty_like(x), state
    for t in range(x.shape[-3]):
        h = np.exp(g[..., t, :, :]) * h + x[..., t, :, :]
        out[..., t, :, :] = h
    return out, h


def naive_hgrn(x, g, scale=None, state=None):
    """The loop with a factor on the output."""
    B, _, H, V = x.shape
    out, end = hgrn_loop(x, g, np.zeros((B, H, V)) if state is None else state[..., 0, :])
    return (1.0 if scale is None else scale) * out, end[..., None, :]


(CASE,) = cases_of(HGRN, naive_hgrn)
EVERY = properties(CASE, test_catalog, test_sequences, test_bits, test_nan, test_numerics, test_libraries, test_calls,
                   test_influence, test_layouts, test_pullback, test_replay, test_replay_vjp,
                   test_stored_states)  # fmt: skip


@pytest.mark.parametrize(("test", "keywords"), EVERY)
def test_properties_of_a_variant_without_queries(test, keywords, request):
    if "monkeypatch" in test.__code__.co_varnames[: test.__code__.co_argcount]:
        keywords = keywords | {"monkeypatch": request.getfixturevalue("monkeypatch")}
    test(CASE, **keywords)


# products


HEADS = {"one each": (2, 2, 2), "keys shared": (4, 2, 4), "one key": (3, 1, 3), "queries share": (4, 2, 2)}


@every_form
@pytest.mark.parametrize("heads", HEADS)
def test_products_with_arrays_of_every_kind(heads, form):
    """Token scalars, constants of heads and of channels, and the arrays of groups, each in its own shape again."""
    axes = QKV | {"s": "T H", "c": "H K", "dt": "T H", "A": "H", "b": "T H K", "w": "T H V"}
    change = products("q", g=("dt", "A"), v=("w", "s", "v"), k=("c", "k"), r=("b", "k"))
    fn = variant(change, axes, Samples({"k": "half unit", "dt": "positive", "A": "negative", "b": "share"}),
                 decay=Decay.SCALAR, erase=Erase.DELTA)  # fmt: skip
    Hq, Hk, H = HEADS[heads]
    x = sample(fn, np.random.default_rng(0), T=20, Hq=Hq, Hk=Hk, H=H)
    wide = np.repeat(x["k"], H // Hk, axis=-2)
    same = variant(products("q", "k", "v", "g", "r"),
                   QKV | {"k": "T H K", "g": "T H", "r": "T H K"}, decay=Decay.SCALAR, erase=Erase.DELTA)  # fmt: skip
    expected = same(x["q"], x["c"] * wide, x["w"] * x["s"][..., None] * x["v"], x["dt"] * x["A"], x["b"] * wide)
    assert relative_error(fn(**x, **form), expected) <= 1e-12
    errors = check_vjp(fn, **x, **form)
    assert set(errors) == set(axes)


def test_a_constant_decay():
    fn = variant(products("q", "k", "v", g="A"), QKV | {"A": "H"}, Samples({"A": "negative"}), decay=Decay.SCALAR)
    x = sample(fn, np.random.default_rng(0), T=20)
    np.testing.assert_array_equal(fn(**x), la.retention(x["q"], x["k"], x["v"], x["A"]))
    check_vjp(fn, **x)


def test_factors_that_are_not_given():
    fn = variant(products("q", "k", v=("w", "v"), g=("dt", "A")), QKV | {"w": "T H V", "dt": "T H", "A": "H"},
                 Samples({"A": "negative"}), optional=("w", "dt", "A"), decay=Decay.SCALAR)  # fmt: skip
    x = sample(fn, np.random.default_rng(0), T=20)
    q, k, v, w, A = (x[n] for n in ("q", "k", "v", "w", "A"))
    np.testing.assert_array_equal(fn(q, k, v), la.linear_attention(q, k, v, scale=5**-0.5))
    np.testing.assert_array_equal(fn(q, k, v, w, A=A), la.retention(q, k, w * v, A))
    grads = la.vjp(fn, q, k, v, w, A=A)[1](v)
    assert grads.dt is None
    assert grads.A.shape == A.shape


def test_one_array_used_twice():
    fn = variant(products("q", "k", v=("s", "s", "v")), QKV | {"s": "T H"})
    x = sample(fn, np.random.default_rng(0), T=9)
    np.testing.assert_allclose(
        fn(**x), la.linear_attention(x["q"], x["k"], x["s"][..., None] ** 2 * x["v"], scale=5**-0.5), rtol=1e-12
    )
    check_vjp(fn, **x)


def test_an_array_alone_is_passed_unchanged_and_a_product_in_the_dtype_of_the_computation():
    seen = []
    change = products("q", "k", v=("w", "v"))
    fn = variant(change, QKV | {"w": "T H V"})
    x = {n: y.astype(ml_dtypes.bfloat16) for n, y in sample(fn, np.random.default_rng(0)).items()}

    def to_core(c):
        seen.append((c, change.to_core(c)))
        return seen[-1][1]

    watched = public(replace(fn.spec, change=replace(change, to_core=to_core)))(fn)
    assert watched(**x).dtype == ml_dtypes.bfloat16
    c, core = seen[0]
    assert core.q is c.q
    assert core.k is c.k
    assert core.v.dtype == np.float32
    assert la.vjp(watched, **x)[1](x["v"]).w.dtype == ml_dtypes.bfloat16


def test_a_function_among_products():
    """Both of its paths: the gate makes the key, as in HGRN-2."""
    key = (lambda c: -np.expm1(c.g), lambda c, dk: {"g": -np.exp(c.g) * dk})
    change = replace(products("q", "v", "g", k=key), key="g")
    fn = variant(change, {"q": "T Hq K", "v": "T H V", "g": "T H K"}, decay=Decay.VECTOR,
                 scaled=False)  # fmt: skip
    x = sample(fn, np.random.default_rng(0), T=20)
    np.testing.assert_allclose(fn(**x), la.hgrn2(**x), rtol=0, atol=1e-14)
    for a, b in zip(*(la.vjp(f, **x)[1](x["v"]) for f in (fn, la.hgrn2)), strict=True):
        assert a is b is None or np.abs(a - b).max() < 1e-13


def test_what_no_product_can_be_made_of():
    with pytest.raises(TypeError, match="products: v is None, expected the name of an array"):
        products("q", "k")
    fn = variant(products("q", "k", "v", g="g"), QKV | {"g": "H|H K"}, Samples({"g": "log decay"}))
    with pytest.raises(ValueError, match=r"products: an array has the axes 'H\|H K', expected heads"):
        fn(**sample(fn, np.random.default_rng(0)))


# erase vectors


def dense_gdn2(q, k, v, g, b, w, state):
    """(out, last state) of one head, (T, K) and (T, V), by the matrix of each token: M_t = (I - k (b k)^T) e^g."""
    out, S = [], state
    for t in range(len(q)):
        M = (np.eye(len(k[t])) - np.outer(k[t], b[t] * k[t])) @ np.diag(np.exp(g[t]))
        S = M @ S + np.outer(k[t], w[t] * v[t])
        out.append(q[t] @ S * len(k[t]) ** -0.5)
    return np.array(out), S


@every_form
def test_gdn2_is_its_matrix(form):
    rng = np.random.default_rng(0)
    x = sample(la.gdn2, rng, B=(), T=70, H=1, optional=False)
    state = rng.standard_normal((1, 5, 3))
    out, end = dense_gdn2(**{n: y[:, 0] for n, y in x.items()}, state=state[0])
    found = la.gdn2(**x, state=state, return_state=True, **form)
    assert relative_error(found.out[:, 0], out) <= 1e-12
    assert relative_error(found.state[0], end) <= 1e-12


def test_gdn2_with_one_strength_is_kda():
    rng = np.random.default_rng(0)
    x = sample(la.kda, rng, T=40, optional=False)
    beta = x.pop("beta")[..., None]
    gates = {"b": np.broadcast_to(beta, x["g"].shape), "w": np.broadcast_to(beta, x["v"].shape)}
    assert relative_error(la.gdn2(**x, **gates), la.kda(**x, beta=beta[..., 0])) <= 1e-13


@every_form
@pytest.mark.parametrize("heads", HEADS)
def test_the_key_in_an_erase_vector_is_normalised_with_it(heads, form):
    """b * k / |k|, and its gradients: those of the call on keys that were divided before, through the division."""
    Hq, Hk, H = HEADS[heads]
    rng = np.random.default_rng(0)
    x = sample(la.gdn2, rng, T=20, Hq=Hq, Hk=Hk, H=H, optional=False)
    x["k"] *= rng.uniform(0.1, 9, (*x["k"].shape[:-1], 1))
    lengths = {n: np.linalg.norm(x[n], axis=-1, keepdims=True) for n in ("q", "k")}
    units = x | {n: x[n] / lengths[n] for n in lengths}
    (out, pull), (expected, pull_units) = la.vjp(la.gdn2, **x, qk_l2norm=True, **form), la.vjp(la.gdn2, **units, **form)
    assert relative_error(out, expected) <= 1e-12
    dout = rng.standard_normal(out.shape)
    grads, wanted = pull(dout), pull_units(dout)._asdict()
    for n in lengths:
        along = (wanted[n] * units[n]).sum(-1, keepdims=True)
        wanted[n] = (wanted[n] - units[n] * along) / lengths[n]
    for n in x:
        assert relative_error(getattr(grads, n), wanted[n]) <= 1e-11, n
    check_vjp(la.gdn2, **x, qk_l2norm=True, **form)


@every_form
def test_keys_of_zero_and_of_any_size_are_normalised(form):
    x = sample(la.gdn2, np.random.default_rng(0), B=(1,), T=9, H=1, optional=False)
    x["k"][0, :3] *= np.array([0.0, 1e-300, 1e200])[:, None, None]
    units = x["k"].copy()
    units[0, 1], units[0, 2] = units[0, 1] * 1e300, units[0, 2] * 1e-200
    out, pull = la.vjp(la.gdn2, **x, qk_l2norm=True, **form)
    assert relative_error(out, la.gdn2(**x | {"k": units}, qk_l2norm=True, **form)) <= 1e-12
    assert all(np.isfinite(d).all() for d in pull(out) if d is not None)


@every_form
@pytest.mark.parametrize("qk_l2norm", [False, True])
def test_an_erase_vector_that_is_the_array_of_the_keys(qk_l2norm, form):
    """comba(p=k): the same numbers in two arguments keep two gradients, and p is not normalised."""
    rng = np.random.default_rng(0)
    x = sample(la.comba, rng, T=20, optional=False)
    x["k"] *= 0.9
    replay.clear()
    results = []
    for p in (x["k"], x["k"].copy()):
        out, pull = la.vjp(la.comba, **x | {"p": p}, qk_l2norm=qk_l2norm, **form)
        results.append((out, *pull(np.ones_like(out))))
    for a, b in zip(*results, strict=True):
        assert a is b is None or relative_error(a, b) <= 1e-12
    assert np.abs(results[0][4]).max() > 0.01


@pytest.mark.parametrize("length", [0.0, 1e-8, 1e-3, 0.3, 1.0, 10.0])
def test_efla_with_keys_of_any_length(length):
    x = sample(la.efla, np.random.default_rng(0), T=20)
    x["k"] = x["k"] * length
    assert relative_error(la.efla(**x), NAIVE["efla"](**x)[0]) <= 1e-12
    check_vjp(la.efla, **x)
    short = la.efla(**x | {"beta": 1e-7 * x["beta"]})
    if length <= 1:
        euler = la.delta_rule(**x | {"beta": 1e-7 * x["beta"]})
        assert relative_error(short, euler) <= 1e-6


def test_efla_with_long_keys_forgets_what_they_held():
    """e^{-beta |k|^2} is 0: a key reads the value that it wrote."""
    x = sample(la.efla, np.random.default_rng(0), T=20)
    x["k"] = 1e4 * x["k"]
    out, S = la.efla(**x, return_state=True)
    assert relative_error(la.read(x["k"][:, -1:], S), x["v"][:, -1:]) <= 1e-12
    assert all(np.isfinite(d).all() for d in la.vjp(la.efla, **x)[1](out) if d is not None)


def test_the_gradient_of_an_array_without_tokens_is_the_cores_own():
    """No sum over no axes, which would be a copy, on a device a launch that no recorded pullback replays."""
    x = sample(la.rwkv6, np.random.default_rng(0), T=5, H=2, K=3, V=2)
    axes = {n: arg.axes for n, arg in la.rwkv6.spec.arrays.items()}
    call = Call(**x, axes=axes, batch=(), plan=SimpleNamespace(xp=xp))
    du = np.ones((2, 3))
    assert la.rwkv6.spec.change.to_core_vjp(call, Inputs(*[None] * 8)._replace(u=du))["u"] is du
