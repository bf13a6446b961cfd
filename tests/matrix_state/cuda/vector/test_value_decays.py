"""Decays of the value channels by the kernels of a decay of the key channels, against their twins: no GPU."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.matrix_state import core as matrix_state
from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state.cuda import calls as cuda_calls
from linattn_np.matrix_state.cuda.vector import value as vector_value
from tests.core_cases import case
from tests.matrix_state.cuda.step_twin import stub
from tests.matrix_state.cuda.vector.test_calls import BFLOAT16, CUPY
from tests.matrix_state.cuda.vector.test_gradient_calls import launched  # noqa: F401, a fixture


def call_of(T=70, heads=(2, 2, 2), K=16, V=8, state=True, **more):
    """(x and plan as the kernels get them, the same in float64, initial state, dout, dstate): values are computed."""
    x, plan, S, dout, dS = case("value", "none", "after", T, 64, heads, K, V, **more)
    rounded = x._replace(**{n: getattr(x, n).astype(BFLOAT16) for n in "qkv"}, gv=x.gv.astype(np.float32))
    wide = type(x)(*(None if y is None else y.astype(np.float64) for y in rounded))
    there = type(x)(*(None if y is None else stub(y) for y in rounded))._replace(v=stub(rounded.v.astype(np.float32)))
    S = S.astype(np.float32) if state else None
    own = plan._replace(xp=CUPY, dtype=np.float32, computed=("v",))
    return (there, own), (wide, plan), S, dout.astype(BFLOAT16), dS.astype(np.float32)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"state": False},
        {"T": 20},
        {"heads": (2, 1, 2)},
        {"heads": (1, 1, 4)},
        {"K": 8, "V": 72, "T": 65},
        {"offsets": [0, 3, 3, 70, 200], "T": 200, "B": 1},
        {"T": 1100, "B": 1, "K": 8},
    ],
    ids=str,
)
def test_output_and_gradients(launched, how):  # noqa: F811
    """The output is the gradient of the queries of the call on the transposed state."""
    (x, plan), (wide, wide_plan), S, dout, dS = call_of(**how)
    call = matrix_state.Call(x, plan)
    assert cuda_calls.unsupported_reason(call) is None
    assert cuda_calls.describe(call).startswith("the transposed state: a scan of chunks")
    expected, end, saved = recurrence.forward(wide, wide_plan, None if S is None else S.astype(np.float64))
    out, last, residuals = cuda_calls.forward(x, plan, None if S is None else stub(S))
    assert out.dtype == np.float32
    assert np.abs(out - expected).max() <= np.abs(expected).max() * 1e-5
    assert np.abs(last - end).max() <= 1e-5 * np.abs(end).max()
    right, first = recurrence.backward(saved, dout.astype(np.float64), dS)
    grads, d = cuda_calls.backward(residuals, stub(dout), stub(dS))
    for name in ("q", "k", "v", "gv"):
        found, want = getattr(grads, name), getattr(right, name)
        assert found.shape == want.shape
        assert np.abs(found.astype(np.float64) - want).max() <= np.abs(want).max() * 2**-7, name
    assert np.abs(d - first).max() <= 1e-4 * np.abs(first).max()
    assert {entry for entry, *_ in launched} <= {"scan", "reverse", "grads", "adds", "segments"}


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("of the value channels alone", lambda x, plan: (x._replace(g=x.k), plan)),
        ("more heads of them", lambda x, plan: (x._replace(q=stub(np.repeat(x.q, 2, axis=-2))), plan)),
        ("different dtypes", lambda x, plan: (x._replace(q=x.v), plan)),
        ("take bfloat16", lambda x, plan: (x, plan._replace(computed=()))),
        ("multiples of 8", lambda x, plan: (x._replace(k=x.k[..., :5]), plan)),
    ],
)
def test_what_is_not_covered_says_why(launched, words, change):  # noqa: F811
    x, plan = change(*call_of()[0])
    call = matrix_state.Call(x, plan._replace(chunk_size=None))
    assert words in vector_value.unsupported_reason(call)
    assert "token by token in one kernel" in cuda_calls.describe(call)
