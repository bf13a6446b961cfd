"""Parallel jobs: spawned processes with one BLAS thread each, large jobs first, progress on stderr."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    known: Mapping[Job, Result] = {},
    keep: Callable[[Job, Result], None] = lambda job, result: None,
) -> dict[Job, Result]:
    """Each job with its result, in the order of `jobs`; `work` must be a module-level function.

    known: results that are not computed again. keep: called with each other one as it is there.
    """
    left = [job for job in jobs if job not in known]
    order = sorted(range(len(left)), key=lambda i: -cost(left[i]))
    results = dict(known)
    with progress(label, len(left), "runs") as done:
        for i, result in finished(work, left, order, processes):
            results[left[i]] = result
            keep(left[i], result)
            done(1)
    return {job: results[job] for job in jobs}


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
