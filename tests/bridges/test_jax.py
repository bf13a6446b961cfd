"""Traced JAX arrays: the results and gradients of NumPy arrays, bit for bit."""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.bridges import programs
from linattn_np.call import dispatch
from linattn_np.runtime.shapes import has_time
from tests.cases import in_dtype, pairwise

jax = pytest.importorskip("jax")
jnp = jax.numpy
CASES = [(fn, n) for fn in la.VARIANTS for n in range(len(fn.samples.options))]
IDS = [f"{fn.__name__}-{n}" for fn, n in CASES]


def draw(fn: Any, seed: int = 0, dtype: Any = np.float32, **sizes: Any) -> dict[str, Any]:
    arrays = la.testing.sample(fn, np.random.default_rng(seed), **{"B": (2,), "T": 9} | sizes)
    return {n: np.ascontiguousarray(in_dtype(x, dtype)) for n, x in arrays.items()}


def equal(actual: Any, expected: Any) -> None:
    """The same structure and the same bits."""
    if isinstance(expected, tuple):
        assert type(actual).__name__ == type(expected).__name__
        for a, b in zip(actual, expected, strict=True):
            equal(a, b)
    elif expected is None:
        assert actual is None
    else:
        assert actual.dtype in (expected.dtype, jax.dtypes.canonicalize_dtype(expected.dtype))
        np.testing.assert_array_equal(np.asarray(actual), expected)


def pull(fn: Any, arrays: dict[str, Any], options: dict[str, Any], cotangents: Any) -> tuple[Any, Any]:
    """(result, gradients by name of the arrays given) in NumPy."""
    result, pullback = la.vjp(fn, **arrays, **options)
    grads = pullback(*cotangents)._asdict()
    return result, {n: grads[n] for n in arrays}


def cotangent(like: Any, seed: int = 7) -> Any:
    if like is None:
        return None
    if isinstance(like, tuple):
        return type(like)(*(cotangent(x, seed + n) for n, x in enumerate(like)))
    return np.random.default_rng(seed).standard_normal(like.shape).astype(like.dtype)


@pytest.fixture
def recomputed(monkeypatch):
    """The forwards that backwards computed because they had no residuals."""
    found = []

    def counted(*call: Any) -> Any:
        found.append(call)
        return original(*call)

    original = programs.run_vjp
    monkeypatch.setattr(programs, "run_vjp", counted)
    return found


@pytest.fixture(autouse=True)
def no_array_calls(monkeypatch):
    """A tracer never reaches the checks of the call path."""
    original = dispatch.prepare

    def prepare(spec: Any, arrays: Any, keywords: Any) -> Any:
        assert not any(isinstance(x, jax.core.Tracer) for x in (*arrays, *keywords.values()))
        return original(spec, arrays, keywords)

    monkeypatch.setattr(dispatch, "prepare", prepare)


@pytest.mark.parametrize(("fn", "n"), CASES, ids=IDS)
def test_jit_and_gradients_of_every_variant(fn, n, recomputed):
    """Also of the initial state; the backward reads the residuals of the forward."""
    own = fn.samples.options[n]
    arrays = draw(fn)
    state = fn(**arrays, **own, return_state=True).state
    arrays["state"] = state
    options = {**own, "return_state": True}
    result, pullback = la.vjp(fn, **arrays, **options)
    cotangents = cotangent(result)
    grads = pullback(*cotangents)._asdict()

    @jax.jit
    def both(arrays: Any, d: Any) -> Any:
        result, pullback = jax.vjp(lambda x: fn(**x, **options), arrays)
        return result, pullback(d)[0]

    actual, actual_grads = both(arrays, type(result)(*cotangents))
    equal(actual, result)
    for name, d in actual_grads.items():
        equal(jax.tree.map(lambda x, y: y if x.dtype == jax.dtypes.float0 else x, d, grads[name]), grads[name])
    assert not recomputed or fn.spec.readout.name == "LEVELS"  # whose sums depend on positions


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64], ids=lambda dtype: dtype.__name__)
def test_dtypes(dtype):
    arrays = draw(la.gated_delta_rule, dtype=dtype)
    with jax.enable_x64(True):
        actual = jax.jit(lambda x: la.gated_delta_rule(**x))(arrays)
        result, grads = pull(la.gated_delta_rule, arrays, {}, [np.ones_like(arrays["v"])])
        equal(actual, result)
        found = jax.jit(jax.grad(lambda x: la.gated_delta_rule(**x).sum()))(arrays)
        for name, d in found.items():
            equal(d, grads[name])


CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "heads_first": (lambda x: {n: y.swapaxes(1, 2) for n, y in x.items()}, {"layout": "heads_first"}),
    "ragged": (lambda x: {n: y[:1] for n, y in x.items()}, {"cu_seqlens": np.array([0, 4, 4, 9])}),
    "positions": (lambda x: x, {"return_states_at": [0, 4], "return_state": True}),
    "fewer queries": (lambda x: {**x, "q": x["q"][:, 5:]}, {}),
    "parallel": (lambda x: x, {"chunk_size": "parallel", "num_threads": 1}),
    "reverse": (lambda x: x, {"reverse": True, "return_state": True}),
    "no gradient of the state": (lambda x: x, {"return_state": True, "scale": 0.5}),
}


@pytest.mark.parametrize("name", CALLS)
def test_options(name):
    change, options = CALLS[name]
    arrays = change(draw(la.kda, optional=False, H=3))
    result, pullback = la.vjp(la.kda, **arrays, **options)
    cotangents = cotangent(result)
    grads = pullback(*(cotangents if isinstance(result, tuple) else [cotangents]))._asdict()

    def both(arrays: Any) -> Any:
        found, vjp = jax.vjp(lambda x: la.kda(**x, **options), arrays)
        return found, vjp(jax.tree.map(jnp.asarray, cotangents))[0]

    actual, actual_grads = jax.jit(both)(arrays)
    equal(actual, result)
    for each, d in actual_grads.items():
        equal(d, grads[each])


def test_one_token_in_a_scan():
    """la.step in the body of a scan: the whole call, and its gradients by the backward of the scan."""
    arrays = draw(la.gated_delta_rule, optional=False, T=5)
    state = np.zeros((2, 2, 5, 3), np.float32)

    def scanned(x: Any, state: Any) -> Any:
        def body(state: Any, token: Any) -> Any:
            out, state = la.step(la.gated_delta_rule, **token, state=state, return_state=True)
            return state, out

        rows = {n: jnp.moveaxis(y, 1, 0) for n, y in x.items()}
        state, out = jax.lax.scan(body, state, rows)
        return jnp.moveaxis(out, 0, 1), state

    result, grads = pull(la.gated_delta_rule, {**arrays, "state": state}, {"return_state": True},
                         [np.ones((2, 5, 2, 3), np.float32), np.ones_like(state)])  # fmt: skip
    actual = jax.jit(scanned)(arrays, state)
    for a, b in zip(actual, result, strict=True):
        la.testing.assert_close(a, b)
    found = jax.jit(jax.grad(lambda x, S: sum(y.sum() for y in scanned(x, S)), argnums=(0, 1)))(arrays, state)
    for name, d in {**found[0], "state": found[1]}.items():
        la.testing.assert_close(d, grads[name], what=name)


def loss(fn: Any, x: Any, **options: Any) -> Any:
    return (fn(**x, **options) ** 2).sum()


def constants(fn: Any) -> list[str]:
    """The arrays without tokens that a call needs."""
    return [n for n, arg in fn.spec.arrays.items() if not (arg.optional or has_time(arg.axes))]


WITH_QUERIES = [fn for fn in la.VARIANTS if {"q", "k", "v"} <= fn.spec.arrays.keys() and not fn.spec.micro_steps]
ONE_OF_A_KIND = {(fn.spec.core, fn.spec.erase, bool(constants(fn))): fn for fn in WITH_QUERIES}.values()


