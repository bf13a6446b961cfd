"""Kernels of the recurrence, to be compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...runtime.cuda.elements import BYTES, ELEMENTS
from ...runtime.cuda.entries import Entry
from ..types import FORMULAS
from .plan import OF_AVERAGES, SOURCE, Pass, average_cut, constants, cut_of, made_cut

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
    for n, formula in enumerate(FORMULAS, 1):
        is_complex = formula == "lru"
        held = np.dtype(np.complex64 if is_complex else np.float32)
        mark = made_cut(held, LONG, True).tokens
        write = dtype if formula in ("min_lstm", "rg_lru") else None
        for name, T, is_back, marked in (("forward for a backward", LONG, False, mark), ("token", 1, False, 0),
                                         ("backward", LONG, True, 0))[: 3 if backward else 2]:  # fmt: skip
            dout = "float32" if is_complex else dtype
            one = Pass(is_back, dtype, dtype, dout, is_linked=T > 1, is_complex=is_complex, mark=marked, formula=n,
                       write=write, is_real=is_complex)  # fmt: skip
            yield Entry(f"scan of {formula}, {name}", SOURCE, constants(made_cut(held, T, is_back), one, held.itemsize))
    kind, average = np.dtype(np.float64 if dtype == "float64" else np.float32), 1 + len(FORMULAS)
    mark = average_cut(kind, LONG, True).tokens
    for name, T, is_back, marked in (("forward", LONG, False, 0), ("token", 1, False, 0),
                                     ("forward for a backward", LONG, False, mark), ("backward", LONG, True, 0)
                                     )[: 4 if backward else 2]:  # fmt: skip
        one = Pass(is_back, *how, is_linked=T > 1, is_double=kind.itemsize == 8, mark=marked, formula=average)
        built = constants(average_cut(kind, T, is_back), one, kind.itemsize)
        yield Entry(f"average in log space, {name}", OF_AVERAGES, built)
