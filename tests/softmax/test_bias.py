"""Softmax attention with a bias per pair: the loop, gradients, what other functions are with it, errors."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from tests.naive import NAIVE
from tests.properties.test_catalog import HEADS

T, K, V = 21, 5, 3
HOWS = ({"backend": "reference"}, {"backend": "chunks", "chunk_size": 16}, {"backend": "numba"},
        {"backend": "numba", "chunk_size": 8}, {"backend": "numba", "chunk_size": 1})  # fmt: skip
OPTIONS = ({}, {"window": 9}, {"normalize": False}, {"causal": False})
every_how = pytest.mark.parametrize("how", HOWS, ids=str)


def draw(Hq=2, Hk=2, H=2, Tq=T, B=(2,), dtype=np.float64):
    """Arrays of a call; one bias of -inf, where another key is read."""
    rng = np.random.default_rng(0)
    shapes = {"q": (Tq, Hq, K), "k": (T, Hk, K), "v": (T, H, V), "bias": (Tq, Hq, T)}
    arrays = {n: rng.standard_normal((*B, *shape)).astype(dtype) for n, shape in shapes.items()}
    arrays["bias"][..., 5, 0, 2] = -np.inf
    return arrays | {"sinks": rng.standard_normal(Hq).astype(dtype)}


@every_how
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_loop_and_central_differences(options, how):
    arrays = draw()
    out = la.softmax_attention(**arrays, **options, **how)
    assert la.testing.relative_error(out, NAIVE["softmax_attention"](**arrays, **options)[0]) <= 1e-12
    arrays["bias"][:, 5, 0, 2] = -1.0
    la.testing.check_vjp(la.softmax_attention, **arrays, **options, **how)


@every_how
@pytest.mark.parametrize("heads", HEADS)
def test_heads(heads, how):
    arrays = draw(*(HEADS[heads][n] for n in (0, 1, 2)))
    expected, back = la.vjp(la.softmax_attention, **arrays, backend="reference")
    assert la.testing.relative_error(expected, NAIVE["softmax_attention"](**arrays)[0]) <= 1e-12
    out, pullback = la.vjp(la.softmax_attention, **arrays, **how)
    assert la.testing.relative_error(out, expected) <= 1e-12
    for name, d in pullback(out)._asdict().items():
        if d is not None:
            assert la.testing.relative_error(d, getattr(back(out), name)) <= 1e-11, name


@every_how
def test_queries_of_their_own_length(how):
    arrays = draw(Tq=7)
    arrays["bias"][..., 5, 0, 2] = 0.5
    out = la.softmax_attention(**arrays, causal=False, **how)
    expected = NAIVE["softmax_attention"](**arrays, causal=False)[0]
    assert la.testing.relative_error(out, expected) <= 1e-12
    la.testing.check_vjp(la.softmax_attention, **arrays, causal=False, **how)


@every_how
def test_distances_are_alibi_and_a_mask_is_a_window(how):
    arrays = draw()
    q, k, v = (arrays[n] for n in "qkv")
    slopes = np.array([0.2, 0.7])
    age = np.arange(T)[:, None] - np.arange(T)
    away = np.broadcast_to(-(slopes[:, None] * age[:, None, :]), (2, T, 2, T))
    alibi = la.alibi(q, k, v, slopes)
    assert la.testing.relative_error(la.softmax_attention(q, k, v, bias=away, **how), alibi) <= 1e-12
    hidden = np.broadcast_to(np.where(age < 4, 0.0, -np.inf)[:, None, :], (2, T, 2, T))
    window = la.softmax_attention(q, k, v, window=4)
    assert la.testing.relative_error(la.softmax_attention(q, k, v, bias=hidden, **how), window) <= 1e-12


@every_how
def test_a_row_without_keys_is_0_and_has_no_gradient(how):
    arrays = draw()
    arrays["bias"][:, 3] = -np.inf
    del arrays["sinks"]
    out, pullback = la.vjp(la.softmax_attention, **arrays, **how)
    assert (out[:, 3] == 0).all()
    grads = pullback(np.ones_like(out))
    assert all(np.isfinite(d).all() for d in grads if d is not None)
    assert (grads.bias[:, 3] == 0).all()


def test_layouts_dtypes_and_the_cache():
    arrays = draw(dtype=np.float32)
    out, end = la.softmax_attention(**arrays, return_state=True)
    first = {n: np.swapaxes(y, 1, 2) if n != "sinks" else y for n, y in arrays.items()}
    assert first["bias"].shape == (2, 2, T, T)
    np.testing.assert_array_equal(la.softmax_attention(**first, layout="heads_first"), np.swapaxes(out, 1, 2))
    np.testing.assert_array_equal(end.k[:, :T], arrays["k"])
    half = arrays | {"bias": arrays["bias"].astype(np.float16)}
    wide = arrays | {"bias": half["bias"].astype(np.float32)}
    np.testing.assert_array_equal(la.softmax_attention(**half), la.softmax_attention(**wide))
    matrix = la.influence_matrix(la.softmax_attention, **arrays)
    assert la.testing.relative_error(np.einsum("bhij,bjhv->bihv", matrix, arrays["v"]), out) <= 1e-5


@pytest.mark.parametrize("name", ["torch", "jax.numpy"])
def test_arrays_of_frameworks(name):
    """Values and gradients of torch tensors; JAX arrays, traced too."""
    library = pytest.importorskip(name)
    arrays = draw(dtype=np.float32)
    out, pullback = la.vjp(la.softmax_attention, **arrays)
    if name == "torch":
        given = {n: library.tensor(y, requires_grad=True) for n, y in arrays.items()}
        found = la.softmax_attention(**given)
        found.sum().backward()
        expected = pullback(np.ones_like(out)).bias
        assert la.testing.relative_error(given["bias"].grad.numpy(), expected) <= 1e-6
        found = found.detach().numpy()
    else:
        import jax

        given = {n: library.asarray(y) for n, y in arrays.items()}
        found = np.asarray(jax.jit(lambda x: la.softmax_attention(**x))(given))
    assert la.testing.relative_error(found, out) <= 1e-6


def test_the_bits_of_a_batch():
    arrays = draw(dtype=np.float32)
    one = {n: y[1:] if n != "sinks" else y for n, y in arrays.items()}
    out, pullback = la.vjp(la.softmax_attention, **arrays)
    alone, back = la.vjp(la.softmax_attention, **one)
    np.testing.assert_array_equal(out[1:], alone)
    np.testing.assert_array_equal(pullback(out).bias[1:], back(alone).bias)


BAD = {
    "bias has shape (2, 21, 2, 20), expected (B, T, Hq, T) = (2, 21, 2, 21)": {"bias": np.ones((2, T, 2, T - 1))},
    "bias with cu_seqlens, expected one of them: bias has an entry for each pair of tokens of the call":
        {"cu_seqlens": [0, 3, T]},
    "bias with state, expected one of them: bias has an entry for each pair of tokens of the call":
        {"state": la.KeyValueCache(np.ones((2, 4, 2, K)), np.ones((2, 4, 2, V)), np.ones(2))},
    "bias with fewer queries than tokens, expected as many": {"q": np.ones((2, 7, 2, K))},
    "bias with reverse=True, expected no bias: all arrays in reverse order, this one on both axes of tokens, are the "
    "same call": {"reverse": True},
}  # fmt: skip


@pytest.mark.parametrize(("message", "given"), BAD.items(), ids=BAD)
def test_bad_input(message, given):
    arrays = draw()
    if "cu_seqlens" in given:
        arrays = {n: y[:1] if n != "sinks" else y for n, y in arrays.items()}
    with pytest.raises(ValueError, match="bias") as error:
        la.softmax_attention(**arrays | given)
    assert str(error.value) == f"softmax_attention: {message}"
