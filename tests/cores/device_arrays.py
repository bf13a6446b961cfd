"""What tests of kernels share: dtypes by name, errors against NumPy."""

from __future__ import annotations

import numpy as np
import pytest


def typed(name):
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def error(actual, expected):
    """Norm of the difference over the norm; absolute where the expected is 0."""
    actual = np.asarray(actual.get()).astype(np.float64)
    assert actual.shape == expected.shape
    return np.linalg.norm(actual - expected) / (np.linalg.norm(expected) or 1.0)
