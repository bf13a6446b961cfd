"""Replayed launches get the arguments of a call in full on the same arrays; kernels that do nothing, no GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import replay
from linattn_np.matrix_state.cuda.arguments import DELTA
from linattn_np.matrix_state.cuda.delta import launch as cuda_delta
from linattn_np.matrix_state.types import Decay, Erase
from linattn_np.ops.cuda.arguments import UNIT_ROWS
from linattn_np.runtime.cuda import launch, record
from tests.cases import RECURRENCES
from tests.matrix_state.cuda.step_twin import CUPY, stub
from tests.matrix_state.cuda.token import host as step_calls

launched, public = step_calls.launched, step_calls.public
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Launches:
    """The argument structs of a call's launches, and the arrays that it allocates."""

    def __init__(self):
        self.structs, self.sizes, self.allocated = [], [], []

    def kernel(self, *how):
        """A kernel that keeps its arguments."""

        def run(grid, block, arguments, shared_mem):
            self.structs.append(arguments[0].tobytes())

        run.kernel = SimpleNamespace(ptr=0)
        return type("Kernel", (), {"__call__": staticmethod(run), "kernel": run.kernel})()

    def from_driver(self, kernel, *rest):
        """The driver's launch, whose last arguments are the stream, the address of the address of a struct, and 0."""
        at = ctypes.c_void_p.from_address(rest[-2]).value
        self.structs.append(ctypes.string_at(at, self.sizes[len(self.structs)]))

    def empty(self, shape, dtype=np.float32):
        x = stub(np.zeros(shape, dtype))
        self.allocated.append(x)
        return x

    def arguments(self, given):
        """The words of each struct; a pointer to an array as its place among those given and allocated."""
        names = {x.data.ptr: f"given {n}" for n, x in enumerate(given)}
        names |= {x.data.ptr: f"allocated {n}" for n, x in enumerate(self.allocated)}
        return [[names.get(word, word) for word in np.frombuffer(s[: len(s) // 8 * 8], np.uint64).tolist()]
                for s in self.structs]  # fmt: skip


@pytest.fixture
def launches(public, monkeypatch):
    found = Launches()
    monkeypatch.setattr(launch, "kernel", found.kernel)
    monkeypatch.setattr(launch, "prepare", lambda wanted, capability: None)
    monkeypatch.setattr(launch.cupy().cuda.driver, "launchKernel", found.from_driver)
    monkeypatch.setattr(launch, "array_type", lambda: found.empty)
    monkeypatch.setattr(CUPY, "empty", found.empty)
    monkeypatch.setattr(record.LaunchSequence, "keep", lambda self, *how: None)  # an array each, known by its address
    for name, value in (("capability", 80), ("multiprocessors", 108), ("shared_limit", 163 << 10)):
        monkeypatch.setattr(launch, name, lambda value=value: value)
    return found


def arrays_of(fn, T, dtype, seed):
    drawn = la.testing.sample(fn, np.random.default_rng(seed), B=(2,), T=T, H=4, K=64, V=64, optional=False)
    return [stub(x.astype(np.float32 if n in ("g", "beta") else dtype)) for n, x in drawn.items()]


@pytest.mark.parametrize("T", [64, 3000], ids=["one segment", "segments"])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16], ids=str)
@pytest.mark.parametrize(
    "fn",
    [
        fn
        for fn in RECURRENCES
        if fn.spec.decay is not Decay.VECTOR and fn.spec.erase is not Erase.FREE and not fn.spec.micro_steps
    ],
    ids=lambda fn: fn.__name__,
)
def test_a_replay_launches_what_a_call_in_full_does(launches, fn, dtype, T):
    sets = [arrays_of(fn, T, dtype, seed) for seed in range(2)]
    douts = [stub(np.ones(x[2].shape, dtype)) for x in sets]

    def run(n, backward):
        launches.structs, launches.allocated = [], []
        if backward:
            la.vjp(fn, *sets[n])[1](douts[n])
        else:
            fn(*sets[n])
        launches.sizes = [len(s) for s in launches.structs]
        return launches.arguments([*sets[n], douts[n]])

    for backward in (False, True):
        replay.clear()
        expected = run(1, backward)
        assert any("given" in str(word) for one in expected for word in one)
        replay.clear()
        run(0, backward)
        assert len(replay.plans) == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "launch", None)  # no launch but the recorded ones
            assert run(1, backward) == expected


@pytest.mark.parametrize(("capability", "divides"), [(80, False), (90, True)])
def test_an_eps_is_an_argument_of_the_kernels_that_divide(launches, monkeypatch, capability, divides):
    """Of the chains by warpgroup products, whose tensor maps need a driver, and of the kernel of rows before others."""
    monkeypatch.setattr(launch, "capability", lambda: capability)
    monkeypatch.setattr(cuda_delta, "tensor_map", lambda y, steps: bytes(cuda_delta.MAP))
    monkeypatch.setattr(cuda_delta, "moves", lambda: False)
    x = arrays_of(la.gated_delta_rule, 64, BFLOAT16, 0)
    la.vjp(la.gated_delta_rule, *x, qk_l2norm=True, l2norm_eps=0.25)[1](stub(np.ones(x[2].shape, BFLOAT16)))
    kind, name, value = (DELTA, "eps", 0.25) if divides else (UNIT_ROWS, "root", 0.5)
    fields = [kind.unpack(s)[name] for s in launches.structs if len(s) == kind.size]
    assert fields
    assert set(fields) == {value}
