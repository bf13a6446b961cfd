"""Arrays by path that lie one after the other in one vector: an optimiser's loop takes the vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..runtime.arrays import NARROW, cast, compat, dtype_name, is_cupy


class Flat(NamedTuple):
    """A vector (N,) and views of it by path."""

    vector: Any
    arrays: dict[str, Any]

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> Flat:
        """Copies of arrays of one library and dtype.   Raises ValueError for none, TypeError for several dtypes."""
        if not arrays:
            raise ValueError("Flat: arrays is empty, expected an array or more")
        if len(kinds := {str(x.dtype) for x in arrays.values()}) > 1:
            raise TypeError(f"Flat: the arrays have the dtypes {', '.join(sorted(kinds))}, expected one")
        vector = _joined(arrays.values())
        return _flat(vector, {path: tuple(x.shape) for path, x in arrays.items()})

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {path: tuple(x.shape) for path, x in self.arrays.items()}

    def like(self, vector: Any) -> Flat:
        """The same paths in another vector."""
        return _flat(vector, self._shapes)

    def cast(self, dtype: Any) -> Flat:
        """The same numbers in another dtype."""
        return self.like(cast(compat.array_namespace(self.vector), self.vector, dtype))

    @property
    def is_narrow(self) -> bool:
        """Whether the dtype has 16 bits."""
        return dtype_name(self.vector) in NARROW

    def first(self, count: int, paths: Iterable[str]) -> Flat:
        """The first `count` numbers, which are the arrays at these paths."""
        return Flat(self.vector[:count], {path: self.arrays[path] for path in paths})

    def zeros(self) -> Flat:
        """The same paths in a vector of zeros."""
        return self.like(compat.array_namespace(self.vector).zeros_like(self.vector))

    def joined(self, arrays: Mapping[str, Any]) -> Any:
        """Arrays of the same paths as a vector."""
        return _joined(arrays[path] for path in self.arrays)

    def set(self, arrays: Mapping[str, Any]) -> None:
        """Writes arrays of the same paths."""
        for path, x in self.arrays.items():
            x[...] = arrays[path]

    def __reduce__(self) -> Any:
        """Copied and pickled as the vector and shapes: the arrays of a copy are views of its own vector."""
        return _flat, (self.vector, self._shapes)


def _joined(arrays: Iterable[Any]) -> Any:
    rows = list(arrays)
    xp = compat.array_namespace(rows[0])
    if is_cupy(xp):
        from ..ops.cuda import join

        if join.takes(rows):
            return join.joined(rows)
    return xp.concat([x.reshape(-1) for x in rows])


def _flat(vector: Any, shapes: Mapping[str, tuple[int, ...]]) -> Flat:
    """A vector with views of these shapes, one after the other."""
    views, end = {}, 0
    for path, shape in shapes.items():
        size = math.prod(shape)
        views[path] = vector[end : end + size].reshape(shape)
        end += size
    return Flat(vector, views)


def on_host(x: Any) -> np.ndarray:
    """An array of NumPy or CuPy as NumPy's."""
    return x.get() if hasattr(x, "get") else np.asarray(x)


def on_device() -> Callable[[Any], Any]:
    """The function that copies an array to the current device of CuPy.

    Raises ModuleNotFoundError without CuPy, RuntimeError without a device.
    """
    from ..runtime.cuda import launch

    try:
        cupy = launch.cupy()
    except ImportError as problem:
        raise ModuleNotFoundError("CuPy, whose arrays lie on a GPU, is not installed") from problem
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as problem:  # no driver
        raise RuntimeError(f"CuPy finds no CUDA device: {problem}") from problem
    if not count:
        raise RuntimeError("CuPy finds no CUDA device")
    return cupy.asarray
