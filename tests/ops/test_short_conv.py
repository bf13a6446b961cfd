"""The causal short convolution and the gated norm: their definitions, token by token, and their transposes."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.ops.gated_norm import GatedNorm, gated_rms_norm, gated_rms_norm_vjp
from linattn_np.ops.short_conv import ShortConv, short_conv, short_conv_vjp

rng = np.random.default_rng(0)
T, D, W = 11, 6, 4
X, DY = rng.standard_normal((2, 2, T, D))
WEIGHT, BIAS = rng.standard_normal((D, W)), rng.standard_normal(D)
STATE = rng.standard_normal((2, W, D))
GATE, SCALE = rng.standard_normal((2, T, D)), rng.standard_normal(D)
NORMS = [GatedNorm(), GatedNorm(1e-3, "sigmoid"), GatedNorm(gate_first=True), GatedNorm(1e-5, "silu", True, 3)]


def silu(x):
    return x / (1 + np.exp(-x))


def token_by_token(x, weight, bias, state, activation, starts=()):
    """The definition, one token and one tap after the other."""
    y = np.zeros_like(x)
    for b in range(len(x)):
        for t in range(len(x[b])):
            for i in range(W):
                if any(t - i < start <= t for start in starts):
                    break
                past = x[b, t - i] if t >= i else (0 if state is None else state[b, len(state[b]) + t - i])
                y[b, t] += weight[:, W - 1 - i] * past
    y = y if bias is None else y + bias
    return silu(y) if activation else y


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("bias", "state"), [(None, None), (BIAS, STATE)], ids=["plain", "all"])
def test_every_token(bias, state, activation):
    y, end = short_conv(np, X, ShortConv(WEIGHT, bias, activation), state)
    np.testing.assert_allclose(y, token_by_token(X, WEIGHT, bias, state, activation), rtol=1e-13, atol=1e-13)
    np.testing.assert_array_equal(end, X[:, T - end.shape[1] :])
    assert end.shape[1] == (W - 1 if state is None else W)


def test_no_tap_reaches_into_another_sequence():
    starts = (0, 1, 2, 7)
    position = np.arange(T) - np.repeat(starts, np.diff([*starts, T]))
    y, _ = short_conv(np, X, ShortConv(WEIGHT, BIAS, "silu", position))
    np.testing.assert_allclose(y, token_by_token(X, WEIGHT, BIAS, None, "silu", starts), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("cut", [1, 2, 7])
def test_two_calls_with_the_state_handed_over_are_one(cut):
    whole, end = short_conv(np, X, ShortConv(WEIGHT, BIAS, "silu"))
    first, state = short_conv(np, X[:, :cut], ShortConv(WEIGHT, BIAS, "silu"))
    second, state = short_conv(np, X[:, cut:], ShortConv(WEIGHT, BIAS, "silu"), state)
    np.testing.assert_array_equal(np.concatenate([first, second], 1), whole)
    np.testing.assert_array_equal(state, end)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_transpose_of_the_convolution(activation, ragged):
    position = np.array([0, 1, 0, 0, 1, 2, 3, 4, 5, 0, 1]) if ragged else None
    arrays = {"x": X, "weight": WEIGHT, "bias": BIAS} | ({} if ragged else {"state": STATE})
    dend = rng.standard_normal(STATE.shape)

    def loss(given):
        conv = ShortConv(given["weight"], given["bias"], activation, position)
        y, end = short_conv(np, given["x"], conv, given.get("state"))
        return np.sum(y * DY) + (0 if ragged else np.sum(end * dend))

    conv = ShortConv(WEIGHT, BIAS, activation, position)
    grads = short_conv_vjp(np, X, conv, arrays.get("state"), DY, None if ragged else dend)
    by_differences(loss, arrays, grads._asdict())
    assert (grads.state is None) == ragged


@pytest.mark.parametrize("how", NORMS, ids=str)
def test_the_gated_norm_and_its_transpose(how):
    act = silu(GATE) if how.activation == "silu" else 1 / (1 + np.exp(-GATE))
    inner = X * act if how.gate_first else X
    rows = inner.reshape(2, T, -1, how.group or D)
    normed = (rows / np.sqrt(np.mean(rows**2, -1, keepdims=True) + how.eps)).reshape(X.shape) * SCALE
    expected = normed if how.gate_first else normed * act
    np.testing.assert_allclose(gated_rms_norm(np, X, GATE, SCALE, how), expected, rtol=1e-13, atol=1e-13)
    grads = gated_rms_norm_vjp(np, X, GATE, SCALE, how, DY)
    by_differences(
        lambda a: np.sum(gated_rms_norm(np, a["x"], a["gate"], a["weight"], how) * DY),
        {"x": X, "gate": GATE, "weight": SCALE},
        grads._asdict(),
    )
    assert gated_rms_norm_vjp(np, X, GATE, None, how, DY).weight is None


def by_differences(loss, arrays, grads):
    for name, x in arrays.items():
        along = rng.standard_normal(x.shape)
        numeric = (loss(arrays | {name: x + 1e-5 * along}) - loss(arrays | {name: x - 1e-5 * along})) / 2e-5
        np.testing.assert_allclose(np.sum(grads[name] * along), numeric, rtol=1e-7, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("how", NORMS, ids=str)
@pytest.mark.parametrize("rows", [1, 700, 9000])
def test_the_norm_in_compiled_loops(rows, how, dtype):
    pytest.importorskip("numba")
    from linattn_np.ops.cpu import gated_norm as compiled

    x, gate, dy = rng.standard_normal((3, rows, 2, D)).astype(dtype)
    weight, eps = SCALE.astype(dtype), np.finfo(dtype).eps
    near = {"rtol": 64 * eps, "atol": 64 * eps}
    wide = [y.astype(np.float64) for y in (x, gate, weight)]
    np.testing.assert_allclose(compiled.gated_rms_norm(x, gate, weight, how), gated_rms_norm(np, *wide, how), **near)
    found = compiled.gated_rms_norm_vjp(x, gate, weight, how, dy)
    wanted = gated_rms_norm_vjp(np, *wide, how, dy.astype(np.float64))
    for a, b, size in zip(found, wanted, (1, 1, rows), strict=True):
        np.testing.assert_allclose(a, b, rtol=64 * eps, atol=64 * eps * size**0.5 * 8)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("activation", "bias"), [(None, None), ("silu", BIAS)], ids=["plain", "all"])
@pytest.mark.parametrize("size", [(1, 1, 3), (2, 37, 6), (1, 5, 1100)])
def test_the_convolution_in_compiled_loops(size, activation, bias, dtype):
    """Channels in several blocks, tokens in several tasks, the same bits on one thread."""
    pytest.importorskip("numba")
    from linattn_np.ops.cpu import short_conv as compiled
    from linattn_np.runtime import threads

    B, T, D = size
    x, dy = rng.standard_normal((2, B, T, D)).astype(dtype)
    weight = rng.standard_normal((D, W)).astype(dtype)
    bias = None if bias is None else rng.standard_normal(D).astype(dtype)
    place, conv = np.broadcast_to(np.arange(T), (B, T)), ShortConv(weight, bias, activation)
    given = (x, weight.T, bias, place)
    eps = 64 * np.finfo(dtype).eps
    np.testing.assert_allclose(compiled.short_conv(*given, silu=activation is not None), short_conv(np, x, conv)[0],
                               rtol=eps, atol=eps)  # fmt: skip
    grads = compiled.short_conv_vjp(*given, silu=activation is not None, dy=dy)
    wanted = short_conv_vjp(np, x, conv, None, dy)
    for a, b in zip(grads, (wanted.x, wanted.weight.T, wanted.bias), strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            np.testing.assert_allclose(a, b, rtol=eps, atol=8 * eps)
    with threads.limited(1):
        again = compiled.short_conv_vjp(*given, silu=activation is not None, dy=dy)
    for a, b in zip(grads, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_token_as_a_view():
    """x[:, None] has a stride of 0 between its tokens, of which there is one."""
    pytest.importorskip("numba")
    from linattn_np.ops.cpu import short_conv as compiled

    x, weight = rng.standard_normal((5, 6))[:, None], rng.standard_normal((6, W))
    y = compiled.short_conv(x, weight.T, None, np.zeros((5, 1), np.int64), silu=False)
    np.testing.assert_allclose(y, short_conv(np, x, ShortConv(weight, None, None))[0], rtol=1e-14)
