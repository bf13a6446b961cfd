"""A step of training: the gradient, its norm, the optimiser's step; as calls, or on a GPU as a CUDA graph.

with step_of(task) as step:
    step(rate)                  the run of the task is one step further
    step.tokens                 how many this rank has read
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..call.vjp import vjp
from ..distributed import Comm
from ..layers import Layer
from ..ops.optimisers import norm
from ..runtime.arrays import Array, cast, compat, dtype_name
from ..runtime.unchanged import marked_by_caller
from .data import Batch
from .flat import on_host
from .gradient import gradient
from .optimisers import launched_on
from .run import Run


class Task(NamedTuple):
    """What all steps of a run have in common: arguments of `fit`."""

    loss: Layer
    run: Run
    batch: Batch
    clip: float
    accumulate: int
    comm: Comm

    def gradient(self, ids: Array, labels: Array, cotangent: Any, wide: bool) -> tuple[Array, Array]:
        """(the loss of a batch, `cotangent` times its gradient as a vector); wide: in float32 at least."""
        params = self.run.params
        with marked_by_caller():  # nobody writes to the parameters before the pullback
            found, pullback = vjp(self.loss, params.arrays, ids, labels)
        g, xp = params.joined(pullback(cotangent).params), compat.array_namespace(ids)
        return found, cast(xp, g, xp.float32) if wide and params.is_narrow else g

    def check(self, loss: float, length: float) -> None:
        """Raise FloatingPointError unless the norm of the gradient is finite."""
        if not math.isfinite(length):
            raise FloatingPointError(f"fit: the gradient of step {self.run.step} is not finite, its loss {loss}")

    def advance(self, loss: float) -> None:
        """The optimiser's step was made."""
        run = self.run
        run.step, run.position = run.step + 1, run.position + self.accumulate
        run.losses.append(loss)


class Calls:
    """The steps of a task, an array call after the other."""

    def __init__(self, task: Task):
        self.task, self.tokens = task, 0

    def __call__(self, rate: float) -> None:
        task, run, self.tokens = self.task, self.task.run, 0
        total, losses = gradient(self._one, task.accumulate, task.comm)
        loss, length = _mean(on_host(losses)), norm(compat.array_namespace(total), total)
        task.check(loss, length)
        scale = min(1.0, task.clip / length) if length else 1.0
        with whole():
            run.optimiser.update(run.params, run.params.like(total), run.moments, run.step + 1, rate, scale)
            task.advance(loss)

    def _one(self, n: int) -> tuple[Array, Array]:
        """(loss, gradient) of the n-th batch of the step."""
        task, xp = self.task, compat.array_namespace(self.task.run.params.vector)
        ids, labels = map(xp.asarray, task.batch(task.run.position + n))
        self.tokens += ids.size
        return task.gradient(ids, labels, 1.0 / task.accumulate, True)


class OnDevice:
    """Those of CuPy arrays: from the second one on CUDA graphs.

    One graph is the whole step if it has one batch and one rank; else one is the gradient of a batch, and one the
    optimiser's step. Ranks exchange gradients between the two. The host waits for these, and for loss and norm: the
    device scales the gradient, and writes nothing where the norm is not finite.
    """

    def __init__(self, task: Task, launched: Any):
        from ..runtime.cuda.graphs import Graphs

        self.task, self.tokens, self._launched = task, 0, launched
        self._xp = xp = compat.array_namespace(task.run.params.vector)
        self._numbers = xp.zeros((launched.COUNT,), dtype=xp.float64)
        is_wide = dtype_name(task.run.params.vector) == "float64"
        self._cotangent = xp.asarray(1.0 / task.accumulate, dtype=xp.float64 if is_wide else xp.float32)
        self._is_whole = task.accumulate == task.comm.size == 1
        self._graphs = Graphs(self._step if self._is_whole else self._gradient, "fit: a step")
        if not self._is_whole:
            self._total = xp.zeros_like(task.run.params.vector, dtype=self._cotangent.dtype)
            self._losses = xp.zeros((task.accumulate,), dtype=xp.float64)
            self._update = Graphs(self._updated_by_total, "fit: a step of the optimiser")

    def __call__(self, rate: float) -> None:
        task, run, launched = self.task, self.task.run, self._launched
        given, self.tokens = launched.numbers_of(run.step + 1, rate, run.optimiser.betas, task.clip), 0
        self._numbers[: len(given)].set(given)
        if self._is_whole:
            batch = self._batch(0)
            with whole():
                self._finish(self._graphs(*batch))
        else:
            self._losses[...] = gradient(self._one, task.accumulate, task.comm, self._total)[1]
            with whole():
                self._finish(self._update())

    def clear(self) -> None:
        """Give back the memory of the graphs."""
        self._graphs.clear()
        if not self._is_whole:
            self._update.clear()

    def _finish(self, found: Array) -> None:
        """found: losses and numbers of a step that is made unless its norm is not finite."""
        each, count = on_host(found), self.task.accumulate
        loss = _mean(each[:count])
        self.task.check(loss, float(each[count + self._launched.NORM]))
        self.task.advance(loss)

    def _updated(self, g: Array, losses: Array) -> Array:
        """The optimiser's step; losses and numbers as one array."""
        run = self.task.run
        self._launched.norm(g, self._numbers)
        run.optimiser.launch(run.params, run.params.like(g), run.moments, self._numbers)
        return self._xp.concat([losses, self._numbers])

    def _updated_by_total(self) -> Array:
        return self._updated(self._total, self._losses)

    def _step(self, ids: Array, labels: Array) -> Array:
        loss, g = self._gradient(ids, labels)
        return self._updated(g, self._xp.astype(loss, self._xp.float64).reshape(1))

    def _gradient(self, ids: Array, labels: Array) -> tuple[Array, Array]:
        return self.task.gradient(ids, labels, self._cotangent, not self._is_whole)

    def _one(self, n: int) -> tuple[Array, Array]:
        """(loss, gradient) of the n-th batch of the step; the next batch of this rank overwrites those of the graph."""
        found = self._graphs(*self._batch(n))
        return found if self.task.accumulate == self.task.comm.size else tuple(x.copy() for x in found)

    def _batch(self, n: int) -> tuple[np.ndarray, ...]:
        ids, labels = map(on_host, self.task.batch(self.task.run.position + n))
        self.tokens += ids.size
        return ids, labels


@contextlib.contextmanager
def step_of(task: Task) -> Iterator[Calls | OnDevice]:
    """The function that makes a step of a task, on the device of its parameters."""
    params = task.run.params
    if (launched := launched_on(params, task.run.moments)) is None:
        yield Calls(task)
        return
    from ..runtime.cuda.graphs import own_stream

    with params.vector.device, own_stream():
        step = OnDevice(task, launched)
        try:
            yield step
        finally:
            step.clear()


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Ctrl-C waits for the end: no step is half done when the run is saved. Signals come to the main thread alone."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    came = list[Any]()
    before = signal.signal(signal.SIGINT, lambda *given: came.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])


def _mean(losses: np.ndarray) -> float:
    return sum(float(x) / len(losses) for x in losses)
