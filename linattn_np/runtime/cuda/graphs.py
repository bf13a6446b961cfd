"""A function of CuPy arrays that is called again and again, as one CUDA graph for each shape.

The first call of a shape computes: kernels are compiled, tables are made. The second one is captured, and its graph is
launched from then on. Memory that a capture allocates belongs to the graphs, and is used again within one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .. import draws
from . import launch

MOST = 8  # shapes that have a graph


class Graphs:
    """f(*arrays) on the current stream, which must not be the default one, of NumPy arrays that are copied there.

    name: in the warning where f cannot be captured, and is called each time. Results are overwritten by the next call.
    f must do the same for all arrays of a shape: what it reads of the host is what it read at the capture.
    """

    def __init__(self, f: Callable[..., Any], name: str):
        self._f, self._name, self._obstacle = f, name, ""
        self._inputs: dict[Any, list[Any]] = {}  # by shapes and dtypes
        self._graphs: dict[Any, tuple[Any, Any]] = {}  # and their results
        self._memory: list[Any] = []
        self._pool: Any = None

    def __call__(self, *arrays: np.ndarray) -> Any:
        cupy, key = launch.cupy(), tuple((x.shape, x.dtype.str) for x in arrays)
        inputs = self._inputs.get(key) or [cupy.empty(x.shape, x.dtype) for x in arrays]
        for to, x in zip(inputs, arrays, strict=True):
            to.set(np.ascontiguousarray(x))
        if key not in self._inputs:
            if len(self._inputs) < MOST:
                self._inputs[key] = inputs
            return self._f(*inputs)
        if key not in self._graphs and not self._obstacle:
            try:
                self._graphs[key] = self._captured(inputs)
            except RuntimeError as why:  # of CuPy, or a copy from the host; other errors are the caller's
                self._obstacle = f"{type(why).__name__}: {why}"
                warnings.warn(f"{self._name} is not one CUDA graph: {self._obstacle}", stacklevel=2)
        if key not in self._graphs:
            return self._f(*inputs)
        graph, results = self._graphs[key]
        graph.launch(cupy.cuda.get_current_stream())
        return results

    def clear(self) -> None:
        """Give back graphs and their memory."""
        self._graphs.clear()
        self._inputs.clear()
        self._memory.clear()
        self._pool = None

    def _captured(self, inputs: list[Any]) -> tuple[Any, Any]:
        """(the graph of a call, its results), which has not been computed."""
        cupy = launch.cupy()
        stream = cupy.cuda.get_current_stream()
        cupy.get_default_memory_pool().free_all_blocks()  # not during the capture
        self._pool = self._pool or cupy.cuda.MemoryPool(functools.partial(_allocate, cupy.cuda, self._memory))
        with cupy.cuda.using_allocator(self._pool.malloc), _without_copies_from_host(cupy):
            stream.begin_capture()
            try:
                with draws.kept() as seeds:
                    results = self._f(*inputs)
                if seeds:
                    raise RuntimeError("random numbers are drawn anew in each call")
            except BaseException:
                with contextlib.suppress(Exception):  # a capture that failed ends with an error of its own
                    stream.end_capture()
                raise
            return stream.end_capture(), results


def _allocate(cuda: Any, memory: list[Any], size: int) -> Any:
    """New memory for a pool, which is held: graphs that use it do not hold it themselves."""
    memory.append(cuda.MemoryPointer(cuda.Memory(size), 0))
    return memory[-1]


@contextlib.contextmanager
def own_stream() -> Iterator[None]:
    """Context: the current stream is a new one, since the default one cannot be captured."""
    cuda = launch.cupy().cuda
    with cuda.Stream(non_blocking=True) as stream:
        cuda.Device().synchronize()
        try:
            yield
        finally:
            stream.synchronize()


@contextlib.contextmanager
def _without_copies_from_host(cupy: Any) -> Iterator[None]:
    """Context: a copy of an array of the host raises RuntimeError in this thread.

    A graph would repeat it from memory that is somebody else's by then.
    """
    own, usual = threading.get_ident(), cupy.get_default_pinned_memory_pool().malloc

    def malloc(size: int) -> Any:
        if threading.get_ident() == own:
            raise RuntimeError("an array of the host is copied to the device")
        return usual(size)

    cupy.cuda.set_pinned_memory_allocator(malloc)
    try:
        yield
    finally:
        cupy.cuda.set_pinned_memory_allocator(usual)
