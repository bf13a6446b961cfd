"""The gradient of sinks by its kernel (cuda_src/softmax/sinks.cu) against NumPy's float64; emulated, or on a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

from linattn_np.softmax.cuda import calls
from linattn_np.softmax.types import Inputs, SoftmaxPlan
from tests.cuda.emulation import device, emulated  # noqa: F401


def draw(rows, N, group, T, rng):
    """Sinks, log2 sums of exponentials that are above them, and <dout, out>."""
    sinks, dots = rng.standard_normal(N).astype(np.float32), rng.standard_normal((rows, N * group, T))
    logs = np.repeat(sinks, group)[:, None] / np.log(2) + 3 * rng.random(dots.shape)
    return sinks, logs.astype(np.float32), dots.astype(np.float32)


def exact(sinks, logs, dots):
    """The gradient in float64, and the sum of its terms' sizes."""
    each = np.repeat(sinks, logs.shape[1] // len(sinks)).astype(np.float64)[:, None]
    terms = np.exp(each - np.log(2) * logs.astype(np.float64)) * dots
    terms = terms.sum(axis=-1).reshape(len(logs), len(sinks), -1), abs(terms).sum(axis=(0, 2)).reshape(len(sinks), -1)
    return -terms[0].sum(axis=(0, 2)), terms[1].sum(axis=1)


def plan_of(device, **more):  # noqa: F811
    return SoftmaxPlan(device.xp, np.dtype(np.float32), 1.0, **more)


def found(device, plan, sinks, logs, dots, strided=False):  # noqa: F811
    x = Inputs(None, None, None, sinks=device.bring(sinks)[:: 2 if strided else 1])
    return device.see(calls.sink_gradient(plan, x, device.bring(logs), device.bring(dots)))


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("T", [1, 511, 513, 2049])
def test_sums_over_tokens_heads_and_rows(device, T, rows, group):  # noqa: F811
    arrays = draw(rows, 2, group, T, np.random.default_rng(T))
    wanted, size = exact(*arrays)
    y = found(device, plan_of(device), *arrays)
    assert y.dtype == np.float32
    assert (abs(y - wanted) <= 1e-6 * size).all()
    assert y.tobytes() == found(device, plan_of(device), *arrays).tobytes()


def test_strided_sinks_and_sinks_of_16_bits(device):  # noqa: F811
    sinks, logs, dots = draw(2, 4, 1, 70, np.random.default_rng(0))
    sinks = sinks.astype(ml_dtypes.bfloat16)
    wanted, size = exact(sinks.astype(np.float32), logs, dots)
    assert (abs(found(device, plan_of(device), sinks, logs, dots) - wanted) <= 1e-6 * size).all()
    wide = np.repeat(sinks.astype(np.float32), 2)
    assert (abs(found(device, plan_of(device), wide, logs, dots, strided=True) - wanted) <= 1e-6 * size).all()


def test_a_sink_without_weight_and_no_denominator(device):  # noqa: F811
    """A sink of -inf has gradient 0, beside rows that read nothing too; NaN stays NaN, in its head alone."""
    sinks, logs, dots = draw(1, 3, 1, 40, np.random.default_rng(0))
    sinks[:2], logs[:, 0, 5] = (-np.inf, np.nan), -np.inf
    y = found(device, plan_of(device), sinks, logs, dots)
    assert y[0] == 0
    assert np.isnan(y[1])
    assert np.isfinite(y[2])
    assert (found(device, plan_of(device, normalize=False), sinks, logs, dots) == 0).all()
