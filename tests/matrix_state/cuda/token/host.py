"""The host side of the CUDA step on this machine: fixtures, and arrays that look like CuPy's."""

from __future__ import annotations

import ctypes
import struct
from math import prod
from types import SimpleNamespace

import array_api_compat
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import binding, results
from linattn_np.call.replay import device as device_plans
from linattn_np.call.replay import plans as replay
from linattn_np.elementwise.cuda import diagonal, selective
from linattn_np.elementwise.cuda import plan as elementwise
from linattn_np.elementwise.cuda.arguments import CLEAR, SCAN, SELECTIVE
from linattn_np.matrix_state.cuda import calls as cuda_calls
from linattn_np.matrix_state.cuda import choose
from linattn_np.matrix_state.cuda.arguments import SOLVE, SYSTEMS
from linattn_np.matrix_state.cuda.systems import plan as systems
from linattn_np.matrix_state.cuda.token import averages as token_averages
from linattn_np.matrix_state.cuda.token import calls as token_calls
from linattn_np.matrix_state.cuda.token import gradients, solve
from linattn_np.matrix_state.cuda.token import launch as token_launch
from linattn_np.matrix_state.types import Inputs
from linattn_np.ops.cuda import (
    complement,
    formulas,
    gate_formula,
    moves,
    preconditioner,
    product,
    ranks,
    rotary,
    shares,
    stabiliser,
    step_size,
    sums,
    trapezoid,
    unit_rows,
)
from linattn_np.ops.cuda.arguments import (
    COMPLEMENT,
    FORMULA,
    GATE_FORMULA,
    GAUGE,
    PRECONDITIONER,
    PRODUCT,
    RANKS,
    ROTARY,
    SHARES,
    STEP_SIZE,
    SUMS,
    TRAPEZOID,
    UNIT_ROWS,
)
from linattn_np.runtime import pools as rows
from linattn_np.runtime.arrays import Library, enter
from linattn_np.runtime.cuda import constants, launch
from tests.cuda import emulation
from tests.matrix_state.cuda import step_twin
from tests.matrix_state.cuda.step_twin import CUPY, Stub, stub


class allocated:
    """Memory, full of NaN, or a place in it."""

    def __init__(self, size, memory=None, offset=0):
        self.memory, self.offset = stub(np.full(size, 0xFF, np.uint8)) if memory is None else memory, offset
        self.ptr = self.memory.data.ptr + offset

    def __add__(self, offset):
        return allocated(0, self.memory, self.offset + offset)


def array(shape, dtype, at=None):
    """A new array full of NaN, or one at a place in memory."""
    if at is None:
        return stub(np.full(shape, np.nan, dtype))
    size = prod(shape) * np.dtype(dtype).itemsize
    return at.memory[at.offset : at.offset + size].view(dtype).reshape(shape)


STRUCTS = {complement.SOURCE: COMPLEMENT, solve.FILE: SOLVE, gate_formula.SOURCE: GATE_FORMULA, sums.SOURCE: SUMS,
           unit_rows.SOURCE: UNIT_ROWS, product.SOURCE: PRODUCT, step_size.SOURCE: STEP_SIZE,
           formulas.SOURCE: FORMULA, stabiliser.SOURCE: GAUGE, shares.SOURCE: SHARES,
           preconditioner.SOURCE: PRECONDITIONER,
           systems.STATES: SYSTEMS, systems.ITERATE: SYSTEMS, trapezoid.SOURCE: TRAPEZOID, ranks.SOURCE: RANKS,
           rotary.SOURCE: ROTARY, elementwise.SOURCE: SCAN, elementwise.OF_AVERAGES: SCAN,
           **dict.fromkeys((selective.FORWARD, selective.BACKWARD, selective.STEP, diagonal.SOURCE),
                           SELECTIVE)}  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """Launches of step.cu and solve.cu go to twins, others are emulated; what step.cu was launched for."""
    emulation.require()
    found, kernels = [], []

    class Kernel:
        def __init__(self, file, entry, constants):
            self.file, self.entry, self.constants = file, entry, constants
            self.kernel = SimpleNamespace(ptr=len(kernels))
            self.size = STRUCTS[file].size if file in STRUCTS else step_twin.SIZE
            self.size = CLEAR.size if entry == "clear" else self.size
            kernels.append(self)

        def __call__(self, grid, block, arguments, shared_mem):
            packed = arguments[0].tobytes()
            if self.file == solve.FILE:
                step_twin.run_solve(grid[0], self.constants, packed)
                return
            if self.file in STRUCTS:
                emulation.compiled(self.file, self.entry, self.constants)(packed, grid[0], block[0])
                return
            found.append((self.constants, grid, block))
            step_twin.run.blocks = grid[0]
            step_twin.run(self.constants, packed)

    def from_driver(kernel, blocks, y, z, threads, v, w, shared, stream, address, extra):
        at = ctypes.c_void_p.from_address(address).value
        kernels[kernel]((blocks,), (threads,), (np.void(ctypes.string_at(at, kernels[kernel].size)),), shared)

    stream = SimpleNamespace(ptr=0, synchronize=lambda: None)
    runtime = SimpleNamespace(streamIsCapturing=lambda ptr: False, setDevice=lambda device: None)
    cuda = SimpleNamespace(
        driver=SimpleNamespace(launchKernel=from_driver), runtime=runtime, get_current_stream=lambda device=-1: stream
    )
    monkeypatch.setattr(launch, "cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(launch, "kernel", lambda file, entry, constants, shared: Kernel(file, entry, constants))
    monkeypatch.setattr(launch, "array_type", lambda: array)
    monkeypatch.setattr(launch, "allocator", lambda: allocated)
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "device_function", lambda: lambda: 0)
    monkeypatch.setattr(launch, "unusable", lambda: None)
    monkeypatch.setattr(launch, "shared_limit", lambda: 227 << 10)
    monkeypatch.setattr(launch, "multiprocessors", lambda: 132)
    return found


