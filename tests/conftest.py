"""GPU tests are skipped where CuPy sees no device."""

from __future__ import annotations

import pytest


def _cupy():
    try:
        import cupy
    except Exception:
        return None
    return cupy if cupy.is_available() else None


def pytest_collection_modifyitems(items):
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and _cupy() is None:
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device that CuPy can use"))
