"""The token mixer of every variant in a language model: gradients, decoding, initial values."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.layers.published import COMPOSED
from tests.layers.test_layers import derivative

B, T, V = 2, 11, 9
NAMES = sorted({*la.layers.PUBLISHED, *COMPOSED})
mixers = pytest.mark.parametrize("name", NAMES)
HYBRID = ["gated_delta_rule", "gla", "softmax_attention"]


def small(names, layers=2, **more):
    sizes = {"K": 4} if "rwkv" in str(names) else {"K": 4, "V": 6}
    window = {"softmax_attention": {"window": 5}, "lact": {"mini_batch": 4}}
    more |= {"D": 8, "heads": 2, "hidden": 10, "options": window}
    return la.layers.language_model(V, layers=layers, mixers=names, **sizes, **more)


def drawn(model, seed=0):
    """Parameters away from special initial values."""
    rng = np.random.default_rng(seed)
    return {n: x + 0.2 * rng.standard_normal(x.shape) for n, x in model.loss.init(rng, np.float64).items()}


def tokens(seed=0):
    return np.random.default_rng(seed).integers(0, V, (2, B, T))


def test_mixers_are_variants():
    assert set(NAMES) == {fn.__name__ for fn in la.VARIANTS}


@pytest.mark.parametrize("names", [*NAMES, HYBRID], ids=str)
def test_gradients_of_a_model_are_central_differences(names):
    """Along a random direction, in which each parameter has the same share of the slope: no parameter hides."""
    model = small(names, len(names) if names is HYBRID else 2)
    params, (ids, labels) = drawn(model), tokens()
    _, pullback = la.vjp(model.loss, params, ids, labels)
    grads = pullback(1.0).params
    assert set(grads) == set(params)
    rng = np.random.default_rng(1)
    along = {n: rng.standard_normal(x.shape) for n, x in params.items()}
    for n, d in along.items():
        slope = np.sum(grads[n] * d)
        assert slope != 0, n
        d *= min(1 / abs(slope), 100 / np.abs(d).max()) / len(params)
    slope = derivative(lambda p: model.loss(p, ids, labels), params, along, step=1e-5)
    assert np.isclose(sum(np.sum(grads[n] * along[n]) for n in params), slope, rtol=1e-6)


@pytest.mark.parametrize("names", [*NAMES, HYBRID], ids=str)
def test_decoding_step_by_step_equals_the_whole(names):
    model = small(names, len(names) if names is HYBRID else 2)
    params, (ids, _) = drawn(model), tokens()
    whole, state, each = model.logits(params, ids), None, []
    logits, state = model.logits(params, ids[:, :4], return_state=True)
    for t in range(4, T):
        y, state = la.step(model.logits, params, ids[:, t], state=state, return_state=True)
        each.append(y)
    assert np.allclose(logits, whole[:, :4], rtol=0, atol=1e-11)
    assert np.allclose(np.stack(each, axis=1), whole[:, 4:], rtol=0, atol=1e-11)


@mixers
def test_an_untrained_model_knows_nothing(name):
    """The loss of initial parameters is near that of equal chances, in float32 as in float64."""
    model, (ids, labels) = small(name), tokens()
    params = model.loss.init(np.random.default_rng(2))
    loss = model.loss(params, ids, labels)
    assert abs(loss - np.log(V)) < 0.1
    wide = model.loss({n: x.astype(np.float64) for n, x in params.items()}, ids, labels)
    assert abs(loss - wide) < 1e-4


@mixers
def test_a_model_is_causal(name):
    model, (ids, _) = small(name), tokens()
    params, changed = drawn(model), ids.copy()
    changed[:, 7] = (changed[:, 7] + 1) % V
    first, second = model.logits(params, ids), model.logits(params, changed)
    assert np.array_equal(first[:, :7], second[:, :7])
    assert (first[:, 7:] != second[:, 7:]).any(axis=(0, 2)).all()


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="mixer: name is 'attention', expected one of"):
        small("attention")
    with pytest.raises(ValueError, match="language_model: mlp is 'relu', expected one of"):
        la.layers.language_model(V, mlp="relu")


def test_parameters_of_a_model_are_named_by_block():
    model = small("gated_delta_rule")
    names = [n for n in model.loss.parameters if n.startswith("blocks/1/")]
    assert {"blocks/1/mixer/project/q/weight", "blocks/1/mixer/o/A_log", "blocks/1/mlp/down/weight"} <= set(names)
    assert model.loss.parameters.keys() == model.logits.parameters.keys()
