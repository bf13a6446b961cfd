"""The loops against each other and against numbers worked out by hand."""

import numpy as np
import pytest

from tests.naive import NAIVE
from tests.naive.delta.comba import comba
from tests.naive.delta.delta_rule import delta_rule
from tests.naive.delta.gated_delta_rule import gated_delta_rule
from tests.naive.delta.kda import kda
from tests.naive.free.dplr import dplr
from tests.naive.free.iplr import iplr
from tests.naive.free.rwkv7 import rwkv7
from tests.naive.no_erase.gla import gla
from tests.naive.no_erase.lightning_attention import lightning_attention, slopes_by_name
from tests.naive.no_erase.linear_attention import linear_attention
from tests.naive.no_erase.mamba2 import mamba2
from tests.naive.no_erase.retention import retention
from tests.naive.no_erase.rwkv6 import rwkv6
from tests.naive.no_erase.simple_gla import simple_gla

B, T, H, K, V = 2, 7, 2, 4, 3
rng = np.random.default_rng(5)
q, k, p, a, b = rng.standard_normal((5, B, T, H, K))
v, z = rng.standard_normal((2, B, T, H, V))
g, beta = -rng.uniform(0, 1, (B, T, H)), rng.uniform(0, 1, (B, T, H))
gk, gv = -rng.uniform(0, 1, (B, T, H, K)), -rng.uniform(0, 1, (B, T, H, V))
u = rng.standard_normal((H, K))
S0 = rng.standard_normal((B, H, K, V))
A, D, dt_bias = -rng.uniform(0.1, 2, H), rng.standard_normal(H), rng.standard_normal(H)
ARRAYS = {
    "linear_attention": (q, k, v),
    "retention": (q, k, v, -rng.uniform(0, 1, (H, K))),
    "lightning_attention": (q, k, v),
    "simple_gla": (q, k, v, g),
    "mamba2": (v, rng.uniform(0, 1, (B, T, H)), A, k, q, D, z, dt_bias),
    "mlstm": (q, k, v, *rng.standard_normal((2, B, T, H))),
    "mesa_net": (q, k, v, g, beta, rng.uniform(0.5, 1.5, (B, T, H, K))),
    "gla": (q, k, v, gk, gv),
    "rwkv6": (q, k, v, gk, u),
    "delta_rule": (q, k, v, beta),
    "gated_delta_rule": (q, k, v, g, beta),
    "comba": (q, k, v, p, g, beta),
    "kda": (q, k, v, gk, beta),
    "dplr": (q, k, v, gk, a, b),
    "rwkv7": (q, k, v, gk, a, b),
    "iplr": (q, k, v, a, b),
    "hgrn2": (q, v, gk),
    "dfw": (q, k, v, gk, gv),
    "longhorn": (q, k, v, beta),
}


STATES = {
    "mlstm": (S0, rng.standard_normal((B, H, K)), rng.standard_normal((B, H))),
    "mesa_net": (S0, np.broadcast_to(np.eye(K), (B, H, K, K))),
}


def flat(result):
    return [y for x in result for y in (flat(x) if isinstance(x, tuple) else [x])]


def agree(first, second):
    for one, other in zip(flat(first), flat(second), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * np.abs(other).max())


def spread(per_token):
    """A scalar per token, (B, T, H), on every key channel, (B, T, H, K)."""
    return np.repeat(per_token[..., None], K, axis=-1)


@pytest.mark.parametrize("name", ARRAYS)
def test_two_halves_are_the_whole(name):
    arrays, start = ARRAYS[name], STATES.get(name, S0)

    def part(array, tokens):
        return array[:, tokens] if array.ndim > 2 else array

    whole, end = NAIVE[name](*arrays, state=start)
    first, middle = NAIVE[name](*(part(x, slice(None, 3)) for x in arrays), state=start)
    second, end_of_halves = NAIVE[name](*(part(x, slice(3, None)) for x in arrays), state=middle)
    agree((np.concatenate([first, second], axis=1), end_of_halves), (whole, end))


@pytest.mark.parametrize("name", [name for name in ARRAYS if name not in ("mamba2", "hgrn2")])
def test_head_groups_are_repeated_heads(name):
    q4, (k2, *rest), start = np.repeat(q, 2, axis=2), ARRAYS[name][1:], STATES.get(name, S0)
    out, end = NAIVE[name](q, k2, *rest, state=start)
    agree(NAIVE[name](q4, k2, *rest, state=start), (np.repeat(out, 2, axis=2), end))
    one_head = (q[:, :, :1], k[:, :, :1])
    two_heads = (np.repeat(x, 2, axis=2) for x in one_head)
    agree(NAIVE[name](*one_head, *rest), NAIVE[name](*two_heads, *rest))


