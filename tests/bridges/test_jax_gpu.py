"""Traced JAX arrays on a CUDA device: the results and gradients of CuPy arrays, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la

pytestmark = pytest.mark.gpu
DTYPES = [np.float32, ml_dtypes.bfloat16]


@pytest.fixture
def jax():
    jax = pytest.importorskip("jax")
    pytest.importorskip("cupy")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no CUDA device")
    return jax


def bits(x: Any) -> np.ndarray:
    return np.asarray(x.get() if hasattr(x, "get") else x).view(np.uint8)


def both(jax: Any, fn: Any, dtype: Any, options: dict[str, Any], **sizes: Any) -> dict[str, tuple[Any, Any]]:
    """(JAX, CuPy) by name: out, state, gradients."""
    import cupy

    arrays = la.testing.sample(fn, np.random.default_rng(0), **{"B": (2,), "T": 130, "K": 64, "V": 64} | sizes)
    arrays = {n: x.astype(dtype) for n, x in arrays.items()}
    arrays["state"] = np.zeros((2, 2, 64, 64), np.float32)
    there = {n: cupy.asarray(x) for n, x in arrays.items()}
    result, pullback = la.vjp(fn, **there, **options, return_state=True)
    d = cupy.ones_like(result.out), cupy.ones_like(result.state)
    grads = pullback(*d)._asdict()

    @jax.jit
    def traced(x: Any) -> Any:
        out, vjp = jax.vjp(lambda x: fn(**x, **options, return_state=True), x)
        return out, vjp(type(out)(*map(jax.numpy.ones_like, out)))[0]

    for _ in range(3):  # also from a captured graph
        out, found = jax.block_until_ready(traced({n: jax.numpy.asarray(x) for n, x in arrays.items()}))
    pairs = {"out": (out.out, result.out), "state": (out.state, result.state)}
    return pairs | {f"d{n}": (x, grads[n]) for n, x in found.items()}


def check(jax: Any, fn: Any, dtype: Any) -> None:
    for name, (a, b) in both(jax, fn, dtype, {}).items():
        assert str(a.dtype) == str(b.dtype), name
        np.testing.assert_array_equal(bits(a), bits(b), name)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_jit_and_gradients_of_a_delta_rule(jax, dtype):
    check(jax, la.gated_delta_rule, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_jit_and_gradients_of_a_vector_decay(jax, dtype):
    check(jax, la.gla, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_jit_and_gradients_of_a_constant_decay(jax, dtype):
    check(jax, la.retention, dtype)


def test_a_backend_of_array_functions(jax):
    """Float64 has no kernels: computed with CuPy, copied into XLA's buffers."""
    with jax.enable_x64(True):
        for name, (a, b) in both(jax, la.gla, np.float64, {}).items():
            np.testing.assert_array_equal(bits(a), bits(b), name)


def test_launches_are_recorded_and_captured(jax, monkeypatch):
    """The operation of a recorded program is compatible with command buffers, and takes no CuPy memory."""
    import cupy

    from linattn_np.bridges import jax as bridge

    x = {n: jax.numpy.asarray(y, "float32" if n in ("g", "beta") else "bfloat16") for n, y in la.testing.sample(
        la.gated_delta_rule, np.random.default_rng(0), T=256, K=64, V=64, optional=False).items()}  # fmt: skip
    loss = jax.jit(jax.grad(lambda x: la.gated_delta_rule(**x).sum().astype("float32")))
    jax.block_until_ready(loss(x))
    signature, given = bridge.signature_of(la.gated_delta_rule.spec, (), x)
    program = bridge.program_of(signature, bridge._abstract(given))
    assert program.is_recorded("saving")
    assert program.is_recorded("backward")
    used = cupy.get_default_memory_pool().total_bytes()
    for _ in range(3):
        jax.block_until_ready(loss(x))
    assert cupy.get_default_memory_pool().total_bytes() == used


def test_vmap_and_scan(jax):
    """Also with residuals between forward and backward: T is more than a chunk."""
    sizes = {"B": (3, 2), "T": 200, "K": 64, "V": 64}
    arrays = la.testing.sample(la.gated_delta_rule, np.random.default_rng(0), optional=False, **sizes)
    x = {n: jax.numpy.asarray(y, "float32") for n, y in arrays.items()}

    def loss(x: Any) -> Any:
        return (la.gated_delta_rule(**x) ** 2).sum()

    mapped = jax.jit(jax.vmap(jax.grad(loss)))(x)
    for n in range(3):
        one = jax.jit(jax.grad(loss))({name: y[n] for name, y in x.items()})
        for name, d in one.items():
            np.testing.assert_array_equal(mapped[name][n], d, name)

    @jax.jit
    def steps(x: Any) -> Any:
        def body(state: Any, token: Any) -> Any:
            out, state = la.step(la.gated_delta_rule, **token, state=state, return_state=True)
            return state, out

        first = {name: jax.numpy.moveaxis(y[0], 1, 0) for name, y in x.items()}
        return jax.lax.scan(body, jax.numpy.zeros((2, 2, 64, 64)), first)[1]

    whole = jax.jit(lambda x: la.gated_delta_rule(**{n: y[0] for n, y in x.items()}))(x)
    la.testing.assert_close(jax.numpy.moveaxis(steps(x), 0, 1), whole)
