"""Feature maps: their kernels, their transposes, what random ones depend on."""

from __future__ import annotations

import math
from math import factorial

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.catalog import VARIANTS
from linattn_np.ops import feature_maps, norms, random_maps, rows
from tests.cases import peak_memory
from tests.naive import features
from tests.naive.no_erase.linear_attention import NAMED_MAPS

maps = la.feature_maps
rng = np.random.default_rng(0)
X, Y = rng.standard_normal((2, 3, 7, 2, 5))
W, B = rng.standard_normal((5, 4)), rng.standard_normal(4)
MADE = {
    "dpfp 3": maps.dpfp(3),
    "taylor 1": maps.taylor(1),
    "taylor 4": maps.taylor(4),
    "favor": maps.favor_plus(11, 3),
    "favor hyperbolic": maps.favor_plus(6, 3, True),
    "fourier": maps.random_fourier(9, 2, 0.7),
    "t2r": maps.t2r(W, B),
    "t2r without b": maps.t2r(W),
    "hedgehog": maps.hedgehog(W, B),
    "hedgehog without b": maps.hedgehog(W),
}
KINKED = ("relu", "t2r", "dpfp", "elu+1", "silu", "hedgehog")  # no complex step across a kink or a maximum


def gram(f, x, y):
    return f(x) @ np.swapaxes(f(y), -1, -2)


@pytest.mark.parametrize("name", [*maps.FEATURE_MAPS, *MADE])
def test_the_transpose_by_central_differences(name):
    f, f_vjp = maps.FEATURE_MAPS.get(name) or MADE[name]
    dphi = rng.standard_normal(f(X).shape)
    numeric = np.sum((f(X + 1e-5 * Y) - f(X - 1e-5 * Y)) * dphi) / 2e-5
    assert abs(np.sum(f_vjp(X, dphi) * Y) / numeric - 1) < 1e-6


@pytest.mark.parametrize("name", [n for n in (*maps.FEATURE_MAPS, *MADE) if not n.startswith(KINKED)])
def test_the_transpose_by_a_complex_step(name):
    f, f_vjp = maps.FEATURE_MAPS.get(name) or MADE[name]
    dphi = rng.standard_normal(f(X).shape)
    exact = np.sum(f(X + 1e-30j * Y).imag * dphi) / 1e-30
    assert abs(np.sum(f_vjp(X, dphi) * Y) / exact - 1) < 1e-12


