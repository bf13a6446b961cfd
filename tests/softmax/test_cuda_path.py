"""CUDA kernels of PaTH attention against NumPy in float64, on the same rounded inputs; new memory is full of NaN."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la

from . import test_cuda
from .test_cuda import both, cp, same  # noqa: F401

fn = la.path_attention
BOUND = {"random": 4e-3, 0.05: 4e-3, 1.0: 4e-3, 2.0: 1.2e-2}  # of the norm, by strength
GRADIENTS = 1.2e-2  # of the norm of each
pytestmark = pytest.mark.gpu


def draw(T, *, B=1, heads=(2, 2, 2), widths=(128, 128), gates=None, beta="random"):
    """(arrays by name, cotangent of the output); w is rounded, of nearly unit length."""
    arrays, dout = test_cuda.draw(fn, T, B=B, heads=heads, widths=widths, gates=gates or "none")
    if gates is None:
        del arrays["g"]
    rng, shape = np.random.default_rng(T + 1), arrays["k"].shape
    w = rng.standard_normal(shape)
    arrays["w"] = (w / np.linalg.norm(w, axis=-1, keepdims=True)).astype(arrays["k"].dtype)
    strengths = 2 / (1 + np.exp(-rng.standard_normal(shape[:-1])))
    arrays["beta"] = (strengths if beta == "random" else np.full(shape[:-1], beta)).astype(np.float32)
    return arrays, dout


def check(cp, T, **drawn):  # noqa: F811
    arrays, _ = draw(T, **drawn)
    exact = fn(**{n: x.astype(np.float64) for n, x in arrays.items()}, backend="reference" if T < 70 else "chunks")
    found = fn(**{n: cp.asarray(x) for n, x in arrays.items()}, backend="cuda")
    found = cp.asnumpy(found).astype(np.float64)
    assert found.shape == exact.shape
    assert np.linalg.norm(found - exact) <= BOUND[drawn.get("beta", "random")] * np.linalg.norm(exact)


@pytest.mark.parametrize("T", [0, 1, 63, 64, 65, 127, 128, 129, 1000])
def test_lengths(cp, T):  # noqa: F811
    check(cp, T) if T else fn(**{n: cp.asarray(x) for n, x in draw(0)[0].items()})


@pytest.mark.parametrize("widths", [(64, 64), (64, 128), (128, 64), (40, 72), (7, 13)])
def test_widths(cp, widths):  # noqa: F811
    check(cp, 200, widths=widths)


@pytest.mark.parametrize(("T", "K", "heads"), [(1700, 64, (2, 2, 2)), (1700, 128, (2, 2, 2)), (8321, 64, (1, 1, 1))])
def test_groups_of_blocks(cp, T, K, heads):  # noqa: F811
    """Blocks by eights, and of 65 blocks by 64."""
    check(cp, T, heads=heads, widths=(K, 64))


@pytest.mark.parametrize("gates", ["mild", "strong", "resets", "mixed"])
def test_gates(cp, gates):  # noqa: F811
    check(cp, 520, gates=gates)


@pytest.mark.parametrize("beta", [0.05, 1.0, 2.0])
def test_strengths(cp, beta):  # noqa: F811
    check(cp, 1300, beta=beta)


@pytest.mark.parametrize("heads", [(4, 2, 2), (2, 2, 4), (6, 1, 1)])
def test_grouped_heads(cp, heads):  # noqa: F811
    check(cp, 300, heads=heads, B=2)


def test_equal_directions(cp):  # noqa: F811
    """Repeated tokens: the maps are powers of one."""
    arrays, _ = draw(700)
    for n in ("w", "k"):
        arrays[n][:] = arrays[n][:, :1]
    for beta in (0.5, 1.0, 2.0):
        arrays["beta"][:] = beta
        exact = fn(**{n: x.astype(np.float64) for n, x in arrays.items()}, backend="chunks")
        found = cp.asnumpy(fn(**{n: cp.asarray(x) for n, x in arrays.items()}, backend="cuda")).astype(np.float64)
        assert np.linalg.norm(found - exact) <= BOUND[2.0] * np.linalg.norm(exact), beta


@pytest.mark.parametrize("gates", [None, "mixed"])
def test_same_bits(cp, gates):  # noqa: F811
    drawn = draw(1700, heads=(4, 2, 2), gates=gates)
    test_cuda.check_same_bits(cp, fn, *drawn, [0, 130, 130, 133, 1420, 1700], test_cuda.output)


@pytest.mark.parametrize("first", [1, 70, 333, 1290])
def test_causality_to_the_bit(cp, first):  # noqa: F811
    test_cuda.check_causality(cp, fn, draw(1400)[0], draw(1401)[0], first)


def compare(cp, arrays, dout, bound=GRADIENTS, **options):  # noqa: F811
    """Gradients against the definition, or its tiles, in float64."""
    exact = {n: x.astype(np.float64) for n, x in arrays.items()}
    backend = "reference" if len(dout[0]) < 70 else "chunks"
    exact = both(fn, exact, dout.astype(np.float64), backend=backend, **options)
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    found = both(fn, there, cp.asarray(dout), backend="cuda", **options)
    assert found.keys() == exact.keys()
    for n, x in exact.items():
        y = cp.asnumpy(found[n]).astype(np.float64)
        assert y.shape == x.shape, n
        assert np.linalg.norm(y - x) <= bound * np.linalg.norm(x), n


@pytest.mark.parametrize("T", [1, 64, 129, 1000])
def test_gradients(cp, T):  # noqa: F811
    if T == 1:
        compare(cp, *draw(2))  # with one token p is 1 and dz 0
    else:
        compare(cp, *draw(T, gates="mild", B=2))
    arrays, dout = draw(1)
    found = both(fn, {n: cp.asarray(x) for n, x in arrays.items()}, cp.asarray(dout), backend="cuda")
    assert all(bool(cp.isfinite(x.astype(np.float32)).all()) for x in found.values())


@pytest.mark.parametrize("drawn", [
    {"widths": (64, 40), "heads": (4, 2, 2)}, {"widths": (128, 64), "heads": (2, 2, 4), "B": 2},
    {"widths": (7, 128), "heads": (6, 1, 1)}, {"beta": 2.0}, {"beta": 0.05}, {"gates": "mixed"}, {"gates": "strong"},
], ids=str)  # fmt: skip
def test_gradients_of_kinds(cp, drawn):  # noqa: F811
    compare(cp, *draw(400, **drawn), bound=2 * GRADIENTS if "beta" in drawn or drawn.get("gates") else GRADIENTS)


@pytest.mark.parametrize(("T", "K", "gates"), [(1300, 128, "mild"), (8400, 64, None)])
def test_gradients_of_groups(cp, T, K, gates):  # noqa: F811
    """Blocks by eights and by 64."""
    compare(cp, *draw(T, heads=(1, 1, 1), widths=(K, 64), gates=gates))


def test_gradients_of_no_strength(cp):  # noqa: F811
    """dbeta where beta is 0."""
    arrays, dout = draw(300)
    arrays["beta"][:, ::3] = 0
    compare(cp, arrays, dout)


@pytest.mark.parametrize("gates", [None, "mixed"])
def test_gradients_have_the_same_bits(cp, gates):  # noqa: F811
    test_cuda.check_same_bits(cp, fn, *draw(1700, heads=(4, 2, 2), gates=gates), [0, 130, 130, 133, 1420, 1700])


def test_gradients_of_numerators(cp):  # noqa: F811
    arrays, dout = draw(300, gates="mild")
    compare(cp, arrays, dout, normalize=False, scale=0.05)


def test_scale_and_numerators(cp):  # noqa: F811
    arrays, options = draw(300, gates="mild")[0], {"normalize": False, "scale": 0.05}
    exact = fn(**{n: x.astype(np.float64) for n, x in arrays.items()}, backend="chunks", **options)
    found = fn(**{n: cp.asarray(x) for n, x in arrays.items()}, backend="cuda", **options)
    assert np.linalg.norm(cp.asnumpy(found).astype(np.float64) - exact) <= BOUND["random"] * np.linalg.norm(exact)


def test_what_is_computed_by_array_calls(cp):  # noqa: F811
    there = {n: cp.asarray(x) for n, x in draw(40)[0].items()}
    explained = la.explain(fn, **there)
    assert explained.backend == "cuda"
    explained = la.explain(fn, **there, window=20)
    assert explained.backend == "chunks"
    assert "windows" in explained.others["cuda"]
    half = there | {"w": there["w"].astype(np.float16)}
    assert "bfloat16" in la.explain(fn, **half).others["cuda"]
