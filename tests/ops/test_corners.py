"""Slopes at the corners of functions that are not smooth: 0 for relu and its like, 1 for a clip at its limits.

The corner itself is an input here, to the bit, and the slope is an exact number; every backend and the array code.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

import linattn_np as la
from linattn_np.ops import averages, clip, polynomial_maps
from linattn_np.ops.feature_maps import FEATURE_MAPS, t2r, t2r_vjp
from linattn_np.ops.step_size import step_size

BELOW, ABOVE = -np.finfo(np.float64).tiny, np.finfo(np.float64).tiny
X = np.array([-1.0, BELOW, -0.0, 0.0, ABOVE, 1.0])
BACKENDS = [{"backend": "reference"}, {"backend": "chunks"}, {"backend": "chunks", "chunk_size": "parallel"},
            {"backend": "numba"}, {"backend": "numba", "chunk_size": 16}, {}]  # fmt: skip
every_backend = pytest.mark.parametrize("how", BACKENDS, ids=str)


@pytest.mark.parametrize(("name", "slopes"), [
    ("relu", [0, 0, 0, 0, 1, 1]), ("t2r", [0, 0, 0, 0, 1, 1]),
    ("elu+1", [None, 1, 1, 1, 1, 1]),  # no corner: both sides have the slope 1
])  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_map_of_single_channels(name, slopes, dtype):
    x = X.astype(dtype)
    x[[1, 4]] = -np.finfo(dtype).tiny, np.finfo(dtype).tiny
    slopes = [FEATURE_MAPS[name][0](x)[0] if y is None else y for y in slopes]  # of e^x: its value
    np.testing.assert_array_equal(FEATURE_MAPS[name][1](x, np.full(6, 3, dtype)), 3 * np.array(slopes, dtype))


def test_relu_of_a_learned_projection():
    """x W + b is 0 in one feature, above in the next, below in the third."""
    x, W, b = np.array([[1.0, 2.0]]), np.array([[2.0, 1.0, 1.0], [-1.0, 1.0, 1.0]]), np.array([0.0, 0.0, -4.0])
    assert (x @ W + b == [[0, 3, -1]]).all()
    dx, dW, db = t2r_vjp(x, W, b, np.ones((1, 3)))
    np.testing.assert_array_equal(dx, [[1, 1]])
    np.testing.assert_array_equal(dW, [[0, 1, 0], [0, 2, 0]])
    np.testing.assert_array_equal(db, [0, 1, 0])
    np.testing.assert_array_equal(t2r(W, b)[1](x, np.ones((1, 3))), dx)


def test_both_halves_of_dpfp():
    """r = [relu(x), relu(-x)]: at 0 neither has a slope, beside it one of them."""
    for x0, slope in ((0.0, 0.0), (-0.0, 0.0), (ABOVE, 1.0), (BELOW, -1.0)):
        x = np.array([x0, 1.0])
        d = polynomial_maps.dpfp_vjp(np, x, 1, np.ones(4))  # sum of r_i r_{i - 1}: r_0 has the neighbours 1 and 0
        r = np.array([max(x0, 0), 1, max(-x0, 0), 0])
        neighbours = np.roll(r, 1) + np.roll(r, -1)
        assert d[0] == (neighbours[0] if slope > 0 else -neighbours[2] if slope < 0 else 0)
        assert d[1] == neighbours[1]
    assert polynomial_maps.dpfp_vjp(np, np.array([ABOVE, 1.0]), 1, np.ones(4))[0] == 1
    assert polynomial_maps.dpfp_vjp(np, np.array([BELOW, 1.0]), 1, np.ones(4))[0] == -1


@every_backend
@pytest.mark.parametrize(("feature_map", "at_zero"), [("relu", 0.0), ("t2r", 0.0), ("elu+1", 1.0)])
def test_gradients_of_queries_and_keys_at_zero(how, feature_map, at_zero):
    """In one channel 0, everywhere else above it: its gradient is the slope there times that of the feature."""
    rng = np.random.default_rng(0)
    q, k = rng.uniform(0.5, 1, (2, 1, 40, 2, 4))
    v = rng.uniform(0.5, 1, (1, 40, 2, 4))
    q[..., 1], k[..., 2] = 0.0, -0.0
    out, pullback = la.vjp(la.linear_attention, q, k, v, feature_map=feature_map, **how)
    grads = pullback(np.ones_like(out))
    phi = [FEATURE_MAPS[feature_map][0](x) for x in (q, k)]
    _, plain = la.vjp(la.linear_attention, *phi, v, **how)
    features = plain(np.ones_like(out))
    assert (features.q[..., 1] != 0).all()
    assert (features.k[..., 2] != 0).all()
    for found, of_features, x in ((grads.q, features.q, q), (grads.k, features.k, k)):
        np.testing.assert_array_equal(found[x == 0], at_zero * of_features[x == 0])
        np.testing.assert_array_equal(found[x > 0], of_features[x > 0])


def test_a_clip_has_the_slope_one_at_its_limits():
    low, high = 0.25, 1.5
    x = np.array([np.nextafter(low, 0), low, np.nextafter(low, 1), np.nextafter(high, 0), high, np.nextafter(high, 2)])
    np.testing.assert_array_equal(clip.clip_vjp(np, x, (low, high), np.full(6, 3.0)), [0, 3, 3, 3, 3, 0])
    np.testing.assert_array_equal(clip.clip_vjp(np, x, (low, low), np.full(6, 3.0)), [0, 3, 0, 0, 0, 0])
    np.testing.assert_array_equal(clip.clip_vjp(np, x, (0.0, np.inf), np.full(6, 3.0)), np.full(6, 3.0))


@every_backend
@pytest.mark.parametrize("fn", [f for f in la.VARIANTS if "dt_softplus" in f.spec.options], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("dt_softplus", [False, True])
def test_step_sizes_at_their_limits(how, fn, dt_softplus):
    """dt at a limit goes through it unclipped, with its slope; the next number beyond has none."""
    x = la.testing.sample(fn, np.random.default_rng(0), B=(1,), T=40, H=2, K=4, V=4, optional=False)
    dt = np.full(x["dt"].shape, 0.7)
    dt[0, 3], dt[0, 4] = 0.2, 1.3
    raw = np.log(np.expm1(dt)) if dt_softplus else dt
    dt = step_size(np, raw, None, dt_softplus, (0.0, np.inf), raw.dtype)
    low, high = dt[0, 3, 0], dt[0, 4, 0]  # what the softplus gives, to the bit
    found = {}
    for name, limits in (("none", (0.0, np.inf)), ("at", (low, high)),
                         ("inside", (np.nextafter(low, 1), np.nextafter(high, 0)))):  # fmt: skip
        out, pullback = la.vjp(fn, **x | {"dt": raw}, dt_softplus=dt_softplus, dt_limit=limits, **how)
        found[name] = pullback(np.ones_like(out)).dt
    np.testing.assert_array_equal(found["at"], found["none"])
    assert (found["none"][0, [3, 4]] != 0).all()
    assert (found["inside"][0, [3, 4]] == 0).all()
    assert (np.delete(found["inside"], [3, 4], axis=1) != 0).all()


def test_an_average_over_weights_whose_sum_is_nothing():
    """0, whatever the numerators, and so are its gradients."""
    out = np.array([[3.0, -2.0, 0.0], [3.0, -2.0, 2.0]])
    average, sums = averages.divide(np, out, 0.0)
    np.testing.assert_array_equal(average, [[0, 0], [1.5, -1]])
    grads = averages.divide_vjp(np, average, sums, np.ones((2, 2)))
    np.testing.assert_array_equal(grads, [[0, 0, 0], [0.5, 0.5, -0.25]])
