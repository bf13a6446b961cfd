"""Similarities that are polynomials of q . k: exact where q . k is small, and within a stated memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state import policy

EPS = float(np.finfo(np.float32).eps)
MAPS = {
    "based": (la.based, {}),
    "based order 3": (la.based, {"order": 3, "normalize": False}),
    "rebased": (la.rebased, {}),
    "rebased numerators": (la.rebased, {"normalize": False}),
    "taylor": (la.linear_attention, {"feature_map": "taylor", "normalize": True}),
    "rebased map": (la.linear_attention, {"feature_map": "rebased", "normalize": True}),
}
HOWS = [{}, {"backend": "chunks"}, {"backend": "chunks", "chunk_size": 4}, {"backend": "numba"}, {"chunk_size": 4},
        {"backend": "reference"}, {"chunk_size": 1}, {"chunk_size": "parallel"}]  # fmt: skip
every_map = pytest.mark.parametrize("name", MAPS)
every_how = pytest.mark.parametrize("how", HOWS, ids=str)


def rows(kind, T, seed=0, K=20, V=5):
    """float32 rows (T, 2, K) whose products q . k are small, or whose keys are all the same, or a few of any kind."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((T, 2, n)) for n in (K, K, V))
    if kind == "equal keys":
        k[1:] = k[0]
    if kind == "small products":  # up to 1 % of q lies along the keys, which span half of the channels
        k[..., K // 2 :], q[..., : K // 2] = 0, 0.01 * q[..., : K // 2]
    return [x.astype(np.float32) for x in (q, k, v)]


def computed(name, given, d, **options):
    """Output and gradients."""
    fn, own = MAPS[name]
    out, pullback = la.vjp(fn, *given, **own, **options)
    return [out, *pullback(d)[:3]]


def perturbations(name, given, d, expected, **options):
    """How far inputs that are off by half an eps of float32 move the output and the gradients, in float64."""
    moved = [0.0] * len(expected)
    for seed in range(8):
        rng = np.random.default_rng(100 + seed)
        near = [x * (1 + EPS / 2 * rng.choice([-1, 1], x.shape)) for x in (*given, d)]
        found = computed(name, near[:3], near[3], **options)
        moved = [max(m, float(np.abs(x - y).max())) for m, x, y in zip(moved, found, expected, strict=True)]
    return moved


def terms(name, given, d):
    """The gradients of q and k by the numerators alone, which the denominators cancel for one token."""
    fn, own = MAPS[name]
    q, k, v = given
    own = own | {"normalize": False}
    sums = fn(q, k, np.ones_like(v), **own) if MAPS[name][1].get("normalize", True) else 1.0
    return [0.0, *(float(np.abs(x).max()) for x in la.vjp(fn, q, k, v, **own)[1](d / sums)[:2]), 0.0]


@every_how
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kind", "T"), [("equal keys", 9), ("small products", 9), ("any", 1), ("any", 2), ("any", 3)])
@every_map
def test_float32_is_as_exact_as_its_inputs(name, kind, T, causal, how):
    """Errors are a few times the effect of rounding the inputs, forward and backward."""
    given = rows(kind, T)
    d = np.random.default_rng(1).standard_normal((T, 2, 5)).astype(np.float32)
    wide = [x.astype(np.float64) for x in (*given, d)]
    expected = computed(name, wide[:3], wide[3], causal=causal, backend="reference")
    allowed = perturbations(name, wide[:3], wide[3], expected, causal=causal, backend="reference")
    if T == 1:
        allowed = [a + EPS * b for a, b in zip(allowed, terms(name, wide[:3], wide[3]), strict=True)]
    found = computed(name, given, d, causal=causal, **how)
    for part, x, y, bound in zip(("out", "dq", "dk", "dv"), found, expected, allowed, strict=True):
        assert x.dtype == np.float32
        assert np.abs(x - y).max() <= 8 * bound + 4 * EPS * np.abs(y).max(), part


@every_map
def test_steps_hand_on_states_without_loss_in_float64(name):
    fn, own = MAPS[name]
    q, k, v = rows("equal keys", 6)
    whole, end = fn(*(x.astype(np.float64) for x in (q, k, v)), **own, return_state=True)
    state = type(end)(*map(np.zeros_like, end)) if isinstance(end, tuple) else np.zeros_like(end)
    outs = []
    for t in range(6):
        out, state = fn(*(x[t : t + 1] for x in (q, k, v)), **own, state=state, return_state=True)
        outs.append(out)
    error = np.abs(np.concatenate(outs) - whole).max() / np.abs(whole).max()
    moved = fn(*(x.astype(np.float64) * (1 + EPS * s) for x, s in ((q, 1), (k, -1), (v, 1))), **own)
    assert error <= 8 * EPS + 8 * np.abs(moved - whole).max() / np.abs(whole).max()


def peak(f):
    """Bytes that a call allocates besides its results."""
    tracemalloc.start()
    result = f()
    now, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return most - now


@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (2, 6)], ids=str)
@pytest.mark.parametrize("options", [{"chunk_size": 64}, {}, {"causal": False}, {"causal": False, "chunk_size": 64}],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["based", "rebased"])
def test_memory_stays_within_the_stated_one(name, options, heads, monkeypatch):
    """Forward and backward; all features would take more."""
    monkeypatch.setattr(policy, "POLYNOMIAL_BYTES", 12 << 20)
    rng, fn = np.random.default_rng(0), MAPS[name][0]
    q, k, v = (rng.standard_normal((1, 768, h, n)).astype(np.float32)
               for h, n in ((heads[0], 28), (heads[1], 28), (heads[1], 9)))  # fmt: skip
    call = lambda: la.vjp(fn, q, k, v, backend="chunks", **options)  # noqa: E731
    out, pullback = call()
    pullback(out)
    features = 768 * sum(heads) * 28 * 29 / 2 * 8
    assert features > 1.5 * policy.POLYNOMIAL_BYTES
    assert peak(call) <= policy.POLYNOMIAL_BYTES
    assert peak(lambda: pullback(out)) <= policy.POLYNOMIAL_BYTES + 4 * (q.nbytes + k.nbytes + v.nbytes)
    assert "at most 12 MiB beside inputs and outputs" in la.explain(fn, q, k, v, backend="chunks", **options).reason


