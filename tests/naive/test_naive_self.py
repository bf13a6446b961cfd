"""The loops against numbers worked out by hand."""

import numpy as np

from tests.naive.no_erase.lightning_attention import slopes_by_name
from tests.naive.no_erase.linear_attention import linear_attention
from tests.naive.no_erase.retention import retention

B, T, H, K, V = 2, 7, 2, 4, 3
rng = np.random.default_rng(5)
q, k = rng.standard_normal((2, B, T, H, K))
v, S0 = rng.standard_normal((B, T, H, V)), rng.standard_normal((B, H, K, V))


def flat(result):
    return [y for x in result for y in (flat(x) if isinstance(x, tuple) else [x])]


def agree(first, second):
    for one, other in zip(flat(first), flat(second), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * np.abs(other).max())


def test_normaliser_averages():
    out, (S, total) = linear_attention(q, k, v, feature_map="elu+1", normalize=True)
    features_q, features_k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k))
    weights = np.einsum("bihd,bjhd->bhij", features_q, features_k) * np.tri(T)
    weights = weights / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(out, np.einsum("bhij,bjhe->bihe", weights, v), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(total, features_k.sum(1), rtol=1e-12)
    np.testing.assert_allclose(S, np.einsum("bjhd,bjhe->bhde", features_k, v), rtol=1e-12, atol=1e-12)


def test_feature_maps_by_name_by_pair_and_one_each():
    square = (lambda x: x * x, lambda x, dphi: 2 * x * dphi)
    agree(linear_attention(q, k, v, feature_map=square), linear_attention(q * q, k * k, v))
    agree(linear_attention(q, k, v, feature_map=("relu", square)), linear_attention(np.maximum(q, 0), k * k, v))
    silu_k = k / (1 + np.exp(-k))
    agree(linear_attention(q, k, v, feature_map=("identity", "silu")), linear_attention(q, silu_k, v))


def test_without_causality_every_query_sees_every_key():
    queries = rng.standard_normal((B, 3, H, K))
    out, state = linear_attention(queries, k, v, causal=False, state=S0)
    np.testing.assert_allclose(out, np.einsum("bihd,bhde->bihe", queries, state), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(state, S0 + np.einsum("bjhd,bjhe->bhde", k, v), rtol=1e-12, atol=1e-12)


def test_zero_denominator_gives_zero():
    out, _ = linear_attention(0 * q, k, v, feature_map="relu", normalize=True)
    assert (out == 0).all()


def test_slope_rules():
    six = slopes_by_name("lightning", 6, 0, 1) / (1 + 1e-5)
    np.testing.assert_allclose(six, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3], rtol=1e-15)
    np.testing.assert_allclose(slopes_by_name("lightning", 4, 3, 4), 1e-5 * 4.0 ** -np.arange(1, 5), rtol=1e-9)
    np.testing.assert_allclose(slopes_by_name("minimax", 8, 0, 4), 2.0 ** -np.arange(1, 9) * (1 + 1e-5), rtol=1e-15)
    np.testing.assert_allclose(slopes_by_name("fla", 4, 1, 2), [0, 1, 2, 3], rtol=1e-15)


def test_retention_schedule():
    plain = retention(q, k, v)
    agree(plain, retention(q, k, v, np.log([31 / 32, 63 / 64])))