def test_no_decay_is_the_undecayed_variant():
    agree(simple_gla(q, k, v, 0 * g, state=S0), linear_attention(q, k, v, scale=K**-0.5, state=S0))
    agree(gla(q, k, v, 0 * gk, state=S0), simple_gla(q, k, v, 0 * g, state=S0))
    agree(retention(q, k, v, np.zeros(H), state=S0), simple_gla(q, k, v, 0 * g, state=S0))
    agree(lightning_attention(q, k, v, np.zeros(H), state=S0), linear_attention(q, k, v, state=S0))
    agree(gated_delta_rule(q, k, v, 0 * g, beta, state=S0), delta_rule(q, k, v, beta, state=S0))
    agree(kda(q, k, v, 0 * gk, beta, state=S0), delta_rule(q, k, v, beta, state=S0))
    agree(comba(q, k, v, k, 0 * g, beta, state=S0), delta_rule(q, k, v, beta, state=S0))
    agree(dplr(q, k, v, 0 * gk, a, b, state=S0), iplr(q, k, v, a, b, state=S0))
    agree(rwkv6(q, k, v, 0 * gk, np.ones((H, K)), state=S0), linear_attention(q, k, v, state=S0))


def test_equal_decays_are_the_scalar_decay():
    agree(gla(q, k, v, spread(g), state=S0), simple_gla(q, k, v, g, state=S0))
    agree(kda(q, k, v, spread(g), beta, state=S0), gated_delta_rule(q, k, v, g, beta, state=S0))
    constant = np.array([-0.1, -0.7])
    every_token = np.broadcast_to(constant, (B, T, H))
    agree(retention(q, k, v, constant, state=S0), simple_gla(q, k, v, every_token, state=S0))
    agree(lightning_attention(q, k, v, -constant, state=S0), simple_gla(q, k, v, every_token, scale=1, state=S0))


def test_value_decay_is_key_decay_of_the_transposed_state():
    one = np.ones((B, T, H, V))
    state = gla(q, k, v, gk, gv, state=S0)[1]
    swapped = gla(one, v, k, gv, gk, state=S0.transpose(0, 1, 3, 2))[1]
    np.testing.assert_allclose(state, swapped.transpose(0, 1, 3, 2), rtol=1e-12, atol=1e-12)


def test_comba_is_the_gated_delta_rule_with_rescaled_values():
    alpha = np.exp(g)
    agree(comba(q, k, v / alpha[..., None], k, g, alpha * beta, state=S0), gated_delta_rule(q, k, v, g, beta, state=S0))


def test_low_rank_forms_of_the_delta_rules():
    wide = beta[..., None]
    agree(iplr(q, k, wide * v, k, -wide * k, scale=K**-0.5, state=S0), delta_rule(q, k, v, beta, state=S0))
    agree(
        dplr(q, k, wide * v, gk, np.exp(gk) * k, -wide * k, scale=K**-0.5, state=S0), kda(q, k, v, gk, beta, state=S0)
    )
    agree(dplr(q, k, wide * v, spread(g), p, -wide * k, scale=K**-0.5, state=S0), comba(q, k, v, p, g, beta, state=S0))
    agree(rwkv7(q, k, v, gk, a, b, state=S0), dplr(q, k, v, gk, a, b, state=S0))


def test_mamba2_is_simple_gla_of_its_steps():
    raw = rng.standard_normal((B, T, H))
    step = np.clip(np.log1p(np.exp(raw + dt_bias)), 0.3, 1.5)
    plain, state = simple_gla(q, k, step[..., None] * v, step * A, scale=1, state=S0)
    agree(
        mamba2(v, raw, A, k, q, D, z, dt_bias, state=S0, dt_softplus=True, dt_limit=(0.3, 1.5)),
        ((plain + D[:, None] * v) * z / (1 + np.exp(-z)), state),
    )


@pytest.mark.parametrize("name", ["simple_gla", "gla", "rwkv6", "gated_delta_rule", "kda", "comba", "dplr"])
def test_decay_of_minus_infinity_forgets_everything(name):
    arrays = list(ARRAYS[name])
    where = {"comba": 4}.get(name, 3)
    arrays[where] = arrays[where].copy()
    arrays[where][:, 3] = -np.inf
    if name in ("comba", "dplr"):
        arrays[where - 1 if name == "comba" else 4] = np.zeros_like(q)  # nothing else carries the state across
    late = [x[:, 3:] if x.ndim > 2 else x for x in arrays]
    out, state = NAIVE[name](*arrays, state=S0)
    fresh_out, fresh_state = NAIVE[name](*late)
    np.testing.assert_array_equal(state, fresh_state)
    from_token = 4 if name == "rwkv6" else 3  # RWKV-6 reads before it decays
    np.testing.assert_array_equal(out[:, from_token:], fresh_out[:, from_token - 3 :])


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
