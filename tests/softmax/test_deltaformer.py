"""DeltaFormer: its matrices, limits, published formulas; what its cache holds."""

from __future__ import annotations

import math

import numpy as np
import pytest

import linattn_np as la
from tests.cases import call, cases_of, draw, tokens

T, K, V = 12, 5, 3
CASE = cases_of(la.deltaformer)[0]
BACKENDS = ("reference", "chunks", "numba")
PAST = np.where(np.tri(T, dtype=bool), 0.0, -np.inf)
BEFORE = np.where(np.tri(T, k=-1, dtype=bool), 0.0, -np.inf)
matrix = la.influence_matrix


@pytest.fixture
def one():
    """q, k, v, beta, w, g of one head."""
    rng = np.random.default_rng(0)
    q, k, w = rng.standard_normal((3, T, 1, K))
    v, beta, g = rng.standard_normal((T, 1, V)), rng.uniform(0.1, 1.9, (T, 1)), -rng.uniform(0.05, 0.7, (T, 1))
    return {"q": q, "k": k, "v": v, "beta": beta, "w": w, "g": g}


def rows(Z):
    """Softmax of rows, 0 where there is nothing to read."""
    P = np.exp(Z)
    return P / np.maximum(P.sum(axis=1, keepdims=True), 1e-300)


def decays(g):
    """b_i - b_j"""
    b = np.cumsum(g[:, 0])
    return b[:, None] - b


def assert_close(found, expected, bound=1e-12):
    assert la.testing.relative_error(found, expected) <= bound


@pytest.mark.parametrize("backend", BACKENDS)
def test_matrices(one, backend):
    """P (1 + diag(beta) R)^-1, both softmax or both exp, with w, gates and the scale in both."""
    q, k, w, b = one["q"][:, 0], one["k"][:, 0], one["w"][:, 0], one["beta"]
    D = decays(one["g"])
    for kernel, normalize, s in ((rows, True, 0.7), (np.exp, False, 0.3)):
        P, R = kernel(s * q @ k.T + D + PAST), kernel(s * w @ k.T + D + BEFORE)
        expected = P @ np.linalg.inv(np.eye(T) + b * R)
        found = matrix(la.deltaformer, **one, scale=s, normalize=normalize, backend=backend)
        assert_close(found[0], expected)
        absorbed = matrix(la.deltaformer, **one | {"q": s * one["q"], "w": s * one["w"]}, scale=1, normalize=normalize)
        assert_close(absorbed, found)


def test_gates_of_the_exponential_kernel_are_a_factor(one):
    options = {"scale": 0.3, "normalize": False}
    gated = matrix(la.deltaformer, **one, **options)[0]
    plain = matrix(la.deltaformer, **one | {"g": None}, **options)[0]
    assert_close(gated, plain * np.exp(np.minimum(decays(one["g"]), 0)) * np.tri(T))


def test_neumann_series_ends(one):
    k, B = one["k"][:, 0], np.zeros((T, T))
    B = one["beta"] * rows(k @ k.T / math.sqrt(K) + BEFORE)
    term = u = one["v"][:, 0]
    for _ in range(T - 1):
        term = -B @ term
        u = u + term
    assert abs(B @ term).max() == 0
    out = la.softmax_attention(one["q"], one["k"], u[:, None])
    assert_close(la.deltaformer(*(one[n] for n in ("q", "k", "v", "beta"))), out)


def test_exponential_kernel_is_the_delta_rule_of_its_features(one):
    """e^{q.k} as an inner product: Taylor's terms of two channels, to 1e-15 of them at 18."""

    def features(x):
        powers = [(a, b) for a in range(19) for b in range(19 - a)]
        each = [x[..., 0] ** a * x[..., 1] ** b / math.sqrt(math.factorial(a) * math.factorial(b)) for a, b in powers]
        return np.stack(each, axis=-1)

    q, k = (0.3 * one[n][..., :2] for n in ("q", "k"))
    v, beta, g = one["v"], one["beta"], one["g"]
    options = {"scale": 1, "normalize": False}
    written = beta[..., None] * v
    plain, gated = (la.deltaformer(q, k, written, beta, g=given, **options) for given in (None, g))
    assert_close(plain, la.delta_rule(features(q), features(k), v, beta, scale=1))
    assert_close(gated, la.gated_delta_rule(features(q), features(k), v, g, beta, scale=1))


