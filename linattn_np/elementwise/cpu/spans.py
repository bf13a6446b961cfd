"""The sequences of a call as rows of a table, and the places of the states that are kept before segments of tokens."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

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
