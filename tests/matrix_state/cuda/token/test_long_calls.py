"""Which long calls go token by token in one kernel: decided without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cuda import calls
from linattn_np.runtime.cuda import launch
from tests.core_cases import case
from tests.matrix_state.cuda.step_twin import CUPY, stub


@pytest.fixture(autouse=True)
def card(monkeypatch):
    """A device whose calls of decays of channels have no chunk kernel."""
    monkeypatch.setattr(policy, "PORTABLE_CHUNKS", False)
    for name, value in {"current_device": 0, "unusable": None, "capability": 90}.items():
        monkeypatch.setattr(launch, name, lambda value=value: value)


def unsupported_reason(dtype, T, **changes):
    x, plan, *_ = case("vector", "none", "after", T, None, heads=(1, 1, 1), B=1)
    there = type(x)(*(None if y is None else stub(y.astype(dtype)) for y in x))
    return calls.unsupported_reason(there, plan._replace(xp=CUPY, dtype=np.float32, **changes))


@pytest.mark.parametrize("C", [32, 64])
def test_a_given_chunk_size_is_not_ignored(C):
    assert unsupported_reason(np.float32, 40) is None
    assert unsupported_reason(np.float32, 40, chunk_size=C) is not None


@pytest.mark.parametrize(
    ("dtype", "more", "recurs"), [(np.float32, 0, True), (np.float32, 1, False), (np.float16, 1, True)]
)
def test_long_sequences_in_float32_go_in_chunks(dtype, more, recurs):
    """Rounding a decay once a token adds up."""
    assert (unsupported_reason(dtype, policy.FLOAT32_RECURRENCE + more) is None) == recurs
