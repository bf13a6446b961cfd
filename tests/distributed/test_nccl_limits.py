"""NCCL's communicator with stubs of CuPy and NCCL: no rank waits without a limit, wherever its host is."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from linattn_np.distributed import NCCL, RankError, nccl

LIMIT = 0.2


class NcclError(RuntimeError):
    pass


class Library:
    """A communicator whose other rank is gone, unless `is_there`. `left`: it was aborted, and the device goes on."""

    NCCL_UINT8, NcclError = 1, NcclError

    def __init__(self):
        self.left, self.is_there, self.blocks, self.aborted = threading.Event(), False, False, 0

    def NcclCommunicator(self, size, unique_id, rank):
        return self

    def allGather(self, *given):
        if self.blocks:
            assert self.left.wait(10)
            raise NcclError("aborted")

    def check_async_error(self):
        pass

    def abort(self):
        self.aborted += 1
        self.left.set()


class Event:
    """Passes with the exchange."""

    def __init__(self, library, asks):
        self.record, self._library, self._asks = lambda stream: None, library, asks

    @property
    def done(self):
        self._asks()
        return self._library.is_there or self._library.left.is_set()


@pytest.fixture
def library(monkeypatch):
    found = Library()
    found.asks = lambda: None
    cuda = SimpleNamespace(
        Device=contextlib.nullcontext,
        get_current_stream=lambda: SimpleNamespace(ptr=0),
        Event=lambda disable_timing: Event(found, lambda: found.asks()),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, empty=np.empty))
    monkeypatch.setattr(nccl, "_nccl", lambda: found)
    monkeypatch.setattr(nccl, "_has_passed", lambda event: event.done)
    return found


def array():
    return SimpleNamespace(shape=(2,), dtype=np.float32, nbytes=8, data=SimpleNamespace(ptr=0))


@pytest.fixture
def x(monkeypatch, library):
    sys.modules["cupy"].empty = lambda shape, dtype: array()
    return array()


def test_a_wait_ends_after_the_limit(library, x):
    comm = NCCL(0, 2, None, timeout=LIMIT)
    with pytest.raises(RankError, match=r"rank 0 waited 0\.2 s for the other ranks"):
        comm.all_gather(x)
    with pytest.raises(RankError):  # it stays an error
        comm.all_gather(x)
    assert library.aborted == 1


@pytest.mark.parametrize("answers", [True, False])
def test_a_driver_that_waits_for_the_device_is_freed(library, x, answers):
    """Between begin and wait, as when a kernel is loaded; the driver may answer no other thread meanwhile."""
    if not answers:
        library.asks = lambda: library.left.wait(10)
    comm = NCCL(0, 2, None, timeout=LIMIT)
    _, wait = comm.begin(x)
    assert library.left.wait(5)
    with pytest.raises(RankError, match=r"rank 0 waited 0\.2 s for the other ranks"):
        wait()
    assert library.aborted == 1


def test_a_first_exchange_that_waits_on_the_host_is_freed(library, x):
    library.blocks = True
    comm = NCCL(0, 2, None, timeout=LIMIT)
    with pytest.raises(RankError, match=r"rank 0 waited 0\.2 s for the other ranks"):
        comm.begin(x)
    assert library.aborted == 1


def test_an_exchange_that_came_may_be_waited_for_late(library, x):
    library.is_there = True
    comm = NCCL(0, 2, None, timeout=LIMIT)
    _, wait = comm.begin(x)
    time.sleep(3 * LIMIT)
    wait()
    comm.all_gather(x)
    assert library.aborted == 0


def test_the_thread_ends_with_the_communicator(library, x):
    before = set(threading.enumerate())
    comm = NCCL(0, 2, None, timeout=LIMIT)
    (thread,) = (one for one in set(threading.enumerate()) - before if one.is_alive())
    del comm
    thread.join(5)
    assert not thread.is_alive()
