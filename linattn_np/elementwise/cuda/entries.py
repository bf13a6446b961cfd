"""Kernels of the recurrence, to be compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator

from ...runtime.cuda.elements import BYTES, ELEMENTS
from ...runtime.cuda.entries import Entry
from .plan import SOURCE, Pass, constants, cut_of

LONG = 1 << 16  # tokens: several tiles


def scan_entries(dtype: str, backward: bool = True) -> Iterator[Entry]:
    """Every kernel of long sequences and of one token, real inputs and gates of one dtype."""
    if dtype not in ELEMENTS:
        return
    size, how = BYTES[dtype], (dtype, dtype, dtype)
    back = cut_of(size, LONG, True)
    for is_log, gate in ((False, "factors"), (True, "log factors")):
        found = [("forward", LONG, Pass(False, *how, is_log)), ("token", 1, Pass(False, *how, is_log, is_linked=False))]
        if backward:
            found += [("forward for a backward", LONG, Pass(False, *how, is_log, mark=back.tokens)),
                      ("backward", LONG, Pass(True, *how, is_log))]  # fmt: skip
        for name, T, one in found:
            yield Entry(f"scan of {gate}, {name}", SOURCE, constants(cut_of(size, T, one.is_back), one, size))
