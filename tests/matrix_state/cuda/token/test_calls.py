"""The host side of the CUDA step, against a twin of its kernel that works on the bytes it is given: no GPU."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cuda.token import calls as cuda_step
from tests.core_cases import CELLS, case
from tests.matrix_state.cuda.step_twin import CUPY, stub
from tests.matrix_state.cuda.token import host

launched, public, arrays_of, there = host.launched, host.public, host.arrays_of, host.there


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
@pytest.mark.parametrize(
    "sizes",
    [
        {"K": 8, "V": 4},
        {"K": 5, "V": 3, "heads": (1, 1, 4)},
        {"K": 130, "V": 1},
        {"heads": (4, 2, 2)},
        {"offsets": [0, 2, 2, 5], "B": 1},
    ],
)
def test_every_cell(launched, cell, sizes):
    x, plan, state, *_ = case(*cell, T=5, dtype=np.float32, C=None, **sizes)
    if cell[2] == "bonus" and sizes.get("heads") == (4, 2, 2):
        pytest.skip("a bonus has the heads of the values")
    expected, end, _ = recurrence.forward(x, plan, state)
    x2 = there(x)
    if cell[1] == "delta":
        x2 = x2._replace(r=x2.k) if np.array_equal(x.r, x.k) else x2
    out2, end2, _ = cuda_step.forward(x2, plan._replace(xp=CUPY), stub(state))
    assert np.abs(out2 - expected).max() < 1e-5
    assert np.abs(end2 - end).max() < 1e-5
    assert not np.isnan(out2).any()
    assert cuda_step.unsupported_reason(x2, plan._replace(xp=CUPY)) is None
    assert policy.is_short_cuda(plan)
