"""A thread pool for kernels that release the interpreter lock.

A call shares its tasks with helper threads and returns, or raises, only after every helper has left it. One pool of
helpers serves all calls. It grows to the largest number that a call requests; a helper exits after IDLE idle seconds.
If the system refuses to start a thread, the pool shrinks to half its size for IDLE seconds, since thread stacks may
have exhausted the memory; the caller's own thread always works. Helpers are started by `_thread`, because
`threading.Thread.start` waits for the new thread, and never returns if a signal or a lack of memory intervenes.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from .held import emptying

IDLE = 20.0  # seconds that a helper waits for work before it exits
LONG = 0.25  # longest duration of a range of tasks, in seconds: a call can be interrupted between ranges

_limit: ContextVar[int | None] = ContextVar("num_threads", default=None)
_waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # a job once per requested helper; None stops one
_lock = threading.Lock()
_helpers = 0
_most, _until = 0, 0.0  # helpers that may be started, until when
_own = threading.local()
_ids: set[int] = set()  # of helpers, in the system
_avoided = -1  # the processor that helpers avoid
try:
    _processor: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu  # that this thread runs on
except (OSError, TypeError, AttributeError):  # not Linux
    _processor = lambda: -1  # noqa: E731


@contextlib.contextmanager
def limited(count: int | None) -> Iterator[None]:
    """Context: calls inside use `count` threads; None leaves the number unchanged."""
    before = _limit.set(_limit.get() if count is None else count)
    try:
        yield
    finally:
        _limit.reset(before)


def num_threads() -> int:
    """The limit set by `limited`, else LINATTN_NUM_THREADS, else the processors available to this process."""
    if (limit := _limit.get()) is not None:
        return limit
    value = os.environ.get("LINATTN_NUM_THREADS")
    if value is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"LINATTN_NUM_THREADS is {value!r}, expected a whole number from 1")
    return int(value)


def run(task: Callable[[int, int], None], tasks: int, threads: int) -> None:
    """Run task(first, last) over ranges that partition 0..tasks, on `threads` threads including the caller's.

    Ranges are scheduled dynamically; the result of a task must not depend on its neighbours. `task` must hold
    references to the arrays whose addresses it passes on: helpers hold `task` while they work.
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
    """Whether the call that this thread works for will raise: the rest of a range can be skipped."""
    job = getattr(_own, "job", None)
    return job is not None and job.cancelled


class _Job:
    """The tasks of one call. A signal may interrupt the caller's thread at any moment, and only that one.

    Plain locks are safe under interruption: `with lock` either holds or has released it; Condition and Event do not
    guarantee that.
    """

    def __init__(self, task: Callable[[int, int], None], tasks: int, threads: int):
        self.task: Callable[[int, int], None] | None = task
        self.tasks, self.first = tasks, 0
        self.most = max(1, tasks if threads == 1 else tasks // (4 * threads))  # tasks of a range
        self.size = max(1, self.most // 8)  # tasks of the next range, adapted to the measured duration
        self.closed = self.cancelled = False  # closed: no helper may join; cancelled: helpers inside stop
        self.error: BaseException | None = None
        self.inside = 0  # helpers
        self.lock, self.busy = threading.Lock(), threading.Lock()  # busy: held while helpers are inside

    def work(self) -> None:
        """Take ranges until none are left."""
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
        """Refuse new helpers and wait until all have left, even if signals raise meanwhile; then raise the last one."""
        left, raised = False, None
        while not left:
            try:
                while not left:  # two loops: a signal raised between two iterations of the inner is caught by the outer
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
        """Raise the exception of a helper's task, if any."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            error = None


def _call_helpers(job: _Job, count: int) -> None:
    """Request `count` helpers for a job, starting missing threads as far as the system allows."""
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
    _keep_away()
    for _ in range(count):
        _waiting.put(job)


def dismiss() -> None:
    """Let the helpers exit that wait for work, with the memory that they hold; the next call starts others."""
    for _ in range(_helpers):
        _waiting.put(None)


emptying.append(dismiss)


def _serve(waiting: queue.SimpleQueue[_Job | None]) -> None:
    """The main loop of a helper thread."""
    global _helpers, _avoided
    helper = threading.get_native_id()
    _ids.add(helper)
    _avoided = -1  # the next call places this thread too
    try:
        while (job := waiting.get(timeout=IDLE)) is not None:
            job.help()
            del job
    except (queue.Empty, MemoryError):
        pass
    finally:
        _ids.discard(helper)
        with _lock:
            _helpers -= 1


def _keep_away() -> None:
    """Keep helpers off the caller's processor: a system may wake them there, and they would wait for the caller."""
    global _avoided
    if (processor := _processor()) == _avoided or not hasattr(os, "sched_setaffinity"):
        return
    _avoided = processor
    allowed = os.sched_getaffinity(0)
    places = allowed - {processor} or allowed
    for helper in list(_ids):
        with contextlib.suppress(OSError):  # it has just exited
            os.sched_setaffinity(helper, places)


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _lock, _waiting, _helpers, _until, _avoided
    _lock, _waiting, _helpers, _until = threading.Lock(), queue.SimpleQueue(), 0, 0.0
    _ids.clear()
    _avoided = -1
    _own.job = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
