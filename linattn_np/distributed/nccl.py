"""Ranks that are GPUs, by NCCL as CuPy has it: one process a GPU.

unique_id = nccl.unique_id()        on one rank, which hands it to the others: by MPI, a queue, a file
comm = nccl.NCCL(rank, size, unique_id)
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .comm import TIMEOUT, RankError, late

SPIN = 2e-3  # seconds of looking without a pause: an exchange seldom takes longer
PAUSE = 5e-5


def unique_id() -> Any:
    """What the ranks of one communicator have in common: a tuple of numbers.   Raises ImportError without NCCL."""
    return _nccl().get_unique_id()


class NCCL:
    """A communicator of `size` GPUs; this process has the current device of CuPy.

    rank, size, unique_id   of this process; how many; of `unique_id()` on one of them
    timeout                 seconds that a rank waits for the others; then it leaves the communicator: RankError
    """

    def __init__(self, rank: int, size: int, unique_id: Any, timeout: float = TIMEOUT):
        nccl, joined = _nccl(), []
        import cupy

        device = cupy.cuda.Device()
        self.rank, self.size, self._timeout = rank, size, timeout

        def join() -> None:  # returns when every rank has come
            with device:
                joined.append(nccl.NcclCommunicator(size, unique_id, rank))

        failed: list[BaseException] = []
        thread = threading.Thread(target=_caught, args=(join, failed), daemon=True)
        thread.start()
        thread.join(timeout)
        if failed:
            raise failed[0]
        if not joined:
            raise late(rank, timeout)
        self._comm, self._nccl = joined[0], nccl

    def all_gather(self, x: Any) -> Any:
        every, wait = self.begin(x)
        wait()
        return every

    def begin(self, x: Any) -> tuple[Any, Callable[[], None]]:
        """(what all_gather returns, once the current stream is there; a function that waits for it)."""
        import cupy

        every = cupy.empty((self.size, *x.shape), x.dtype)
        stream = cupy.cuda.get_current_stream()
        self._comm.allGather(x.data.ptr, every.data.ptr, x.nbytes, self._nccl.NCCL_UINT8, stream.ptr)
        done = cupy.cuda.Event(disable_timing=True)
        done.record(stream)
        return every, functools.partial(self._wait, done)

    def _wait(self, done: Any) -> None:
        began = time.monotonic()
        while not done.done:
            passed = time.monotonic() - began
            try:
                self._comm.check_async_error()
            except self._nccl.NcclError as error:
                self._comm.abort()
                raise RankError(f"distributed: rank {self.rank}: {error}") from error
            if passed > self._timeout:
                self._comm.abort()
                raise late(self.rank, self._timeout)
            if passed > SPIN:
                time.sleep(PAUSE)


def _caught(work: Any, failed: list[BaseException]) -> None:
    try:
        work()
    except BaseException as error:
        failed.append(error)


def _nccl() -> Any:
    """CuPy's bindings; the library may be in a package of Python, where the loader does not look.

    Raises ImportError without it.
    """
    for path in _libraries():
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    try:
        from cupy.cuda import nccl
    except ImportError:
        nccl = None
    if nccl is None or not nccl.available:
        raise ImportError(
            "distributed: CuPy finds no NCCL, expected the package nvidia-nccl-cu12 or nvidia-nccl-cu13 beside it"
        )
    return nccl


def _libraries() -> list[Path]:
    """libnccl of the packages nvidia-nccl-cu12 and nvidia-nccl-cu13, which share a folder."""
    spec = find_spec("nvidia")
    places = [] if spec is None else spec.submodule_search_locations or []
    return [path for place in places for path in sorted(Path(place).glob("nccl/lib/libnccl.so*"))]
