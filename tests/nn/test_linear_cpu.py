"""Dense layers by compiled loops: values, the same bits however rows are cut, and replays of layers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans
from linattn_np.call.replay.vjp import Forward
from linattn_np.layers.functions import formula
from linattn_np.layers.parts import linears
from linattn_np.ops.rows import all_times, all_times_vjp
from linattn_np.runtime import threads
from tests.nn.table import normal

pytest.importorskip("numba")
loops = pytest.importorskip("linattn_np.ops.cpu.linear")
WIDTHS = (3, 37, 1, 16, 130, 5, 2, 33, 7)  # more than a kernel has
ROWS = (1, 2, 5, 63, 64, 65, 200)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("K", [1, 6, 70])
def test_products_and_gradients_equal_numpy(dtype, R, K):
    x, Ws = normal(R, K).astype(dtype), [normal(K, M).astype(dtype) for M in WIDTHS]
    biases = [normal(M).astype(dtype) if n % 2 else None for n, M in enumerate(WIDTHS)]
    dys = [normal(R, M).astype(dtype) for M in WIDTHS]
    close = {"rtol": 0, "atol": 40 * np.finfo(dtype).eps * max(R, K, sum(WIDTHS)) ** 0.5 * 10}
    for y, W, b in zip(all_times(np, x, Ws, biases), Ws, biases, strict=True):
        np.testing.assert_allclose(y, x.astype(float) @ W + (0 if b is None else b), **close)
    dx, dWs = all_times_vjp(np, x, Ws, dys)
    np.testing.assert_allclose(dx, sum(d.astype(float) @ W.T for d, W in zip(dys, Ws, strict=True)), **close)
    for dW, d in zip(dWs, dys, strict=True):
        np.testing.assert_allclose(dW, x.T.astype(float) @ d, **close)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("K", "M"), [(24, 1), (24, 5), (24, 40), (24, 70), (300, 300), (70, 1100), (600, 130)])
def test_a_row_has_the_bits_that_it_has_alone(K, M, dtype):
    x, W, b, dy = (normal(*shape).astype(dtype) for shape in ((200, K), (K, M), (M,), (200, M)))
    whole, pullback = la.vjp(la.nn.linear, x, W, b)
    dx = pullback(dy).x
    for n, m in itertools.pairwise((0, 1, 3, 67, 131, 200)):
        own, pullback = la.vjp(la.nn.linear, x[n:m], W, b)
        assert own.tobytes() == whole[n:m].tobytes()
        assert pullback(dy[n:m]).x.tobytes() == dx[n:m].tobytes()


@pytest.mark.parametrize("count", [2, 3])
def test_the_bits_do_not_depend_on_threads(count):
    x, Ws = normal(700, 70).astype(np.float32), [normal(70, M).astype(np.float32) for M in WIDTHS]
    dys = [normal(700, M).astype(np.float32) for M in WIDTHS]
    found = []
    for n in (1, count):
        with threads.limited(n):
            dx, dWs = all_times_vjp(np, x, Ws, dys)
            found.append([y.tobytes() for y in (*all_times(np, x, Ws, [None] * len(Ws)), dx, *dWs)])
    assert found[0] == found[1]


def test_strided_rows_and_transposed_weights_are_inputs():
    x, W = normal(9, 12).astype(np.float32)[:, ::2], normal(7, 6).astype(np.float32).T
    np.testing.assert_array_equal(la.nn.linear(x, W), la.nn.linear(x.copy(), W.copy()))
    grads = [la.vjp(la.nn.linear, *each)[1](np.ones((9, 7), np.float32)) for each in ((x, W), (x.copy(), W.copy()))]
    for a, b in zip(*grads, strict=True):
        np.testing.assert_array_equal(a, b)


def test_products_of_nan_and_inf_stay_in_their_rows():
    x, W = normal(70, 5).astype(np.float32), normal(5, 40).astype(np.float32)
    x[3], x[66] = np.nan, np.inf
    y = la.nn.linear(x, W)
    assert not np.isfinite(y[[3, 66]]).any()
    assert np.isfinite(np.delete(y, [3, 66], 0)).all()


@pytest.mark.parametrize("R", [1, 70, 200])
def test_large_weights(R):
    """Several of one kernel, with and without copies of their strips, more columns than a task has, deep sums."""
    x, Ws = normal(R, 270).astype(np.float32), [normal(270, M).astype(np.float32) for M in (300, 2, 1100)]
    assert not loops.are_small(*Ws)
    dys = [normal(R, W.shape[1]).astype(np.float32) for W in Ws]
    close = {"rtol": 0, "atol": 1e-5 * 1400**0.5 * 4}
    for y, W in zip(all_times(np, x, Ws, [None] * 3), Ws, strict=True):
        np.testing.assert_allclose(y, x.astype(float) @ W, **close)
    dx, dWs = all_times_vjp(np, x, Ws, dys)
    np.testing.assert_allclose(dx, sum(d.astype(float) @ W.T for d, W in zip(dys, Ws, strict=True)), **close)
    for dW, d in zip(dWs, dys, strict=True):
        np.testing.assert_allclose(dW, x.T.astype(float) @ d, **close)


# layers as one plan


@pytest.fixture
def no_plan(monkeypatch):
    monkeypatch.setattr(plans, "by_key", {})
    monkeypatch.setattr(plans, "held", ({}, {}))


def step_of(model, params, ids, labels):
    loss, pullback = la.vjp(model.loss, params, ids, labels)
    return [loss.tobytes(), *(d.tobytes() for _, d in sorted(pullback(1.0).params.items()))]


@pytest.mark.parametrize("name", ["gated_delta_rule", "gla", "softmax_attention", "mamba2", "rwkv7", "hgrn2"])
def test_a_repeated_step_has_the_same_bits(name, no_plan, monkeypatch):
    model = la.layers.language_model(11, D=16, layers=2, heads=2, mixers=name)
    params = [model.loss.init(np.random.default_rng(n)) for n in range(2)]
    ids = [np.random.default_rng(n).integers(0, 11, (2, 20)) for n in range(3)]
    found = [step_of(model, params[n], ids[n], ids[n + 1]) for _ in range(4) for n in range(2)]
    with monkeypatch.context() as m:
        m.setattr(plans, "ENABLED", False)
        m.setattr(plans, "by_key", {})
        alone = [step_of(model, params[n], ids[n], ids[n + 1]) for n in range(2)]
    assert found == alone * 4


def test_the_block_of_gated_delta_net_is_one_plan(no_plan):
    model = la.layers.language_model(11, D=16, layers=2, heads=2)
    params, ids = model.loss.init(np.random.default_rng(0)), np.random.default_rng(1).integers(0, 11, (2, 20))
    for _ in range(5):
        step_of(model, params, ids, ids)
    layers = [p for key, p in plans.by_key.items() if key[1][0].startswith("layer") and type(p) is Forward]
    assert any(p.replayable and max(len(s._launches) for s in p.pullbacks.values()) > 40 for p in layers)


def test_a_model_with_its_loss_is_one_plan(no_plan):
    model = la.layers.language_model(11, D=16, layers=2, heads=2)
    params = model.loss.init(np.random.default_rng(0))
    ids, labels = np.random.default_rng(1).integers(0, 11, (2, 2, 20))
    for _ in range(3):
        step_of(model, params, ids, labels)
    (plan,) = plans.by_key.values()
    assert type(plan) is Forward
    assert plan.replayable
    held = [x for check in plan.checks for x in check.args[2].values() if isinstance(x, np.ndarray)]
    assert len(plan.checks) == 2
    assert len(held) == 1  # in place of the hidden states
    assert not any(any(x.strides) for x in held)  # shapes, no array of the call


def test_a_recorded_loss_checks_its_labels_again(no_plan, monkeypatch):
    model = la.layers.language_model(11, D=16, layers=1, heads=2)
    params = model.loss.init(np.random.default_rng(0))
    ids, labels = np.random.default_rng(1).integers(0, 11, (2, 2, 20))
    few = np.where(ids % 3 == 0, -100, labels)  # not all have a loss: other kernels
    for _ in range(3):
        whole = step_of(model, params, ids, labels)
    found = step_of(model, params, ids, few)
    with pytest.raises(ValueError, match="labels has the number 12"):
        la.vjp(model.loss, params, ids, np.where(few < 0, 12, labels))
    with pytest.raises(ValueError, match="ids has the number -1"):
        la.vjp(model.loss, params, ids - 1 - ids.min(), labels)
    assert step_of(model, params, ids, labels) == whole != found
    with monkeypatch.context() as m:
        m.setattr(plans, "ENABLED", False)
        m.setattr(plans, "by_key", {})
        assert step_of(model, params, ids, few) == found


def test_integers_that_are_no_array_of_a_layer_prevent_its_plan(no_plan):
    table = la.layers.parts.embedding(11, 4)
    shifted = la.layers.compose(("next", formula(lambda n: n + 1, lambda d, n: [None]), "ids"), ("y", table, "next"),
                                given="ids")  # fmt: skip
    params, ids = shifted.init(np.random.default_rng(0)), np.arange(10)
    for n in (0, 0, 0, -1):
        y, pullback = la.vjp(shifted, params, ids + n)
        pullback(np.ones((10, 4), np.float32))
        np.testing.assert_array_equal(y, params["y/weight"][ids + n + 1])
    with pytest.raises(ValueError, match="ids has the number 11"):
        la.vjp(shifted, params, ids + 1)


def test_a_recorded_layer_checks_its_ids_again(no_plan):
    table = la.layers.parts.embedding(11, 4)
    model = la.layers.compose(("rows", table, "ids"), ("y", la.layers.linear(4, 3), "rows"), given="ids")
    params, ids = model.init(np.random.default_rng(0)), np.arange(11)
    for _ in range(3):
        _, pullback = la.vjp(model, params, ids)
        pullback(np.ones((11, 3), np.float32))
    with pytest.raises(ValueError, match="ids has the number 11"):
        la.vjp(model, params, ids + 1)


def test_several_dense_layers_are_those_of_each():
    own = linears(5, {"a": 3, "b": 70}, {"b": la.layers.init.zeros(70)})
    params, x = own.init(np.random.default_rng(0)), normal(4, 5).astype(np.float32)
    params["b/bias"] += 1
    a, b = own(params, x)
    assert a.tobytes() == la.nn.linear(x, params["a/weight"]).tobytes()
    assert b.tobytes() == la.nn.linear(x, params["b/weight"], params["b/bias"]).tobytes()
