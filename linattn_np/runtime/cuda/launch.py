"""Kernels on a CuPy device: compiled on first use, loaded through RawModule, launched on the current stream.

The compiler is imported by the first call that needs it, not by `import linattn_np`.
"""

from __future__ import annotations

import functools
import os
import threading
from concurrent.futures import Future
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from ..recorder import active as recording
from .elements import Constants

LARGEST_GRID = 2**31 - 1


def unusable() -> str | None:
    """Why no kernel can run here, in words; None if kernels can run."""
    return _unusable(current_device())


@functools.cache
def _unusable(device: int) -> str | None:
    from . import nvrtc
    from .compile import architecture

    if not nvrtc.available():
        return "NVRTC, the CUDA compiler library, is not installed"
    try:
        architecture(capability())
    except nvrtc.CompileError as error:
        return str(error)
    return None if capability() >= 80 else f"the device has compute capability {capability()}, the kernels need 80"


def current_device() -> int:
    """Number of CuPy's current device."""
    return device_function()()


@functools.cache
def device_function() -> Any:
    """The function that `current_device` calls."""
    return cupy().cuda.runtime.getDevice


def capability() -> int:
    """Compute capability of the current device: 80, 90, ..."""
    return _capability(current_device())


@functools.cache
def _capability(device: int) -> int:
    return int(cupy().cuda.Device(device).compute_capability)


def shared_limit() -> int:
    """Bytes of shared memory that a block may use on the current device."""
    return _shared_limit(current_device())


@functools.cache
def _shared_limit(device: int) -> int:
    return int(cupy().cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])


def multiprocessors() -> int:
    """Number of multiprocessors of the current device."""
    return _multiprocessors(current_device())


@functools.cache
def _multiprocessors(device: int) -> int:
    return int(cupy().cuda.Device(device).attributes["MultiProcessorCount"])


def is_capturing() -> bool:
    """Whether launches on the current stream become part of a CUDA graph."""
    cuda = cupy().cuda
    return bool(cuda.runtime.streamIsCapturing(cuda.get_current_stream().ptr))


_codes: dict[tuple[Any, ...], Future[Any]] = {}
_lock = threading.Lock()


def _begin(file: str, constants: Constants, capability: int, beside: bool) -> Future[Any]:
    """A future of the machine code of a source: compiled once per process, by this thread or, `beside`, by another."""
    key = (file, constants, capability)
    with _lock:
        if key in _codes:
            return _codes[key]
        code = _codes[key] = Future()

    def compiled() -> None:
        from .compile import architecture, compile_source
        from .sources import installed

        try:
            code.set_result(compile_source(installed(file), dict(constants), architecture(capability)))
        except BaseException as error:
            code.set_exception(error)
            with _lock:
                _codes.pop(key, None)

    if beside:
        threading.Thread(target=compiled, name=f"compiles {file}").start()
    else:
        compiled()
    return code


def _forget() -> None:
    """A forked child has none of the parent's threads: their compilations never finish."""
    global _lock
    _lock = threading.Lock()
    _codes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@functools.lru_cache(maxsize=1024)
def prepare(wanted: tuple[tuple[str, Constants], ...], capability: int) -> None:
    """Start compiling every (file, constants) that will be launched; a launch waits for its own."""
    for file, constants in wanted:
        _begin(file, constants, capability, beside=True)


def kernel(file: str, entry: str, constants: Constants, shared: int) -> Any:
    """The entry of a source on the current device, ready to be launched with `shared` bytes of shared memory."""
    return _kernel(file, entry, constants, shared, current_device())


@functools.cache
def _kernel(file: str, entry: str, constants: Constants, shared: int, device: int) -> Any:
    code = _begin(file, constants, capability(), beside=False).result()
    import tempfile

    with tempfile.TemporaryDirectory() as folder:  # CuPy reads machine code from files only
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file_:
            file_.write(code[0])
        function = cupy().RawModule(path=path).get_function(entry)
        function.max_dynamic_shared_size_bytes = shared  # loads the module
    return function


def array_type() -> Any:
    """The type of arrays on the current device; called with (shape, dtype) it allocates one."""
    return cupy().ndarray


def allocator() -> Any:
    """A function of a number of bytes: memory on the current device, in a third of the time of an array."""
    return cupy().cuda.alloc


@functools.cache
def cupy() -> Any:
    """CuPy, imported on first use."""
    return import_module("cupy")


class Kernel(NamedTuple):
    """An entry function of a source: the threads of a block, the constants that it is compiled for."""

    file: str
    entry: str
    threads: int
    constants: Constants = ()
    shared: int = 0  # bytes of a block
    parts: int = 1  # blocks of a sequence and head

    def built(self, constants: Constants) -> Kernel:
        """The kernel with constants; LA_SHARED is the shared memory of a block."""
        return self._replace(constants=constants, shared=dict(constants).get("LA_SHARED", 0))

    def launch(self, blocks: int, arguments: bytes, arrays: tuple[Any, ...] | None = None) -> None:
        """`launch` of this kernel."""
        launch(self.file, self.entry, self.constants, blocks, self.threads, self.shared, arguments, arrays)


class Launch(NamedTuple):
    """A recorded launch, and the arrays whose pointers are among its arguments; None if they were not named."""

    kernel: Kernel
    blocks: int
    arguments: bytes
    arrays: tuple[Any, ...] | None


class _Active(threading.local):
    is_bound: bool = False  # whether a CUDA context is current in this thread


active = _Active()


def bind() -> None:
    """Make the context of the current device current in this thread.

    Functions of the runtime do so themselves, functions of the driver need it; a thread whose memory comes from a pool
    may not have called the runtime before.
    """
    if not active.is_bound:
        cupy().cuda.runtime.setDevice(current_device())
        active.is_bound = True


def launch(
    file: str,
    entry: str,
    constants: Constants,
    blocks: int,
    threads: int,
    shared: int,
    arguments: bytes,
    arrays: tuple[Any, ...] | None = None,
) -> None:
    """Launch on the current stream; `arguments` are the bytes of the entry's argument struct.

    arrays: all arrays whose pointers are among them, if the launch may be replayed (record.py).
    Without blocks nothing is launched. Raises OverflowError for more blocks than a grid can have.
    """
    if blocks <= 0:
        return
    if blocks > LARGEST_GRID:
        raise OverflowError(f"{entry}: {blocks} blocks, a grid has at most {LARGEST_GRID}")
    function = kernel(file, entry, constants, shared)
    function((blocks,), (threads,), (np.void(arguments),), shared_mem=shared)
    if recording.recorder is not None:
        kernel_ = Kernel(file, entry, threads, constants, shared)
        recording.recorder.launches.append(Launch(kernel_, blocks, arguments, arrays))
