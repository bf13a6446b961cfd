"""Layers: values are named, gradients are those of the parts in reverse, states and parameters have paths."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.layers import (
    affine,
    chain,
    compose,
    function,
    linear,
    linears,
    multiply,
    short_conv,
    squared_relu,
    swiglu,
)
from linattn_np.runtime import blas, threads

B, T, D = 2, 7, 6


def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def derivative(f, arrays, along, step=1e-5):
    """The slope of f(arrays) in a direction, of fourth order in the step."""

    def at(s):
        return f({n: x + s * step * along[n] for n, x in arrays.items()})

    return (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)


def diamond():
    """x is read twice, and y is given anew."""
    return compose(
        ("a", linear(D, 4), "x"),
        ("y", chain(project=linear(D, 4, bias=True), twice=affine(2.0, 0.5)), "x"),
        ("y", multiply(), "a y"),
    )


LAYERS = {
    "diamond": diamond(),
    "swiglu": swiglu(D, 5),
    "squared_relu": squared_relu(D, 5),
    "conv": chain(up=linear(D, 3), conv=short_conv(3, 4), down=linear(3, D)),
    "channel_mixing_6": la.layers.channel_mixing_6(D, 5),
    "channel_mixing_7": la.layers.channel_mixing_7(D, 5),
}
layers = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


@layers
def test_gradients_are_central_differences(layer):
    x, params = normal(B, T, D), layer.init(np.random.default_rng(0), np.float64)
    params = {n: p + 0.1 * normal(*p.shape) for n, p in params.items()}
    y, pullback = la.vjp(layer, params, x)
    assert np.array_equal(y, layer(params, x))
    dy = normal(*y.shape)
    grads = pullback(dy)
    assert grads._fields == ("params", "x", "state")
    along = {n: normal(*p.shape) for n, p in params.items()}
    for only in along:
        slope = derivative(
            lambda p: np.sum(layer(p, x) * dy), params, {**dict.fromkeys(params, 0.0), only: along[only]}
        )
        assert np.isclose(np.sum(grads.params[only] * along[only]), slope, rtol=1e-8, atol=1e-9), only
    dx = normal(*x.shape)
    slope = derivative(lambda given: np.sum(layer(params, given["x"]) * dy), {"x": x}, {"x": dx})
    assert np.isclose(np.sum(grads.x * dx), slope, rtol=1e-8)


def test_halves_with_the_state_handed_over_equal_the_whole():
    layer, x = LAYERS["conv"], normal(B, T, D)
    params = layer.init(np.random.default_rng(0), np.float64)
    whole, pull = la.vjp(layer, params, x)
    (first, state), pull_first = la.vjp(layer, params, x[:, :3], return_state=True)
    assert list(state) == ["conv/state"]
    second, pull_second = la.vjp(layer, params, x[:, 3:], state=state)
    assert np.allclose(np.concatenate([first, second], axis=1), whole, rtol=1e-14)
    dy = normal(*whole.shape)
    last = pull_second(dy[:, 3:])
    before = pull_first(dy[:, :3], last.state)
    assert np.allclose(np.concatenate([before.x, last.x], axis=1), pull(dy).x, rtol=1e-13)
    for n, d in pull(dy).params.items():
        assert np.allclose(before.params[n] + last.params[n], d, rtol=1e-12, atol=1e-13), n


def test_a_step_is_one_token():
    layer, x = LAYERS["conv"], normal(B, T, D)
    params = layer.init(np.random.default_rng(0), np.float64)
    whole, state, ys = layer(params, x), None, []
    for t in range(T):
        y, state = la.step(layer, params, x[:, t], state=state, return_state=True)
        ys.append(y)
    assert np.allclose(np.stack(ys, axis=1), whole, rtol=1e-14)


def test_parameters_have_the_names_of_their_steps():
    layer = LAYERS["diamond"]
    assert list(layer.parameters) == ["a/weight", "y/project/weight", "y/project/bias"]
    assert layer.count == 2 * D * 4 + 4


def test_an_output_that_nobody_reads_has_no_gradient():
    layer = compose(("unread", linear(D, 4), "x"), ("y", linear(D, 4), "x"))
    x, params = normal(B, T, D), layer.init(np.random.default_rng(0), np.float64)
    grads = la.vjp(layer, params, x)[1](normal(B, T, 4)).params
    assert not grads["unread/weight"].any()
    assert grads["y/weight"].any()


def test_bad_parameters_are_named():
    layer, x = swiglu(D, 5).named("mlp"), normal(B, T, D)
    params = layer.init(np.random.default_rng(0), np.float64)
    with pytest.raises(
        ValueError, match=r"mlp: params has no 'project/up/weight', expected an array of shape \(6, 5\)"
    ):
        layer({n: p for n, p in params.items() if n != "project/up/weight"}, x)
    with pytest.raises(ValueError, match=r"mlp: params has 'other', which is no parameter"):
        layer({**params, "other": x}, x)
    with pytest.raises(ValueError, match=r"mlp: project/up/weight has shape \(5, 6\), expected \(6, 5\)"):
        layer({**params, "project/up/weight": params["project/up/weight"].T}, x)
    with pytest.raises(TypeError, match=r"mlp: 2 arrays were given, expected x"):
        layer(params, x, x)
    with pytest.raises(TypeError, match=r"mlp: params is a ndarray, expected a dict of arrays by path"):
        layer(x, x)


def test_steps_read_what_there_is_and_own_their_parameters():
    with pytest.raises(ValueError, match="compose: y reads 'z', expected one of x"):
        compose(("y", linear(D, 4), "z"))
    with pytest.raises(ValueError, match="compose: two steps have the parameter 'y/weight'"):
        compose(("y", linear(D, D), "x"), ("y", linear(D, D), "y"))


def test_a_function_without_a_gradient_of_integers():
    layer = function(la.nn.embedding, "ids", {"weight": la.layers.Init((5, 3), lambda rng, shape: normal(*shape))})
    params, ids = layer.init(np.random.default_rng(0), np.float64), np.array([[0, 4, 4]])
    grads = la.vjp(layer, params, ids)[1](np.ones((1, 3, 3)))
    assert grads.ids is None
    assert grads.params["weight"][:, 0].tolist() == [1, 0, 0, 0, 2]


@pytest.mark.parametrize("rows", [(2, 3), (5, 417)])
def test_dense_layers_of_one_array_are_those_of_each_weight(rows):
    """One product for all of them has the bits of nn.linear, on one thread and on three."""
    layer = linears(D, {"a": 5, "b": 2, "c": 70}, {"b": la.layers.init.ones(2)})
    x, params = normal(*rows, D), layer.init(np.random.default_rng(0), np.float64)
    ys, pull = la.vjp(layer, params, x)
    dys = [normal(*y.shape) for y in ys]
    grads = pull(tuple(dys))
    dx = 0
    for n, y, dy in zip("abc", ys, dys, strict=True):
        bias = params.get(f"{n}/bias")
        alone, pull_alone = la.vjp(la.nn.linear, x, params[f"{n}/weight"], bias)
        assert np.array_equal(alone, y)
        own = pull_alone(dy)
        assert np.array_equal(own.weight, grads.params[f"{n}/weight"])
        assert bias is None or np.array_equal(own.bias, grads.params[f"{n}/bias"])
        dx = dx + own.x
    assert np.allclose(dx, grads.x, rtol=1e-14, atol=1e-14)
    with blas.one_thread(), threads.limited(3):
        again = la.vjp(layer, params, x)[1](tuple(dys))
    assert np.array_equal(again.x, grads.x)
    assert all(np.array_equal(again.params[n], d) for n, d in grads.params.items())


def test_an_input_that_changes_before_the_pullback_is_named():
    layer, x = swiglu(D, 5).named("mlp"), normal(B, T, D)
    params = layer.init(np.random.default_rng(0), np.float64)
    y, pull = la.vjp(layer, params, x)
    params["down/weight"] *= 2
    with pytest.raises(RuntimeError, match="mlp: down/weight was changed in place after vjp"):
        pull(y)
    _, pull = la.vjp(layer, params, x)
    x += 1
    with pytest.raises(RuntimeError, match="mlp: x was changed in place after vjp"):
        pull(y)
