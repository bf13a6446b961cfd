"""Ranks that are GPUs, by NCCL as CuPy has it: one process a GPU.

unique_id = nccl.unique_id()        on one rank, which hands it to the others: by MPI, a queue, a file
comm = nccl.NCCL(rank, size, unique_id)
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import time
import weakref
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

    A thread looks after exchanges that nobody waits for yet: the driver may wait for the device, to load a kernel, and
    the device for a rank that is gone.
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
        self._error: RankError | None = None  # why this rank has left
        self._leaving, self._open = threading.Lock(), set[_Exchange]()
        threading.Thread(target=_look_after, args=(weakref.ref(self), timeout / 10), daemon=True).start()

    def all_gather(self, x: Any) -> Any:
        every, wait = self.begin(x)
        wait()
        return every

    def begin(self, x: Any) -> tuple[Any, Callable[[], None]]:
        """(what all_gather returns, once the current stream is there; a function that waits for it)."""
        import cupy

        if self._error is not None:
            raise self._error
        every = cupy.empty((self.size, *x.shape), x.dtype)
        stream, exchange = cupy.cuda.get_current_stream(), _Exchange(time.monotonic())
        self._open.add(exchange)  # the first one waits on the host until all ranks have come
        try:
            self._comm.allGather(x.data.ptr, every.data.ptr, x.nbytes, self._nccl.NCCL_UINT8, stream.ptr)
        except self._nccl.NcclError as error:
            self._open.discard(exchange)
            raise self._error or RankError(f"distributed: rank {self.rank}: {error}") from error
        done = cupy.cuda.Event(disable_timing=True)
        done.record(stream)
        exchange.done = done
        return every, functools.partial(self._wait, exchange)

    def _wait(self, exchange: _Exchange) -> None:
        began = time.monotonic()
        while self._error is None and not exchange.done.done:
            passed = time.monotonic() - began
            try:
                self._comm.check_async_error()
            except self._nccl.NcclError as error:
                self._leave(RankError(f"distributed: rank {self.rank}: {error}"))
            if passed > self._timeout:
                self._leave(late(self.rank, self._timeout))
            if passed > SPIN:
                time.sleep(PAUSE)
        self._open.discard(exchange)
        if self._error is not None:
            raise self._error

    def look(self) -> None:
        """Leave if an exchange has not come within the time limit."""
        for exchange in list(self._open):
            if time.monotonic() - exchange.began < self._timeout:
                continue
            if exchange.is_done():
                self._open.discard(exchange)
            else:
                self._leave(late(self.rank, self._timeout))

    def _leave(self, error: RankError) -> None:
        with self._leaving:
            if self._error is None:
                self._error = error
                self._comm.abort()  # kernels that wait for other ranks end


class _Exchange:
    """An exchange since `began`.   done: an event, once the kernel is in its stream."""

    def __init__(self, began: float):
        self.began = began
        self.done: Any = None

    def is_done(self) -> bool:
        """Whether its event has passed; not if the driver does not tell, because it waits for the device itself."""
        found: list[bool] = []
        if self.done is not None:
            ask = functools.partial(_caught, lambda: found.append(_has_passed(self.done)), [])
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            thread.join(1.0)
        return found == [True]


def _has_passed(event: Any) -> bool:
    """What the driver says of an event. CuPy's own question would stop all threads of Python until it is answered."""
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    return driver.cuEventQuery(ctypes.c_void_p(event.ptr)) == 0


def _look_after(comm: weakref.ref[NCCL], pause: float) -> None:
    """Look at the exchanges of a communicator as long as there is one, and it has not left."""
    while (own := comm()) is not None and own._error is None:
        own.look()
        del own
        time.sleep(pause)


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
