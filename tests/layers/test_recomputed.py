"""Recomputed layers: the bits of the layer, the memory of one block and of the inputs of all."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans
from linattn_np.layers import chain, compose, function, linear, recomputed
from linattn_np.nn.declaration import Piece
from tests.layers.test_layers import derivative, normal
from tests.layers.test_mixers import HYBRID, NAMES, drawn, small, tokens

MODELS = pytest.mark.parametrize("names", [*NAMES, HYBRID], ids=str)


def both(names):
    """A model, and one whose blocks are recomputed."""
    layers = len(names) if names is HYBRID else 2
    return small(names, layers), small(names, layers, recompute=True)


def bits(x):
    """The bytes of arrays in dicts and tuples."""
    if isinstance(x, dict):
        return {n: bits(y) for n, y in x.items()}
    return tuple(map(bits, x)) if isinstance(x, tuple) else None if x is None else np.asarray(x).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda kind: kind.__name__)
@MODELS
def test_losses_and_gradients_have_the_bits_of_the_model(names, dtype):
    """The first call, one that is recorded, and replayed ones."""
    model, again = both(names)
    params, (ids, labels) = {n: x.astype(dtype) for n, x in drawn(model).items()}, tokens()
    for _ in range(3):
        each = [la.vjp(m.loss, params, ids, labels) for m in (model, again)]
        (loss, grads), (other, others) = ((bits(loss), bits(pull(1.0).params)) for loss, pull in each)
        assert loss == other
        assert grads == others
    assert bits(again.loss(params, ids, labels)) == bits(model.loss(params, ids, labels))


def like(states):
    """Cotangents of states; None of the number of tokens so far."""

    def one(S):
        return np.cos(np.arange(S.size)).reshape(S.shape).astype(S.dtype) if isinstance(S, np.ndarray) else None

    return {n: type(S)(*map(one, S)) if isinstance(S, tuple) else one(S) for n, S in states.items()
            if not isinstance(S, int)}  # fmt: skip


@pytest.mark.parametrize("names", [HYBRID, "rwkv7", "mamba3", "titans_linear", "hgrn"], ids=str)
def test_states_and_their_gradients_have_the_bits_of_the_model(names):
    model, again = both(names)
    params, (ids, _) = drawn(model), tokens()
    dlogits, found = normal(*ids.shape, 9), []
    for m in (model, again):
        (first, state), pull_first = la.vjp(m.logits, params, ids, return_state=True)
        (last, end), pull = la.vjp(m.logits, params, ids, state=state, return_state=True)
        grads = pull(dlogits, like(end))
        found.append(
            bits((first, state, last, end, grads.params, grads.state, pull_first(dlogits, like(state)).params))
        )
    assert found[0] == found[1]
    assert found[0][5]


def test_gradients_are_central_differences():
    """Of a layer with two arrays and two outputs, one of them read by nobody outside."""
    inner = compose(("a", linear(6, 4), "x"), ("b", linear(6, 4), "y"), ("c", function(la.nn.swiglu, "x gate"), "a b"),
                    given="x y", gives="c a")  # fmt: skip
    layer = compose(("c a", recomputed(inner), "x y"), ("out", linear(4, 3), "c"), given="x y", gives="out a")
    x, params = (
        {n: normal(2, 5, 6 + 0 * i) + i for i, n in enumerate("xy")},
        layer.init(np.random.default_rng(0), float),
    )
    (out, a), pull = la.vjp(layer, params, x["x"], x["y"])
    d = normal(*out.shape), normal(*a.shape)
    for cotangents in (d, (d[0], None)):
        grads = pull(cotangents)

        def value(p, cotangents=cotangents):
            ys = layer({n: p[n] for n in params}, p["x"], p["y"])
            return sum(np.sum(y * dy) for y, dy in zip(ys, cotangents, strict=True) if dy is not None)

        along = {n: normal(*y.shape) for n, y in (params | x).items()}
        slope = sum(np.sum(grads.params[n] * along[n]) for n in params)
        slope += sum(np.sum(getattr(grads, n) * along[n]) for n in x)
        assert np.isclose(slope, derivative(value, params | x, along), rtol=1e-9)


def test_drawn_numbers_are_drawn_once():
    """The mask of dropout is that of the forward; the generator goes on as without recomputation."""

    def twice(rng, wrap):
        drop = function(la.nn.dropout, p=0.5, rng=rng)
        return chain(one=wrap(chain(up=linear(6, 4), drop=drop)), two=wrap(wrap(chain(down=linear(4, 6), drop=drop))))

    x, found = normal(3, 7, 6), []
    for wrap in (lambda layer: layer, recomputed):
        layer = twice(rng := np.random.default_rng(5), wrap)
        params = layer.init(np.random.default_rng(0), np.float64)
        y, pull = la.vjp(layer, params, x)
        found.append(bits((y, tuple(pull(y)), tuple(pull(2 * y)), rng.standard_normal(3))))
    assert found[0] == found[1]


def test_a_recomputed_block_is_replayed_and_its_model_is_not(monkeypatch):
    """No piece is checked again: a block is one recorded plan, forward and pullback."""
    pytest.importorskip("numba")
    monkeypatch.setattr(plans, "by_key", {})
    model = small("gated_delta_rule", recompute=True)
    params, (ids, labels) = model.loss.init(np.random.default_rng(0)), tokens()
    for _ in range(3):
        la.vjp(model.loss, params, ids, labels)[1](1.0)
    entered, real = [], Piece.entered
    monkeypatch.setattr(Piece, "entered", lambda own, given: entered.append(own.name) or real(own, given))
    la.vjp(model.loss, params, ids, labels)[1](1.0)
    assert not entered
    assert plans.computed_in_full in plans.by_key.values()


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "in full"])
def test_memory_is_that_of_one_block_and_of_all_inputs(replay, monkeypatch):
    monkeypatch.setattr(plans, "ENABLED", replay)
    T, D = 2048, 32

    def peak(layers, **options):
        model = la.layers.language_model(16, D=D, layers=layers, heads=2, **options)
        params, ids = model.loss.init(np.random.default_rng(0)), np.arange(T)[None] % 16
        la.vjp(model.loss, params, ids, ids)[1](1.0)  # compiles
        la.clear_cache()  # memory that is used again is not seen
        tracemalloc.start()
        la.vjp(model.loss, params, ids, ids)[1](1.0)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    one, plain, again = peak(1), peak(8), peak(8, recompute=True)
    assert plain > 3 * one
    assert again - one < (plain - one) / 8  # of seven more blocks: inputs and gradients of parameters


def test_the_logits_of_a_long_text_do_not_exist_at_once():
    """8192 tokens of 50,000: all logits would take 1563 MiB."""
    T, V = 8192, 50_000
    model = la.layers.language_model(V, D=8, layers=1, mixers="simple_gla")
    params, ids = model.loss.init(np.random.default_rng(0)), np.arange(T)[None] * 7 % V
    la.vjp(model.loss, params, ids[:, :65], ids[:, :65])[1](1.0)  # compiles
    la.clear_cache()
    tracemalloc.start()
    grads = la.vjp(model.loss, params, ids, ids)[1](1.0).params
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert grads["head/weight"].shape == (8, V)
    assert most < 80 * 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("names", [HYBRID, "gla", "rwkv7", "selective_scan", "mlstm"], ids=str)
def test_bits_and_memory_on_a_gpu(names, dtype):
    """Also where a forward without gradients has other bits than the one of training."""
    cupy = pytest.importorskip("cupy")
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.float32
    found, used = [], []
    for recompute in (False, True):
        model = la.layers.language_model(64, D=128, layers=6, mixers=names, heads=2, recompute=recompute)
        given = model.loss.init(np.random.default_rng(0))
        params = {n: cupy.asarray(x.astype(kind)) for n, x in given.items()}
        ids = cupy.asarray(np.random.default_rng(1).integers(0, 64, (2, 1024)))
        for _ in range(2):
            loss, pull = la.vjp(model.loss, params, ids, ids)
            used.append(cupy.get_default_memory_pool().used_bytes())
            grads = pull(1.0).params
            found.append((loss.get().tobytes(), {n: d.get().tobytes() for n, d in grads.items()}))
            del pull, grads
    assert found[0] == found[1] == found[2] == found[3]
    assert used[3] < used[1]