@pytest.mark.parametrize("name", maps.FEATURE_MAPS)
def test_every_name_is_its_definition(name):
    np.testing.assert_allclose(maps.FEATURE_MAPS[name][0](X), NAMED_MAPS[name](X), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("order", [1, 2, 3, 6])
def test_taylor_features_are_the_polynomial_with_every_monomial_once(order):
    z = X @ np.swapaxes(Y, -1, -2) / 5**0.5
    np.testing.assert_allclose(
        gram(maps.taylor(order)[0], X, Y), sum(z**p / factorial(p) for p in range(order + 1)), rtol=1e-12, atol=1e-12
    )
    count = factorial(5 + order) // (factorial(5) * factorial(order))
    assert maps.taylor(order)[0](X).shape[-1] == count


def test_rebased_is_the_square_of_the_normed_product():
    normed = [(x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) for x in (X, Y)]
    expected = (normed[0] @ np.swapaxes(normed[1], -1, -2)) ** 2 / 5
    np.testing.assert_allclose(gram(maps.rebased()[0], X, Y), expected, rtol=1e-11, atol=1e-12)


def test_dpfp_has_the_papers_sign():
    """r = [relu(x), relu(-x)]: every feature is >= 0, which [relu(x), -relu(x)] would not give."""
    for nu in (1, 2, 3):
        phi = maps.dpfp(nu)[0](X)
        assert phi.shape[-1] == 2 * 5 * nu
        assert (phi >= 0).all()
        np.testing.assert_array_equal(phi, features.dpfp(X, nu))


def test_hedgehog_features_are_two_distributions():
    phi = maps.hedgehog(W, B)[0](X)
    np.testing.assert_allclose(phi[..., :4].sum(-1), 1, rtol=1e-14)
    np.testing.assert_allclose(phi[..., 4:].sum(-1), 1, rtol=1e-14)
    assert np.isfinite(maps.FEATURE_MAPS["hedgehog"][0](1e4 * X)).all()


@pytest.mark.parametrize("name", ["t2r", "hedgehog"])
@pytest.mark.parametrize("array", ["x", "W", "b"])
def test_gradients_of_learned_projections(name, array):
    make, vjp = getattr(maps, name), getattr(maps, name + "_vjp")
    given = {"x": X, "W": W, "b": B}
    step = 1e-6 * rng.standard_normal(given[array].shape)
    dphi = rng.standard_normal(make(W, B)[0](X).shape)
    phi = [make(g["W"], g["b"])[0](g["x"]) for g in (given | {array: given[array] + s * step} for s in (1, -1))]
    numeric = np.sum((phi[0] - phi[1]) * dphi) / 2
    exact = np.sum(dict(zip(given, vjp(X, W, B, dphi), strict=True))[array] * step)
    assert abs(exact / numeric - 1) < 1e-6


# random features


@pytest.mark.parametrize("hyperbolic", [False, True])
def test_favor_plus_is_unbiased_and_as_exact_as_its_features_are_many(hyperbolic):
    q, k = 0.5 * np.random.default_rng(5).standard_normal((2, 12, 4))
    exact = np.exp(q @ k.T / 2)
    for m, seeds in ((16, 800), (256, 100)):
        found = np.array([gram(maps.favor_plus(m, seed, hyperbolic)[0], q, k) for seed in range(seeds)])
        relative = found / exact - 1
        spread = np.sqrt(np.mean(relative**2))
        assert abs(relative.mean()) < 4 * spread / np.sqrt(seeds)
        assert spread < 0.5 * 4 / m**0.5
    assert (found > 0).all()


def test_random_fourier_features_are_a_gaussian_kernel():
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in np.random.default_rng(5).standard_normal((2, 9, 4)))
    apart = np.sum((q[:, None] - k) ** 2, axis=-1)
    for sigma in (0.7, 1.0, 3.0):
        found = np.mean([gram(maps.random_fourier(64, seed, sigma)[0], 5 * q, k) for seed in range(400)], axis=0)
        assert np.abs(found - np.exp(-apart / (2 * sigma**2))).max() < 0.03


def test_directions_are_orthogonal_in_blocks_and_as_long_as_normal_vectors():
    w = random_maps.directions(6, 15, 3)
    for block in (w[:6], w[6:12], w[12:]):
        products = block @ block.T
        assert np.abs(products - np.diag(np.diag(products))).max() < 1e-5
    many = np.concatenate([random_maps.directions(6, 12, seed) for seed in range(300)])
    assert abs(np.mean(np.sum(many**2, axis=1)) / 6 - 1) < 0.05
    assert np.abs(many.T @ many / len(many) - np.eye(6)).max() < 0.1


def test_a_draw_depends_on_channels_features_and_seed_alone():
    first = maps.favor_plus(8, 1)[0](X)
    np.testing.assert_array_equal(first, maps.favor_plus(8, 1)[0](X))
    assert np.abs(first - maps.favor_plus(8, 2)[0](X)).max() > 0.01
    narrow = maps.favor_plus(8, 1)[0](X.astype(np.float32))
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(narrow, first, rtol=1e-5)


