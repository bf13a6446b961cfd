"""The delta rule with erase vectors of its own by the kernels of erase FREE, against their twins: no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from linattn_np.matrix_state import core as matrix_state
from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state.cuda import calls as cuda_calls
from linattn_np.matrix_state.cuda.arguments import ERASE_VECTORS
from linattn_np.matrix_state.cuda.free import delta, plan
from linattn_np.matrix_state.types import EraseKey
from linattn_np.runtime.cuda import launch
from tests.core_cases import case
from tests.matrix_state.cuda.vector import twin as vector_twin
from tests.matrix_state.cuda.vector.test_calls import BFLOAT16, CUPY

from ..step_twin import KINDS, stub
from .test_calls import launched  # noqa: F401, a fixture


class _Call:
    """The arrays of a launch, of all rows (batch, T, heads, width)."""

    def __init__(self, constants, arguments):
        self.constants = SimpleNamespace(**dict(constants))
        self.a = SimpleNamespace(**ERASE_VECTORS.unpack(arguments))
        self.shape = self.a.rows // (self.a.T * self.a.heads), self.a.T, self.a.heads

    def rows(self, name, width, kind):
        x, dtype = SimpleNamespace(**getattr(self.a, name)), KINDS[kind]
        shape, strides = (*self.shape[:2], self.shape[2] // x.group, width), (x.batch, x.token, x.head, dtype.itemsize)
        return np.repeat(vector_twin._view(x.data, shape, strides, dtype).astype(np.float64), x.group, axis=2)

    def dense(self, name, width, kind):
        at = getattr(self.a, name)
        return vector_twin._array(at, *self.shape, width, dtype=KINDS[kind]) if at else None

    def strengths(self):
        x = SimpleNamespace(**self.a.beta)
        shape, strides = (*self.shape[:2], self.shape[2] // x.group), (4 * x.batch, 4 * x.token, 4 * x.head)
        return np.repeat(vector_twin._view(x.data, shape, strides, np.float32), x.group, axis=2)[..., None]


def run(entry, constants, arguments):
    """One launch of erase_vectors.cu."""
    call = _Call(constants, arguments)
    c, beta = call.constants, call.strengths()
    r, g, v = call.rows("r", c.LA_K, c.LA_ERASERS), call.rows("g", c.LA_K, c.LA_GATE), call.rows("v", c.LA_V, 0)
    factor = 1.0 if c.LA_BEFORE else np.exp(g)
    a, values = call.dense("a", c.LA_K, 0), call.dense("values", c.LA_V, 0)
    if entry == "erase_vectors":
        a[...], values[...] = -beta * factor * r, beta * v
        return
    da, dvalues = a.astype(np.float64), values.astype(np.float64)
    call.dense("dr", c.LA_K, c.LA_ERASERS)[...] = -beta * factor * da
    dg = call.dense("dg", c.LA_K, c.LA_GATE)
    dg[...] = dg - (not c.LA_BEFORE) * beta * factor * r * da
    call.dense("dv", c.LA_V, 0)[...] = beta * dvalues
    call.dense("dbeta", 1, 2)[...] = (v * dvalues).sum(-1, keepdims=True) - (factor * r * da).sum(-1, keepdims=True)
    if (dk := call.dense("dk", c.LA_K, 0)) is not None:
        dk[...] = dk.astype(np.float32) + call.dense("db", c.LA_K, 0).astype(np.float32)


@pytest.fixture
def by_twins(launched, monkeypatch):  # noqa: F811
    """Entries of erase_vectors.cu and kernels of erase FREE, as they are launched."""
    of_free, found = launch.launch, []

    def launch_twin(file, entry, constants, blocks, threads, shared, arguments, arrays=None):
        if file == delta.SOURCE:
            found.append(entry)
            assert blocks * delta.WARPS >= ERASE_VECTORS.unpack(arguments)["rows"] > (blocks - 1) * delta.WARPS
            run(entry, constants, arguments)
        else:
            found.append(next((n for n, kernel in plan.KERNELS.items() if kernel.file == file), entry))
            of_free(file, entry, constants, blocks, threads, shared, arguments, arrays)

    monkeypatch.setattr(launch, "launch", launch_twin)
    return found


def call_of(erase="delta", T=70, heads=(2, 2, 2), K=16, V=8, gate=np.float32, erasers=BFLOAT16, **more):
    """(x and plan as the kernels get them, the same in float64, initial state, dout, dstate)."""
    x, wide_plan, S, dout, dS = case("vector", erase, "after", T, 64, heads, K, V, **more)
    kinds = dict.fromkeys("qkv", BFLOAT16) | {"g": gate, "r": erasers, "beta": np.float32}
    rounded = x._replace(**{n: getattr(x, n).astype(kind) for n, kind in kinds.items()})
    wide, there = (type(x)(*(None if y is None else made(y) for y in rounded))
                   for made in (lambda y: y.astype(np.float64), stub))  # fmt: skip
    return ((there, wide_plan._replace(xp=CUPY, dtype=np.float32)), (wide, wide_plan), S.astype(np.float32),
            dout.astype(BFLOAT16), dS.astype(np.float32))  # fmt: skip


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"erase": "delta undecayed"},
        {"gate": BFLOAT16},
        {"erasers": np.float32},
        {"heads": (4, 2, 2)},
        {"heads": (1, 1, 4)},
        {"offsets": [0, 3, 3, 70, 90], "T": 90, "B": 1},
    ],
    ids=str,
)
def test_output_and_gradients(by_twins, how):
    (x, plan_of), (wide, wide_plan), S, dout, dS = call_of(**how)
    plan_of = plan_of._replace(gradients=True)
    call = matrix_state.Call(x, plan_of)
    assert cuda_calls.unsupported_reason(call) is None
    assert cuda_calls.describe(call).startswith("as a free rank-one term")
    expected, end, kept = recurrence.forward(wide, wide_plan, S.astype(np.float64))
    out, last, saved = cuda_calls.forward(x, plan_of, stub(S))
    assert by_twins[0] == "erase_vectors"
    assert np.linalg.norm(out.astype(np.float64) - expected) <= np.linalg.norm(expected) * 2**-6
    assert np.linalg.norm(last - end) <= np.linalg.norm(end) * 2**-6
    grads, first = cuda_calls.backward(saved, stub(dout), stub(dS))
    assert by_twins[-1] == "erase_vectors_vjp"
    right, dS0 = recurrence.backward(kept, dout.astype(np.float64), dS.astype(np.float64))
    for name, want in right._asdict().items():
        if want is not None:
            found = getattr(grads, name).astype(np.float64)
            assert found.shape == want.shape, name
            assert np.linalg.norm(found - want) <= np.linalg.norm(want) * 2**-5, name
    assert np.linalg.norm(first - dS0) <= np.linalg.norm(dS0) * 2**-6


def test_inputs_alone_give_the_gradients(by_twins):
    """The backward of a few tokens, whose forward was another kernel's."""
    (x, plan_of), _, S, dout, dS = call_of(T=20)
    plan_of = plan_of._replace(gradients=True)
    saved = cuda_calls.forward(x, plan_of, stub(S))[2]
    whole = cuda_calls.backward(saved, stub(dout), stub(dS))
    alone = cuda_calls.backward(saved._replace(starts=None), stub(dout), stub(dS))
    assert all(np.array_equal(a, b) for a, b in zip(whole[0], alone[0], strict=True) if a is not None)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("of the heads of the values", lambda x, plan: (x._replace(g=x.g[..., :1, :]), plan)),
        ("in bfloat16 or float32", lambda x, plan: (x._replace(r=x.r.astype(np.float16)), plan)),
        ("take bfloat16", lambda x, plan: (x._replace(v=x.v.astype(np.float32)), plan)),
        ("with the key itself", lambda x, plan: (x, plan._replace(erase_key=EraseKey.KEY, erase_reads=None))),
    ],
)
def test_what_is_not_covered_says_why(by_twins, words, change):
    x, plan_of = change(*call_of()[0])
    assert words in cuda_calls.unsupported_reason(matrix_state.Call(x, plan_of))
