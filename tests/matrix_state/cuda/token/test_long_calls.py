"""Calls that no chunk kernel covers go token by token in one kernel, at any length: no GPU."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.matrix_state import core as matrix_state
from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cuda import calls as cuda_calls
from linattn_np.runtime.cuda import launch
from tests.core_cases import case
from tests.matrix_state.cuda import step_twin
from tests.matrix_state.cuda.step_twin import CUPY, stub


@pytest.fixture
def launched(monkeypatch):
    """Launches go to the twin of the recurrence, gradients by array calls; entries of each."""
    monkeypatch.setattr(policy, "RECURRENCE_BACKWARD", False)
    monkeypatch.setattr(policy, "PORTABLE_CHUNKS", False)
    found = []

    def launch_twin(file, entry, constants, blocks, threads, shared, arguments, arrays=None):
        found.append(entry)
        assert entry == "step"
        step_twin.run.blocks = blocks
        step_twin.run(constants, arguments)

    changes = {"launch": launch_twin, "current_device": lambda: 0, "unusable": lambda: None, "capability": lambda: 90}
    for name, change in changes.items():
        monkeypatch.setattr(launch, name, change)
    return found


@pytest.mark.parametrize(
    ("decay", "erase", "dtype"),
    [
        ("vector", "none", np.float32),
        ("vector", "delta", np.float32),
        ("vector", "none", np.float16),
        ("outer", "none", np.float32),
        ("value", "none", np.float32),
        ("vector", "free", np.float32),
        ("none", "free", np.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("offsets", [None, [0, 3, 3, 40]])
def test_decays_of_channels_that_no_chunk_kernel_covers(launched, decay, erase, dtype, offsets):
    how = {"B": 1} if offsets else {}
    x, plan, S, dout, dS = case(decay, erase, "after", 40, None, offsets=offsets, **how)
    there = type(x)(*(None if y is None else stub(y.astype(dtype)) for y in x))
    wide = type(x)(*(None if y is None else y.astype(np.float64) for y in there))
    call = matrix_state.Call(there, plan._replace(xp=CUPY, dtype=np.float32))
    assert cuda_calls.unsupported_reason(call) is None
    assert cuda_calls.form(call) == ("recurrent form", None)
    expected, end, saved = recurrence.forward(wide, plan, S)
    out, last, residuals = cuda_calls.forward(*call, stub(S.astype(np.float32)))
    assert launched == ["step"]
    bound = 4 * np.finfo(dtype).eps
    assert np.abs(out - expected).max() <= np.abs(expected).max() * bound
    assert np.abs(last - end).max() <= 1e-5 * np.abs(end).max()
    grads, first = cuda_calls.backward(residuals, stub(dout.astype(np.float32)), stub(dS.astype(np.float32)))
    right, expected_first = recurrence.backward(saved, dout, dS)
    for name, want in right._asdict().items():
        if want is not None:
            assert np.abs(getattr(grads, name) - want).max() <= np.abs(want).max() * max(bound, 1e-5), name
    assert np.abs(first - expected_first).max() <= 1e-5 * np.abs(expected_first).max()


def test_a_chunk_size_that_was_given_is_kept(launched):
    x, plan, *_ = case("vector", "none", "after", 40, None)
    there = type(x)(*(None if y is None else stub(y.astype(np.float32)) for y in x))
    for C in (32, 64):
        call = matrix_state.Call(there, plan._replace(xp=CUPY, dtype=np.float32, chunk_size=C))
        assert cuda_calls.unsupported_reason(call) is not None


@pytest.mark.parametrize(
    ("dtype", "T", "recurs"),
    [
        (np.float32, policy.FLOAT32_RECURRENCE, True),
        (np.float32, policy.FLOAT32_RECURRENCE + 1, False),
        (np.float16, policy.FLOAT32_RECURRENCE + 1, True),
    ],
)
def test_long_sequences_in_float32_go_in_chunks(launched, dtype, T, recurs):
    """Rounding a decay once a token adds up."""
    x, plan, *_ = case("vector", "none", "after", T, None, heads=(1, 1, 1), B=1)
    there = type(x)(*(None if y is None else stub(y.astype(dtype)) for y in x))
    call = matrix_state.Call(there, plan._replace(xp=CUPY, dtype=np.float32))
    assert (cuda_calls.unsupported_reason(call) is None) == recurs
