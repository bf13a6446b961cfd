"""What stays in memory between calls: its bytes, caches of tables that many calls read, and how all are emptied."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Hashable
from types import FunctionType, ModuleType
from typing import Any, Generic, TypeVar

import numpy as np

MOST_BYTES = 8 << 20  # of the results of one cached function
LEAST = 1 << 10  # bytes of the Python objects of a result

R = TypeVar("R")
emptying: list[Callable[[], Any]] = []  # the functions that empty every cache


def empty_all() -> None:
    """Empty every cache."""
    for empty in emptying:
        empty()


class Cached(Generic[R]):
    """Decorator: the latest results of a function of hashable arguments are cached, up to MOST_BYTES of NumPy arrays.

    They must not be written to.
    """

    def __init__(self, function: Callable[..., R]):
        functools.update_wrapper(self, function)
        self.__wrapped__, self._results, self._sizes = function, dict[Hashable, R](), dict[Hashable, int]()
        emptying.append(self.cache_clear)

    def __call__(self, *arguments: Any) -> R:
        if arguments in self._results and (found := self._results.get(arguments)) is not None:
            return found  # another thread may have removed it
        found = self._results[arguments] = self.__wrapped__(*arguments)
        self._sizes[arguments] = LEAST + held_bytes(found)
        while sum(self._sizes.values()) > MOST_BYTES:
            oldest, *_ = self._sizes  # in one step: other threads may call
            self._sizes.pop(oldest, None)
            self._results.pop(oldest, None)
        return found

    def cache_clear(self) -> None:
        """Forget all results."""
        self._results.clear()
        self._sizes.clear()


def held_bytes(owner: Any) -> int:
    """Bytes of the NumPy arrays that an object holds, itself, or in functions and objects that it holds.

    Left out are modules, classes, and objects of classes that say `is_shared`: there is one for all calls.
    """
    seen: dict[int, Any] = {}  # the objects, so that no other one gets their id
    rest, total = [owner], 0
    while rest:
        x = rest.pop()
        if id(x) in seen or isinstance(x, ModuleType | type) or getattr(type(x), "is_shared", False):
            continue
        seen[id(x)] = x
        if isinstance(x, np.ndarray):
            total += x.nbytes if x.base is None else 0
            rest.append(x.base)
        elif isinstance(x, FunctionType):  # not the names of its module
            rest += [*(x.__closure__ or ()), *(x.__defaults__ or ())]
        else:
            rest += gc.get_referents(x)
    return total
