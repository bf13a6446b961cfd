"""CUDA kernels of deltaformer's linear system against NumPy in float64; new memory is full of NaN."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la

from .terms import ROUNDING, cancelling
from .test_cuda import GATES, both, check_causality, cp, same  # noqa: F401

BOUND = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-5}  # of the norm
pytestmark = pytest.mark.gpu
FN = la.deltaformer


def draw(T, *, dtype="float32", B=2, heads=(2, 2, 2), widths=(64, 64), gates=None, w=False):
    """(arrays by name, cotangent of the output); fresh for every call."""
    rng, (Hq, Hk, H), (K, V) = np.random.default_rng(), heads, widths
    kind = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    shapes = {"q": (B, T, Hq, K), "k": (B, T, Hk, K), "v": (B, T, H, V)} | ({"w": (B, T, Hk, K)} if w else {})
    arrays = {n: rng.standard_normal(shape).astype(kind) for n, shape in shapes.items()}
    arrays["beta"] = rng.uniform(0, 1.5, (B, T, H)).astype(np.float32)
    arrays["beta"][:, ::7] = 0
    if gates is not None:
        arrays["g"] = GATES[gates](rng, (B, T, H)).astype(np.float32)
    return arrays, rng.standard_normal((B, T, max(heads), V)).astype(kind)


def check(cp, T, options=None, **drawn):  # noqa: F811
    """The output and every gradient; gradients of logits may cancel, so their error is relative to their terms."""
    arrays, dout = draw(T, **drawn)
    options, dtype = options or {}, drawn.get("dtype", "float32")
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    exact = both(FN, wide, dout.astype(np.float64), backend="reference" if T < 70 else None, **options)
    found = both(FN, {n: cp.asarray(x) for n, x in arrays.items()}, cp.asarray(dout), backend="cuda", **options)
    terms = cancelling(wide, exact, dout.astype(np.float64), **options)
    for n, x in exact.items():
        y = cp.asnumpy(found[n]).astype(np.float64)
        assert y.shape == x.shape, n
        assert np.linalg.norm(y - x) <= BOUND[dtype] * np.linalg.norm(x) + ROUNDING[dtype] * terms.get(n, 0.0), n


@pytest.mark.parametrize("T", [1, 63, 64, 65, 128, 700])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lengths(cp, dtype, T):  # noqa: F811
    check(cp, T, dtype=dtype, heads=(4, 2, 2))


@pytest.mark.parametrize("widths", [(256, 256), (128, 128), (160, 100), (33, 7)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_widths(cp, dtype, widths):  # noqa: F811
    check(cp, 140, dtype=dtype, widths=widths, heads=(2, 1, 2), w=True)


@pytest.mark.parametrize("gates", list(GATES))
def test_gates(cp, gates):  # noqa: F811
    check(cp, 270, widths=(32, 48), gates=gates, w=True)


@pytest.mark.parametrize("g", [-88.0, -1e4, -1e10, -1e30])
def test_a_gate_that_is_common_to_all_keys_hides_no_logit(cp, g):  # noqa: F811
    """A gate common to all keys, at single tokens and in whole blocks, in float64 and by the kernels."""
    common = lambda rng, shape: np.where(rng.random(shape) < 0.2, g, -0.3 * rng.random(shape))  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(GATES, "common", common)
        for dtype in ("float32", "bfloat16"):
            check(cp, 270, dtype=dtype, widths=(32, 48), gates="common", w=True)


def test_without_denominators(cp):  # noqa: F811
    check(cp, 130, {"normalize": False, "scale": 0.01}, gates="mild")


def test_ragged(cp):  # noqa: F811
    check(cp, 300, {"cu_seqlens": [0, 65, 65, 130, 300]}, B=1, heads=(4, 2, 2), gates="mixed")


def test_same_bits(cp):  # noqa: F811
    """Alone, in a batch, in a ragged batch, on every run, with more blocks than run at once."""
    arrays, dout = draw(900, dtype="bfloat16", B=3, heads=(32, 32, 32), gates="mild", w=True)
    arrays, dout = {n: cp.asarray(x) for n, x in arrays.items()}, cp.asarray(dout)
    first, again = (both(FN, arrays, dout, backend="cuda") for _ in range(2))
    part = {n: cp.ascontiguousarray(x[1:2, :, 5:6]) for n, x in (arrays | {"dout": dout}).items()}
    alone = both(FN, {n: part[n] for n in arrays}, part["dout"], backend="cuda")
    packed = {n: cp.concatenate([x[:, :77], x, x[:, :130]], axis=1) for n, x in part.items()}
    ragged = both(FN, {n: packed[n] for n in arrays}, packed["dout"], backend="cuda", cu_seqlens=[0, 77, 977, 1107])
    for n, x in first.items():
        assert same(cp, x, again[n]), n
        assert same(cp, x[1:2, :, 5:6], alone[n]), n
        assert same(cp, ragged[n][:, 77:977], alone[n]), n


def test_causality_to_the_bit(cp):  # noqa: F811
    check_causality(cp, FN, draw(300, w=True)[0], draw(300, w=True)[0], 133)


def test_which_calls(cp):  # noqa: F811
    arrays, _ = draw(20)
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    assert la.explain(FN, **there).backend == "cuda"
    state = FN(**there, return_state=True).state
    assert "a system that goes on from a cache" in la.explain(FN, **there, state=state).others["cuda"]
    wide = {n: x.astype(np.float64) for n, x in there.items()}
    assert "float64" in la.explain(FN, **wide).others["cuda"]