def test_no_exponent_exceeds_half_the_square_of_its_direction():
    """The largest feature is at x = w: e^{|w|^2 / 2}."""
    w = random_maps.directions(5, 11, 3)
    phi = maps.favor_plus(11, 3)[0](w * 5**0.25) * 11**0.5
    np.testing.assert_allclose(np.diag(phi), np.exp(np.sum(w**2, axis=1) / 2), rtol=1e-10)
    for far in (1.1, 10.0, 1e3):
        assert (maps.favor_plus(11, 3)[0](far * w * 5**0.25) * 11**0.5 <= np.exp(np.sum(w**2, axis=1) / 2)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bits_of_a_row_do_not_depend_on_the_others(dtype):
    x = rng.standard_normal((200, 24)).astype(dtype)
    weights = rng.standard_normal((24, 77)).astype(dtype)
    whole = rows.times(np, x, weights)
    np.testing.assert_allclose(whole, x @ weights, rtol=1e-5, atol=1e-5)
    for a, b in ((0, 1), (3, 70), (131, 200), (199, 200)):
        np.testing.assert_array_equal(rows.times(np, x[a:b], weights), whole[a:b])


@pytest.mark.parametrize("name", ["taylor", "rebased", "favor+", "fourier", "dpfp", "hedgehog"])
def test_sixteen_bit_inputs(name):
    x = [y.astype(ml_dtypes.bfloat16) for y in np.random.default_rng(1).standard_normal((3, 9, 2, 8))]
    wide = [y.astype(np.float32) for y in x]
    out = la.linear_attention(*x, feature_map=name)
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(out, la.linear_attention(*wide, feature_map=name).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: maps.dpfp(0), "dpfp: nu is 0, expected a whole number from 1"),
        (lambda: maps.taylor(1.5), "taylor: order is 1.5, expected a whole number from 1"),
        (lambda: maps.favor_plus(0), "favor_plus: num_features is 0, expected a whole number from 1"),
        (lambda: maps.favor_plus(3, hyperbolic=True), "favor_plus: num_features is 3, expected an even number"),
        (lambda: maps.random_fourier(True), "random_fourier: num_features is True, expected a whole number from 1"),
        (lambda: maps.random_fourier(8, sigma=0.0), "random_fourier: sigma is 0.0, expected a number above 0"),
    ],
)
def test_bad_parameters(make, text):
    with pytest.raises(ValueError, match=text):
        make()


# norms


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm", "unit"])
def test_norms_and_their_transposes(norm):
    f, f_vjp = getattr(norms, norm), getattr(norms, norm + "_vjp")
    dy = rng.standard_normal(X.shape)
    exact = np.sum(f(np, X + 1e-30j * Y).imag * dy) / 1e-30
    assert abs(np.sum(f_vjp(np, X, dy) * Y) / exact - 1) < 1e-12
    y, zero = f(np, X), f(np, 0 * X)
    size = {"rms_norm": np.mean(y**2, -1), "layer_norm": y.var(-1), "unit": np.linalg.norm(y, axis=-1)}[norm]
    np.testing.assert_allclose(size, 1, rtol=0.02)  # eps
    np.testing.assert_array_equal(zero, 0)


def test_a_norm_over_all_heads_is_another_function():
    dy = rng.standard_normal(X.shape)
    both = (-2, -1)
    y = norms.rms_norm(np, X, axis=both)
    np.testing.assert_allclose(np.mean(y**2, axis=both), 1, rtol=1e-12)
    assert np.abs(y - norms.rms_norm(np, X)).max() > 0.1
    exact = np.sum(norms.rms_norm(np, X + 1e-30j * Y, 1e-3, both).imag * dy) / 1e-30
    assert abs(np.sum(norms.rms_norm_vjp(np, X, dy, 1e-3, both) * Y) / exact - 1) < 1e-12


