"""Arrays on a GPU whose array calls are computed later, many in one kernel (fusion.py).

    xp = Namespace(cupy, device)         like CuPy's (deferred_namespace.py)
    y = xp.exp(given(xp, x)) * 2         nothing is computed
    y, z = materialise([y, z])           CuPy arrays, computed by one launch

A deferred array is a view of a node: an array in memory, or a function of other deferred arrays, whose elements lie in
C order. What a namespace lacks, and a number that leaves an array, raises Unsupported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np

Array = Any
COMPUTED = ("kind", "inputs", "value", "work", "fixed")  # of a node, what changes when it is computed
LARGEST = 1 << 31  # elements of an array: indices of 32 bits


class Unsupported(Exception):
    """What is computed cannot be deferred."""


class Node:
    """The elements of an array, or the function that computes them.

    kind: "array", "number", "map", "concat", "sum", "max", "min", or "pending" (Pending). value: the array, the number,
    the function's name, the axis of concat, whether one thread adds all numbers of a sum, or the array that a pending
    kernel overwrites. inputs of a map have its shape; those of a reduction have one more axis, the last.
    """

    __slots__ = ("_memory", "dtype", "fixed", "inputs", "kind", "shape", "stored", "value", "work")

    def __init__(
        self, kind: str, shape: tuple[int, ...], dtype: Any, inputs: Sequence[Deferred] = (), value: Any = None
    ):
        if not 0 < prod(shape) < LARGEST:
            raise Unsupported(f"{prod(shape)} elements")
        self.kind, self.shape, self.dtype = kind, shape, np.dtype(dtype)
        self.inputs, self.value = tuple(inputs), value
        self._memory: np.ndarray | None = None
        self.stored = False  # whether it is computed before what reads it
        self.count_work()

    def count_work(self) -> None:
        """work: functions of numbers for an element, at most. fixed: those for all of a row."""
        self.work: int = 1 if self.stored else 1 + sum(x.node.work for x in self.inputs)
        self.fixed: int = 0 if self.kind == "concat" or self.stored else sum(map(_fixed_work, self.inputs))
        if self.kind in ("sum", "max", "min") and not self.stored:
            self.work, self.fixed = self.fixed + self.inputs[0].shape[-1] * (self.work - self.fixed), 0

    @property
    def memory(self) -> np.ndarray:
        """A byte for each element, which is never read: views of it describe views of the node."""
        if self._memory is None:
            self._memory = np.empty(self.shape, np.uint8)
        return self._memory

    def become(self, array: Array) -> None:
        """The elements have been computed."""
        self.kind, self.inputs, self.value, self.work, self.fixed = "array", (), array, 1, 0


def _target(x: Deferred) -> Array | None:
    """The array that a pending kernel overwrites."""
    return x.node.value if x.node.kind == "pending" else None


def _fixed_work(x: Deferred) -> int:
    """Functions of numbers that do not depend on the last coordinate of a view."""
    if not x.ndim or x.view.strides[-1] == 0:
        return x.node.work
    return x.node.fixed if x.view.strides[-1] == 1 and x.node.shape and x.shape[-1] == x.node.shape[-1] else 0


class Pending(Protocol):
    """A kernel that is launched when its results are needed; out and end, of kind "pending", become arrays then."""

    out: Node
    end: Node

    def begin(self, stored: Any) -> None:
        """Allocate the results; stored: the dtype of the output, or None for its own."""

    def finish(self, wanted: Any) -> bool:
        """Launch the kernel, and compute what is wanted, (array, where it is written), if a block of it can."""


class Deferred:
    """A view of a node. real: the same view of an array in memory, if there is one."""

    __slots__ = ("node", "real", "view", "xp")
    __array_priority__ = 1000
    __array_ufunc__ = None

    def __init__(self, xp: Any, node: Node, view: np.ndarray | None = None, real: Array = None):
        self.xp, self.node, self.real = xp, node, real
        self.view = node.memory if view is None else view

    dtype = property(lambda self: self.node.dtype)
    shape = property(lambda self: self.view.shape)
    ndim = property(lambda self: self.view.ndim)
    size = property(lambda self: self.view.size)
    device = property(lambda self: self.xp.device)
    T = property(lambda self: self.viewed(lambda xp, x: xp.permute_dims(x, tuple(range(x.ndim))[::-1])))
    mT = property(lambda self: self.viewed(lambda xp, x: xp.swapaxes(x, -1, -2)))

    @property
    def place(self) -> tuple[int, tuple[int, ...]]:
        """(offset, strides) in elements of the node."""
        begin = self.node.memory.__array_interface__["data"][0]
        return self.view.__array_interface__["data"][0] - begin, self.view.strides

    @property
    def is_whole(self) -> bool:
        """Whether it is its node."""
        return self.place[0] == 0 and self.node.shape == self.shape and self.view.flags.c_contiguous

    def hold(self, array: Array) -> None:
        """The elements have been computed."""
        self.xp.held.append((self, self.real, self.node, [getattr(self.node, n) for n in COMPUTED]))
        self.real = array
        if self.is_whole and self.node.kind != "number":
            self.node.become(array)

    @staticmethod
    def release(held: list[Any]) -> None:
        """They have not: held is xp.held since some time."""
        while held:
            x, x.real, node, values = held.pop()
            for name, value in zip(COMPUTED, values, strict=True):
                setattr(node, name, value)

    def viewed(self, how: Callable[[Any, Any], Any]) -> Deferred:
        """how(namespace, array), which makes a view."""
        view = how(np, self.view)
        if not isinstance(view, np.ndarray):
            raise Unsupported("a number leaves an array")
        if view.size and not np.may_share_memory(view, self.view):  # as many elements in another order
            return how(self.xp, self.xp.copy(self))
        return Deferred(self.xp, self.node, view, None if self.real is None else how(self.xp.library, self.real))

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        return self.xp

    def __getitem__(self, index: Any) -> Deferred:
        each = index if isinstance(index, tuple) else (index,)
        if not all(i is None or i is Ellipsis or isinstance(i, int | slice | np.integer) for i in each):
            raise Unsupported("an index that is an array")
        if (part := self._part(each)) is not None:
            return part
        return self.viewed(lambda xp, x: x[index])

    def _part(self, index: tuple[Any, ...]) -> Deferred | None:
        """Columns [..., index] that lie in one part of concatenated ones, as a view of that part."""
        if self.node.kind != "concat" or self.node.value != self.ndim - 1 or not self.is_whole:
            return None
        if len(index) != 2 or index[0] is not Ellipsis or not isinstance(index[1], int | slice):
            return None
        n, last = self.shape[-1], index[1]
        first, stop, step = last.indices(n) if isinstance(last, slice) else (last % n, last % n + 1, 1)
        for x in self.node.inputs:
            width = x.shape[-1]
            if 0 <= first < stop <= width and step == 1:
                whole = isinstance(last, slice) and stop - first == width
                return x if whole else x[..., first:stop] if isinstance(last, slice) else x[..., first]
            first, stop = first - width, stop - width
        return None

    def __setitem__(self, index: Any, value: Any) -> None:
        if index is not Ellipsis or self.real is None:
            raise Unsupported("an assignment to a part of an array")
        if isinstance(value, Deferred) and (value.real is self.real or _target(value) is self.real):
            return  # the kernel writes it there
        self.xp.assigned.append((self.real, self.xp.astype(self.xp.broadcast_to(value, self.shape), self.dtype)))

    def __neg__(self) -> Deferred:
        return self.xp.map("negative", self)

    def __abs__(self) -> Deferred:
        return self.xp.map("abs", self)

    def __invert__(self) -> Deferred:
        return self.xp.map("logical_not", self)

    def __matmul__(self, other: Any) -> Deferred:
        return self.xp.matmul(self, other)

    __hash__ = object.__hash__

    def _leaves(self, *more: Any) -> Any:
        raise Unsupported("a number leaves an array")

    __float__ = __int__ = __bool__ = __index__ = __array__ = __len__ = __iter__ = item = _leaves

    def astype(self, dtype: Any, copy: bool = False) -> Deferred:
        """A cast."""
        return self.xp.astype(self, dtype)

    def reshape(self, *shape: Any) -> Deferred:
        """As the function."""
        return self.xp.reshape(self, shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape)

    def swapaxes(self, a: int, b: int) -> Deferred:
        """As the function."""
        return self.viewed(lambda xp, x: xp.swapaxes(x, a, b))


def _operator(name: str, swapped: bool = False) -> Callable[[Deferred, Any], Any]:
    def call(self: Deferred, other: Any) -> Any:
        if other is not None and not isinstance(other, Deferred | int | float | np.number | np.bool):
            return NotImplemented
        return self.xp.map(name, other, self) if swapped else self.xp.map(name, self, other)

    return call


for _name, _own in (("add", "add"), ("sub", "subtract"), ("mul", "multiply"), ("truediv", "divide"), ("pow", "pow"),
                    ("and", "logical_and"), ("or", "logical_or")):  # fmt: skip
    setattr(Deferred, f"__{_name}__", _operator(_own))
    setattr(Deferred, f"__r{_name}__", _operator(_own, True))
for _name, _own in (("lt", "less"), ("le", "less_equal"), ("gt", "greater"), ("ge", "greater_equal"), ("eq", "equal"),
                    ("ne", "not_equal")):  # fmt: skip
    setattr(Deferred, f"__{_name}__", _operator(_own))


def given(xp: Any, x: Array) -> Deferred:
    """An array in memory as a deferred one."""
    steps = [abs(s) if n == 1 else s for n, s in zip(x.shape, x.strides, strict=True)]  # of one element: any
    if any(s < 0 or s % x.dtype.itemsize for s in steps) or not x.size:
        raise Unsupported("strides")
    strides = tuple(s // x.dtype.itemsize for s in steps)
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
    node = Node("array", (span,), x.dtype, value=x)
    view = np.lib.stride_tricks.as_strided(node.memory, x.shape, strides)
    return Deferred(xp, node, view, x)
