"""What stays in memory between calls: its bytes, caches of tables that many calls read, and how all are emptied."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Hashable
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np

MOST_BYTES = 8 << 20  # of the results of one cached function
LEAST = 1 << 10  # bytes of the Python objects of a result

R = TypeVar("R")
emptying: list[Callable[[], Any]] = []  # the functions that empty every cache


def empty_all() -> None:
    """Empty every cache."""
    for empty in emptying:
        empty()


def cached(function: Callable[..., R]) -> Any:
    """Decorator: the latest results of a function of hashable arguments are cached, up to MOST_BYTES of NumPy arrays.

    They must not be written to.
    """
    results, sizes = dict[Hashable, R](), dict[Hashable, int]()

    @functools.wraps(function)
    def call(*arguments: Any) -> R:
        if arguments in results and (found := results.get(arguments)) is not None:
            return found  # another thread may have removed it
        found = results[arguments] = function(*arguments)
        sizes[arguments] = LEAST + held_bytes(found)
        while sum(sizes.values()) > MOST_BYTES:
            oldest, *_ = sizes  # in one step: other threads may call
            sizes.pop(oldest, None)
            results.pop(oldest, None)
        return found

    emptying.extend((results.clear, sizes.clear))
    return call


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
