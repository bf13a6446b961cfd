"""Gradients of vector decays by their kernels, also where the environment switches them off."""

from __future__ import annotations

import pytest

from linattn_np.matrix_state import policy


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch):
    monkeypatch.setattr(policy, "VECTOR_BACKWARD", True)
