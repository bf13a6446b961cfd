"""Numbers of tokens in caches: integers of 64 bits in arrays, in every library, advanced where they are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from tests.cases import GROWING

T = 5
every = pytest.mark.parametrize("fn", GROWING, ids=lambda fn: fn.__name__)


def arrays_of(fn, B=()):
    drawn = la.testing.sample(fn, np.random.default_rng(0), B=B, T=T, H=1, optional=False)
    return {n: x.astype(np.float32) for n, x in drawn.items()}


def cut(state, n):
    """Buffers of n slots with the same length."""
    return type(state)(*(np.array(y[..., :n, :] if m == "b" else y[..., :n, :, :] if m in "kv" else y)
                         for m, y in state._asdict().items()))  # fmt: skip


@every
@pytest.mark.parametrize("backend", ["reference", "chunks", "numba", None])
@pytest.mark.parametrize("B", [(), (2,)], ids=str)
def test_lengths_are_integers_in_arrays_and_advance_in_place(fn, backend, B):
    x, options = arrays_of(fn, B), {"backend": backend, "return_state": True}
    state = fn(**x, **options).state
    for n in (2, 3, 4, 5):  # recorded from the second call on
        assert type(state.length) is np.ndarray
        assert (state.length.dtype, state.length.shape) == (np.int64, B)
        assert (state.length == (n - 1) * T).all()
        state = fn(**x, state=state, **options).state
    positions = fn(**x, state=state, **options, return_states_at=[0, T]).states.length
    assert positions.dtype == np.int64
    own = cut(state, 4)
    for n in (1, 2, 3):
        fn(**x, state=own, backend=backend, overwrite_state=True)
        assert (own.length == (5 + n) * T).all()
    (out, end), pullback = la.vjp(fn, **x, state=state, **options)
    grads = pullback(out, end)
    assert grads.state.length.dtype == np.int64
    assert not grads.state.length.any()


@every
@pytest.mark.parametrize(("dtype", "most"), [(np.float16, 2**11), (ml_dtypes.bfloat16, 2**8), (np.float32, 2**24)])
def test_floats_are_taken_if_they_are_whole_and_hold_what_they_become(fn, dtype, most):
    x = arrays_of(fn)
    state = cut(fn(**x, return_state=True).state, 4)
    expected = fn(**x, state=state._replace(length=np.array(most - T)))
    given = state._replace(length=np.array(most - T, dtype))
    for _ in range(2):
        out, end = fn(**x, state=given, return_state=True)
        np.testing.assert_array_equal(out, expected)
        assert (end.length, end.length.dtype) == (most, np.int64)
    fn(**x, state=given, overwrite_state=True)
    assert float(given.length) == most
    with pytest.raises(ValueError, match=rf"state.length would be {most + T}, .* up to {most} only: expected int64"):
        fn(**x, state=given, overwrite_state=True)
    assert float(given.length) == most


@every
@pytest.mark.parametrize(("length", "error", "text"), [
    (np.array(4.5), ValueError, "state.length holds 4.5, expected whole numbers, in int64"),
    (np.array(np.inf), ValueError, "state.length holds inf, expected whole numbers, in int64"),
    (np.array(np.nan), ValueError, "state.length holds nan, expected whole numbers, in int64"),
    (np.array(4, np.int16), TypeError, "state.length has dtype int16, expected int64"),
    (np.array(True), TypeError, "state.length has dtype bool, expected int64"),
    (4, TypeError, "state.length is a int, expected an array"),
])  # fmt: skip
def test_what_is_no_length(fn, length, error, text):
    state = fn(**arrays_of(fn), return_state=True).state
    for _ in range(3):
        with pytest.raises(error, match=text):
            fn(**arrays_of(fn), state=state._replace(length=length))


@every
@pytest.mark.parametrize(("length", "text"), [
    (np.int64(T), "state.length is a NumPy scalar, expected an array, also without axes"),
    (np.float32(T), "state.length is a NumPy scalar, expected an array, also without axes"),
    (np.array(T, np.int32), "state.length has dtype int32, expected int64 to be overwritten"),
])  # fmt: skip
def test_what_cannot_be_advanced(fn, length, text):
    """It is read, but not written to."""
    state = cut(fn(**arrays_of(fn), return_state=True).state, T)._replace(length=length)
    assert fn(**arrays_of(fn), state=state, return_state=True).state.length == 2 * T
    with pytest.raises(TypeError, match=text):
        fn(**arrays_of(fn), state=state, overwrite_state=True)


@every
def test_lengths_beyond_32_bits(fn):
    x = arrays_of(fn)
    state, far = cut(fn(**x, return_state=True).state, 4), 4 * 2**32
    small, large = (state._replace(length=np.array(n)) for n in (4, far))
    for options in ({}, {"window": 3} if "window" in fn.spec.options else {}):
        np.testing.assert_array_equal(fn(**x, state=small, **options), fn(**x, state=large, **options))
    assert fn(**x, state=large, return_state=True).state.length == far + T


@every
@pytest.mark.parametrize("library", ["torch", "jax.numpy", "array_api_strict"])
def test_every_library(fn, library):
    xp = pytest.importorskip(library)
    x = {n: xp.asarray(y) for n, y in arrays_of(fn, (2,)).items()}
    state = fn(**x, return_state=True).state
    assert type(state.length) is type(x["v"])
    narrow = "int32" if library == "jax.numpy" and xp.arange(1).dtype == "int32" else "int64"
    for n in (2, 3):
        state = fn(**x, state=state, return_state=True).state
        assert str(state.length.dtype).rsplit(".", 1)[-1] == narrow
        assert [int(m) for m in state.length] == [n * T] * 2


@every
@pytest.mark.parametrize("backend", [None, "chunks"])
def test_traced_calls_of_jax(fn, backend):
    jax = pytest.importorskip("jax")
    x = {n: jax.numpy.asarray(y) for n, y in arrays_of(fn, (2,)).items()}
    call = lambda x, state: fn(**x, state=state, return_state=True, backend=backend)  # noqa: E731
    state = fn(**x, return_state=True).state
    end = jax.jit(call)(x, state).state
    assert (end.length.dtype, end.length.tolist()) == (state.length.dtype, [2 * T] * 2)
    loss = lambda k: sum(y.sum() for y in (lambda out, state: (out, state.k))(*call(x, state._replace(k=k))))  # noqa: E731
    assert np.isfinite(jax.jit(jax.grad(loss))(state.k)).all()
    if backend is not None:
        with pytest.raises(TypeError, match=r"state.length has dtype float32, expected integers where"):
            jax.jit(call)(x, state._replace(length=state.length.astype("float32")))


@every
def test_pytorch_differentiates_caches(fn):
    torch = pytest.importorskip("torch")
    x = {n: torch.from_numpy(y).requires_grad_() for n, y in arrays_of(fn, (2,)).items()}
    first = fn(**{n: y.detach() for n, y in x.items()}, return_state=True).state
    state = type(first)(*(y.clone().requires_grad_(y.is_floating_point()) for y in first))
    out, end = fn(**x, state=state, return_state=True)
    (out.sum() + end.k.sum()).backward()
    assert state.k.grad is not None
    assert end.length.tolist() == [2 * T] * 2
