"""Features in bfloat16 (cuda_src/ops/features.cu, monomials.cu) against float64, in calls too; emulated or on a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state.cuda.scan import calls as scan_calls
from linattn_np.ops import feature_maps as maps
from linattn_np.ops import polynomial_maps
from linattn_np.ops.cuda import features
from linattn_np.runtime.cuda import launch
from tests.cuda.emulation import device, emulated, public  # noqa: F401

BF16 = np.dtype(ml_dtypes.bfloat16)
EPS = 2.0**-8  # of bfloat16
MAPS = {
    "favor": maps.favor_plus(),
    "favor 300": maps.favor_plus(300, 1),
    "favor hyperbolic": maps.favor_plus(24, 3, True),
    "fourier": maps.random_fourier(),
    "fourier 16": maps.random_fourier(16, 2, 0.3),
}
POLYNOMIALS = {
    "taylor": maps.taylor(),
    "taylor 1": maps.taylor(1),
    "square": maps.SQUARE,
    "no constant": maps.powers((0.0, 2.0, 0.5)),
}


def wide(x):
    return np.asarray(x).astype(np.float64)


CASES = [(name, K) for name in MAPS for K in (8, 40, 128)] + [(name, K) for name in POLYNOMIALS for K in (8, 16, 32)]


@pytest.mark.parametrize(("name", "K"), CASES)
def test_features_and_their_transpose(device, name, K):  # noqa: F811
    """A row of zeros, rows that are no multiple of a tile, and columns of zeros behind the features."""
    f, f_vjp = (MAPS | POLYNOMIALS)[name]
    steps, rng = f.steps, np.random.default_rng(0)
    x = rng.standard_normal((2, 37, 3, K)).astype(BF16)
    x[0, 3] = 0
    given = device.bring(x)
    assert features.takes(steps, given)
    phi, M = device.see(features.features(device.xp, steps, [given])[0]), steps.width(K)
    assert phi.shape[-1] == features.width(steps, K)
    assert not wide(phi)[..., M:].any()
    right = f(wide(x))
    size = np.abs(right).max() if steps.kind == "waves" else np.maximum(np.abs(right), 1e-3 * np.abs(right).max())
    assert (np.abs(wide(phi)[..., :M] - right) <= 1.05 * EPS * size).all()
    dphi = rng.standard_normal(phi.shape).astype(BF16)
    dx = device.see(features.features_vjp(device.xp, steps, [given], [device.bring(phi)], [device.bring(dphi)])[0])
    known = [wide(phi)[..., :M]] if getattr(f_vjp, "takes_features", False) else []
    right = f_vjp(wide(x), wide(dphi)[..., :M], *known)
    assert np.abs(wide(dx) - right).max() <= 2 * EPS * np.abs(right).max()


def test_rows_of_any_length_and_stride(device):  # noqa: F811
    """Waves are of unit rows: long and short ones have the features of others, and rows may be apart."""
    of = lambda y: device.see(features.features(device.xp, steps, [y])[0])  # noqa: E731
    steps, x = MAPS["fourier"][0].steps, np.random.default_rng(0).standard_normal((3, 5, 2, 64)).astype(BF16)
    phi = of(device.bring(x))
    for factor in (2.0**100, 2.0**-100):
        scaled = (wide(x) * factor).astype(BF16)
        np.testing.assert_array_equal(phi, of(device.bring(scaled)))
    whole = device.bring(np.concatenate([x, -x], axis=-1))
    np.testing.assert_array_equal(phi, of(whole[..., :64]))
    steps = maps.taylor()[0].steps
    phi = of(device.bring(np.ascontiguousarray(x[..., 16:32])))
    np.testing.assert_array_equal(phi, of(whole[..., 16:32]))


@pytest.mark.parametrize("name", ["favor 300", "fourier", "taylor"])
def test_queries_and_keys_share_a_launch(device, name):  # noqa: F811
    """Of other shapes and strides, and more rows than a block has: the numbers of each alone."""
    steps, rng = (MAPS | POLYNOMIALS)[name][0].steps, np.random.default_rng(0)
    given = [rng.standard_normal((2, 150, 3, 32)).astype(BF16), rng.standard_normal((1, 7, 2, 48)).astype(BF16)]
    x = [device.bring(given[0])[..., :16], device.bring(given[1])[..., 32:]]
    phi = features.features(device.xp, steps, x)
    dphi = [device.bring(rng.standard_normal(y.shape).astype(BF16)) for y in phi]
    dx = features.features_vjp(device.xp, steps, x, phi, dphi)
    for n in range(2):
        alone = features.features(device.xp, steps, x[n : n + 1])
        np.testing.assert_array_equal(device.see(phi[n]), device.see(alone[0]))
        alone = features.features_vjp(device.xp, steps, x[n : n + 1], alone, dphi[n : n + 1])
        np.testing.assert_array_equal(device.see(dx[n]), device.see(alone[0]))


@pytest.mark.parametrize("coefficients", [(1.0, 1.0, 0.5), (0.0, 0.0, 1.0), (1.0, 2.0), (0.0, 1.0, 0.5)], ids=str)
@pytest.mark.parametrize("K", [1, 5, 40])
def test_the_transpose_of_monomials(device, coefficients, K):  # noqa: F811
    rng, width = np.random.default_rng(1), polynomial_maps.powers_width(K, coefficients)
    x, d = (rng.standard_normal((2, 9, 3, n)).astype(np.float32) for n in (K, width))
    found = polynomial_maps.powers_vjp(device.xp, device.bring(x), coefficients, device.bring(d), 0.5)
    flat = polynomial_maps.powers_of_rows_vjp(0.5 * wide(x).reshape(-1, K), coefficients, wide(d).reshape(-1, width))
    np.testing.assert_allclose(device.see(found), 0.5 * flat.reshape(x.shape), rtol=0, atol=2e-5)


def walk(batch, arrays, g, start, end, factors, reverse=False, **_):
    """A pass over the tokens as one chunk, without decay: products of operands in bfloat16, by their definition."""
    (q, k, v), out, heads = (wide(y) for y in arrays[:3]), np.asarray(arrays[3]), batch.heads
    q, k, v = (np.moveaxis(np.repeat(y, heads // y.shape[2], axis=2), 2, 1) for y in (q, k, v))
    (B, _, T, K), V, narrow = q.shape, v.shape[-1], lambda y: wide(y.astype(BF16))

    def places(states):
        slot = (np.arange(B * heads) // states.group).reshape(B, heads, 1, 1) * states.slot
        return slot + np.arange(K)[:, None] * states.column + np.arange(V) * states.row

    S = np.zeros((B, heads, K, V))
    if start.array is not None:
        S += np.asarray(start.array).reshape(-1)[places(start)]
    P = (np.triu if reverse else np.tril)(factors[1] * (q @ np.swapaxes(k, -1, -2)))
    out.reshape(B, T, heads, V)[:] = np.moveaxis(factors[0] * (narrow(P) @ v + q @ narrow(S)), 1, 2)
    if end is not None and end.array is not None:
        np.asarray(end.array).reshape(-1)[places(end)] = S + factors[1] * (np.swapaxes(k, -1, -2) @ v)


CALLS = {  # heads of q and k: 2, of v: the last number
    "performer in panels": (la.performer, {"num_features": 300}, 24, 2),
    "performer in panels, shared": (la.performer, {"num_features": 300}, 24, 4),
    "performer": (la.performer, {}, 24, 4),
    "performer, odd values": (la.performer, {"num_features": 270}, 20, 2),
    "rfa": (la.rfa, {}, 24, 2),
    "based": (la.based, {}, 24, 2),
    "based, shared": (la.based, {}, 24, 4),
    "based, odd values": (la.based, {}, 20, 2),
    "a polynomial of the first order": (la.based, {"order": 1}, 24, 2),
}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_calls_with_states_and_gradients(public, monkeypatch, name, normalize):  # noqa: F811
    """States have the features of the map alone, stored features and states more."""
    if public.launched is not None:  # the passes are not emulated
        for what, value in (("_capability", 80), ("_shared_limit", 163 << 10), ("_multiprocessors", 1)):
            monkeypatch.setattr(launch, what, lambda device, value=value: value)
        monkeypatch.setattr(scan_calls, "scan", walk)
        monkeypatch.setattr(launch, "prepare", lambda wanted, capability: None)
    (fn, options, V, H), rng, T = CALLS[name], np.random.default_rng(0), 40
    options = options | {"normalize": normalize, "return_state": True}
    x = {n: (0.5 * rng.standard_normal((1, T, *((H, V) if n == "v" else (2, 16))))).astype(BF16) for n in "qkv"}
    exact = {n: wide(y) for n, y in x.items()}
    _, like = fn(**exact, **options)
    draw = lambda: [0.1 * np.abs(rng.standard_normal(y.shape)) for y in (like if normalize else [like])]  # noqa: E731
    of = lambda parts: type(like)(*parts) if normalize else parts[0]  # noqa: E731
    bring = lambda parts: of([public.bring(y.astype(np.float32)) for y in parts])  # noqa: E731
    state, dstate, dout = draw(), draw(), rng.standard_normal(x["v"].shape).astype(BF16)
    (right, end), pull = la.vjp(fn, **exact, state=of(state), **options)
    given = {n: public.bring(y) for n, y in x.items()}
    (out, found_end), found_pull = la.vjp(fn, **given, state=bring(state), **options)
    grads, found = pull(wide(dout), of(dstate)), found_pull(public.bring(dout), bring(dstate))
    pairs = [(out, right), *((getattr(found, n), getattr(grads, n)) for n in "qkv")]
    pairs += zip(found_end, end, strict=True) if normalize else [(found_end, end)]
    pairs += zip(found.state, grads.state, strict=True) if normalize else [(found.state, grads.state)]
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape
        assert np.linalg.norm(wide(public.see(ours)) - theirs) <= 3 * EPS * np.linalg.norm(theirs)