def test_blocks_of_heads_do_not_change_bits(monkeypatch):
    q, k, v = (np.random.default_rng(n).standard_normal((2, 70, 4, 9)).astype(np.float32) for n in range(3))
    results = []
    for size in (256 << 20, 1):
        monkeypatch.setattr(policy, "POLYNOMIAL_BYTES", size)
        out, pullback = la.vjp(la.based, q, k, v, backend="chunks", chunk_size=16, return_state=True)
        results.append([out.out, *out.state, *pullback(out.out)[:3]])
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(x, y)


def test_array_libraries_compute_what_numpy_computes():
    strict = pytest.importorskip("array_api_strict")
    q, k, v = (np.random.default_rng(n).standard_normal((2, 11, 2, 6)).astype(np.float32) for n in range(3))
    for options in ({}, {"chunk_size": 4}, {"causal": False}, {"chunk_size": 4, "causal": False}):
        expected = la.rebased(q, k, v, backend="chunks", **options)
        found = la.rebased(*map(strict.asarray, (q, k, v)), **options)
        assert la.testing.relative_error(np.asarray(found), expected) <= 64 * EPS


@pytest.mark.parametrize(("T", "form"), [(200, "parallel form"), (300, "chunk form")])
def test_without_a_causal_mask_pairs_count_twice(T, form):
    """2 T^2 (K + V) operations of pairs, or 4 T M V of M = 153 features: the pairs up to T = 2 M V / (K + V)."""
    x = np.broadcast_to(np.float32(1), (1, T, 2, 16))
    v = np.broadcast_to(np.float32(1), (1, T, 2, 64))
    found = la.explain(la.based, x, x, v, causal=False)
    assert found.reason.startswith("the default path; a polynomial of q . k")
    assert found.form == form
    assert found.operations == (2 * 2 * T * T * 80 if form == "parallel form" else 2 * 2 * 2 * T * 153 * 64)
