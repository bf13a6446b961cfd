"""Kernels on a CuPy device: compiled on first use, loaded through RawModule, launched on the current stream.

The compiler and its like are imported by the first call that needs them: `import linattn_np` does not wait for them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np

LARGEST_GRID = 2**31 - 1


def unusable() -> str | None:
    """Why no kernel can run here, in words; None where they can."""
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
    """Number of the device that CuPy uses now."""
    return _cupy().cuda.runtime.getDevice()


def capability() -> int:
    """Compute capability of the current device: 80, 90, ..."""
    return _capability(current_device())


@functools.cache
def _capability(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).compute_capability)


def shared_limit() -> int:
    """Bytes of shared memory that one block may have on the current device."""
    return _shared_limit(current_device())


@functools.cache
def _shared_limit(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])


@functools.cache
def _code(file: str, constants: tuple[tuple[str, int], ...], capability: int) -> Any:
    from .compile import architecture, compile_source
    from .sources import installed

    return compile_source(installed(file), dict(constants), architecture(capability))


@functools.lru_cache(maxsize=1024)
def prepare(wanted: tuple[tuple[str, tuple[tuple[str, int], ...]], ...], capability: int) -> None:
    """Compile the (file, constants) that a call will launch, all at once where there are several."""
    if len(wanted) > 1:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(len(wanted)) as pool:
            list(pool.map(lambda one: _code(*one, capability), wanted))


def kernel(file: str, entry: str, constants: tuple[tuple[str, int], ...], shared: int) -> Any:
    """The entry of a source on the current device, ready to be launched with `shared` bytes of shared memory."""
    return _kernel(file, entry, constants, shared, current_device())


@functools.cache
def _kernel(file: str, entry: str, constants: tuple[tuple[str, int], ...], shared: int, device: int) -> Any:
    import cupy

    code = _code(file, constants, capability())
    if code.path is not None and code.path.exists():
        found = cupy.RawModule(path=str(code.path)).get_function(entry)
        found.max_dynamic_shared_size_bytes = shared  # loads the module
        return found
    import tempfile

    with tempfile.TemporaryDirectory() as folder:  # no cache folder: the driver still wants a file
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file_:
            file_.write(code.cubin)
        found = cupy.RawModule(path=path).get_function(entry)
        found.max_dynamic_shared_size_bytes = shared
    return found


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """A new array on the current device."""
    return _cupy().empty(shape, dtype)


@functools.cache
def _cupy() -> Any:
    import cupy

    return cupy


def launcher(
    file: str, entry: str, constants: tuple[tuple[str, int], ...], blocks: int, threads: int, shared: int
) -> Callable[[bytes], None]:
    """`launch` of one kernel as a function of its arguments, on the device that is current now."""
    found, grid, block = kernel(file, entry, constants, shared), (blocks,), (threads,)

    def fire(arguments: bytes) -> None:
        found(grid, block, (np.void(arguments),), shared_mem=shared)

    return fire


def launch(
    file: str, entry: str, constants: tuple[tuple[str, int], ...], blocks: int, threads: int, shared: int,
    arguments: bytes,
) -> None:
    """Launch on the current stream; `arguments` are the bytes of the one struct that the entry takes.

    No blocks, no launch. Raises OverflowError for more blocks than a grid has.
    """
    if blocks <= 0:
        return
    if blocks > LARGEST_GRID:
        raise OverflowError(f"{entry}: {blocks} blocks, a grid has at most {LARGEST_GRID}")
    found = kernel(file, entry, constants, shared)
    found((blocks,), (threads,), (np.void(arguments),), shared_mem=shared)