def there(x):
    return Inputs(*(None if y is None else stub(y) if y.strides and 0 not in y.strides else y.view(Stub) for y in x))


@pytest.fixture
def public(launched, monkeypatch):
    """Public functions take stubs for CuPy arrays."""

    def is_stubs(xp):
        return xp is CUPY or xp is moves.namespace(CUPY)

    def entering(fn, arrays, beside=None):
        if any(isinstance(x, Stub) for x in arrays.values()):
            return Library(CUPY, 0, lambda x: x, "cupy", "q"), dict(arrays)
        return enter(fn, arrays, beside)

    monkeypatch.setattr(binding, "enter", entering)
    monkeypatch.setattr(results, "enter", entering)

    real = array_api_compat.array_namespace
    monkeypatch.setattr(array_api_compat, "array_namespace",
                        lambda *x, **how: CUPY if any(isinstance(y, Stub) for y in x) else real(*x, **how))  # fmt: skip

    def launched_stubs(x, *rest):  # maps are functions of NumPy's arrays here
        return token_launch.launched(Inputs(*(stub(y) if type(y) is np.ndarray else y for y in x)), *rest)

    for module in (token_calls, token_averages):
        monkeypatch.setattr(module, "launched", launched_stubs)
    monkeypatch.setattr(
        rows,
        "compat",
        SimpleNamespace(
            is_cupy_array=lambda x: isinstance(x, Stub),
            is_cupy_namespace=is_stubs,
            is_numpy_namespace=lambda xp: not is_stubs(xp),
        ),
    )
    monkeypatch.setitem(replay.makers, Stub, device_plans.signature_maker(Stub))
    monkeypatch.setattr(replay, "by_key", {})
    monkeypatch.setattr(constants, "_cached", {})
    return launched


def backward_by_array_calls(monkeypatch):
    """No kernel computes gradients."""
    monkeypatch.setattr(cuda_calls, "family_of_gradients", lambda x, plan: choose.token)
    monkeypatch.setattr(gradients, "unsupported_reason", lambda x, plan: "there is no GPU")


def arrays_of(fn, T=1, H=4, Hk=2, K=8, V=4, seed=0):
    drawn = la.testing.sample(fn, np.random.default_rng(seed), T=T, H=H, Hk=Hk, Hq=Hk, K=K, V=V, optional=False)
    return {n: x.astype(np.float32) for n, x in drawn.items()}


def doubling(monkeypatch):
    """A backward of launches: twice every input, twice dout for v, or v where there is no dout."""
    real, made = launch.kernel, []

    class Doubled:
        def __init__(self):
            self.kernel = SimpleNamespace(ptr=self)

        def __call__(self, grid, block, arguments, shared_mem):
            x, y, size, kind = struct.unpack_from("<4q", arguments[0].tobytes())
            at = [np.frombuffer((ctypes.c_uint8 * size).from_address(p), step_twin.KINDS[kind]) for p in (x, y)]
            at[1][:] = 2 * at[0]

    def kernel(file, *how):
        return made[0] if file == "double" else real(file, *how)

    def backward(saved, dout, dstate):
        def twice(x):
            y = saved.plan.xp.empty(x.shape, dtype=x.dtype)
            kind = step_twin.KINDS.index(x.dtype)
            packed = struct.pack("<4q", x.data.ptr, y.data.ptr, x.nbytes, kind).ljust(step_twin.SIZE, b"\0")
            launch.launch("double", "double", (), 1, 32, 0, packed, (x, y))
            return y

        x, dv, dS = saved.x, saved.x.v if dout is None else dout, saved.state if dstate is None else dstate
        return Inputs(twice(x.q), twice(x.k), twice(dv), twice(x.g), beta=twice(x.beta)), twice(dS)

    made.append(Doubled())
    cuda, other = launch.cupy().cuda, launch.cupy().cuda.driver.launchKernel

    def from_driver(kernel, *rest):
        if isinstance(kernel, int):
            return other(kernel, *rest)
        at = ctypes.c_void_p.from_address(rest[-2]).value
        return kernel(None, None, (np.void(ctypes.string_at(at, step_twin.SIZE)),), 0)

    cuda.driver.launchKernel = from_driver
    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(cuda_calls, "backward", backward)
