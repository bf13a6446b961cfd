"""Free rank-one terms by their kernels of chunks, also where the environment leaves them off."""

from __future__ import annotations

import pytest

from linattn_np.matrix_state import policy


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch):
    monkeypatch.setattr(policy, "FREE_ERASE", True)
