"""Layouts of a caller's arrays other than time first (..., T, H, K): views to time first and back.

A layout has `axes`, the caller's axes of an array; `add_sizes`, for sizes that the caller's arrays do not have; `enter`
and `leave`, which convert an array of a call, of given time-first axes, to and from time first; `enter_rows` and
`leave_rows`, which do so for outputs, and `shape`, the caller's shape of an output. count: axes of an output's row.
"""

from __future__ import annotations

from typing import Any

from ..runtime import shapes
from ..runtime.arrays import Array

Shape = tuple[int, ...]


class HeadsFirst:
    """(..., H, T, K)."""

    def axes(self, axes: str) -> str:
        return shapes.heads_first(axes)

    def add_sizes(self, sizes: shapes.Sizes) -> None:
        """The arrays have every size."""

    def enter(self, xp: Any, x: Array | None, axes: str, batch: Shape) -> Array | None:
        if x is None or (time := shapes.time_axis(axes, x.ndim, batch)) is None:
            return x
        return xp.moveaxis(x, time, time + shapes.head_axis(axes))

    def leave(self, xp: Any, x: Array, axes: str, batch: Shape) -> Array:
        time = shapes.time_axis(axes, x.ndim, batch)
        return x if time is None else xp.moveaxis(x, time + shapes.head_axis(axes), time)

    def enter_rows(self, xp: Any, x: Array, count: int) -> Array:
        return x if count < 2 else xp.moveaxis(x, -3, -2)

    leave_rows = enter_rows

    def shape(self, shape: Shape, count: int) -> Shape:
        if count < 2:
            return shape
        *batch, T, H, V = shape
        return (*batch, H, T, V)


class OneToken:
    """(..., H, K): one token without a time axis, as in `la.step`."""

    def axes(self, axes: str) -> str:
        return shapes.one_token(axes)

    def add_sizes(self, sizes: shapes.Sizes) -> None:
        sizes |= {"T": 1, "Tq": 1}

    def enter(self, xp: Any, x: Array | None, axes: str, batch: Shape) -> Array | None:
        time = None if x is None else shapes.time_axis(shapes.one_token(axes), x.ndim, batch)
        return x if time is None or x is None else x[before(time)]

    def leave(self, xp: Any, x: Array, axes: str, batch: Shape) -> Array:
        time = shapes.time_axis(axes, x.ndim, batch)
        return x if time is None else x[(slice(None),) * time + (0, ...)]

    def enter_rows(self, xp: Any, x: Array, count: int) -> Array:
        return x[(..., None, *(slice(None),) * count)]

    def leave_rows(self, xp: Any, x: Array, count: int) -> Array:
        return x[(..., 0, *(slice(None),) * count)]

    def shape(self, shape: Shape, count: int) -> Shape:
        at = len(shape) - count
        return (*shape[: at - 1], *shape[at:])


def before(axis: int) -> tuple[Any, ...]:
    """The index that inserts an axis."""
    return (slice(None),) * axis + (None, ...)


ONE_TOKEN = "la.step"  # no value of the option: la.step alone gives it
LAYOUTS: dict[str, Any] = {"heads_first": HeadsFirst(), ONE_TOKEN: OneToken()}
