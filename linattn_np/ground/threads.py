"""Threads for kernels that let go of the interpreter lock: made at first use, again after a fork."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

_pools: dict[int, ThreadPoolExecutor] = {}
_lock = threading.Lock()
_asked: ContextVar[int | None] = ContextVar("num_threads", default=None)


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

    Ranges are handed out as threads become free; what a task computes must not depend on its neighbours.
    """
    threads = min(threads, tasks)
    if threads <= 1:
        if tasks:
            task(0, tasks)
        return
    parts = min(tasks, 4 * threads)
    bounds = [tasks * n // parts for n in range(parts + 1)]
    following = itertools.count()

    def work() -> None:
        while (n := next(following)) < parts:
            task(bounds[n], bounds[n + 1])

    helpers = [_pool(threads - 1).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        for helper in helpers:
            helper.cancel() or helper.exception()
    for helper in helpers:
        if not helper.cancelled():
            helper.result()


def _pool(helpers: int) -> ThreadPoolExecutor:
    with _lock:
        if helpers not in _pools:
            _pools[helpers] = ThreadPoolExecutor(helpers, thread_name_prefix="linattn_np")
        return _pools[helpers]


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
