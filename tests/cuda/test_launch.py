"""What launch passes to CuPy, with a stand-in that only records it: no GPU."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from linattn_np.matrix_state.cuda.scan import launch as cuda_scan
from linattn_np.matrix_state.cuda.scan import plan as cuda_plan
from linattn_np.runtime.cuda import compile as cuda_compile
from linattn_np.runtime.cuda import launch, nvrtc

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
CACHED = (
    launch.cupy,
    launch._unusable,
    launch._capability,
    launch._shared_limit,
    launch._multiprocessors,
    launch.prepare,
    launch._kernel,
)


class Kernel:
    def __init__(self, code, entry, calls):
        self.code, self.entry, self.calls = code, entry, calls

    def __call__(self, grid, block, arguments, shared_mem):
        self.calls.append((self.entry, grid, block, arguments[0].tobytes(), shared_mem))


@pytest.fixture
def cupy(monkeypatch, tmp_path):
    """A stand-in for CuPy on a device of compute capability 8.0; `loaded` and `calls` record its arguments."""
    fake = SimpleNamespace(loaded=[], calls=[])

    def raw_module(path):
        fake.loaded.append(Path(path).read_bytes())
        return SimpleNamespace(get_function=lambda entry: Kernel(fake.loaded[-1], entry, fake.calls))

    fake.RawModule = raw_module
    attributes = {"MaxSharedMemoryPerBlockOptin": 166912, "MultiProcessorCount": 108}
    device = SimpleNamespace(compute_capability="80", attributes=attributes)
    fake.cuda = SimpleNamespace(Device=lambda n: device, runtime=SimpleNamespace(getDevice=lambda: 0))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setenv("LINATTN_CACHE_DIR", str(tmp_path / "cache"))
    for function in CACHED:
        function.cache_clear()
    monkeypatch.setattr(launch, "_codes", {})
    yield fake
    for function in CACHED:
        function.cache_clear()


SMALL = (cuda_scan.GATE, cuda_plan.common_constants("bfloat16", True, False))


def test_a_kernel_is_loaded_once_and_launched_with_its_arguments(cupy):
    assert launch.unusable() is None
    assert launch.shared_limit() == 166912
    assert launch.multiprocessors() == 108
    for blocks in (3, 0, 5):
        launch.launch(SMALL[0], "gate_grad", SMALL[1], blocks, 128, 1024, b"abcd")
    assert cupy.calls == [("gate_grad", (n,), (128,), b"abcd", 1024) for n in (3, 5)]
    assert len(cupy.loaded) == 1
    assert cupy.loaded[0].startswith(b"\x7fELF")


def test_without_a_cache_folder(cupy, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LINATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    launch.launch(SMALL[0], "gate_grad", SMALL[1], 1, 128, 0, b"abcd")
    assert cupy.loaded[0].startswith(b"\x7fELF")
    assert len(cupy.calls) == 1


def test_several_are_compiled_together(cupy, monkeypatch):
    """Beside the caller, each once; a launch waits for its own."""
    threads, compiled = [], cuda_compile.compile_source

    def slow(*how):
        threads.append(threading.current_thread())
        time.sleep(0.2)
        return compiled(*how)

    monkeypatch.setattr(cuda_compile, "compile_source", slow)
    other = (cuda_scan.SEGMENTS, cuda_plan.common_constants("bfloat16", True, False))
    launch.prepare((SMALL, other), launch.capability())
    launch.launch(SMALL[0], "gate_grad", SMALL[1], 1, 128, 0, b"abcd")
    assert len(cupy.calls) == 1
    launch.launch(other[0], "segments", other[1], 1, 128, 0, b"abcd")
    assert len(threads) == len(set(threads)) == 2
    assert threading.current_thread() not in threads


def test_a_source_that_does_not_compile_says_so_every_time(cupy):
    for _ in range(2):
        with pytest.raises(nvrtc.CompileError):
            launch.launch(SMALL[0], "gate_grad", (("LA_DTYPE", 7),), 1, 128, 0, b"")


def test_too_many_blocks(cupy):
    with pytest.raises(OverflowError, match="a grid has at most"):
        launch.launch(SMALL[0], "gate_grad", SMALL[1], 2**31, 128, 0, b"")
