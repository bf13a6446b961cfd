"""Polynomials of q . k pair by pair: the formulas of the kernels, which calls take them, and on a GPU their numbers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.runtime.cuda import launch
from tests.cuda.emulation import device, emulated, public  # noqa: F401

BF16 = np.dtype(ml_dtypes.bfloat16)
EPS = 2.0**-8  # of bfloat16
VARIANTS = {"based": la.based, "rebased": la.rebased}


def wide(x):
    return np.asarray(x).astype(np.float64)


def relative(found, right):
    return np.linalg.norm(wide(found) - right) / max(np.linalg.norm(right), 1e-300)


def kernels(q, k, v, dout, polynomial, eps, normalize):
    """out and gradients as cuda_src/softmax/forward.cu and backward.cu compute them, of one head in float64."""
    c, scale = polynomial, q.shape[-1] ** -0.5
    read = np.tril(np.ones((len(q), len(k))))
    s = scale * q @ k.T
    e, slope = read * (c[0] + c[1] * s + c[2] * s**2), read * (c[1] + 2 * c[2] * s)
    total = e.sum(1) + eps
    over = np.divide(1, total, where=total != 0, out=np.zeros_like(total)) if normalize else np.ones_like(total)
    out = over[:, None] * (e @ v)
    dot = (dout * out).sum(1) if normalize else 0 * over
    dz = over[:, None] * slope * (dout @ v.T - dot[:, None])
    return out, scale * dz @ k, scale * dz.T @ q, (over[:, None] * e).T @ dout


@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_formulas_of_the_kernels(normalize, eps):
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((21, n)) for n in (5, 5, 3, 3))
    q[4] = 0
    rows = [x[:, None] for x in (q, k, v)]
    out, pull = la.vjp(la.based, *rows, normalize=normalize, eps=eps, scale=0.7)
    right = [out, *pull(dout[:, None])[:3]]
    found = kernels(q, k, v, dout, (0.7, 0.7, 0.35), eps, normalize)
    for got, exact in zip(found, right, strict=True):
        np.testing.assert_allclose(got, exact[:, 0], rtol=0, atol=1e-12)


def given_of(bring, K=64, V=64, T=90, dtype=BF16, H=2, few=2, B=1, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"q": (B, T, H, K), "k": (B, T, few, K), "v": (B, T, few, V)}
    return {n: bring(rng.standard_normal(s).astype(dtype)) for n, s in shapes.items()}


NOT_TAKEN = {
    "a state is asked for": ({"return_state": True}, {}),
    "float16": ({}, {"dtype": np.float16}),
    "float32": ({}, {"dtype": np.float32}),
    "few channels": ({}, {"K": 16}),
    "wide values": ({}, {"V": 200}),
    "array calls": ({"backend": "chunks"}, {}),
    "chunks of 64 tokens": ({"chunk_size": 64}, {}),
    "third order": ({"order": 3}, {"K": 24}),
}


@pytest.mark.parametrize("why", ["taken", *NOT_TAKEN])
def test_which_calls_are_taken(public, monkeypatch, why):  # noqa: F811
    if public.launched is not None:
        monkeypatch.setattr(launch, "_capability", lambda device: 90)
    elif launch.capability() != 90:
        pytest.skip("the kernels are for compute capability 90")
    options, sizes = NOT_TAKEN.get(why, ({}, {}))
    found = la.explain(la.based, **given_of(public.bring, **sizes), **options)
    assert ("pair by pair, in time that grows with T^2" in found.reason) == (why == "taken")


@pytest.fixture
def cp():
    cupy = pytest.importorskip("cupy")
    if launch.capability() != 90:
        pytest.skip("the kernels are for compute capability 90")
    return cupy


CASES = [(64, 64, 200), (128, 128, 257), (40, 72, 2), (56, 64, 17), (72, 40, 130), (128, 64, 1000)]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"normalize": False}, {"eps": 0.5, "scale": 0.7}], ids=str)
@pytest.mark.parametrize(("K", "V", "T"), CASES)
@pytest.mark.parametrize("name", VARIANTS)
def test_against_float64(cp, name, K, V, T, options):
    fn, host = VARIANTS[name], given_of(np.asarray, K, V, T, H=4)
    dout = np.random.default_rng(1).standard_normal((1, T, 4, V)).astype(BF16)
    right, right_pull = la.vjp(fn, **{n: wide(x) for n, x in host.items()}, **options)
    given = {n: cp.asarray(x) for n, x in host.items()}
    assert "pair by pair" in la.explain(fn, **given, **options).reason
    out, pull = la.vjp(fn, **given, **options)
    assert relative(cp.asnumpy(out), right) <= 3 * EPS
    for n, got, exact in zip("qkv", pull(cp.asarray(dout)), right_pull(wide(dout)), strict=False):
        assert relative(cp.asnumpy(got), exact) <= 4 * EPS, n


@pytest.mark.gpu
def test_same_bits(cp):
    """Alone, in a batch, in a ragged batch, and again; a later token changes no earlier output."""
    host = given_of(np.asarray, T=300, B=2)
    dout = cp.asarray(host["v"])

    def run(rows, dout, **options):
        out, pull = la.vjp(la.based, **{n: cp.asarray(x) for n, x in rows.items()}, **options)
        return [cp.asnumpy(y).view(np.int16) for y in (out, *pull(dout)[:3])]

    both, again = run(host, dout), run(host, dout)
    alone = run({n: x[1:] for n, x in host.items()}, dout[1:])
    packed = {n: x.reshape(1, 600, *x.shape[2:]) for n, x in host.items()}
    ragged = run(packed, dout.reshape(1, 600, *dout.shape[2:]), cu_seqlens=[0, 300, 600])
    for x, y, z, w in zip(both, again, alone, ragged, strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(x[1:], z)
        np.testing.assert_array_equal(x.reshape(w.shape), w)
    host["k"][:, 200:] = np.nan
    later = cp.asnumpy(la.based(**{n: cp.asarray(x) for n, x in host.items()})).view(np.int16)
    np.testing.assert_array_equal(later[:, :200], both[0][:, :200])


@pytest.mark.gpu
def test_numbers_travel_to_what_they_touch(cp):
    host = given_of(np.asarray, T=200)
    host["q"][0, 50, 1, 3], host["k"][0, 70, 0, 2] = np.nan, np.inf
    out = wide(cp.asnumpy(la.based(**{n: cp.asarray(x) for n, x in host.items()})))
    bad = np.zeros((200, 2), bool)
    bad[50, 1] = True
    bad[70:, 0] = True
    np.testing.assert_array_equal(np.isfinite(out[0]).all(axis=-1), ~bad)


@pytest.mark.gpu
def test_a_row_without_weights(cp):
    """A query of zeros has weights 0 in ReBased without a norm's shift: outputs and gradients are 0."""
    host = given_of(np.asarray, T=100)
    host["q"][:, 20] = 0
    given = {n: cp.asarray(x) for n, x in host.items()}
    out, pull = la.vjp(la.rebased, **given)
    dq = pull(given["v"]).q
    assert not cp.asnumpy(out)[:, 20].view(np.int16).any()
    assert np.isfinite(wide(cp.asnumpy(dq))).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", VARIANTS)
def test_a_gradient_of_the_state(cp, name):
    """A cotangent of a state that was not asked for goes through the features."""
    fn, host = VARIANTS[name], given_of(np.asarray, K=40, V=24, T=100)
    given = {n: cp.asarray(x) for n, x in host.items()}
    _, (S, z) = fn(**{n: wide(x) for n, x in host.items()}, return_state=True)
    dstate = type(la.based(*(np.ones((1, 1, 1)),) * 3, return_state=True)[1])
    parts = [np.random.default_rng(2).standard_normal(y.shape) for y in (S, z)]
    right = la.vjp(fn, **{n: wide(x) for n, x in host.items()})[1](wide(host["v"]), dstate(*parts))
    _, pull = la.vjp(fn, **given)
    found = pull(given["v"], dstate(*(cp.asarray(y.astype(np.float32)) for y in parts)))
    for n in "qkv":
        assert relative(cp.asnumpy(getattr(found, n)), getattr(right, n)) <= 4 * EPS, n
