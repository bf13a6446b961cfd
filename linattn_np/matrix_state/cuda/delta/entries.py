"""Kernels of the delta rule, to be compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator

from ....runtime.cuda.entries import Entry
from .. import operands
from ..portable.entries import portable_delta_entries
from . import plan


def delta_entries(
    dtype: str,
    K: int,
    V: int,
    capability: int,
    decay: bool = True,
    backward: bool = True,
    raw: bool = False,
    steps: int = 1,
) -> Iterator[Entry]:
    """Every kernel of the delta rule for key width K and value width V.

    raw: q and k are l2-normalised by the kernel. steps: micro-steps per token; the last one reads.
    """
    if plan.takes(dtype, K, V, capability):
        for name, reverse in plan.names(2, backward):
            yield Entry(
                f"delta rule, {name}", plan.KERNELS[name].file, plan.constants(name, K, V, decay, reverse, raw, steps)
            )
        if backward:
            yield Entry("delta rule, sums over heads", operands.HEAD_SUMS, ())
        return
    yield from portable_delta_entries(dtype, K, V, capability, decay, backward)
