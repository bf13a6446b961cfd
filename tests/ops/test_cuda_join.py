"""Arrays as one vector by cuda_src/ops/join.cu; emulated here, or on a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

from linattn_np.ops.cuda import join
from tests.cuda.emulation import device, emulated  # noqa: F401

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = {
    "one": [(3, 5)],
    "aligned": [(64, 64), (8,), (16, 8)],
    "of any length": [(1,), (3,), (64, 7), (), (0, 4), (9, 9), (2, 3, 5)],
    "of several blocks": [(5,), (130, 129), (8192,), (8193,)],
    "of several launches": [(n % 5 + 1,) for n in range(2 * join.MOST + 3)],
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BFLOAT16], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_numbers_are_those_of_the_arrays(device, shapes, dtype):  # noqa: F811
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    given = [device.bring(x) for x in arrays]
    assert join.takes(given)
    found = device.see(join.joined(given))
    assert found.dtype == dtype
    assert found.tobytes() == b"".join(x.tobytes() for x in arrays)


@pytest.mark.parametrize(("T", "long"), [(5, 8), (8, 5), (3, 3), (700, 704)])
@pytest.mark.parametrize("count", [1, 3])
def test_sequences_of_another_length(device, T, long, count):  # noqa: F811
    """Arrays of several dtypes and widths: their first rows, zeros after them; there and back they are the same."""
    rng, N = np.random.default_rng(0), 3
    kinds = [(BFLOAT16, (2, 8)), (np.float32, (2, 1)), (BFLOAT16, (1, 3))][:count]
    arrays = [rng.standard_normal((N * T, *shape)).astype(dtype) for dtype, shape in kinds]
    given = [device.bring(x) for x in arrays]
    assert join.resizes(given, T)
    moved = join.resized(given, T, long)
    for ours, x in zip(moved, arrays, strict=True):
        rows = x.reshape(N, T, *x.shape[1:])[:, :long]
        right = np.zeros((N, long, *x.shape[1:]), x.dtype)
        right[:, : rows.shape[1]] = rows
        assert device.see(ours).dtype == x.dtype
        np.testing.assert_array_equal(device.see(ours), right.reshape(N * long, *x.shape[1:]))
    for ours, x in zip(join.resized(moved, long, T) if long >= T else given, arrays, strict=True):
        np.testing.assert_array_equal(device.see(ours), x)


def test_arrays_that_are_not_dense(device):  # noqa: F811
    x = np.arange(60, dtype=np.float32).reshape(5, 12)
    X = device.bring(x)
    found = device.see(join.joined([X.T, X[:, 1:4], X[1:2, 3:]]))
    np.testing.assert_array_equal(found, np.concatenate([x.T.ravel(), x[:, 1:4].ravel(), x[1, 3:]]))