def test_no_strength_is_attention(one):
    nothing = np.zeros((T, 1))
    q, k, v, g = (one[n] for n in ("q", "k", "v", "g"))
    np.testing.assert_array_equal(la.deltaformer(q, k, v, nothing), la.softmax_attention(q, k, v))
    np.testing.assert_array_equal(la.deltaformer(q, k, v, nothing, g=g), la.forgetting_attention(q, k, v, g))


def test_w_is_k_if_it_is_not_given(one):
    given = {n: one[n] for n in ("q", "k", "v", "beta")}
    out, pullback = la.vjp(la.deltaformer, **given)
    same, back = la.vjp(la.deltaformer, **given, w=one["k"])
    np.testing.assert_array_equal(out, same)
    d, both = pullback(out), back(out)
    assert d.w is None
    assert_close(d.k, both.k + both.w)


def test_query_heads_share_one_system():
    """4 query heads over one key head: the weights of each times the one u, which the cache has."""
    case = CASE.required
    arrays, _ = draw(case, T=20, Hq=4, H=1, Hk=1)
    out, end = call(case, arrays)
    assert end.v.shape == (2, 20, 1, 3)
    u = np.take_along_axis(end.v, np.arange(20)[None, :, None, None], axis=1)
    assert_close(out, la.softmax_attention(arrays["q"], arrays["k"], u))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ancestors(backend):
    """Sharp keys: o_i = sum_p (-1)^p v of the p-th ancestor, several lookups in one call."""
    parents = np.array([-1, -1, 1, 2, 0, 4, 1, -1, 3, 6, 0, 4])
    k, q = np.eye(T)[:, None], 800 * np.eye(T)[:, None]
    w = np.where(parents[:, None] >= 0, 800 * np.eye(T)[parents], 0.0)[:, None]
    v, beta = np.random.default_rng(0).standard_normal((T, 1, V)), (parents >= 0).astype(float)[:, None]
    expected = v.copy()
    for i in range(T):
        at, sign = parents[i], -1
        while at >= 0:
            expected[i] += sign * v[at]
            at, sign = parents[at], -sign
    assert_close(la.deltaformer(q, k, v, beta, w, scale=1, backend=backend), expected, 1e-14)


def test_equal_keys():
    """Bounded while e^{|k|^2} <= 2 without denominators, and always with them."""
    q, v, beta = np.ones((64, 1, 1)), np.random.default_rng(0).standard_normal((64, 1, 1)), np.ones((64, 1))

    def largest(norm, **options):
        return abs(la.deltaformer(q, norm * q, v, beta, scale=1, return_state=True, **options).state.v).max()

    assert largest(0.8, normalize=False) < 10
    assert largest(0.9, normalize=False) > 1e4
    assert largest(5.0) < 2 * abs(v).max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_that_decayed_is_read_without_gates(backend):
    """Gates of the first tokens go on to act where later ones have none."""
    arrays, _ = draw(CASE, T=20)
    arrays["g"][:, 12:] = 0
    whole = CASE.fn(**arrays)
    state = call(CASE, tokens(CASE, arrays, 0, 12))[1]
    rest = tokens(CASE, arrays, 12, 20) | {"g": None}
    out, pullback = la.vjp(CASE.fn, **rest, state=state, backend=backend)
    assert_close(out, whole[:, 12:])
    assert pullback(out).g is None


def test_memory_grows_with_the_tokens():
    import tracemalloc

    peaks = []
    for n in (512, 1024):
        arrays, _ = draw(CASE, T=n, B=(1,), H=1, K=4, V=4)
        tracemalloc.start()
        result, pullback = la.vjp(la.deltaformer, **arrays, backend="chunks", chunk_size=32)
        pullback(result)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2.5 * peaks[0]
    assert peaks[1] < 1024 * 1024 * 8 / 4


