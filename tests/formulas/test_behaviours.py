"""What the recurrences can and cannot do without any training: 6.1 to 6.8."""

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from tests.formulas.one_head import agree, final_state, rows, run, run_with_state, unit

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def swap_keys(swaps, n):
    """e_i - e_j, of norm sqrt 2, for each pair."""
    return np.stack([np.eye(n)[i] - np.eye(n)[j] for i, j in swaps])


def swapped(swaps, n):
    """Which element stands in each place after each swap of two places."""
    places, history = list(range(n)), []
    for i, j in swaps:
        places[i], places[j] = places[j], places[i]
        history.append(list(places))
    return np.array(history)


@pytest.mark.parametrize("dtype", FLOATS)
def test_6_1_a_token_swaps_two_elements(dtype):
    n, T = 5, 200
    swaps = [np.random.default_rng(t).choice(n, 2, replace=False) for t in range(T)]
    history = swapped(swaps, n)
    k, nothing, first = swap_keys(swaps, n), np.zeros((T, n)), np.tile(np.eye(n)[0], (T, 1))
    start = np.eye(n)
    arrays = [x.astype(dtype) for x in (first, k, nothing, np.ones(T))]
    out, S = run_with_state(
        la.delta_rule, *arrays, state=start.astype(np.float64 if dtype is np.float64 else np.float32)
    )
    np.testing.assert_array_equal(S.astype(float), start[history[-1]])
    np.testing.assert_array_equal(out.astype(float), start[history[:, 0]])
    if dtype is np.float64:
        S = final_state(la.delta_rule, first, unit(k), nothing, np.full(T, 2.0), state=start)
        assert np.abs(S - start[history[-1]]).max() < 1e-12


def test_6_1_two_swaps_are_a_cycle_of_three():
    k, nothing, one = swap_keys([(0, 1), (1, 2)], 3), np.zeros((2, 3)), np.ones(2)
    M = final_state(la.delta_rule, k, k, nothing, one, state=np.eye(3))
    np.testing.assert_array_equal(M, np.eye(3)[[1, 2, 0]])
    np.testing.assert_array_equal(M @ M @ M, np.eye(3))
    assert not np.array_equal(M, np.eye(3))
    assert not np.array_equal(M @ M, np.eye(3))


def test_6_1_four_swaps_are_any_permutation_of_five():
    n, T = 5, 50
    rng = np.random.default_rng(0)
    swaps, keys, beta, places, history = [], [], [], np.arange(n), []
    for _ in range(T):
        wanted, now, token = rng.permutation(n), list(range(n)), []
        for place in range(n - 1):
            other = now.index(wanted[place])
            now[place], now[other] = now[other], now[place]
            token.append((place, other))
        keys += [np.eye(n)[i] - np.eye(n)[j] for i, j in token]
        beta += [float(i != j) for i, j in token]
        places = places[wanted]
        history.append(places[0])
        swaps += token
    q = np.tile(np.eye(n)[0], (4 * T, 1))
    out, S = run_with_state(la.delta_rule, q, np.array(keys), np.zeros((4 * T, n)), np.array(beta), state=np.eye(n))
    np.testing.assert_array_equal(S, np.eye(n)[places])
    np.testing.assert_array_equal(out[3::4], np.eye(n)[history])


def test_6_1_a_diagonal_decay_never_permutes():
    T, n = 20, 5
    g = -np.random.default_rng(0).uniform(0, 1, (T, n))
    q = k = np.ones((T, n))
    agree(final_state(la.gla, q, k, np.zeros((T, n)), g, state=np.eye(n)), np.diag(np.exp(g.sum(0))))


@pytest.mark.parametrize("beta", [0.5, 1.0, 1.5, 2.0])
def test_6_2_parity(beta):
    bits = np.random.default_rng(0).integers(0, 2, 300)
    one = np.ones((300, 1))
    out = run(la.delta_rule, one, one, 0 * one, beta * bits, state=np.ones((1, 1)))[:, 0]
    count = np.cumsum(bits)
    if beta == 2:
        np.testing.assert_array_equal(out, (-1.0) ** count)
    np.testing.assert_allclose(out, (1 - beta) ** count, rtol=1e-12)
    odd = out < 0
    assert np.array_equal(odd, count % 2 == 1) == (beta > 1)