@pytest.mark.parametrize(
    "fn",
    [
        fn
        for fn in la.VARIANTS
        if {"normalize", "eps"} <= fn.spec.options.keys() and "feature_map" not in fn.spec.options
    ],
    ids=lambda fn: fn.__name__,
)
def test_no_bit_depends_on_the_number_of_threads_or_on_other_rows(fn):
    """Long enough for several blocks of rows, shared out by two threads."""
    x = la.testing.sample(fn, np.random.default_rng(0), B=(), T=2100, H=2, K=8, V=4)
    x = {n: y.astype(np.float32) for n, y in x.items()}
    results = []
    for count in (1, 2, 3):
        out, pullback = la.vjp(fn, **x, num_threads=count)
        results.append([out, *(d for d in pullback(np.ones_like(out)) if d is not None)])
    for one, other in zip(results[0] * 2, results[1] + results[2], strict=True):
        np.testing.assert_array_equal(one, other)
    assert la.explain(fn, **x).reason.endswith("features chunk by chunk")
    some = {n: y[:37] if y.shape[0] == 2100 else y for n, y in x.items()}
    np.testing.assert_array_equal(fn(**some), results[0][0][:37])


STEPS = {"taylor 1": maps.taylor(1), "taylor 3": maps.taylor(3), "favor": maps.favor_plus(11, 3),
         "favor hyperbolic": maps.favor_plus(6, 3, True), "fourier": maps.random_fourier(9, 2, 0.03),
         "rebased": maps.rebased(), "square": feature_maps.SQUARE}  # fmt: skip


@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 2, 2), (1, 1, 2)])
@pytest.mark.parametrize("name", STEPS)
def test_features_in_chunks_are_those_that_are_made_first(name, heads):
    """Compiled loops with a map in their programs against the same map by array calls: all outputs and gradients."""
    pytest.importorskip("numba")
    (Hq, Hk, H), rng = heads, np.random.default_rng(5)
    given = [1.3 * rng.standard_normal((2, 71, h, K)) for h, K in ((Hq, 20), (Hk, 20), (H, 9))]
    f, f_vjp = STEPS[name]
    plain = lambda x: f(x), lambda x, d: f_vjp(x, d)
    for options in ({}, {"normalize": True, "eps": 30.0}, {"cu_seqlens": [0, 3, 3, 40, 71]}):
        own, results = ([x[0] for x in given] if "cu_seqlens" in options else given), []
        for pair in (plain, STEPS[name]):
            result, pullback = la.vjp(
                la.linear_attention, *own, feature_map=pair, return_state=True, scale=0.7, **options
            )
            state = result.state
            parts = state if isinstance(state, tuple) else (state,)
            d = type(state)(*map(np.cos, state)) if isinstance(state, tuple) else np.cos(state)
            results.append([result.out, *parts, *(y for y in pullback(np.sin(result.out), d) if y is not None)])
            explained = la.explain(la.linear_attention, *own, feature_map=pair, **options).reason
            assert ("features chunk by chunk" in explained) == (pair is not plain)
        for mine, theirs in zip(results[1], results[0], strict=True):
            assert la.testing.relative_error(mine, theirs) < 1e-11


LEFT_TO_THE_LOOPS = [f.spec.name for f in VARIANTS
                     if f.spec.state.option and "feature_map" not in f.spec.options]  # fmt: skip


@pytest.mark.parametrize("name", LEFT_TO_THE_LOOPS)
def test_short_sequences_with_a_map_go_token_by_token(name):
    """In steps of one token, alone, and in a ragged batch beside longer sequences: the same bits.

    Polynomials sum states in float64, so steps hand on float64 states.
    """
    pytest.importorskip("numba")
    fn, rng = getattr(la, name), np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 31, h, n)).astype(np.float32) for h, n in ((4, 6), (2, 6), (2, 37)))
    short = tuple(x[:, :5] for x in (q, k, v))
    out, state = fn(*short, return_state=True)
    assert la.explain(fn, *short).form == "recurrent form"
    assert la.explain(fn, *short).reason.endswith("features token by token")
    wide = np.float64 if name in ("based", "rebased") else np.float32
    S, tokens = type(state)(*(np.zeros(x.shape, wide) for x in state)), []
    whole, end = fn(*short, state=S, return_state=True)
    for t in range(5):
        one, S = fn(*(x[:, t : t + 1] for x in short), state=S, return_state=True)
        tokens.append(one)
    np.testing.assert_array_equal(np.concatenate(tokens, axis=1), whole)
    np.testing.assert_array_equal(S.S, end.S)
    np.testing.assert_array_equal(S.z, end.z)
    ragged, ends = fn(q[0], k[0], v[0], cu_seqlens=[0, 5, 5, 31], return_state=True)
    np.testing.assert_array_equal(ragged[:5], out[0])
    np.testing.assert_array_equal(ends.S[0], state.S[0])
    np.testing.assert_array_equal(ragged[5:], fn(*(x[0, 5:] for x in (q, k, v))))
    chunked = fn(*short, chunk_size=4)
    assert la.testing.relative_error(out, chunked) < 1e-5


