"""Kernels of portable chunks, to be compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from ....runtime.cuda.elements import BYTES
from ....runtime.cuda.entries import SHARED, Entry
from ...types import Erase
from ..vector.plan import takes
from . import delta_plan, plan


def portable_entries(
    dtype: str, K: int, V: int, capability: int, erase: Erase = Erase.NONE, bonus: bool = False, backward: bool = True
) -> Iterator[Entry]:
    """Every kernel of chunks by products of warps, with log decays in float32; none where there are others."""
    if dtype == "tf32" or takes(dtype, K, V, capability):
        return
    align = gcd(16, K * BYTES[dtype], V * BYTES[dtype], K * BYTES["float32"])
    delta = erase is Erase.DELTA
    kind = plan.PortableKind(K, V, dtype, "float32", align, delta, bonus, bonus, dtype == "float32")
    every = [("values", False), ("values", True), ("channels", False), ("channels", True)]
    for name, back in every if backward else every[:1]:
        found = plan.launch_of(name, kind, SHARED[capability] * 1024, back)
        if found is not None:
            words = f"portable chunks of a vector decay, {name}{', from the last chunk' * back}"
            yield Entry(words, found.file, found.constants)
    if bonus and backward:
        constants = plan.bonus_constants(kind)
        yield Entry("portable chunks of a vector decay, bonus", plan.BONUS.file, constants)


def portable_delta_entries(
    dtype: str, K: int, V: int, capability: int, decay: bool = True, backward: bool = True
) -> Iterator[Entry]:
    """Every kernel of the delta rule by products of warps."""
    align = gcd(16, K * BYTES[dtype], V * BYTES[dtype])
    kind, limit = (
        delta_plan.PortableDeltaKind(dtype, K, V, align, decay, capability=capability),
        SHARED[capability] * 1024,
    )
    seen = set()
    for cut in (False, True):
        for words, how in delta_plan.passes(kind._replace(cut=cut), limit, backward).items():
            if (how.file, how.constants) not in seen:
                seen.add((how.file, how.constants))
                yield Entry(
                    f"delta rule, {words}" + ", of segments" * (cut and "segment" not in words), how.file, how.constants
                )