def test_6_3_writing_a_key_twice():
    rng = np.random.default_rng(0)
    v1, v2 = v = rng.standard_normal((2, 3))
    k = np.tile(unit(rng.standard_normal((1, 5))), (2, 1))
    agree(run(la.linear_attention, k, k, v)[-1], v1 + v2)
    agree(run(la.retention, k, k, v, np.log(0.8))[-1], 0.8 * v1 + v2)
    agree(run(la.delta_rule, k, k, v, np.ones(2))[-1], v2)
    agree(run(la.delta_rule, k, k, v, np.full(2, 0.6))[-1], 0.6 * 0.4 * v1 + 0.6 * v2)


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
def test_6_4_noisy_least_squares(beta):
    draws, T, K, V, sigma = 200, 2000, 8, 4, 1.0
    rng = np.random.default_rng(0)
    k = unit(rng.standard_normal((draws, T, 1, K)))
    W = rng.standard_normal((draws, 1, K, V))
    v = k[:, :, 0][:, :, None, :] @ W + sigma * rng.standard_normal((draws, T, 1, V))
    _, S = la.delta_rule(None, k, v, np.full((draws, T, 1), beta), return_state=True)
    error = np.mean(np.sum((S - W) ** 2, axis=(1, 2, 3)))
    assert abs(error / (beta * K * V * sigma**2 / (2 - beta)) - 1) < 0.1


def test_6_5_recall_of_orthonormal_keys():
    rng = np.random.default_rng(0)
    k = np.linalg.qr(rng.standard_normal((8, 8)))[0]
    v = rng.standard_normal((8, 3))
    for state in (final_state(la.linear_attention, k, k, v), final_state(la.delta_rule, k, k, v, np.ones(8))):
        agree(la.read(k[:, None], state[None])[:, 0], v)


def test_6_5_the_last_key_is_always_recalled():
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((30, 5)), rng.standard_normal((30, 3))
    agree(run(la.delta_rule, k, k, v, 1 / np.sum(k**2, axis=1)), v)


@pytest.mark.parametrize("chunk_size", [1, 16, 64, "parallel", None])
def test_6_5_equal_keys(chunk_size):
    T = 64
    rng = np.random.default_rng(0)
    k, v = np.tile(unit(rng.standard_normal((1, 16))), (T, 1)), rng.standard_normal((T, 3))
    agree(run(la.delta_rule, k, k, v, np.ones(T), chunk_size=chunk_size), v)
    sign = (-1.0) ** np.arange(T)
    alternating = 2 * rows(sign) * np.cumsum(rows(sign) * v, axis=0)
    agree(run(la.delta_rule, k, k, v, np.full(T, 2.0), chunk_size=chunk_size), alternating)


def norm(S):
    return np.linalg.norm(S, axis=(-2, -1))


def test_6_7_one_pair_again_and_again():
    T, gamma, beta = 50, 0.9, 0.02
    rng = np.random.default_rng(0)
    k, v = unit(rng.standard_normal((1, 8))), rng.standard_normal((1, 4))
    K, V = np.tile(k, (T, 1)), np.tile(v, (T, 1))
    length = np.linalg.norm(v)
    linear = final_state(la.linear_attention, K, K, V)
    decayed = final_state(la.retention, K, K, V, np.log(gamma))
    delta = final_state(la.delta_rule, K, K, V, np.full(T, beta))
    agree(norm(linear), T * length)
    agree(norm(decayed), length * (1 - gamma**T) / (1 - gamma))
    agree(norm(delta), length * abs(1 - (1 - beta) ** T))
    agree(-np.sum((k @ linear) * v), -T * length**2)
    shrunk = (1 - gamma) / 2 * norm(decayed) ** 2
    agree(-np.sum((k @ decayed) * v) + shrunk, -(length**2) * (1 - gamma ** (2 * T)) / (2 * (1 - gamma)))
    agree(np.sum((k @ delta - v) ** 2) / 2, length**2 * (1 - beta) ** (2 * T) / 2)


