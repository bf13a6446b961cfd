"""CUDA kernels of stick-breaking attention against NumPy in float64; new memory is full of NaN."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.softmax import policy

from .test_cuda import both, check_causality, cp, same  # noqa: F401

BOUND = {"bfloat16": 1.2e-2, "float16": 2e-3, "float32": 5e-6}  # of the norm
pytestmark = pytest.mark.gpu
FN = la.stick_breaking_attention


def draw(T, *, dtype="float32", B=2, heads=(2, 2, 2), widths=(64, 64), level=0.0):
    """(arrays by name, cotangent of the output), fresh for every call; level: added to the logits."""
    rng, (Hq, Hk, H), (K, V) = np.random.default_rng(), heads, widths
    kind = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    q, k, v = (rng.standard_normal((B, T, *shape)) for shape in ((Hq, K), (Hk, K), (H, V)))
    q, k = (q + level * K**-0.5, 0.1 * k + 1) if level else (q, k)
    arrays = {n: x.astype(kind) for n, x in (("q", q), ("k", k), ("v", v))}
    return arrays, rng.standard_normal((B, T, max(heads), V)).astype(kind)


def check(cp, T, options=None, **drawn):  # noqa: F811
    """The output and every gradient."""
    arrays, dout = draw(T, **drawn)
    wide, options = {n: x.astype(np.float64) for n, x in arrays.items()}, options or {}
    exact = both(FN, wide, dout.astype(np.float64), **options)
    found = both(FN, {n: cp.asarray(x) for n, x in arrays.items()}, cp.asarray(dout), backend="cuda", **options)
    bound = BOUND[drawn.get("dtype", "float32")]
    for n, x in exact.items():
        y = cp.asnumpy(found[n]).astype(np.float64)
        assert y.shape == x.shape, n
        assert np.linalg.norm(y - x) <= bound * np.linalg.norm(x), n


@pytest.mark.parametrize("T", [1, 63, 64, 65, 128, 700])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lengths(cp, dtype, T):  # noqa: F811
    check(cp, T, dtype=dtype, heads=(4, 2, 2))


@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0)])
def test_no_sequences_and_no_tokens(cp, B, T):  # noqa: F811
    """Nothing to compute: results of the shapes that NumPy arrays have."""
    arrays, dout = draw(T, B=B)
    found = both(FN, {n: cp.asarray(x) for n, x in arrays.items()}, cp.asarray(dout))
    assert {n: x.shape for n, x in found.items()} == {n: x.shape for n, x in both(FN, arrays, dout).items()}


@pytest.mark.parametrize("widths", [(256, 256), (128, 128), (160, 100), (33, 7)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_widths(cp, dtype, widths):  # noqa: F811
    check(cp, 140, {"attend_current": True}, dtype=dtype, widths=widths, heads=(2, 1, 2))


@pytest.mark.parametrize("level", [-12.0, -4.0, 6.0, 9.0])
def test_small_and_large_shares(cp, level):  # noqa: F811
    """Where hundreds of keys take a little each, and where the first takes nearly all."""
    check(cp, 500, level=level)


def test_ragged(cp):  # noqa: F811
    check(cp, 300, {"cu_seqlens": [0, 65, 65, 130, 300]}, B=1, heads=(4, 2, 2))


def test_same_bits(cp, monkeypatch):  # noqa: F811
    """Alone, in a batch, in a ragged batch, on every run, with marks of all heads and of few."""
    arrays, dout = draw(900, dtype="bfloat16", B=3, heads=(32, 16, 16), level=-4.0)
    arrays, dout = {n: cp.asarray(x) for n, x in arrays.items()}, cp.asarray(dout)
    first, again = (both(FN, arrays, dout, backend="cuda") for _ in range(2))
    monkeypatch.setattr(policy, "STICK_BYTES", 1)
    few = both(FN, arrays, dout, backend="cuda")
    part = {n: cp.ascontiguousarray(x[1:2, :, 5:6]) for n, x in arrays.items() if n != "q"}
    part |= {n: cp.ascontiguousarray(x[1:2, :, 10:12]) for n, x in (("q", arrays["q"]), ("dout", dout))}
    alone = both(FN, {n: part[n] for n in arrays}, part["dout"], backend="cuda")
    packed = {n: cp.concatenate([x[:, :77], x, x[:, :130]], axis=1) for n, x in part.items()}
    ragged = both(FN, {n: packed[n] for n in arrays}, packed["dout"], backend="cuda", cu_seqlens=[0, 77, 977, 1107])
    for n, x in first.items():
        heads = slice(10, 12) if n in ("out", "dq") else slice(5, 6)
        assert same(cp, x, again[n]), n
        assert same(cp, x, few[n]), n
        assert same(cp, x[1:2, :, heads], alone[n]), n
        assert same(cp, ragged[n][:, 77:977], alone[n]), n


def test_causality_to_the_bit(cp):  # noqa: F811
    check_causality(cp, FN, draw(300)[0], draw(300)[0], 133)


def test_keys_that_nothing_reaches_are_not_read(cp):  # noqa: F811
    arrays, dout = draw(600, level=20.0)
    arrays["v"][:, :64] = np.nan
    found = both(FN, {n: cp.asarray(x) for n, x in arrays.items()}, cp.asarray(dout), backend="cuda")
    assert not np.isnan(cp.asnumpy(found["out"])[:, 300:]).any()
    assert not np.isnan(cp.asnumpy(found["dq"])[:, 300:]).any()


def test_which_calls(cp):  # noqa: F811
    arrays, _ = draw(20)
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    assert la.explain(FN, **there).backend == "cuda"
    state = FN(**there, return_state=True).state
    assert "with a cache" in la.explain(FN, **there, state=state).others["cuda"]
