"""Portable CUDA kernels of the softmax core, and caches, against NumPy in float64; new memory is full of NaN."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import dispatch
from linattn_np.softmax import policy
from tests.cases import parts

from .test_cuda import BY_TOKEN, FUNCTIONS, GATES, both, check_same_bits, cp, draw, same  # noqa: F401

BOUND = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}  # of the norm
pytestmark = pytest.mark.gpu
GATED = la.forgetting_attention


def check(cp, fn, T, options=None, **drawn):  # noqa: F811
    """The output and every gradient; what cancels is compared with its terms."""
    arrays, dout = draw(fn, T, **drawn)
    options = options or {}
    exact = both(fn, {n: x.astype(np.float64) for n, x in arrays.items()}, dout.astype(np.float64), **options)
    found = both(fn, {n: cp.asarray(x) for n, x in arrays.items()}, cp.asarray(dout), backend="cuda", **options)
    size = np.sqrt(np.mean(np.square(exact["dv"])))
    for n, x in exact.items():
        y = cp.asnumpy(found[n]).astype(np.float64)
        assert y.shape == x.shape, n
        least = 0 if n in ("out", "dv") else 0.1 * size * np.sqrt(x.size)
        assert np.linalg.norm(y - x) <= BOUND[drawn["dtype"]] * max(np.linalg.norm(x), least), n


@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("T", [1, 65, 300])
def test_float32(cp, fn, T):  # noqa: F811
    check(cp, fn, T, dtype="float32", heads=(4, 2, 2), widths=(64, 64))


@pytest.mark.parametrize("widths", [(256, 256), (160, 100), (33, 7)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_widths(cp, dtype, widths):  # noqa: F811
    check(cp, la.softmax_attention, 140, dtype=dtype, widths=widths, sinks=True)
    check(cp, GATED, 270, {"window": 150}, dtype=dtype, widths=widths, heads=(2, 2, 4))


@pytest.mark.parametrize("gates", list(GATES))
def test_gates(cp, gates):  # noqa: F811
    check(cp, GATED, 520, dtype="float32", widths=(32, 48), gates=gates)
    check(cp, GATED, 520, {"window": 150}, dtype="float32", widths=(32, 48), gates=gates)


def test_other_options(cp):  # noqa: F811
    check(cp, la.softmax_attention, 100, {"causal": False}, dtype="float32", widths=(64, 64), keys=333)
    check(cp, la.softmax_attention, 100, {"normalize": False, "scale": 0.05}, dtype="float32", widths=(64, 64))
    check(cp, la.softmax_attention, 100, {"scale": -0.1}, dtype="bfloat16", widths=(64, 64))


@pytest.mark.parametrize("fn", BY_TOKEN)
def test_same_bits(cp, fn):  # noqa: F811
    drawn = draw(fn, 420, B=1, heads=(4, 2, 2), dtype="float32", widths=(64, 64))
    check_same_bits(cp, fn, *drawn, [0, 130, 130, 133, 420])


# caches


def cache_of(fn, B, L, seen, *, dtype, heads, widths, seed=0):
    """A cache after `seen` tokens of each sequence."""
    rng, (Hq, Hk, H), (K, V) = np.random.default_rng(seed), heads, widths
    kind = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    k, v = (rng.standard_normal((B, L, *shape)).astype(kind) for shape in ((Hk, K), (H, V)))
    length = np.asarray(seen, np.int64)
    if fn is la.softmax_attention:
        return la.KeyValueCache(k, v, length)
    b = -3 * rng.random((B, L, Hq))
    b[rng.random(b.shape) < 0.02] = -np.inf
    return la.GatedCache(k, v, b.astype(np.float32), length)


def check_cache(cp, fn, T, L, seen, options=None, stored=None, dtype="bfloat16", heads=(4, 2, 2), widths=(128, 128)):  # noqa: F811
    """The output, and the cache where it is overwritten; in a batch the bits of each sequence alone."""
    B, options = len(seen), options or {}
    arrays, _ = draw(fn, T, B=B, dtype=dtype, heads=heads, widths=widths, sinks=fn is la.softmax_attention)
    start = cache_of(fn, B, L, seen, dtype=stored or dtype, heads=heads, widths=widths)
    exact = type(start)(*(y.astype(np.float64) for y in start))
    wanted = fn(**{n: x.astype(np.float64) for n, x in arrays.items()}, state=exact, overwrite_state=True, **options)
    there, cache = {n: cp.asarray(x) for n, x in arrays.items()}, type(start)(*map(cp.asarray, start))
    explained = la.explain(fn, **there, state=cache, **options)
    assert explained.backend == "cuda"
    plain = fn(**there, state=cache, backend="cuda", **options)
    found = fn(**there, state=cache, overwrite_state=True, backend="cuda", **options)
    assert same(cp, plain, found)
    error = np.linalg.norm(cp.asnumpy(found).astype(np.float64) - wanted)
    assert error <= BOUND[dtype] * np.linalg.norm(wanted)
    for n, x in exact._asdict().items():
        y = cp.asnumpy(getattr(cache, n)).astype(np.float64)
        assert (np.isfinite(x) == np.isfinite(y)).all(), n
        np.testing.assert_allclose(y[np.isfinite(x)], x[np.isfinite(x)], rtol=BOUND[stored or dtype], atol=1e-4)
    for n in range(B):
        one = type(start)(*(cp.asarray(y[n : n + 1]) for y in start))
        alone = fn(**{m: x[n : n + 1] if m in ("q", "k", "v", "g") else x for m, x in there.items()}, state=one,
                   overwrite_state=True, backend="cuda", **options)  # fmt: skip
        assert same(cp, alone, found[n : n + 1])
        assert all(same(cp, x, getattr(cache, m)[n : n + 1]) for m, x in one._asdict().items())


def check_cache_gradients(
    cp,  # noqa: F811
    T,
    L,
    seen,
    options=None,
    stored=None,
    dtype="bfloat16",
    heads=(4, 2, 2),
    widths=(64, 64),
):
    """Of every array and of the cache, against float64; nothing for slots without a token; the plain call's output."""
    B, fn, options = len(seen), la.softmax_attention, options or {}
    arrays, dout = draw(fn, T, B=B, dtype=dtype, heads=heads, widths=widths, sinks=True)
    start = cache_of(fn, B, L, seen, dtype=stored or dtype, heads=heads, widths=widths)
    for n, count in enumerate(seen):
        start.k[n, count:] = start.v[n, count:] = np.nan  # whatever is there is not read
    clean = type(start)(*(np.nan_to_num(y.astype(np.float64)) for y in start))
    _, back = la.vjp(fn, **{n: x.astype(np.float64) for n, x in arrays.items()}, state=clean, **options)
    there, cache = {n: cp.asarray(x) for n, x in arrays.items()}, type(start)(*map(cp.asarray, start))
    out, pullback = la.vjp(fn, **there, state=cache, backend="cuda", **options)
    assert same(cp, out, fn(**there, state=cache, backend="cuda", **options))
    wanted, found = (dict(y._asdict()) for y in (back(dout.astype(np.float64)), pullback(cp.asarray(dout))))
    for y in (wanted, found):
        y |= {f"past {n}": d for n, d in y.pop("state")._asdict().items()}
    size = np.sqrt(np.mean(np.square(wanted["v"])))
    for n, x in wanted.items():
        if x is None:
            continue
        y = cp.asnumpy(found[n]).astype(np.float64)
        least = 0.1 * size * np.sqrt(x.size)  # dz may cancel to nothing
        assert np.linalg.norm(y - x) <= BOUND[dtype] * max(np.linalg.norm(x), least), n
    for n, count in enumerate(seen):
        assert not found["past k"][n, count:].any()
        assert not found["past v"][n, count:].any()