@pytest.mark.parametrize("T", [100, 1600])
def test_6_7_random_pairs(T):
    draws, K, V, gamma, beta = 20, 16, 4, 0.95, 0.6
    rng = np.random.default_rng(T)
    k, v = unit(rng.standard_normal((draws, T, 1, K))), rng.standard_normal((draws, T, 1, V))

    def mean_square(fn, *arrays):
        return np.mean(norm(fn(None, k, v, *arrays, return_state=True)[1]) ** 2)

    assert abs(mean_square(la.linear_attention) / (T * V) - 1) < 0.15
    decayed = mean_square(la.retention, np.log([gamma]))
    assert abs(decayed / (V * (1 - gamma ** (2 * T)) / (1 - gamma**2)) - 1) < 0.15
    delta = mean_square(la.delta_rule, np.full((draws, T, 1), beta))
    assert abs(delta / (beta * K * V / (2 - beta)) - 1) < 0.15


def test_6_7_the_delta_rule_grows_by_at_most_what_it_writes():
    T, K, V = 60, 6, 3
    rng = np.random.default_rng(0)
    k, v, beta = unit(rng.standard_normal((T, K))), rng.standard_normal((T, V)), rng.uniform(0.05, 1.95, T)
    S = rng.standard_normal((K, V))
    for t in range(T):
        now = slice(t, t + 1)
        after = final_state(la.delta_rule, k[now], k[now], v[now], beta[now], state=S)
        allowed = norm(S) ** 2 + beta[t] * np.sum(v[t] ** 2) / (2 - beta[t])
        assert norm(after) ** 2 <= allowed * (1 + 1e-12)
        S = after


def test_6_7_keys_that_make_the_delta_rule_grow():
    T, K, one = 400, 8, np.ones(1)
    rng = np.random.default_rng(0)
    S = np.zeros((K, 1))
    for _ in range(T):
        k = rng.standard_normal((1, K))
        if S.any():
            k = k - (k @ S) * S.T / np.sum(S**2)
        S = final_state(la.delta_rule, k, unit(k), np.ones((1, 1)), one, state=S)
    agree(norm(S) ** 2, float(T))


def needle_cosines(repeated, weight):
    """Cosine of the needle's value and the final read-out of its key: linear, decay 0.99, delta rule."""
    draws, T, K, place = 8, 1024, 64, 256
    rng = np.random.default_rng(0)
    k, v = unit(rng.standard_normal((2, draws, T, 1, K)))
    if repeated:
        k, v = (np.tile(x[:, :16], (1, T // 16, 1, 1)) for x in (k, v))
    k[:, place], v[:, place] = unit(rng.standard_normal((2, draws, 1, K)))
    beta = np.full((draws, T, 1), weight)
    beta[:, place] = 1
    states = (
        la.linear_attention(None, k, beta[..., None] * v, return_state=True)[1],
        la.retention(None, k, beta[..., None] * v, np.log([0.99]), return_state=True)[1],
        la.delta_rule(None, k, v, beta, return_state=True)[1],
    )
    answers = (la.read(k[:, place : place + 1], state)[:, 0] for state in states)
    return [np.mean(np.sum(unit(answer) * v[:, place], axis=-1)) for answer in answers]


def test_6_8_a_needle_among_repeated_pairs():
    linear, decayed, delta = needle_cosines(repeated=True, weight=1.0)
    assert delta > 0.85
    assert abs(linear) < 0.3
    assert abs(decayed) < 0.3


def test_6_8_a_needle_among_distinct_pairs():
    linear, decayed, delta = needle_cosines(repeated=False, weight=1.0)
    assert abs(delta) < 0.3
    assert abs(decayed) < 0.3
    assert linear < 0.5


def test_6_8_a_needle_written_with_more_weight():
    linear, _, delta = needle_cosines(repeated=False, weight=0.01)
    assert linear > 0.95
    assert delta > 0.95