@pytest.mark.parametrize(
    ("fn", "order", "keeps"),
    pairwise(ONE_OF_A_KIND, ["vmap of grad", "grad of vmap"], [True, False]),
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_vmap(fn, order, keeps, recomputed, monkeypatch):
    """The mapped axis is a batch axis; one array is not mapped, one has it elsewhere. keeps: residuals of the batch."""
    monkeypatch.setattr(programs.Program, "can_map", keeps)
    arrays = draw(fn, B=(3, 2), optional=False)
    first = {"k": arrays["k"][1], "q": np.moveaxis(arrays["q"], 0, 2)}
    axes = dict.fromkeys(arrays, 0) | {"k": None, "q": 2}
    axes |= dict.fromkeys(constants(fn))
    given = {**arrays, **first}
    if order == "vmap of grad":
        found = jax.jit(jax.vmap(jax.grad(functools.partial(loss, fn)), in_axes=(axes,)))(given)
    else:
        found = jax.jit(jax.grad(lambda x: jax.vmap(functools.partial(loss, fn), in_axes=(axes,))(x).sum()))(given)
    each = []
    for n in range(3):
        x = {name: y if axes[name] is None else np.ascontiguousarray(np.moveaxis(y, axes[name], 0)[n])
             for name, y in given.items()}  # fmt: skip
        out = fn(**x)
        each.append(pull(fn, x, {}, [2 * out])[1])
    for name, d in found.items():
        rows = [grads[name] for grads in each]
        if order == "grad of vmap":
            expected = np.stack(rows, 0 if axes[name] is None else axes[name])
            la.testing.assert_close(d, expected.sum(0) if axes[name] is None else expected, what=name)
        else:
            equal(d, np.stack(rows))
    assert bool(recomputed) == (not keeps and not constants(fn))


@pytest.mark.parametrize("keeps", [True, False])
def test_residuals_of_a_batch_and_of_its_rows(keeps, monkeypatch):
    """A pullback of a mapped forward, taken for one row, and mapped over compiled gradients in a scan."""
    monkeypatch.setattr(programs.Program, "can_map", keeps)
    x = draw(la.gla, B=(3, 2), optional=False)
    pullbacks = jax.vmap(lambda x: jax.vjp(functools.partial(loss, la.gla), x)[1])(x)
    grads = [pull(la.gla, y := {n: z[i] for n, z in x.items()}, {}, [2 * la.gla(**y)])[1] for i in range(3)]
    for i in range(3):
        own = jax.tree.map(lambda y: y[i], pullbacks)  # noqa: B023
        for name, d in own(np.float32(1))[0].items():
            equal(d, grads[i][name])

    @jax.jit
    def inner(x: Any) -> Any:
        def body(total: Any, _: None) -> Any:
            return total + jax.grad(functools.partial(loss, la.gla))(x)["v"], None

        return jax.lax.scan(body, jnp.zeros_like(x["v"]), None, length=2)[0]

    found = jax.jit(jax.vmap(inner))(x)
    for i in range(3):
        equal(found[i], 2 * grads[i]["v"])


def test_vmap_of_cotangents():
    """jacrev maps the backward alone: the residuals of one forward serve every row."""
    arrays = draw(la.gla, B=(), T=3, H=2, K=2, V=2, optional=False)
    found = jax.jit(jax.jacrev(lambda v: la.gla(**{**arrays, "v": v})))(arrays["v"])
    A = la.influence_matrix(la.gla, **arrays)
    expected = np.einsum("hij,hg,vw->ihvjgw", A, np.eye(2), np.eye(2))
    la.testing.assert_close(found, expected.astype(np.float32))


def test_gradients_outside_jit_and_la_vjp_inside():
    arrays = draw(la.gla, optional=False)
    result, grads = pull(la.gla, arrays, {}, [np.ones_like(arrays["v"])])
    found = jax.grad(lambda x: la.gla(**x).sum())({n: jnp.asarray(x) for n, x in arrays.items()})

    @jax.jit
    def inside(x: Any) -> Any:
        out, pullback = la.vjp(la.gla, **x, return_state=True)
        return out.out, pullback(jnp.ones_like(x["v"]))

    out, own = inside(arrays)
    equal(out, result)
    assert own.state is None
    for name, d in grads.items():
        equal(found[name], d)
        equal(getattr(own, name), d)


def test_one_array_given_twice_and_a_state_in_place():
    x = draw(la.linear_attention)["q"][..., :3]
    equal(jax.jit(lambda x: la.linear_attention(x, x, x))(x), la.linear_attention(x, x, x))
    found = jax.jit(jax.grad(lambda x: la.linear_attention(x, x, x).sum()))(x)
    grads = la.vjp(la.linear_attention, x, x.copy(), x.copy())[1](np.ones_like(x))
    la.testing.assert_close(found, grads.q + grads.k + grads.v)
    state = np.zeros((2, 2, 3, 3), np.float16)
    result = jax.jit(lambda x, S: la.linear_attention(x, x, x, state=S, overwrite_state=True, return_state=True))(
        x, state
    )
    assert not state.any()
    equal(result.state, la.linear_attention(x, x, x, return_state=True).state.astype(np.float16))


def test_other_residuals_than_announced_are_recomputed(monkeypatch, recomputed):
    """A program whose forward leaves other residuals says so, and its backward computes them."""
    arrays = draw(la.gla, seed=3, T=6)
    original = programs.Separation.structure
    first = []

    def structure(self: Any, x: Any, like: Any = None) -> Any:
        found = original(self, x, like)
        first.append(found)
        return found if len(first) == 1 else ("other", found)

    monkeypatch.setattr(programs.Separation, "structure", structure)
    found = jax.jit(jax.grad(lambda x: la.gla(**x, scale=0.25).sum()))(arrays)
    _, grads = pull(la.gla, arrays, {"scale": 0.25}, [np.ones_like(arrays["v"])])
    assert len(recomputed) == 1
    for name, d in found.items():
        equal(d, grads[name])


def test_errors():
    x = draw(la.gla)
    with pytest.raises(ValueError, match=re.escape("gla: g has shape (2, 9, 2, 4), expected (B, T, H, K) = ")):
        jax.jit(lambda x: la.gla(**x))({**x, "g": x["g"][..., :4]})
    with pytest.raises(TypeError, match="gla: cu_seqlens is traced by JAX, expected numbers that are known"):
        jax.jit(lambda x, n: la.gla(**x, cu_seqlens=n))(x, np.array([0, 9]))
    with pytest.raises(TypeError, match="gla: state_rows was given with arrays that JAX traces"):
        jax.jit(lambda x: la.gla(**x, state_rows=np.array([0, 1])))(x)
    with pytest.raises(TypeError, match=r"gla: q is a builtins\.list beside arrays that JAX traces"):
        jax.jit(lambda k: la.gla(x["q"].tolist(), k, x["v"], x["g"]))(x["k"])
    with pytest.raises(TypeError, match="gla: scale is "):
        jax.jit(lambda x: la.gla(**x, scale={}))(x)
    with pytest.raises(TypeError, match="gla: q was given twice"):
        jax.jit(lambda x: la.gla(x["q"], **x))(x)
    with pytest.raises(TypeError, match="gla: 6 arrays were given by position"):
        jax.jit(lambda q: la.gla(q, q, q, q, q, q))(x["q"])
    with pytest.raises(ValueError, match="gla: overwrite_state=True was given to a call that JAX differ"):
        jax.grad(lambda S: la.gla(**x, state=S, overwrite_state=True).sum())(np.zeros((2, 2, 5, 3), np.float32))


def test_forward_mode_and_second_derivatives_are_errors():
    x = draw(la.gla)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: la.gla(**{**x, "q": q}), (x["q"],), (x["q"],))

    def first(q: Any) -> Any:
        return jax.grad(lambda q: la.gla(**{**x, "q": q}).sum())(q).sum()

    with pytest.raises(NotImplementedError, match="gla: a second derivative in JAX, expected first derivatives"):
        jax.grad(first)(x["q"])


def test_a_backend_of_array_calls_is_traced(monkeypatch):
    monkeypatch.undo()
    x = {n: jnp.asarray(y) for n, y in draw(la.linear_attention, B=(), T=4).items()}
    found = jax.jvp(lambda q: la.linear_attention(**{**x, "q": q}, backend="chunks"), (x["q"],), (x["q"],))[1]
    la.testing.assert_close(found, la.linear_attention(**x))


def test_results_that_lie_in_another_place():
    """The loops took the memory of the second result for the first one."""
    first, second = np.zeros((4, 1024)), np.zeros((4, 1024))
    x, y = np.full((4, 1024), 1.0), np.full((4, 1024), 2.0)
    with programs.writing_to([first, second]) as put:
        memory = sys.modules[programs.MEMORY]
        one, other = memory.empty((4, 1024), first.dtype), memory.empty((4, 1024), first.dtype)
        assert one is first
        assert other is second
        assert memory.empty((4, 1024), first.dtype) is not first
        one[...], other[...] = y, x
        put([other[:], one])
    np.testing.assert_array_equal(first, x)
    np.testing.assert_array_equal(second, y)
