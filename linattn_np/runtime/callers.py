"""The caller of this package: the line that a warning names."""

from __future__ import annotations

import sys
from typing import Any

THROUGH = (__name__.partition(".")[0], "torch", "jax", "dask", "contextlib", "functools")  # passed by a call


def caller() -> tuple[Any, int]:
    """(the first frame outside this package and what calls it for the caller, its stack level for a warning).

    The level is that of `warnings.warn` in the function that calls this one; the frame is None if there is none.
    """
    frame: Any = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in THROUGH:
        frame, level = frame.f_back, level + 1
    return frame, level
