"""Residuals as arrays: a framework that traces keeps arrays between forward and backward, not objects.

    separation = Separation(known)
    structure = separation.structure(x)      x with a View in the place of each NumPy array
    rebuild(structure, [*known, *separation.extras])        x

A view lies in one of the known arrays, which the framework keeps anyway, or in one of the extras. The structures of two
calls are equal if the calls differ in the contents of their arrays only: either structure can then be rebuilt over the
arrays of the other call.
"""

from __future__ import annotations

import itertools
import operator
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..runtime.memory import address
from ..spec import FIXED, Call, VariantSpec

# compared by value, or the same object in every call of one signature
VALUES = (type(None), bool, int, float, str, bytes, np.generic, np.dtype, type, Enum, ModuleType, BuiltinFunctionType,
          VariantSpec, slice)  # fmt: skip
PLAIN = (type(None), bool, int, float, str, tuple)


class View(NamedTuple):
    """An array in memory of another one: which, at which byte, with which strides; -1: an array without elements."""

    of: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    writeable: bool


class Node(NamedTuple):
    """A container: its type, the names of its parts if it has any, the parts."""

    kind: type
    names: tuple[Any, ...] | None
    parts: tuple[Any, ...]


class Fixed:
    """A value that a call's signature determines: not compared."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed)

    __hash__ = None  # type: ignore[assignment]


class Function:
    """A function: one of the same code with the same values in its closure can replace it.

    Values of a closure are equal if they are plain and equal, or the same object.
    """

    def __init__(self, function: FunctionType):
        self.function = function
        values = [cell.cell_contents for cell in function.__closure__ or ()]
        self.values = [Function(y) if isinstance(y, FunctionType) else y for y in values]

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Function) and self.function.__code__ is other.function.__code__
        return same and all(map(_is_same, self.values, other.values))  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (*PLAIN, Function)) and bool(a == b))


class Separation:
    """The arrays behind the views of a structure: the known ones, then those that no known one contains."""

    def __init__(self, known: list[np.ndarray]):
        """known: arrays in C order."""
        self._pool, self._count = list(known), len(known)
        self._starts = [address(x) for x in known]
        self._seen: dict[int, tuple[View, np.ndarray]] = {}  # by the id of an array, which stays alive
        self.used: set[int] = set()  # positions of the arrays that views lie in

    @property
    def extras(self) -> list[np.ndarray]:
        """The arrays after the known ones, in C order."""
        return self._pool[self._count :]

    def structure(self, x: Any, like: Any = None) -> Any:
        """x with a View in the place of each array.   Raises LookupError for objects that cannot be compared.

        like: the structure of another call; an array that lies where its array did is described in the same way, also
        if it lies in several known arrays.
        """
        if isinstance(x, np.ndarray):
            return self._view_of(x, like)
        if x is like or isinstance(x, VALUES):
            return x
        likes = like.parts if isinstance(like, Node) else like if isinstance(like, tuple) else ()
        if isinstance(x, tuple | list):
            parts = tuple(itertools.starmap(self.structure, zip(x, _padded(likes, len(x)), strict=True)))
            plain = isinstance(x, tuple) and all(map(operator.is_, parts, x))
            return x if plain else Node(type(x), None, parts)  # plain: cores look some tuples up by identity
        if isinstance(x, Call):
            values = {n: y for n, y in sorted(vars(x).items()) if n != "recorder"}
            fixed = {n: Fixed({**y, "state": None} if n == "options" else y) for n, y in values.items() if n in FIXED}
        elif isinstance(x, dict):
            values, fixed = x, {}
        elif isinstance(x, FunctionType):
            return Function(x)
        else:
            raise LookupError(f"residuals hold a {type(x).__qualname__}")
        parts = tuple(fixed[n] if n in fixed else self.structure(y, own)
                      for (n, y), own in zip(values.items(), _padded(likes, len(values)), strict=True))  # fmt: skip
        return Node(type(x), tuple(values), parts)

    def _view_of(self, x: np.ndarray, like: Any) -> View:
        """Where an array lies."""
        if isinstance(like, View) and 0 <= like.of < len(self._pool):
            at, start = address(x), self._starts[like.of]
            given = at - start, x.shape, x.strides, x.dtype, x.flags.writeable
            if given == like[1:] and _lies_in(x, at, start, self._pool[like.of].nbytes):
                return like
        if id(x) not in self._seen:
            self._seen[id(x)] = self._view(x), x
            self.used.add(self._seen[id(x)][0].of)
        return self._seen[id(x)][0]

    def _view(self, x: np.ndarray) -> View:
        """Where an array lies; an array that no other contains joins the pool."""
        if not x.size:
            return View(-1, 0, x.shape, x.strides, x.dtype, x.flags.writeable)
        at = address(x)
        for n, (base, start) in enumerate(zip(self._pool, self._starts, strict=True)):
            if _lies_in(x, at, start, base.nbytes):
                return View(n, at - start, x.shape, x.strides, x.dtype, x.flags.writeable)
        owner, strides = _owner(x)
        self._pool.append(owner)
        self._starts.append(address(owner))
        return View(len(self._pool) - 1, 0, x.shape, strides, x.dtype, x.flags.writeable)


def _padded(likes: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    return likes if len(likes) == count else (None,) * count


def _lies_in(x: np.ndarray, at: int, start: int, size: int) -> bool:
    """Whether all elements of an array at address `at` are among `size` bytes from `start` on."""
    if x.flags.c_contiguous:
        return start <= at and at + x.nbytes <= start + size
    spans = [stride * (n - 1) for stride, n in zip(x.strides, x.shape, strict=True)]
    low, high = sum(s for s in spans if s < 0), sum(s for s in spans if s > 0) + x.itemsize
    return start <= at + low and at + high <= start + size


def _owner(x: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """(a C-ordered array with the elements of x, the strides of x in it); a copy if x has holes."""
    axes = [n for n in range(x.ndim) if x.strides[n]]
    once = x[(*(slice(None) if n in axes else 0 for n in range(x.ndim)), ...)]  # without repetitions
    order = sorted(range(len(axes)), key=lambda n: -abs(once.strides[n]))
    owner = np.ascontiguousarray(once.transpose(order)).reshape([once.shape[n] for n in order])
    strides = [0] * x.ndim
    for n, stride in zip(order, owner.strides, strict=True):
        strides[axes[n]] = stride
    return owner, tuple(strides)


def rebuild(structure: Any, pool: list[np.ndarray]) -> Any:
    """What was separated, over other arrays."""
    if isinstance(structure, View):
        return _array(structure, pool)
    if isinstance(structure, Fixed):
        return structure.value
    if isinstance(structure, Function):
        return structure.function
    if not isinstance(structure, Node):
        return structure
    kind, names, parts = structure
    values = [rebuild(part, pool) for part in parts]
    if names is None:
        return kind(*values) if hasattr(kind, "_fields") else kind(values)
    named = dict(zip(names, values, strict=True))
    return Call(**named, recorder=None) if kind is Call else kind(named)


def _array(view: View, pool: list[np.ndarray]) -> np.ndarray:
    of, offset, shape, strides, dtype, writeable = view
    if of < 0:
        return np.empty(shape, dtype)
    memory = pool[of].reshape(-1).view(np.uint8)
    low = offset + sum(s * (n - 1) for s, n in zip(strides, shape, strict=True) if s < 0)
    x = np.ndarray(shape, dtype, memory[low:], offset - low, strides)
    if not writeable:
        x.flags.writeable = False
    return x
