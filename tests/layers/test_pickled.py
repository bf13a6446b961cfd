"""Layers and schedules are pickled, as for processes that train; a copy computes the same bits."""

from __future__ import annotations

import copy
import inspect
import pickle

import numpy as np
import pytest

import linattn_np as la
from linattn_np.layers import init
from linattn_np.train import constant, cosine
from tests.layers.test_layers import LAYERS
from tests.layers.test_mixers import HYBRID, NAMES, small, tokens

COPIES = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy, "copy": copy.copy}
copied = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


def bits(x):
    return {n: y.tobytes() for n, y in x.items()}


def assert_same(layer, other, *arrays):
    """The same initial parameters, outputs and gradients."""
    params, own = (one.init(np.random.default_rng(0)) for one in (layer, other))
    assert bits(params) == bits(own)
    (y, pull), (z, back) = la.vjp(layer, params, *arrays), la.vjp(other, own, *arrays)
    assert y.tobytes() == z.tobytes()
    dy = np.ones_like(y)
    assert bits(pull(dy).params) == bits(back(dy).params)
    assert (other.__name__, other.given, other.gives) == (layer.__name__, layer.given, layer.gives)


@copied
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layers(layer, copied):
    x = np.random.default_rng(1).standard_normal((2, 7, 6)).astype(np.float32)
    assert_same(layer, copied(layer), x)


@pytest.mark.parametrize("names", [*NAMES, HYBRID], ids=str)
def test_language_models(names):
    model, (ids, labels) = small(names, recompute=names == HYBRID), tokens()
    found = pickle.loads(pickle.dumps(model))
    assert type(found) is la.layers.Model
    assert_same(model.loss, found.loss, ids, labels)
    params = model.logits.init(np.random.default_rng(0))
    (y, state), (z, end) = (one(params, ids, return_state=True) for one in (model.logits, found.logits))
    assert y.tobytes() == z.tobytes()
    assert state.keys() == end.keys()


def square(x):
    return x * x


def square_vjp(dy, x):
    return [2 * x * dy]


ONE, SIZES = la.layers.linear(6, 4), la.layers.Sizes(6)
MAKERS = {  # functions that return a layer, and arguments
    "affine": [2.0], "block": [6, la.layers.linear(6, 6)], "by_heads": [2, 3], "chain": {"one": ONE},
    "channel_mixing_6": [6, 5], "channel_mixing_7": [6, 5], "compose": [("y", ONE, "x")], "embedding": [4, 6],
    "formula": [square, square_vjp], "function": [la.nn.silu], "gated_attention": [6, 2, 4, 1], "gated_norm": [6],
    "linear": [6, 4], "linears": [6, {"a": 2}, {"a": init.ones(2)}], "low_rank": [6, 2, 6, init.zeros(6)],
    "merged": [2, 3], "mixer": ["gla", SIZES], "multiply": [], "parameter": [la.nn.silu, init.normal(3)],
    "recomputed": [ONE], "rms_norm": [6], "rotary": [], "short_conv": [6], "squared_relu": [6, 5], "stack": [[ONE]],
    "swiglu": [6, 5], "time_mixing_6": [SIZES], "time_mixing_7": [SIZES],
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
def test_what_each_public_function_returns(name):
    make, given = getattr(la.layers, name), MAKERS[name]
    layer = make(**given) if isinstance(given, dict) else make(*given)
    found = pickle.loads(pickle.dumps(layer))
    drawn = (one.init(np.random.default_rng(0)) for one in (layer, found))
    assert bits(next(drawn)) == bits(next(drawn))
    assert (found.__name__, found.given, found.gives) == (layer.__name__, layer.given, layer.gives)
    other = found.named("other", " ".join(f"{n}_" for n in found.given))
    assert pickle.loads(pickle.dumps(other)).given == other.given


def test_the_table_has_every_function_that_returns_a_layer():
    every = {n: getattr(la.layers, n) for n in la.layers.__all__}
    made = {n for n, f in every.items() if inspect.isfunction(f)
            and inspect.signature(f).return_annotation == "Layer"}  # fmt: skip
    assert made == MAKERS.keys() | {"mix"}  # whose mixer has functions


INITS = [init.normal(3, 4), init.normal(3, std=2.0), init.uniform(3, bound=1.0), init.full(3, value=2.0), init.ones(2),
         init.zeros(2), init.spaced(2, 5, first=0.0, last=1.0), init.log_uniform(4, low=1.0, high=16.0),
         init.step_bias(4)]  # fmt: skip


@pytest.mark.parametrize("one", INITS, ids=lambda one: one.draw.func.__name__)
def test_initialisations(one):
    other = pickle.loads(pickle.dumps(one))
    draws = [each.draw(np.random.default_rng(0), each.shape) for each in (one, other)]
    assert draws[0].shape == one.shape
    assert np.array_equal(*draws)


@pytest.mark.parametrize(
    "rate", [constant(0.1), cosine(0.1, 20), cosine(0.1, 20, 0.0, 0.01)], ids=["constant", "cosine", "last"]
)
def test_schedules(rate):
    other = pickle.loads(pickle.dumps(rate))
    assert [rate(n) for n in range(25)] == [other(n) for n in range(25)]


def test_a_layer_of_a_local_function_and_a_pullback_are_not():
    layer = la.layers.Layer(lambda mode, params, xs, states: (xs, {}, None), {}, ["x"])
    assert copy.deepcopy(layer)({}, 1.0) == 1.0
    _, pullback = la.vjp(ONE, ONE.init(np.random.default_rng(0)), np.ones((1, 2, 6), np.float32))
    for x in (layer, la.layers.formula(lambda x: x, square_vjp), pullback):
        with pytest.raises((AttributeError, pickle.PicklingError), match=r"lambda|pullback"):
            pickle.dumps(x)
