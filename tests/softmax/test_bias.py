"""Softmax attention with a bias per pair: the loop, gradients, what other functions are with it, errors."""

from __future__ import annotations

import importlib
import itertools

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


def rows(arrays, start, stop, columns):
    """The tokens start..stop, with these columns of their bias."""
    given = {n: y if n == "sinks" else y[:, start:stop] for n, y in arrays.items()}
    return given | {"bias": arrays["bias"][:, start:stop, :, columns]}


@every_how
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_two_halves_are_the_whole(options, how):
    arrays = draw()
    arrays["bias"][..., 5, 0, 2] = 0.5
    (whole, end), pullback = la.vjp(la.softmax_attention, **arrays, **options, return_state=True)
    first = la.softmax_attention(**rows(arrays, 0, 12, slice(12)), **options, return_state=True)
    L = first.state.v.shape[1]
    columns = [p for slot in range(L) for p in range(12) if p % L == slot and p >= 12 - L] + list(range(12, T))
    rest = rows(arrays, 12, T, columns)
    (out, last), back = la.vjp(la.softmax_attention, **rest, **options, **how, state=first.state, return_state=True)
    assert la.testing.relative_error(np.concatenate([first.out, out], axis=1), whole) <= 1e-12
    for x, y in zip(last, end, strict=True):
        np.testing.assert_array_equal(x, y)
    dout = np.random.default_rng(1).standard_normal(out.shape)
    grads = back(dout)
    expected = pullback(np.concatenate([np.zeros_like(first.out), dout], axis=1))
    assert la.testing.relative_error(grads.bias, expected.bias[:, 12:, :, columns]) <= 1e-11
    assert la.testing.relative_error(grads.k, expected.k[:, 12:]) <= 1e-11
    assert la.testing.relative_error(grads.state.v, expected.v[:, columns[:L]]) <= 1e-11
    la.testing.check_vjp(la.softmax_attention, **rest, **options, **how, state=first.state)


@every_how
def test_one_token_and_a_buffer(how):
    """Empty slots are not read, whatever their bias; the oldest tokens are forgotten first."""
    arrays, how = draw(), {n: x for n, x in how.items() if n != "chunk_size"}
    whole = la.softmax_attention(**arrays)
    shape = (2, 32, 2)
    buffer = la.KeyValueCache(np.full((*shape, K), 9.0), np.full((*shape, V), 9.0), np.zeros(2))
    for t in range(T):
        one = {n: y if n == "sinks" else y[:, t] for n, y in arrays.items()}
        bias = np.full((2, 2, 33), 7.0)
        bias[..., :t], bias[..., 32] = one["bias"][..., :t], one["bias"][..., t]
        out = la.step(la.softmax_attention, **one | {"bias": bias}, **how, state=buffer, overwrite_state=True)
        assert la.testing.relative_error(out, whole[:, t]) <= 1e-12
    small = la.KeyValueCache(buffer.k[:, :4].copy(), buffer.v[:, :4].copy(), np.full(2, 4.0))
    for _ in range(2):
        last = rows(arrays, 4, 6, [0, 1, 2, 3, 4, 5])
        out = la.softmax_attention(**last, **how, state=small)
        assert la.testing.relative_error(out, whole[:, 4:6]) <= 1e-12


@every_how
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_packed_sequences_are_one_by_one(options, how):
    offsets, rng = [0, 3, 3, 12, T], np.random.default_rng(2)
    arrays = draw(B=(1,))
    state = la.testing.sample_state(la.softmax_attention, rng, (4,), options, K=K, V=V)
    L = state.v.shape[1]
    bias = rng.standard_normal((1, T, 2, L + T))
    for begin, given in ((None, arrays | {"bias": bias[..., L:]}), (state, arrays | {"bias": bias})):
        packed = {**given, **options, **how, "cu_seqlens": offsets}
        out, end = la.softmax_attention(**packed, state=begin, return_state=True)
        slots = 0 if begin is None else L
        for n, (a, b) in enumerate(itertools.pairwise(offsets)):
            columns = [*range(slots), *range(slots + a, slots + b)]
            one = None if begin is None else la.KeyValueCache(*(y[n : n + 1] for y in begin))
            found = la.softmax_attention(**rows(given, a, b, columns), **options, **how, state=one)
            np.testing.assert_array_equal(out[:, a:b], found)
        plain = {n: y for n, y in packed.items() if n != "bias"}
        _, expected = la.softmax_attention(**plain, state=begin, return_state=True)
        for x, y in zip(end, expected, strict=True):
            np.testing.assert_array_equal(x, y)
        la.testing.check_vjp(la.softmax_attention, **packed | ({} if begin is None else {"state": begin}))


def test_all_queries_of_a_cache_and_other_libraries():
    """Without causality; the results of torch and JAX are NumPy's."""
    arrays, rng = draw(Tq=7), np.random.default_rng(3)
    state = la.testing.sample_state(la.softmax_attention, rng, (2,), {}, K=K, V=V)
    L = state.v.shape[1]
    given = arrays | {"bias": rng.standard_normal((2, 7, 2, L + T))}
    out = la.softmax_attention(**given, state=state, causal=False)
    joined = {n: np.concatenate([getattr(state, n), arrays[n]], axis=1) for n in "kv"}
    expected = la.softmax_attention(**given | joined, causal=False)
    assert la.testing.relative_error(out, expected) <= 1e-13
    for name in ("torch", "jax.numpy"):
        try:
            library = importlib.import_module(name)
        except ImportError:
            continue
        as_array = library.as_tensor if name == "torch" else library.asarray
        found = la.softmax_attention(**{n: as_array(y) for n, y in given.items()},
                                     state=la.KeyValueCache(*map(as_array, state)), causal=False)  # fmt: skip
        assert la.testing.relative_error(np.asarray(found), out) <= (1e-13 if name == "torch" else 1e-5)


BAD = {
    "bias has shape (2, 21, 2, 20), expected (B, T, Hq, T) = (2, 21, 2, 21)": {"bias": np.ones((2, T, 2, T - 1))},
    "bias has 21 columns, expected L + T = 4 + 21: one for each slot of the state, then one for each token":
        {"state": la.KeyValueCache(np.ones((2, 4, 2, K)), np.ones((2, 4, 2, V)), np.ones(2))},
    "bias with fewer queries than tokens, expected as many": {"q": np.ones((2, 7, 2, K))},
    "bias with reverse=True, expected no bias: all arrays in reverse order, this one on both axes of tokens, are the "
    "same call": {"reverse": True},
}  # fmt: skip


@pytest.mark.parametrize(("message", "given"), BAD.items(), ids=BAD)
def test_bad_input(message, given):
    arrays = draw()
    with pytest.raises(ValueError, match="bias") as error:
        la.softmax_attention(**arrays | given)
    assert str(error.value) == f"softmax_attention: {message}"
