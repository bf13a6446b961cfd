"""Whether a recorded plan computes what a call in full computes, tried on other numbers.

What a change of variables computes is traced. A number that escaped the trace would be taken for a constant: other
numbers show it. So would an array library whose functions are not what their description says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .memory import address
from .tracing import extent

Array = Any
FACTOR = 0.75  # keeps signs and ranges: log decays <= 0, strengths in [0, 2], shares in [0, 1]


def agrees(plan: Callable[..., Any], full: Callable[..., Any], arrays: list[Array], state: Any) -> bool:
    """Whether the plan computes the bits of the full call for these arrays times FACTOR.

    What is compared is what the full call returns, and the state, which both may overwrite.
    """
    given, parts, results = other_numbers(arrays), [y for y in _parts(state) if y is not None], []
    for compute in (plan, full):
        own = other_numbers(parts)
        if given is None or own is None:
            return False
        S = state if not parts else own[0] if not isinstance(state, tuple) else _like(state, own)
        try:
            with np.errstate(all="ignore"):
                found = compute(given, S, None)
        except ValueError:  # numbers that the call refuses
            return False
        if found is None:
            return False
        results.append((*found, own))
    return all(y is None or _same(x, y) for x, y in zip(*results, strict=True))


def _same(x: Any, y: Any) -> bool:
    """Whether two results are the same."""
    pairs = list(zip(_parts(x), _parts(y), strict=True))
    return all(a is b if a is None or b is None else _equal(a, b) for a, b in pairs)


def other_numbers(arrays: list[Array]) -> list[Array] | None:
    """Arrays of the same layout with other numbers; None if elements are not whole steps apart.

    Columns of one array stay columns of one array.
    """
    if any(step % y.itemsize for y in arrays for step in y.strides):
        return None
    spans = [extent(y) for y in arrays]
    groups: list[tuple[int, int]] = []  # of arrays that are columns of one
    for low, high in sorted(spans):
        if groups and low < groups[-1][1]:
            low, high = groups[-1][0], max(high, groups.pop()[1])
        groups.append((low, high))
    memory = {group: np.zeros(group[1] - group[0], np.uint8) for group in groups}
    found = []
    for y, (low, _) in zip(arrays, spans, strict=True):
        group = next(g for g in groups if g[0] <= low < g[1] or g[0] == low)
        z: np.ndarray = np.ndarray(y.shape, y.dtype, memory[group], address(y) - group[0], y.strides)
        z[...] = y * y.dtype.type(FACTOR)
        found.append(z)
    return found


def _like(state: Any, parts: list[Array]) -> Any:
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def _parts(x: Any) -> list[Any]:
    """The arrays of nested tuples and lists, and None."""
    return [y for part in x for y in _parts(part)] if isinstance(x, tuple | list) else [x]


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and (x.tobytes() == y.tobytes() or bool(
        np.array_equal(x, y, equal_nan=True)))  # fmt: skip
