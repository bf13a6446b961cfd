"""Parallel jobs: spawned processes with one BLAS thread each, large jobs first, a progress bar on stderr."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(
    work: Callable[[Job], Result], jobs: Sequence[Job], cost: Callable[[Job], int], processes: int, label: str
) -> list[tuple[Job, Result]]:
    """Each job with its result, in the order of `jobs`; `work` must be a module-level function."""
    from tqdm import tqdm

    order = sorted(range(len(jobs)), key=lambda i: -cost(jobs[i]))
    results: dict[int, Result] = {}
    with tqdm(total=sum(map(cost, jobs)), desc=label, unit_scale=True, dynamic_ncols=True) as bar:
        for i, result in finished(work, jobs, order, processes):
            results[i] = result
            bar.update(cost(jobs[i]))
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
    os.environ["LINATTN_NP_NUM_THREADS"] = "1"
    one_thread()