@pytest.mark.parametrize("T", [1, policy.FEW_QUERIES, policy.FEW_QUERIES + 1, 200])
def test_gradients_through_a_cache(cp, T):  # noqa: F811
    """Not full, full, empty, a ring that has gone round."""
    check_cache_gradients(cp, T, 300, [250, 300, 0, 5000])


@pytest.mark.parametrize(("dtype", "stored"), [("float16", None), ("float32", None), ("bfloat16", "float32")])
def test_gradients_through_a_cache_of_dtypes_and_options(cp, dtype, stored):  # noqa: F811
    check_cache_gradients(cp, 70, 90, [33, 90], dtype=dtype, stored=stored, widths=(128, 40))
    check_cache_gradients(cp, 70, 90, [33, 90], {"causal": False}, dtype=dtype, stored=stored, heads=(2, 1, 2))
    check_cache_gradients(cp, 70, 90, [33, 90], {"normalize": False, "scale": 0.02}, dtype=dtype, stored=stored)


@pytest.mark.parametrize(("fn", "options"), [(la.softmax_attention, {"window": 9}), (GATED, {})])
def test_gradients_through_caches_that_take_array_calls(cp, fn, options):  # noqa: F811
    """The output is the kernels'."""
    arrays, dout = draw(fn, 20, B=2)
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    cache = fn(**there, return_state=True).state
    out, pullback = la.vjp(fn, **there, state=cache, **options, backend="cuda")
    assert same(cp, out, fn(**there, state=cache, **options, backend="cuda"))
    _, right = la.vjp(fn, **there, state=cache, **options, backend="chunks")
    for d, expected in zip(pullback(cp.asarray(dout)), right(cp.asarray(dout)), strict=True):
        for x, y in zip(parts(d), parts(expected), strict=True):
            assert same(cp, x, y)


