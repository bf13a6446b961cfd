"""Kernels of linear learners, to be compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from ...runtime.cuda.elements import ELEMENTS
from ...runtime.cuda.entries import SHARED, Entry
from ..array.chunks import TILE
from . import between, momentum, rates
from .plan import WIDTHS, kernel

MINI_BATCH = 16  # the default of titans_linear


def between_entries() -> Iterator[Entry]:
    """What lies between the products of learners that have no kernel of their own."""
    for kind in between.KINDS:
        yield Entry(f"between products of learners: {kind}", between.SOURCE, between.constants("float32", kind))


def learner_entries(dtype: str, K: int, capability: int, backward: bool = True) -> Iterator[Entry]:
    """Those of keys, and of values, of K channels. Tokens of every dtype are float32 in the momentum delta rule."""
    if dtype not in ELEMENTS:
        return
    for back in (False, True)[: 1 + backward] if K in WIDTHS else ():
        one = kernel(dtype, K, back)
        yield Entry(f"linear learner of {K} channels, {'backward' if back else 'forward'}", one.file, one.constants)
    exact, align = dtype != "bfloat16", gcd(16, 4 * K)
    has_kernels, by_tiles = momentum.fits(K, SHARED[capability] << 10)
    if by_tiles:
        made = momentum.walk_constants(K, K, exact, align)
        yield Entry("momentum delta rule, walks over its states", momentum.WALK, made)
    if K <= momentum.WIDEST:
        made = momentum.constants("float32", K, TILE, False, align, MINI_BATCH)
        yield Entry("momentum delta rule, mini-batches", momentum.SOURCE, made)
    for words, decayed in (("decayed", True), ("previous", False)) if K <= momentum.WIDEST else ():
        if not by_tiles:
            made = momentum.constants("float32", K, TILE, decayed, align)
            yield Entry(f"momentum delta rule, {words} prediction", momentum.SOURCE, made)
        if by_tiles or backward:
            yield Entry(f"coefficients of tiles, {words} prediction", rates.SOURCE, rates.constants("float32", decayed))
        for file, made in momentum.tile_constants(decayed, exact, align).items():
            if has_kernels and (backward or (by_tiles and file == momentum.SYSTEMS)):
                yield Entry(f"tiles of the momentum delta rule, {words} prediction", file, made)
