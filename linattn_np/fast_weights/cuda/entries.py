"""Kernels of linear learners, to be compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator

from ...runtime.cuda.elements import ELEMENTS
from ...runtime.cuda.entries import Entry
from .plan import WIDTHS, kernel


def learner_entries(dtype: str, backward: bool = True) -> Iterator[Entry]:
    """Every kernel, of each width."""
    for D in WIDTHS if dtype in ELEMENTS else ():
        for back in (False, True)[: 1 + backward]:
            one = kernel(dtype, D, back)
            yield Entry(f"linear learner of {D} channels, {'backward' if back else 'forward'}", one.file, one.constants)
