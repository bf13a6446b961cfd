"""The host side of the kernels of erase FREE: launches go to a twin in NumPy, token by token. No GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from linattn_np.matrix_state import core as matrix_state
from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state.cuda import calls as cuda_calls
from linattn_np.matrix_state.cuda import vector
from linattn_np.matrix_state.cuda.arguments import FREE
from linattn_np.matrix_state.cuda.free import calls, plan
from linattn_np.matrix_state.types import ReadState
from linattn_np.runtime.cuda import launch
from tests.core_cases import case

from .. import vector_twin
from ..step_twin import stub
from ..test_vector_calls import BFLOAT16, CUPY


class _Call(vector_twin._Call):
    """The arguments of a launch, by name."""

    def __init__(self, constants, arguments):
        self.constants = SimpleNamespace(**dict(constants))
        self.a = SimpleNamespace(**FREE.unpack(arguments))
        self.narrow = BFLOAT16


def twin(call, of_keys, n, head):
    """One sequence and head; of_keys: the launch that has made its factors."""
    a, constants = call.a, call.constants
    row, first, T = call.sequence(n)
    slot = n * a.heads + head
    start = call.state("start", slot // a.start_group, constants.LA_K, constants.LA_V)
    S = np.zeros((constants.LA_K, constants.LA_V)) if start is None else start.astype(np.float64)
    rows = {name: of_keys.rows(name, head, n, 0, T).astype(np.float64) for name in "qkgab"}
    out, v = vector_twin._mapped(a.out, BFLOAT16), call.rows("v", head, n, 0, T).astype(np.float64)
    for t in range(T):
        w = rows["a"][t] @ S
        S = np.exp(rows["g"][t])[:, None] * S + np.outer(rows["b"][t], w) + np.outer(rows["k"][t], v[t])
        out[row, first + t, head] = of_keys.a.scale * (rows["q"][t] @ S)
    if head % a.end_group == 0:
        call.state("end", slot // a.end_group, constants.LA_K, constants.LA_V)[:] = S


@pytest.fixture
def launched(monkeypatch):
    """(entry, constants, blocks) of each launch."""
    found, made = [], {}

    def launch_twin(file, entry, constants, blocks, threads, shared, arguments, arrays=None):
        call = _Call(constants, arguments)
        found.append((entry, dict(constants), blocks))
        assert (file, entry) == plan.KERNELS[entry][:2]
        if entry == plan.FACTORS:
            assert blocks == call.a.heads * (blocks // call.a.heads)
            made[call.a.factors] = call
            return
        for block in range(blocks):
            twin(call, made[call.a.factors], *divmod(block, call.a.heads))

    told = {"current_device": 0, "unusable": None, "capability": 90, "multiprocessors": 132}
    own = {n: lambda value=value: value for n, value in told.items()}
    for name, value in ({"launch": launch_twin, "prepare": lambda wanted, capability: None} | own).items():
        monkeypatch.setattr(launch, name, value)
    monkeypatch.setattr(vector, "tensor_map", vector_twin.tensor_map)
    monkeypatch.setattr(calls, "moves", lambda: True)
    monkeypatch.setattr("linattn_np.matrix_state.policy.PORTABLE", False)
    return found


def call_of(decay="vector", T=70, heads=(2, 2, 2), K=16, V=8, gate=np.float32, **more):
    """(x and plan as the kernels get them, the same in float64, initial state)."""
    x, wide_plan, S, *_ = case(decay, "free", "after", T, 64, heads, K, V, **more)
    kinds = dict.fromkeys("qkvab", BFLOAT16) | {"g": gate}
    rounded = x._replace(**{n: getattr(x, n).astype(kind) for n, kind in kinds.items() if getattr(x, n) is not None})
    wide, there = (type(x)(*(None if y is None else made(y) for y in rounded))
                   for made in (lambda y: y.astype(np.float64), stub))  # fmt: skip
    return (there, wide_plan._replace(xp=CUPY, dtype=np.float32)), (wide, wide_plan), S.astype(np.float32)


@pytest.mark.parametrize("how", [
    {}, {"T": 17}, {"gate": BFLOAT16}, {"heads": (4, 2, 2)}, {"heads": (1, 1, 4)}, {"decay": "none"},
    {"K": 128, "V": 64, "T": 65}, {"offsets": [0, 3, 3, 70, 200], "T": 200, "B": 1},
], ids=str)
def test_factors_and_a_chain(launched, how):
    (x, plan_of), (wide, wide_plan), S = call_of(**how)
    assert cuda_calls.unsupported_reason(matrix_state.Call(x, plan_of)) is None
    expected, end, _ = recurrence.forward(wide, wide_plan, S.astype(np.float64))
    out, last, _ = cuda_calls.forward(x, plan_of, stub(S))
    assert np.abs(out.astype(np.float64) - expected).max() <= np.abs(expected).max() * 2**-8
    assert np.abs(last - end).max() <= 1e-5 * max(np.abs(end).max(), 1)
    assert [(entry, constants.get("LA_EXACT")) for entry, constants, _ in launched] == [
        ("factors", 0), ("factors", 1), ("chain", None)]  # fmt: skip
    assert launched[2][1]["LA_RAGGED"] == ("offsets" in how)


def test_what_is_not_covered_says_why(launched):
    (x, plan_of), *_ = call_of()
    for words, other in (
        ("take bfloat16", (x._replace(v=x.v.astype(np.float32)), plan_of)),
        ("or none", (x._replace(g=x.g[..., :1]), plan_of)),
        ("after its own write", (x, plan_of._replace(query_reads=ReadState.PREVIOUS))),
    ):
        assert words in cuda_calls.unsupported_reason(matrix_state.Call(*other))
    assert "62 nats" in cuda_calls.describe(matrix_state.Call(x, plan_of))
