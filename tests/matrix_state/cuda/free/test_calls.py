"""The host side of the kernels of erase FREE: launches go to a twin in NumPy, token by token. No GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from linattn_np.matrix_state import core as matrix_state
from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state.cuda import calls as cuda_calls
from linattn_np.matrix_state.cuda.arguments import FREE, FREE_GRADS
from linattn_np.matrix_state.cuda.free import gradients as backward
from linattn_np.matrix_state.cuda.free import launch as launches
from linattn_np.matrix_state.cuda.free import plan
from linattn_np.matrix_state.cuda.vector import launch as vector_launch
from linattn_np.matrix_state.types import ReadState
from linattn_np.runtime.cuda import launch
from tests.core_cases import case
from tests.matrix_state.cuda.vector import twin as vector_twin
from tests.matrix_state.cuda.vector.test_calls import BFLOAT16, CUPY

from ..step_twin import stub


class _Call(vector_twin._Call):
    """The arguments of a launch, by name."""

    def __init__(self, constants, kind, arguments):
        self.constants = SimpleNamespace(**dict(constants))
        self.a = SimpleNamespace(**kind.unpack(arguments))
        self.narrow = BFLOAT16

    def given(self, n, head, names):
        """All rows of a sequence and head, by name, in float64."""
        T = self.sequence(n)[2]
        return {name: self.rows(name, head, n, 0, T).astype(np.float64) for name in names}

    def first(self, n, head):
        """The state, or its gradient, that a chain begins with."""
        K, V = self.constants.LA_K, self.constants.LA_V
        found = self.state("start", (n * self.a.heads + head) // self.a.start_group, K, V)
        return np.zeros((K, V)) if found is None else found.astype(np.float64)

    def store(self, name, n, head, values):
        """Rows of a sequence and head, by a map or by strides."""
        at, (row, first, T) = getattr(self.a, name), self.sequence(n)
        if isinstance(at, dict):
            kind = np.float32 if name == "dg" and self.constants.LA_GATE == 2 else BFLOAT16
            strides = (at["token"], np.dtype(kind).itemsize)
            begin = at["data"] + row * at["batch"] + first * at["token"] + head * at["head"]
            if at["data"]:
                vector_twin._view(begin, values.shape, strides, kind)[:] = values
        else:
            vector_twin._mapped(at, BFLOAT16)[row, first : first + T, head] = values


def traverse(x, S, scale):
    """(out, states before and after all tokens)."""
    states = [S]
    for t in range(len(x["q"])):
        S = np.exp(x["g"][t])[:, None] * S + np.outer(x["b"][t], x["a"][t] @ S) + np.outer(x["k"][t], x["v"][t])
        states.append(S)
    return scale * np.einsum("tk,tkv->tv", x["q"], np.array(states[1:]).reshape(-1, *S.shape)), states


def adjoint(x, S, dout, G, scale):
    """(gradients of the rows by name, of the first state)."""
    states = traverse(x, S, scale)[1]
    found = {n: np.zeros_like(x[n]) for n in "qkvgab"}
    for t in reversed(range(len(dout))):
        before, dw = states[t], None
        found["q"][t] = scale * states[t + 1] @ dout[t]
        G = G + scale * np.outer(x["q"][t], dout[t])
        dw = x["b"][t] @ G
        found["k"][t], found["b"][t], found["v"][t] = G @ x["v"][t], G @ (x["a"][t] @ before), x["k"][t] @ G
        found["a"][t], found["g"][t] = before @ dw, np.exp(x["g"][t]) * np.sum(before * G, axis=1)
        G = np.exp(x["g"][t])[:, None] * G + np.outer(x["a"][t], dw)
    return found, G


class Twin:
    """Launches in NumPy, token by token; what a kernel leaves to another is known by where it is stored."""

    def __init__(self):
        self.launches, self.made, self.states = [], {}, {}

    def launch(self, file, entry, constants, blocks, threads, shared, arguments, arrays=None):
        if entry == "head_sums":
            x, d = arrays
            d[...] = np.asarray(x, np.float64).reshape(*d.shape[:-1], -1, d.shape[-1]).sum(-2)
            return
        name = next(n for n, kernel in plan.KERNELS.items() if kernel.file == file)
        call = _Call(constants, FREE_GRADS if entry == "grads" else FREE, arguments)
        self.launches.append((name, dict(constants), blocks))
        if name == plan.FACTORS:
            self.made[call.a.factors] = call
        elif name == plan.GRADS:
            self.grads(call)
        elif name == plan.CHAIN:
            for block in range(blocks):
                self.chain(call, *divmod(block, call.a.heads))

    def chain(self, call, n, head):
        a, keys = call.a, self.made[call.a.factors]
        x = keys.given(n, head, "qkgab")
        slot, end = n * a.heads + head, call.first(n, head)
        self.states[a.states, n, head] = end
        if call.constants.LA_BACKWARD:
            x["v"] = np.zeros((len(x["q"]), call.constants.LA_V))
            found, S = adjoint(x, np.zeros_like(end), call.given(n, head, "v")["v"], end, keys.a.scale)
            call.store("out", n, head, found["v"])
        else:
            out, states = traverse(x | call.given(n, head, "v"), end, keys.a.scale)
            call.store("out", n, head, out)
            S = states[-1]
        if head % a.end_group == 0:
            call.state("end", slot // a.end_group, call.constants.LA_K, call.constants.LA_V)[:] = S

    def grads(self, call):
        for n, head in {key[1:] for key in self.states if key[0] == call.a.states}:
            dout = _mapped_rows(call, n, head)
            found, _ = adjoint(call.given(n, head, "qkvgab"), self.states[call.a.states, n, head], dout,
                               self.states[call.a.ends, n, head], call.a.scale)  # fmt: skip
            for name in "qkgab":
                call.store(f"d{name}", n, head, found[name])


def _mapped_rows(call, n, head):
    row, first, T = call.sequence(n)
    return vector_twin._mapped(call.a.dout, BFLOAT16)[row, first : first + T, head].astype(np.float64)


@pytest.fixture
def launched(monkeypatch):
    """(kernel, constants, blocks) of each launch."""
    twin = Twin()
    shown = {"current_device": 0, "unusable": None, "capability": 90, "multiprocessors": 132}
    own = {n: lambda value=value: value for n, value in shown.items()}
    for name, value in ({"launch": twin.launch, "prepare": lambda wanted, capability: None} | own).items():
        monkeypatch.setattr(launch, name, value)
    monkeypatch.setattr(vector_launch, "tensor_map", vector_twin.tensor_map)
    for module in (launches, backward):
        monkeypatch.setattr(module, "moves", lambda: True)
    monkeypatch.setattr("linattn_np.matrix_state.policy.PORTABLE", False)
    return twin.launches


def call_of(decay="vector", T=70, heads=(2, 2, 2), K=16, V=8, gate=np.float32, **more):
    """(x and plan as the kernels get them, the same in float64, initial state)."""
    x, wide_plan, S, *_ = case(decay, "free", "after", T, 64, heads, K, V, **more)
    kinds = dict.fromkeys("qkvab", BFLOAT16) | {"g": gate}
    rounded = x._replace(**{n: getattr(x, n).astype(kind) for n, kind in kinds.items() if getattr(x, n) is not None})
    wide, there = (type(x)(*(None if y is None else made(y) for y in rounded))
                   for made in (lambda y: y.astype(np.float64), stub))  # fmt: skip
    return (there, wide_plan._replace(xp=CUPY, dtype=np.float32)), (wide, wide_plan), S.astype(np.float32)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"T": 17},
        {"gate": BFLOAT16},
        {"heads": (4, 2, 2)},
        {"heads": (1, 1, 4)},
        {"decay": "none"},
        {"K": 128, "V": 64, "T": 65},
        {"offsets": [0, 3, 3, 70, 200], "T": 200, "B": 1},
    ],
    ids=str,
)
def test_factors_and_a_chain(launched, how):
    (x, plan_of), (wide, wide_plan), S = call_of(**how)
    assert cuda_calls.unsupported_reason(matrix_state.Call(x, plan_of)) is None
    expected, end, _ = recurrence.forward(wide, wide_plan, S.astype(np.float64))
    out, last, _ = cuda_calls.forward(x, plan_of, stub(S))
    assert np.abs(out.astype(np.float64) - expected).max() <= np.abs(expected).max() * 2**-8
    assert np.abs(last - end).max() <= 1e-5 * max(np.abs(end).max(), 1)
    assert [(name, constants.get("LA_EXACT")) for name, constants, _ in launched] == [
        ("factors", 0), ("factors", 1), ("chain", None)]  # fmt: skip
    assert launched[2][1]["LA_RAGGED"] == ("offsets" in how)


def test_what_is_not_covered_says_why(launched):
    (x, plan_of), *_ = call_of()
    for words, other in (
        ("take bfloat16", (x._replace(v=x.v.astype(np.float32)), plan_of)),
        ("goes token by token", (x._replace(g=x.g[..., :1]), plan_of)),
        ("after its own write", (x, plan_of._replace(query_reads=ReadState.PREVIOUS))),
    ):
        assert words in cuda_calls.unsupported_reason(matrix_state.Call(*other))
    assert "62 nats" in cuda_calls.describe(matrix_state.Call(x, plan_of))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"gate": BFLOAT16},
        {"heads": (4, 2, 2)},
        {"heads": (1, 1, 4)},
        {"decay": "none"},
        {"offsets": [0, 3, 3, 70, 90], "T": 90, "B": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("keep", [True, False])
def test_gradients(launched, monkeypatch, how, keep):
    """From what a forward has kept, and from the inputs alone."""
    (x, plan_of), (wide, wide_plan), S = call_of(**how)
    plan_of = plan_of._replace(gradients=True)
    monkeypatch.setattr("linattn_np.matrix_state.policy.saves_factors", lambda size: keep)
    out, end, saved = cuda_calls.forward(x, plan_of, stub(S))
    assert (saved.starts is not None) == keep
    rng = np.random.default_rng(0)
    dout, dstate = rng.standard_normal(out.shape).astype(BFLOAT16), rng.standard_normal(end.shape).astype(np.float32)
    found, first = cuda_calls.backward(saved, stub(dout), stub(dstate))
    saved = recurrence.forward(wide, wide_plan, S.astype(np.float64))[2]
    right, dS = recurrence.backward(saved, dout.astype(np.float64), dstate.astype(np.float64))
    for name, want in right._asdict().items():
        if want is not None:
            got = getattr(found, name).astype(np.float64)
            assert np.abs(got - want).max() <= np.abs(want).max() * 2**-6, name
    assert np.abs(first - dS).max() <= 1e-5 * np.abs(dS).max()
    names = [plan.FACTORS] * 2 + [plan.CHAIN]
    assert [n for n, *_ in launched] == names * (2 + (not keep)) + [plan.GRADS, plan.EXACT_GRADS]
