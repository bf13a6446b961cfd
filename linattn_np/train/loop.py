"""The loop of training: batches, gradients, clipping, the optimiser's step."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..distributed import Comm
from ..layers import Layer
from ..runtime import blas
from ..runtime.values import is_whole, shown
from .data import Batch
from .gradient import ALONE, check_alike
from .run import Run
from .schedules import Schedule
from .step import Task, step_of


def fit(loss: Layer, run: Run, batch: Batch, steps: int, rate: Schedule, clip: float = 1.0, accumulate: int = 1,
        save: str | Path | None = None, every: int = 0, bar: bool = True, comm: Comm = ALONE) -> Run:  # fmt: skip
    """Trains to step number `steps`; `run` changes in place. A run that is resumed has the bits of one that was not.

    loss        layer of (ids, labels); its result is the mean loss
    batch       n -> (ids, labels), the data of batch number n
    rate        step -> rate of the optimiser
    clip        largest norm of the gradient of all parameters; a longer one is scaled down
    accumulate  batches of a step; their gradients are averaged
    save        a file, written every `every` steps, at the end, and when an exception or ctrl-C ends the loop
    bar         loss and tokens a second on standard error
    comm        ranks that share the batches of a step, as many each (la.distributed); all have equal runs, rank 0 alone
                saves and has a bar. On 2, 4, 8, ... ranks the run has the bits of one rank

    Raises FloatingPointError for a gradient that is not finite; the parameters are those before it. Raises ValueError
    for `accumulate` that is no multiple of the ranks and for runs that differ, RankError for a rank that is gone.
    """
    if not is_whole(accumulate) or accumulate % comm.size:
        wanted = f"a multiple of the {comm.size} ranks" if comm.size > 1 else "a whole number from 1"
        raise ValueError(f"fit: accumulate is {shown(accumulate)}, expected {wanted}")
    if comm.size > 1:
        check_alike(run, comm)
        save, bar = (None, False) if comm.rank else (save, bar)
    task = Task(loss, run, batch, clip, accumulate, comm)
    try:
        with blas.one_thread(), _few_collections(), _bar(run.step, steps, bar) as told, step_of(task) as step:
            while run.step < steps:
                start = time.perf_counter()
                step(rate(run.step))
                told(run.losses, comm.size * step.tokens / (time.perf_counter() - start))
                if save and every and run.step % every == 0:
                    run.save(save)
    finally:
        if save:
            run.save(save)
    return run


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Objects that exist are not searched for cycles again and again: a step makes thousands of small ones."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _bar(first: int, steps: int, wanted: bool) -> Iterator[Any]:
    """A function that shows losses and tokens a second: a bar on a terminal, else ten lines."""
    if not wanted:
        yield lambda losses, speed: None
    elif sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=steps, initial=first, unit=" steps", dynamic_ncols=True) as line:

            def show(losses: list[float], speed: float) -> None:
                line.set_postfix_str(_words(losses, speed), refresh=False)
                line.update()

            yield show
    else:
        each = max(1, (steps - first) // 10)

        def write(losses: list[float], speed: float) -> None:
            if len(losses) % each == 0 or len(losses) == steps:
                sys.stderr.write(f"step {len(losses)} of {steps}: {_words(losses, speed)}\n")

        yield write


def _words(losses: list[float], speed: float) -> str:
    last = losses[-20:]
    return f"loss {sum(last) / len(last):.3f}, {speed:,.0f} tokens/s"
