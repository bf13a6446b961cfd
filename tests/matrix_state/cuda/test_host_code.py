"""The host code of every family of kernels, on stubs of CuPy arrays and kernels that do nothing: no GPU."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from linattn_np.call.replay.vjp import Forward
from linattn_np.matrix_state import core as matrix_state
from linattn_np.matrix_state.cuda.delta import launch as delta_launch
from linattn_np.matrix_state.cuda.free import gradients as free_gradients
from linattn_np.matrix_state.cuda.free import launch as free_launch
from linattn_np.matrix_state.cuda.vector import gradients as vector_gradients
from linattn_np.matrix_state.cuda.vector import launch as vector_launch
from linattn_np.matrix_state.types import Decay, Erase
from linattn_np.runtime.cuda import launch, record
from linattn_np.softmax.core import CORE
from linattn_np.softmax.cuda import calls as attention
from tests.cases import RECURRENT, has_plain_state, one_per, passes_through
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

    def empty(self, shape, dtype=np.float32, **_):
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
    replay.clear()
    monkeypatch.setattr(launch, "kernel", found.kernel)
    monkeypatch.setattr(launch, "prepare", lambda wanted, capability: None)
    monkeypatch.setattr(launch.cupy().cuda.driver, "launchKernel", found.from_driver)
    monkeypatch.setattr(launch, "array_type", lambda: found.empty)
    monkeypatch.setattr(CUPY, "empty", found.empty)
    monkeypatch.setattr(record.LaunchSequence, "keep", lambda self, *how: None)  # an array each, known by its address
    for name, value in (("capability", 80), ("multiprocessors", 108), ("shared_limit", 163 << 10)):
        monkeypatch.setattr(launch, name, lambda value=value: value)
    for module in (delta_launch, vector_launch):
        monkeypatch.setattr(module, "tensor_map", tensor_map)
    for module in (delta_launch, vector_launch, vector_gradients, free_launch, free_gradients):
        monkeypatch.setattr(module, "moves", lambda: True)
    return found


def tensor_map(x, steps=1):
    """A map as the driver encodes it: the address first, then the layout."""
    return struct.pack("<Q4q4q2q", x.data.ptr, *x.shape, *x.strides, x.itemsize, steps).ljust(128, b"\0")


FUNCTIONS = one_per(
    lambda spec: (spec.decay, spec.erase, spec.erase_reads, spec.query_reads, spec.change.erase_key),
    [fn for fn in RECURRENT if has_plain_state(fn.spec) and not fn.spec.micro_steps],
)
REPLAYED = [
    fn for fn in FUNCTIONS
    if passes_through(fn) and fn.spec.decay is not Decay.VECTOR and fn.spec.erase is not Erase.FREE
]  # fmt: skip


def arrays_of(fn, T, dtype, seed):
    drawn = la.testing.sample(fn, np.random.default_rng(seed), B=(2,), T=T, H=4, K=64, V=64, optional=False)
    wide = ("g", "beta", "u", "w", "gv", "A", "dt")
    return {n: stub(x.astype(np.float32 if n in wide else dtype)) for n, x in drawn.items()}


LENGTHS = pytest.mark.parametrize("T", [64, 3000], ids=["one segment", "segments"])


def run(fn, arrays, dout):
    """The output of a call and, with a dout, its gradients."""
    if dout is None:
        return [fn(**arrays)]
    out, pull = la.vjp(fn, **arrays)
    grads = pull(dout)._asdict()
    return [out, *(grads[n] for n in arrays)]


@LENGTHS
@pytest.mark.parametrize(("capability", "dtype"), [(80, np.float32), (80, np.float16), (90, BFLOAT16)], ids=str)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_host_code_of_every_family_runs(launches, monkeypatch, fn, capability, dtype, T):
    monkeypatch.setattr(launch, "capability", lambda: capability)
    arrays = arrays_of(fn, T, dtype, 0)
    out, *grads = run(fn, arrays, stub(np.ones(arrays["v"].shape, dtype)))
    assert launches.structs
    assert out.dtype == dtype
    assert [(d.shape, d.dtype) for d in grads] == [(x.shape, x.dtype) for x in arrays.values()]


@LENGTHS
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16], ids=str)
@pytest.mark.parametrize("fn", REPLAYED, ids=lambda fn: fn.__name__)
def test_a_replay_launches_what_a_call_in_full_does(launches, fn, dtype, T, backward):
    sets = [arrays_of(fn, T, dtype, seed) for seed in range(2)]
    douts = [stub(np.ones(x["v"].shape, dtype)) for x in sets]

    def arguments_of(n):
        launches.structs, launches.allocated = [], []
        run(fn, sets[n], douts[n] if backward else None)
        launches.sizes = [len(s) for s in launches.structs]
        return launches.arguments([*sets[n].values(), douts[n]])

    expected = arguments_of(1)
    assert any("given" in str(word) for one in expected for word in one)
    replay.clear()
    arguments_of(0)
    assert len(replay.by_key) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "launch", None)  # no launch but the recorded ones
        assert arguments_of(1) == expected


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_a_forward_starts_to_compile_what_its_backward_launches(launches, monkeypatch, fn):
    """Kernels are compiled side by side: a first call waits for the slowest one, not for all in turn."""
    wanted = set()
    monkeypatch.setattr(launch, "capability", lambda: 90)
    monkeypatch.setattr(launch, "prepare", lambda kernels, capability: wanted.update(kernels))
    arrays = arrays_of(fn, 64, BFLOAT16, 0)
    out, pull = la.vjp(fn, **arrays)
    by_forward = set(wanted)
    pull(stub(np.ones(out.shape, BFLOAT16)))
    assert wanted == by_forward


def test_calls_with_slots_are_recorded_whole(launches, monkeypatch):
    """Two memories, one with its decay on the value axis: nothing is allocated that no launch takes."""
    monkeypatch.setattr(launch, "capability", lambda: 90)
    drawn = la.testing.sample(la.gsa, np.random.default_rng(0), B=(2,), T=200, H=4, K=64, V=64, M=64, optional=False)
    arrays = {n: stub(x.astype(BFLOAT16)) for n, x in drawn.items()}
    la.gsa(**arrays)
    out, pullback = la.vjp(la.gsa, **arrays)
    pullback(stub(np.ones(out.shape, BFLOAT16)))
    assert la.explain(la.gsa, **arrays).replay == "replayed"
    (forward,) = [plan for plan in replay.by_key.values() if isinstance(plan, Forward)]
    assert forward.replayable
    assert all(forward.pullbacks.values())


@pytest.mark.parametrize("heads", [{}, {"Hq": 8}, {"Hk": 2, "H": 4}], ids=str)
@pytest.mark.parametrize(("capability", "dtype"), [(80, np.float32), (80, np.float16), (90, BFLOAT16)], ids=str)
def test_positions_of_queries_and_keys_are_kernels(launches, monkeypatch, heads, capability, dtype):
    """Both cores: the delta rule maps q and k, and attention takes them as they come."""
    monkeypatch.setattr(launch, "capability", lambda: capability)
    monkeypatch.setattr(attention, "tensor_map", tensor_map)
    monkeypatch.setattr(attention, "moves", lambda: True)
    fn = la.householder_positions
    sizes = {"Hq": 4, "Hk": 4, "H": 4} | heads
    drawn = la.testing.sample(fn, np.random.default_rng(0), B=(2,), T=200, K=64, V=64, **sizes)
    arrays = {n: stub(x.astype(np.float32 if n == "beta" else dtype)) for n, x in drawn.items()}
    assert la.explain(fn, **arrays).backend == "cuda"
    given = []
    for core in (matrix_state, CORE):
        forward = core.forward
        monkeypatch.setattr(core, "forward", lambda fn, x, *rest, own=forward: (given.append(x), own(fn, x, *rest))[1])
    out, pull = la.vjp(fn, **arrays)
    assert [{y.dtype for y in x[:3]} for x in given] == [{np.dtype(dtype)}] * 3
    grads = pull(stub(np.ones(out.shape, dtype)))._asdict()
    assert out.dtype == dtype
    assert [(grads[n].shape, grads[n].dtype) for n in arrays] == [(x.shape, x.dtype) for x in arrays.values()]
    explained = la.explain(fn, **arrays)
    assert not explained.slow
    assert "the delta rule (cuda)" in explained.reason
