"""Parallel jobs: spawned processes with one BLAS thread each, large jobs first, progress on stderr."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

from .progress import progress

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(
    work: Callable[[Job], Result],
    jobs: Sequence[Job],
    cost: Callable[[Job], int],
    processes: int,
    label: str,
    tokens: Callable[[Job], int] | None = None,
) -> list[tuple[Job, Result]]:
    """Each job with its result, in the order of `jobs`; `work` must be a module-level function.

    Progress counts the tokens of the jobs, or the jobs as runs without `tokens`.
    """
    size, unit = (tokens, "tokens") if tokens else (lambda _: 1, "runs")
    order = sorted(range(len(jobs)), key=lambda i: -cost(jobs[i]))
    results: dict[int, Result] = {}
    with progress(label, sum(map(size, jobs)), unit) as done:
        for i, result in finished(work, jobs, order, processes):
            results[i] = result
            done(size(jobs[i]))
    return [(jobs[i], results[i]) for i in range(len(jobs))]


def finished(
    work: Callable[[Job], Result], jobs: Sequence[Job], order: list[int], processes: int
) -> Iterator[tuple[int, Result]]:
    """Indices and results of the jobs as they complete; with processes = 1, in this process."""
    if processes == 1:
        with one_thread():
            for i in order:
                yield i, work(jobs[i])
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=begin_worker) as pool:
        running = {pool.submit(work, jobs[i]): i for i in order}
        for future in as_completed(running):
            yield running[future], future.result()


def one_thread() -> Any:
    """Limit this process to one BLAS thread, permanently or in a with statement; products here are small."""
    import numpy  # noqa: F401  a BLAS can be limited only after it is loaded
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1)


def begin_worker() -> None:
    """Initialise a spawned process: one thread for BLAS and for compiled loops."""
    os.environ["LINATTN_NUM_THREADS"] = "1"
    one_thread()
