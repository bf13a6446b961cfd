"""Threads for kernels that let go of the interpreter lock.

A call shares its tasks with helper threads and returns, or raises, only after every helper has left it. One pool of
helpers serves all calls. It grows to the most that one call asked for; a helper that was idle for IDLE seconds ends.
Where the system starts no more threads, the pool falls to half of those that there are, for IDLE seconds: their stacks
may be what it is short of; a call always has its own thread. Helpers are started by `_thread`, because
`threading.Thread.start` waits for the new thread, for ever if a signal or a lack of memory comes in between.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

IDLE = 20.0  # seconds that a helper waits for work before it ends
LONG = 0.25  # seconds that a range of tasks should take at most: between two of them a call can be interrupted

_asked: ContextVar[int | None] = ContextVar("num_threads", default=None)
_waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # a job once a helper that it asks for; None ends one
_lock = threading.Lock()
_helpers = 0
_most, _until = 0, 0.0  # helpers that may be started, until when
_own = threading.local()


@contextlib.contextmanager
def limited(count: int | None) -> Iterator[None]:
    """What is computed inside takes `count` threads; None: as many as it would."""
    before = _asked.set(_asked.get() if count is None else count)
    try:
        yield
    finally:
        _asked.reset(before)


def num_threads() -> int:
    """What `limited` says, else LINATTN_NP_NUM_THREADS, else the number of processors that this process may use."""
    if (asked := _asked.get()) is not None:
        return asked
    given = os.environ.get("LINATTN_NP_NUM_THREADS")
    if given is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"LINATTN_NP_NUM_THREADS is {given!r}, expected a whole number from 1")
    return int(given)


def run(task: Callable[[int, int], None], tasks: int, threads: int) -> None:
    """task(first, last) over ranges that make up 0..tasks, on `threads` threads, the caller's own among them.

    Ranges are handed out as threads become free; what a task computes must not depend on its neighbours. `task` must
    hold references to the arrays whose addresses it passes on: helpers hold `task` as long as they work.
    """
    threads = min(threads, tasks)
    if tasks == 1:
        task(0, 1)
    if tasks <= 1:
        return
    job = _Job(task, tasks, threads)
    if threads == 1:
        job.work()
        return
    try:
        try:
            _call_helpers(job, threads - 1)
            job.work()
        except BaseException:
            job.cancelled = True
            raise
        finally:
            job.close()
    finally:
        job.close()  # again: a signal may have raised before the first was inside its `try`
    job.raise_error()


def cancelled() -> bool:
    """Whether the call that this thread computes for will raise: what is left of a range need not be done."""
    job = getattr(_own, "job", None)
    return job is not None and job.cancelled


class _Job:
    """The tasks of one call. Only the caller's thread can be interrupted by signals, and is at any moment.

    Plain locks are safe then: `with lock` holds it or has let go of it, which a Condition or an Event does not promise.
    """

    def __init__(self, task: Callable[[int, int], None], tasks: int, threads: int):
        self.task: Callable[[int, int], None] | None = task
        self.tasks, self.first = tasks, 0
        self.most = max(1, tasks if threads == 1 else tasks // (4 * threads))  # tasks of a range
        self.size = max(1, self.most // 8)  # of the next one: the first show how long they take
        self.closed = self.cancelled = False  # to helpers that would join; for those that are inside
        self.error: BaseException | None = None
        self.inside = 0  # helpers
        self.lock, self.busy = threading.Lock(), threading.Lock()  # busy: held while helpers are inside

    def work(self) -> None:
        """Take ranges until there are none."""
        task, outer = self.task, getattr(_own, "job", None)
        assert task is not None
        _own.job = self
        try:
            while True:
                with self.lock:
                    first = self.first
                    last = self.first = min(first + self.size, self.tasks)
                if first == last or self.cancelled:
                    return
                began = time.perf_counter()
                task(first, last)
                seconds = max(time.perf_counter() - began, 1e-9)
                self.size = max(1, min(self.most, int((last - first) * LONG / seconds)))
        finally:
            _own.job = outer

    def help(self) -> None:
        """`work` on a helper thread, if the caller still waits for it."""
        with self.lock:
            if self.closed:
                return
            if not self.inside:
                self.busy.acquire()
            self.inside += 1
        try:
            self.work()
        except BaseException as error:
            self.error, self.cancelled = error, True
        finally:
            with self.lock:
                self.inside -= 1
                if not self.inside:
                    self.busy.release()

    def close(self) -> None:
        """Let no helper in, and wait until all have left, however often a signal raises meanwhile; then raise that."""
        left, raised = False, None
        while not left:
            try:
                while not left:  # two loops: a signal that raises between two turns of the inner one meets the outer
                    try:
                        with self.lock:
                            self.closed = True
                        with self.busy:
                            left = True
                    except BaseException as error:
                        raised, self.cancelled = error, True
            except BaseException as error:
                raised, self.cancelled = error, True
        self.task = None  # the queue may hold the job longer
        try:
            if raised is not None:
                raise raised
        finally:
            raised = None  # its traceback holds this frame

    def raise_error(self) -> None:
        """What a helper's task raised."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            error = None


def _call_helpers(job: _Job, count: int) -> None:
    """Ask `count` helpers to join a job; starts those that are missing, as far as the system lets it."""
    global _helpers, _most, _until
    if sys.is_finalizing():  # no other thread gets the interpreter lock any more
        return
    if time.monotonic() < _until:
        count = min(count, _most)
    while _helpers < count:
        with _lock:
            if _helpers < count:
                _helpers += 1
                try:
                    _thread.start_new_thread(_serve, (_waiting,))
                except (RuntimeError, MemoryError):
                    _helpers -= 1
                    count = _most = _helpers // 2
                    _until = time.monotonic() + IDLE
                    for _ in range(_helpers - count):
                        _waiting.put(None)
    for _ in range(count):
        _waiting.put(job)


def _serve(waiting: queue.SimpleQueue[_Job | None]) -> None:
    """A helper's life."""
    global _helpers
    try:
        while (job := waiting.get(timeout=IDLE)) is not None:
            job.help()
            del job
    except (queue.Empty, MemoryError):
        pass
    finally:
        with _lock:
            _helpers -= 1


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _lock, _waiting, _helpers, _until
    _lock, _waiting, _helpers, _until = threading.Lock(), queue.SimpleQueue(), 0, 0.0
    _own.job = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
