"""CUDA kernels on a host: g++ compiles a source of cuda_src, fibers are the threads of a block.

    def test(emulated):                     the fixture: CuPy is a stub, every launch runs here
        out = la.nn.silu(stub(x))

What is tested is the product's own path: dispatch, shapes, strides, packing of arguments, grid, and the source itself.
A source is compiled once for its constants (device.h and the headers of tile/ here stand for the compiler's
words: of tensor cores, products of bfloat16 and tf32 by mma.sync). Dynamic shared memory is an array `memory`, which
`shared` stands for, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from linattn_np.runtime.cuda import constants as cached_constants
from linattn_np.runtime.cuda import launch, sources

HERE = Path(__file__).resolve().parent
COMPILER = shutil.which("g++")
FLAGS = ("-std=c++17", "-g0", "-fPIC", "-w", "-ffp-contract=off", "-fno-strict-aliasing",
         "-fsanitize=alignment", "-U_FORTIFY_SOURCE")  # fmt: skip
LONGER = ("fast_weights/", "portable/")  # sources that run for longer than -O1 takes to compile; -O0 takes half of it
ENTRY = re.compile(r'^extern "C" __global__ void\b[^;{]*?(\w+)\(const __grid_constant__', re.MULTILINE)


@functools.cache
def _folder() -> Path:
    """Compiled sources: shared between runs, since a source takes seconds."""
    folder = Path(os.environ.get("LINATTN_EMULATION_DIR") or Path(tempfile.gettempdir()) / f"linattn-{os.getuid()}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def entries(text: str) -> list[str]:
    """Entries of a source under no condition."""
    always, depth = [], 0
    for line in text.splitlines():
        depth += line.startswith("#if") - line.startswith("#endif")
        always += [line] * (depth == 0)
    return ENTRY.findall("\n".join(always))


@functools.cache
def compiled(file: str, entry: str, constants: tuple[tuple[str, int], ...]) -> Any:
    """A function of (address of the arguments, blocks, threads); the first misaligned access, in words, or nothing."""
    all_of_them = entries(sources.installed(file)[1])  # in one library: a compiler makes code of all in any case
    library = _library(file, tuple(all_of_them) if entry in all_of_them else (entry,), constants)
    function = getattr(library, f"run_{entry}")
    function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint], ctypes.c_char_p
    return function


@functools.cache
def _host_header(flags: tuple[str, ...]) -> Path:
    """A folder with host.h, precompiled. Where it is not that of the compiler, the compiler reads the text."""
    text = (HERE / "host.h").read_text()
    found = _folder() / f"host-{hashlib.sha256(repr((text, flags)).encode()).hexdigest()[:24]}"
    if not found.exists():
        with tempfile.TemporaryDirectory(dir=_folder()) as name, contextlib.suppress(OSError):
            folder = Path(name) / "host"
            folder.mkdir()
            (folder / "host.h").write_text(text)
            command = [COMPILER, *flags, "-x", "c++-header", "host.h", "-o", "host.h.gch"]
            subprocess.run(command, cwd=folder, check=True)
            os.rename(folder, found)  # OSError: another process was first
    return found


@functools.cache
def _library(file: str, names: tuple[str, ...], constants: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    source, own = sources.installed(file), [HERE / "host.h", HERE / "device.h", *sorted((HERE / "tile").iterdir())]
    flags = (*FLAGS, "-O1" if file.startswith(LONGER) else "-O0")
    runs = "".join(
        f'extern "C" const char* run_{entry}(const void* arguments, unsigned blocks, unsigned threads) {{\n'
        f"    misaligned[0] = 0;\n    run_grid({entry}, arguments, blocks, threads);\n    return misaligned;\n}}\n"
        for entry in names
    )
    main = f'#include "host.h"\n#include "device.h"\n#include "{file}"\n{runs}'
    text = "\n".join([sources.digest(*source), main, repr(constants), *flags, *(path.read_text() for path in own)])
    library = _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=_folder()) as name:
            folder = Path(name)
            for header in source[2]:
                if (generated := sources.generated(header)) is not None:
                    (folder / header).parent.mkdir(parents=True, exist_ok=True)
                    (folder / header).write_text(generated)
            (folder / "main.cc").write_text(main)
            paths = [f"-I{path}" for path in (_host_header(flags), HERE, sources.root(), folder)]
            defined = [f"-D{name}={value}" for name, value in constants]
            done = subprocess.run([COMPILER, *flags, "-shared", *defined, *paths, "main.cc", "-o", "out.so"],
                                  cwd=folder, capture_output=True, text=True)  # fmt: skip
            assert not done.returncode, done.stderr
            os.replace(folder / "out.so", library)
    return ctypes.CDLL(str(library))


def require() -> None:
    """Skip the test where there is no compiler."""
    if COMPILER is None:
        pytest.skip("g++ is not installed")


class Kernel:
    """An entry of a source, as `launch.kernel` returns it."""

    def __init__(self, file: str, entry: str, constants: tuple[tuple[str, int], ...], shared: int):
        assert shared <= 1 << 18, "device.h has less dynamic shared memory"
        assert shared == dict(constants).get("LA_SHARED", shared), "the size of the array is this constant"
        self.file, self.entry, self.constants = file, entry, constants

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], arguments: Any, shared_mem: int) -> None:
        launched.append((self.file, self.entry, self.constants, grid[0], block[0]))
        misaligned = compiled(self.file, self.entry, self.constants)(arguments[0].tobytes(), grid[0], block[0])
        assert not misaligned, misaligned.decode()


launched: list[tuple[Any, ...]] = []  # by the test


def poison(dtype: Any) -> Any:
    """What new arrays hold: nothing that a kernel could take for a result."""
    return np.iinfo(dtype).max if np.dtype(dtype).kind in "iu" else np.nan


@pytest.fixture
def emulated(monkeypatch):
    """The list of launches (file, entry, constants, blocks, threads) of the test; kernels run on this machine."""
    require()
    from tests.matrix_state.cuda.step_twin import stub

    stream = SimpleNamespace(ptr=0, synchronize=lambda: None)
    runtime = SimpleNamespace(streamIsCapturing=lambda ptr: False, setDevice=lambda device: None)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    cuda = SimpleNamespace(runtime=runtime, get_current_stream=lambda device=-1: stream, alloc_pinned_memory=bytearray,
                           Event=lambda disable_timing: event)  # fmt: skip
    monkeypatch.setattr(launch, "cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(launch, "kernel", Kernel)
    monkeypatch.setattr(launch, "array_type", lambda: lambda shape, dtype: stub(np.full(shape, poison(dtype), dtype)))
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "unusable", lambda: None)
    monkeypatch.setattr(launch, "multiprocessors", lambda: 132)
    monkeypatch.setattr(launch, "_shared_limit", lambda device: 227 << 10)
    monkeypatch.setattr(cached_constants, "_cached", {})
    launched.clear()
    return launched


@pytest.fixture(params=["emulated", pytest.param("cupy", marks=pytest.mark.gpu)])
def device(request):
    """CuPy's namespace in calls, how a NumPy array gets to it and back, and launches (None on a GPU)."""
    if request.param == "cupy":
        cp, xp = pytest.importorskip("cupy"), pytest.importorskip("array_api_compat.cupy")
        return SimpleNamespace(xp=xp, bring=cp.asarray, see=cp.asnumpy, launched=None)
    from tests.matrix_state.cuda.step_twin import CUPY, stub

    return SimpleNamespace(xp=CUPY, bring=stub, see=np.asarray, launched=request.getfixturevalue("emulated"))


@pytest.fixture
def public(request, device, monkeypatch):
    """The same, with public functions of linattn_np, its pieces and cores, that take its arrays."""
    if device.launched is not None:
        from linattn_np.call import binding, results, reverse
        from linattn_np.nn import declaration
        from linattn_np.runtime.arrays import Library, enter
        from linattn_np.serving import pools, small
        from tests.matrix_state.cuda.step_twin import CUPY, Stub

        def entering(fn, arrays, beside=None):
            if any(isinstance(x, Stub) for x in arrays.values()):
                return Library(CUPY, 0, lambda x: x, "cupy", "x"), dict(arrays)
            return enter(fn, arrays, beside)

        for module in (declaration, binding, results, reverse, pools, small):
            monkeypatch.setattr(module, "enter", entering)
    return device