def test_explain_counts_both():
    q, k, v = np.ones((3, 1, 10, 2, 64))
    found = la.explain(la.deltaformer, q, k, v, np.ones((1, 10, 2)))
    assert found.operations == 2 * 2 * (64 + 64) * (55 + 45)
    assert "from T = 96 on more operations than the delta rule's 6 K V a token" in found.reason


@pytest.mark.parametrize("threads", [1, 2])
def test_no_bit_depends_on_threads_or_the_batch(threads):
    arrays, _ = draw(CASE, T=200, B=(2,), dtype=np.float32)
    one = {n: y[1:] for n, y in arrays.items()}
    found, pullback = la.vjp(CASE.fn, **arrays, num_threads=threads)
    alone, back = la.vjp(CASE.fn, **one, num_threads=1)
    np.testing.assert_array_equal(found[1:], alone)
    for name, d, own in zip(CASE.given, pullback(found), back(alone), strict=False):
        np.testing.assert_array_equal(d[1:], own, name)


def solved(one, g, begin):
    """u token by token; g_t is common to all that token t reads: only a reset, -inf, counts."""
    keys, values, b = (list(y[:, 0]) for y in (begin.k, begin.v, begin.b))
    us = []
    for t in range(len(g)):
        z = np.array([one["w"][t, 0] @ key / math.sqrt(K) + decay for key, decay in zip(keys, b, strict=True)])
        p = np.exp(z - z.max()) if np.isfinite(g[t, 0]) and len(z) else np.zeros(len(z))
        us.append(one["v"][t, 0] - one["beta"][t, 0] * sum((a * u for a, u in zip(p, values, strict=True)), 0 * p.sum())
                  / max(p.sum(), 1e-300))  # fmt: skip
        keys, values, b = [*keys, one["k"][t, 0]], [*values, us[-1]], [*(x + g[t, 0] for x in b), 0.0]
    return np.array(us)[:, None]


@pytest.mark.parametrize("how", [{"backend": "reference"}, {"backend": "chunks", "chunk_size": 16},
                                 {"backend": "numba", "chunk_size": 1}, {"backend": "numba", "chunk_size": 4},
                                 {"backend": "numba"}], ids=str)  # fmt: skip
@pytest.mark.parametrize("g", [-1.0, -88.0, -1e4, -1e10, -1e20, -1e30, -np.inf])
@pytest.mark.parametrize("slots", [0, 3])
def test_a_gate_that_is_common_to_all_keys_hides_no_logit(one, how, g, slots):
    """At the first token after a cache, within a tile, at the start of one and after it; gradients too."""
    rng = np.random.default_rng(2)
    one = {n: np.concatenate([x, x[::-1]]) for n, x in one.items()}
    for t in (0, 5, 16, 21):
        one["g"][t] = g
    begin = la.GatedCache(rng.standard_normal((slots, 1, K)), rng.standard_normal((slots, 1, V)),
                          -rng.uniform(0, 5, (slots, 1)), np.array(float(slots)))  # fmt: skip
    options = {"state": begin, "return_state": True} if slots else {"return_state": True}
    result, pullback = la.vjp(la.deltaformer, **one, **options, **how)
    assert_close(result.state.v[slots:], solved(one, one["g"], begin))
    dout, du = (rng.standard_normal(y.shape) for y in (result.out, result.state.v))
    dstate = la.GatedCache(*(du if n == "v" else np.zeros(y.shape) for n, y in result.state._asdict().items()))
    grads, step = pullback(dout, dstate), 1e-6
    for name in ("q", "k", "v", "beta", "w"):
        d = rng.standard_normal(one[name].shape)
        ends = [la.deltaformer(**one | {name: one[name] + sign * step * d}, **options, **how) for sign in (1, -1)]
        slope = sum(
            float(np.sum((x - y) * c))
            for x, y, c in ((*(end.out for end in ends), dout), (*(end.state.v for end in ends), du))
        ) / (2 * step)
        assert abs(slope - np.sum(getattr(grads, name) * d)) < 1e-6 * max(1.0, abs(slope)), name
    assert np.isfinite(grads.g).all()
    assert all(np.isfinite(y).all() for y in grads.state or ())
