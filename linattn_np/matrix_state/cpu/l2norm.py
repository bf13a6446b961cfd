"""Rows of queries and keys divided by their length in compiled loops, and the transpose, one pass over each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...runtime import threads
from ...runtime.compiled.code import entry
from ...runtime.compiled.emit import Emit, Value
from ...runtime.compiled.lengths import length_of, scaled_dot
from ..preprocess import Rows
from ..types import Plan
from .memory import address

EACH = 2**15  # numbers of a task


@entry(numbers=0, wholes=5)
def divided(e: Emit, x: Value, to: Value, n: Value, first: Value, last: Value) -> None:
    """to_i = x_i / |x_i| for rows first..last of n numbers."""
    with e.each(last, start=first) as i:
        row = i * n * e.size
        over, factor = (e.spread(y) for y in length_of(e, x + row, n))

        def divide(j: Value, mask: Value | None) -> None:
            at = row + j * e.size
            e.store(factor * e.load(x + at, mask) // over, to + at, mask)

        e.across(n, divide)


@entry(numbers=0, wholes=6)
def divided_vjp(e: Emit, x: Value, dy: Value, to: Value, n: Value, first: Value, last: Value) -> None:
    """to_i = (dy_i - x_i (x_i . dy_i) / |x_i|^2) / |x_i| for rows first..last of n numbers."""
    with e.each(last, start=first) as i:
        row = i * n * e.size
        length, factor = length_of(e, x + row, n)
        along = scaled_dot(e, factor, x + row, e.number(1), dy + row, n)
        over, share, factor = (e.spread(y) for y in (length, -(along // length // length), factor))

        def project(j: Value, mask: Value | None) -> None:
            at = row + j * e.size
            d = e.fma(share, factor * e.load(x + at, mask), e.load(dy + at, mask))
            e.store(d // over * factor, to + at, mask)

        e.across(n, project)


def unit_rows(plan: Plan, rows: Rows) -> Rows:
    """Rows divided by their length, in the dtype of the computation."""
    return tuple(_over_rows(divided, plan, y) for y in rows)


def unit_rows_vjp(plan: Plan, rows: Rows, grads: Rows) -> Rows:
    """The transpose, for those rows that are given."""
    return tuple(_over_rows(divided_vjp, plan, y, dy) for y, dy in zip(rows, grads, strict=True))


def _over_rows(made: Callable[[Any], Callable[..., None]], plan: Plan, *arrays: Any) -> np.ndarray | None:
    """A function of rows on whole arrays, None of None; threads share the rows."""
    if arrays[0] is None:
        return None
    arrays = tuple(np.ascontiguousarray(y, plan.dtype) for y in arrays)
    out, kernel = np.empty_like(arrays[0]), made(plan.dtype)
    if not out.size:
        return out
    n, places = out.shape[-1], [address(y) for y in (*arrays, out)]
    rows, each = out.size // n, max(EACH // n, 1)
    tasks = -(-rows // each)

    def work(first: int, last: int, owners: Any = (arrays, out)) -> None:
        kernel(*places, n, first * each, min(last * each, rows))

    threads.run(work, tasks, threads.num_threads() if tasks > 1 else 1)
    return out
