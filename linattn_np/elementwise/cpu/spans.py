"""A call's sequences as rows of a table, with the places of the states stored before segments of tokens; its arrays."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...ops.parts import from_parts
from ...runtime.arrays import cast, is_complex
from ...runtime.constants import host_constants
from ..types import Plan

SPAN = 3  # of a sequence: its first row, the row after its last one, its first mark


class Spans(NamedTuple):
    """The sequences of a call."""

    lead: tuple[int, ...]  # the first axes of their states
    count: int
    places: int  # of marks
    table: np.ndarray  # (count, SPAN)


def spans_of(plan: Plan, lead: tuple[int, ...], T: int, segment: int) -> Spans:
    """The sequences of T tokens in `lead` batch rows, with a mark before every `segment` tokens."""
    if plan.sequences[0].row is None:
        ends = tuple((n * T, n * T + T) for n in range(prod(lead)))
    else:
        lead, ends = (len(plan.sequences),), tuple((s.start, s.stop) for s in plan.sequences)
    counts = [-(-(stop - start) // segment) for start, stop in ends]
    rows = [(*end, first) for end, first in zip(ends, np.cumsum([0, *counts]), strict=False)]
    table = host_constants.once(("spans", ends, segment), lambda: np.array(rows, np.int64).reshape(-1, SPAN))
    return Spans(tuple(lead), len(ends), sum(counts), table)


def real_rows(y: np.ndarray, width: int, kind: np.dtype[Any], real: np.dtype[Any]) -> np.ndarray:
    """An array in the dtype `kind`, real or the complex one of `real`, as rows of `width` real numbers side by side."""
    if kind != real and not is_complex(y):
        y = from_parts(np, y, None, real)
    y = cast(np, y.real if is_complex(y) and kind == real else y, kind)
    y = y if y.strides[-1] == y.itemsize or y.shape[-1] == 1 else np.ascontiguousarray(y)
    rows = y.view(real).reshape(-1, width)  # of a last axis of 1 a view in the strides of the one before
    return rows if rows.strides[-1] == rows.itemsize or width == 1 else np.ascontiguousarray(rows)
