"""AdamW and the norm of a gradient by cuda_src/ops/optimiser.cu; emulated here, or on a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

from linattn_np.ops import optimisers as ops
from linattn_np.ops.cuda import optimisers as launched
from linattn_np.ops.cuda.optimisers import COUNT, MOST_BLOCKS, NORM, PER, SCALE, Moments
from linattn_np.ops.cuda.unit_rows import THREADS
from tests.cuda.emulation import device, emulated  # noqa: F401

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
KINDS = {  # dtypes of parameters and gradients
    "float32": (np.float32, np.float32),
    "float64": (np.float64, np.float64),
    "bfloat16": (BFLOAT16, BFLOAT16),
    "bfloat16, gradients added in float32": (BFLOAT16, np.float32),
    "float16": (np.float16, np.float16),
}
BETAS, EPS, DECAY = (0.8, 0.9), 1e-6, 0.3


def draw(kind, size, seed=0):
    """Parameters, gradients, and moments with masters, whose parameters are the nearest numbers."""
    rng, (p, g) = np.random.default_rng(seed), KINDS[kind]
    wide = np.float64 if p == np.float64 else np.float32
    master, m = (rng.standard_normal(size).astype(wide) for _ in range(2))
    moments = Moments(master if np.dtype(p).itemsize == 2 else None, m, rng.random(size).astype(wide))
    return master.astype(p), rng.standard_normal(size).astype(g), moments


def brought(device, p, g, moments):  # noqa: F811
    bring = lambda x: None if x is None else device.bring(x)  # noqa: E731
    return bring(p), bring(g), Moments(*map(bring, moments))


def numbers(device, step, rate, most):  # noqa: F811
    given = np.full(COUNT, np.nan)
    given[: SCALE - 1] = launched.numbers_of(step, rate, BETAS, most)
    return device.bring(given)


@pytest.mark.parametrize("size", [1, PER, 3 * PER * THREADS + 5])
@pytest.mark.parametrize("most", [0.5, 1e9])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_numpy(device, kind, most, size):  # noqa: F811
    """The float64 step of the array form, clipped and not, some of the numbers decaying."""
    p, g, moments = draw(kind, size)
    P, G, M = brought(device, p, g, moments)
    own, decaying = numbers(device, 3, 0.05, most), size // 3
    launched.norm(G, own)
    launched.adamw(P, G, M, own, decaying, DECAY, BETAS, EPS)
    wide = [x.astype(np.float64) for x in (p if moments.master is None else moments.master, g, moments.m, moments.v)]
    length = np.linalg.norm(wide[1])
    found = device.see(own)
    assert np.isclose(found[NORM], length, rtol=1e-13)
    assert np.isclose(found[SCALE], min(1, most / length), rtol=1e-13)
    groups = [(0, decaying, 1 - 0.05 * DECAY, 0.05), (decaying, size, 1.0, 0.05)]
    ops.adamw(np, *wide, groups, BETAS, EPS, 3, min(1, most / length))
    masters = P if M.master is None else M.master
    eps = np.finfo(device.see(masters).dtype).eps
    for x, exact in zip((masters, M.m, M.v), (wide[0], *wide[2:]), strict=True):
        np.testing.assert_allclose(device.see(x), exact, rtol=8 * eps, atol=8 * eps)
    np.testing.assert_array_equal(device.see(P), device.see(masters).astype(p.dtype))  # the nearest numbers


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_changes_nothing(device, kind, bad):  # noqa: F811
    p, g, moments = draw(kind, 100)
    g[-1] = bad
    P, G, M = brought(device, p, g, moments)
    own = numbers(device, 1, 0.05, 1.0)
    launched.norm(G, own)
    launched.adamw(P, G, M, own, 50, DECAY, BETAS, EPS)
    assert not np.isfinite(device.see(own)[NORM])
    for x, before in zip((P, *M), (p, *moments), strict=True):
        assert before is None or device.see(x).tobytes() == before.tobytes()


def test_no_square_overflows_and_the_norm_of_zeros_is_0(device):  # noqa: F811
    for g, length in ((np.full(4, 3e38, np.float32), 6e38), (np.full(4, 1e-40, np.float32), 2e-40), (np.zeros(9), 0)):
        own = numbers(device, 1, 0.05, 1.0)
        launched.norm(device.bring(g), own)
        assert np.isclose(device.see(own)[NORM], length, rtol=1e-5, atol=0)
        assert np.isclose(device.see(own)[SCALE], 1 / length if length > 1 else 1, rtol=1e-5)


def test_many_numbers_are_added_in_turns(device):  # noqa: F811
    """More of them than all blocks read at once; the sum has the same bits again, and unaligned vectors their own."""
    size = PER * THREADS * MOST_BLOCKS + 3 * PER + 1 if device.launched is None else PER * THREADS * 4 + 1
    g = np.random.default_rng(0).standard_normal(size + 1).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        if device.launched is not None:
            patch.setattr(launched, "MOST_BLOCKS", 2)
        G, lengths = device.bring(g), []
        for _ in range(2):
            own = numbers(device, 1, 0.05, 1.0)
            launched.norm(G[1:], own)
            lengths.append(device.see(own)[NORM])
            own = numbers(device, 1, 0.05, 1.0)
            launched.norm(G[:-1], own)
            lengths.append(device.see(own)[NORM])
    assert lengths[0] == lengths[2]
    assert lengths[1] == lengths[3]
    assert np.allclose(lengths[:2], [np.linalg.norm(x.astype(np.float64)) for x in (g[1:], g[:-1])], rtol=1e-13)


def test_which_vectors_are_taken(device):  # noqa: F811
    p, g, moments = brought(device, *draw("float32", 8))
    assert launched.takes(p, g, *moments)
    assert launched.takes(*brought(device, *draw("bfloat16", 8))[:2], *moments)
    assert not launched.takes(p, g, None, *(device.bring(np.zeros(8)) for _ in range(2)))
    assert not launched.takes(p[::2], g, *moments)
