"""CuPy for tests of kernels; few slots for the compiled loops' backward."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.call.replay import plans as replay
from linattn_np.matrix_state import policy
from linattn_np.runtime.cuda import launch


@pytest.fixture
def cp(monkeypatch):
    """CuPy, with every new buffer full of NaN."""
    cupy = pytest.importorskip("cupy")
    namespace = pytest.importorskip("array_api_compat.cupy")

    def poisoned(shape, dtype=None, **_):
        return cupy.full(shape, np.nan if np.dtype(dtype).kind in "fV" else -1, dtype=dtype)

    def array(shape, dtype, *memory):
        return cupy.ndarray(shape, dtype, *memory) if memory else poisoned(shape, dtype)

    def memory(size):
        found = cupy.cuda.alloc(size)
        found.memset_async(0xFF, size)  # a capture takes no synchronous call
        return found

    monkeypatch.setattr(namespace, "empty", poisoned)
    monkeypatch.setattr(launch, "array_type", lambda: array)
    monkeypatch.setattr(launch, "allocator", lambda: memory)
    replay.clear()  # recorded plans allocate with the namespace of their time
    return cupy


@pytest.fixture
def hopper(cp):
    """Only where warpgroup products are."""
    if launch.capability() != 90:
        pytest.skip("needs compute capability 90")


@pytest.fixture
def portable(cp, monkeypatch):
    """The portable kernels where others would be taken."""
    monkeypatch.setattr(policy, "PORTABLE", True)
    yield
    replay.clear()  # recorded plans depend on it


@pytest.fixture
def short_blocks(monkeypatch):
    """short_blocks(n): the compiled loops' backward takes so many tokens at once."""

    def limit(tokens):
        monkeypatch.setattr(policy, "TIME_BLOCK", tokens)
        monkeypatch.setattr(policy, "LONGEST_BLOCK", tokens)

    return limit
