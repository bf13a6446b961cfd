"""Rotations of queries, keys and states, and calls that make them: the same bits in every layout and each time."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from linattn_np.ops import rotary
from linattn_np.ops.rotary import rotate, rotate_rows, rotate_vjp, rotation

pytest.importorskip("numba")


def draw(K, P, V, dtype, tokens=3):
    rng = np.random.default_rng(K)
    x, angles = (rng.standard_normal(shape) for shape in ((2, tokens, 2, K), P))
    return x.astype(dtype), rotation(np, angles, np.arange(1.0, tokens + 1)[:, None, None], np.dtype(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("K", "P"), [(2, 1), (7, 2), (64, 32), (5, 0)])
@pytest.mark.parametrize("back", [False, True])
def test_channels_are_rotated_as_complex_numbers(K, P, back, dtype):
    x, turn = draw(K, P, 1, dtype)
    y = rotate(np, x, turn, dtype, back)
    z = (x[..., 0 : 2 * P : 2] + 1j * x[..., 1 : 2 * P : 2]) * (turn[0] + (-1j if back else 1j) * turn[1])
    eps = 8 * np.finfo(dtype).eps
    np.testing.assert_allclose(y[..., 0 : 2 * P : 2], z.real, rtol=0, atol=eps)
    np.testing.assert_allclose(y[..., 1 : 2 * P : 2], z.imag, rtol=0, atol=eps)
    assert np.array_equal(y[..., 2 * P :], x[..., 2 * P :])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("K", "P", "V"), [(2, 1, 1), (7, 2, 5), (64, 32, 70), (5, 0, 3)])
@pytest.mark.parametrize("back", [False, True])
def test_rows_of_a_state_are_rotated_as_columns_of_its_transpose(K, P, V, back, dtype):
    rng = np.random.default_rng(V)
    S, turn = rng.standard_normal((2, 3, K, V)).astype(dtype), draw(K, P, V, dtype, tokens=1)[1]
    for own in (S, np.concatenate([S, S], -1)[..., :V], S[:, ::-1]):
        expected = rotate(np, own.swapaxes(-1, -2), turn, dtype, back).swapaxes(-1, -2)
        np.testing.assert_allclose(rotate_rows(np, own, turn, back), expected, rtol=0, atol=8 * np.finfo(dtype).eps)


def test_kernels_equal_array_calls(monkeypatch):
    x, turn = draw(10, 4, 1, np.float64)
    S, one = x.swapaxes(-1, -2), turn[:, :1]
    compute = [lambda: rotation(np, np.arange(3.0), np.arange(4.0)[:, None], np.float64),
               lambda: rotate(np, x, turn, np.float64, True), lambda: rotate_rows(np, S, one),
               lambda: rotate_vjp(np, x, turn, x[:, ::-1], True)[1]]  # fmt: skip
    found = [f() for f in compute]
    monkeypatch.setattr(rotary, "kernels", lambda xp, *arrays: None)
    for f, y in zip(compute, found, strict=True):
        np.testing.assert_allclose(y, f(), rtol=0, atol=1e-14)


def test_the_transpose_is_the_gradient():
    x, turn = draw(6, 2, 1, np.float64)
    dy, h = np.random.default_rng(1).standard_normal(x.shape), 1e-6
    for back in (False, True):
        dx, dangle = rotate_vjp(np, rotate(np, x, turn, x.dtype, back), turn, dy, back)
        assert abs(np.sum(dx * x) - np.sum(dy * rotate(np, x, turn, x.dtype, back))) < 1e-12
        angle = np.arctan2(turn[1], turn[0])
        up, down = (rotate(np, x, np.stack([np.cos(angle + s), np.sin(angle + s)]), x.dtype, back) for s in (h, -h))
        assert abs(np.sum(dangle) - np.sum(dy * (up - down)) / (2 * h)) < 1e-7


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "in place"])
@pytest.mark.parametrize("sizes", [
    {"K": 5, "V": 40, "H": 2, "Hq": 4}, {"K": 5, "V": 140, "H": 2, "P": 1}, {"K": 16, "V": 16, "H": 2, "Hq": 1},
])  # fmt: skip
@pytest.mark.parametrize("T", [1, 3, 20])
def test_a_repeated_call_with_rotations_has_the_bits_of_a_first_one(T, sizes, overwrite, monkeypatch):
    """More queries than states, pairs beside channels that do not rotate, wide blocks of columns, chunks."""
    K, V, H, Hq, P = (sizes.get(n, sizes.get("H", 0)) for n in ("K", "V", "H", "Hq", "P"))
    rng = np.random.default_rng(0)
    shapes = {"q": (2, T, Hq, K), "k": (2, T, min(H, Hq), K), "v": (2, T, H, V), "theta": (P,)}

    def calls(count):
        drawn = np.random.default_rng(1)
        for _ in range(count):
            x = {n: drawn.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
            S = rng.standard_normal((2, H, K, V)).astype(np.float32)
            out, end = la.retnet(**x, state=S, return_state=True, overwrite_state=overwrite)
            assert (end is S) == overwrite
            yield out.tobytes(), end.tobytes()

    with monkeypatch.context() as patch:
        patch.setattr(replay, "ENABLED", False)
        expected = [*calls(3)]
    rng = np.random.default_rng(0)
    replay.clear()
    assert [*calls(3)] == expected


def test_a_state_that_shares_memory_with_an_input():
    """A repeated call does not rotate its state twice."""
    rng, K = np.random.default_rng(0), 4
    q, k, numbers = (rng.standard_normal(n).astype(np.float32) for n in ((1, 1, 1, K), (1, 1, 1, K), K * K))

    def call(S, v):
        return [y.tobytes() for y in la.retnet(q, k, v, state=S, return_state=True, overwrite_state=True)]

    replay.clear()
    apart = numbers.copy().reshape(1, 1, K, K), numbers[:K].copy().reshape(1, 1, 1, K)
    expected = call(*apart)
    for _ in range(2):
        call(*apart)
    assert call(numbers.reshape(1, 1, K, K), numbers[:K].reshape(1, 1, 1, K)) == expected