def test_features_are_not_kept_for_all_tokens():
    """The most that a call takes beside its result does not grow with T."""
    pytest.importorskip("numba")
    q, k, v = np.random.default_rng(0).standard_normal((3, 4096, 1, 16)).astype(np.float32)
    la.based(q, k, v)  # compiles
    assert peak_memory(lambda: la.based(q, k, v)) < 6 * v.nbytes < q.nbytes * 153 / 16


def test_polynomials_of_rows_are_those_of_any_array():
    """NumPy's transposed blocks against the look-up that other libraries take."""
    import array_api_strict as xp

    from linattn_np.ops import polynomial_maps

    for coefficients in ((1.0, 1.0, 0.5), (0.0, 0.0, 1.0), (1.0, 0.0, 0.5, 1 / 6), (0.0, 2.0)):
        x, d = X.reshape(-1, 5), rng.standard_normal((42, polynomial_maps.powers_width(5, coefficients)))
        mine, theirs = (
            polynomial_maps.powers_of_rows(x, coefficients),
            polynomial_maps.powers(xp, xp.asarray(x), coefficients),
        )
        np.testing.assert_allclose(mine, np.from_dlpack(theirs), rtol=1e-13, atol=1e-14)
        mine = polynomial_maps.powers_of_rows_vjp(x, coefficients, d)
        theirs = polynomial_maps.powers_vjp(xp, xp.asarray(x), coefficients, xp.asarray(d))
        np.testing.assert_allclose(mine, np.from_dlpack(theirs), rtol=1e-12, atol=1e-12)


def test_no_channels_leave_the_constant():
    """K = 0: q . k is 0, and so the kernel is 1 + 0 + ... of order 2 and 0 of a square."""
    x = np.zeros((4, 0))
    phi, pull = maps.taylor(2)
    np.testing.assert_array_equal(phi(x), np.ones((4, 1)))
    assert pull(x, np.ones((4, 1))).shape == (4, 0)
    assert maps.rebased()[0](x).shape == (4, 0)
    v = np.random.default_rng(0).standard_normal((6, 1, 2))
    mean = np.cumsum(v, axis=0) / np.arange(1, 7)[:, None, None]
    np.testing.assert_allclose(la.based(x[:, None][[0] * 6], x[:, None][[0] * 6], v), mean, atol=1e-14)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_binomial_features_have_the_product_of_a_power(n):
    f, f_vjp = feature_maps.binomial(n)
    q, k, d = (np.random.default_rng(i).standard_normal((6, 4)) for i in range(3))
    np.testing.assert_allclose(f(q) @ f(k).T, (1 + q @ k.T / 2) ** n, rtol=1e-11, atol=1e-11)
    assert f(q).shape == (6, math.comb(4 + n, n))
    dphi = np.random.default_rng(3).standard_normal(f(q).shape)
    numeric = np.sum((f(q + 1e-6 * d) - f(q - 1e-6 * d)) * dphi) / 2e-6
    np.testing.assert_allclose(np.sum(f_vjp(q, dphi) * d), numeric, rtol=1e-7)
    with pytest.raises(ValueError, match="binomial: n is 0"):
        feature_maps.binomial(0)