@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("T", [1, 3, policy.FEW_QUERIES, policy.FEW_QUERIES + 1, 100])
def test_caches(cp, fn, T):  # noqa: F811
    """Not full, full, empty; rings that have gone round; more tokens than slots."""
    check_cache(cp, fn, T, 700, [650, 697, 0, 5000])
    check_cache(cp, fn, T, 40, [33, 100], {"window": 30}, widths=(64, 40))


@pytest.mark.parametrize("heads", [(2, 2, 2), (2, 2, 4), (32, 1, 1), (20, 1, 1), (6, 2, 2)])
def test_heads_of_a_cache(cp, heads):  # noqa: F811
    check_cache(cp, la.softmax_attention, 2, 300, [200, 299], heads=heads, widths=(64, 64))
    check_cache(cp, GATED, 2, 300, [200, 299], heads=heads, widths=(64, 64))


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "float32"), ("float16", "float16"), ("bfloat16", "float32"),
                                               ("float32", "bfloat16")])  # fmt: skip
def test_dtypes_of_a_cache(cp, dtype, stored):  # noqa: F811
    for widths in ((128, 128), (256, 200), (7, 13)):
        for T in (1, 20):
            check_cache(cp, GATED, T, 600, [555], dtype=dtype, stored=stored, widths=widths)


def test_long_caches_and_other_options(cp):  # noqa: F811
    check_cache(cp, la.softmax_attention, 1, 5000, [4999, 12345])
    check_cache(cp, la.softmax_attention, 1, 5000, [4999, 600], {"window": 1000})
    check_cache(cp, la.softmax_attention, 3, 200, [150], {"causal": False})
    check_cache(cp, la.softmax_attention, 3, 200, [150], {"normalize": False, "scale": 0.05})


def test_ragged_batches_of_caches(cp):  # noqa: F811
    """Short and long sequences, and one without tokens, have the bits of each alone."""
    offsets, N = [0, 3, 3, 43, 44], 4
    arrays, _ = draw(GATED, 44, B=1, heads=(4, 2, 2), widths=(64, 64))
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    start = cache_of(GATED, N, 90, [80, 20, 85, 0], dtype="bfloat16", heads=(4, 2, 2), widths=(64, 64))
    cache = type(start)(*map(cp.asarray, start))
    out = GATED(**there, state=cache, overwrite_state=True, cu_seqlens=offsets, backend="cuda")
    for n, (a, b) in enumerate(pairwise(offsets)):
        one = type(start)(*(cp.asarray(y[n : n + 1]) for y in start))
        if a < b:
            own = {m: cp.ascontiguousarray(x[:, a:b]) for m, x in there.items()}
            alone = GATED(**own, state=one, overwrite_state=True, backend="cuda")
            assert same(cp, alone, out[:, a:b])
        assert all(same(cp, x, getattr(cache, m)[n : n + 1]) for m, x in one._asdict().items())


def test_one_token_is_recorded(cp):  # noqa: F811
    """Prompt, then steps in a buffer, equal the whole; from the second step on only recorded launches run."""
    for fn in (la.softmax_attention, GATED):
        arrays, _ = draw(fn, 40, B=2, heads=(4, 2, 2), widths=(64, 64))
        there = {n: cp.asarray(x) for n, x in arrays.items()}
        whole = fn(**there, backend="cuda")
        start = fn(**{n: x[:, :36] for n, x in there.items()}, return_state=True)[1]
        parts = start._asdict()
        for n in parts.keys() - {"length"}:
            full = cp.zeros((2, 48, *parts[n].shape[2:]), parts[n].dtype)
            full[:, :36] = parts[n]
            parts[n] = full
        cache = type(start)(**parts)
        with pytest.MonkeyPatch.context() as nothing_planned:
            for t in range(36, 40):
                one = {n: cp.ascontiguousarray(x[:, t]) for n, x in there.items()}
                out = la.step(fn, **one, state=cache, overwrite_state=True)
                assert float(cp.abs(out.astype(np.float32) - whole[:, t].astype(np.float32)).max()) < 3e-2
                nothing_planned.setattr(dispatch, "prepare", None)
        assert (cache.length == 40).all()
