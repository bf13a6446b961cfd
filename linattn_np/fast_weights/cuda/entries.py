"""Kernels of linear learners, to be compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from ...runtime.cuda.elements import ELEMENTS
from ...runtime.cuda.entries import Entry
from ..array.chunks import TILE
from . import momentum, rates
from .plan import WIDTHS, kernel


def learner_entries(dtype: str, K: int, backward: bool = True) -> Iterator[Entry]:
    """Those of keys of K channels. Arrays of every dtype here are float32 in the momentum delta rule."""
    if dtype not in ELEMENTS:
        return
    for back in (False, True)[: 1 + backward] if K in WIDTHS else ():
        one = kernel(dtype, K, back)
        yield Entry(f"linear learner of {K} channels, {'backward' if back else 'forward'}", one.file, one.constants)
    for words, decayed in (("decayed", True), ("previous", False)) if K <= momentum.WIDEST else ():
        made = momentum.constants("float32", K, TILE, decayed, gcd(16, 4 * K))
        yield Entry(f"momentum delta rule, {words} prediction", momentum.SOURCE, made)
        if backward:
            words = f"coefficients of tiles, {words} prediction"
            yield Entry(words, rates.SOURCE, rates.constants("float32", decayed))
