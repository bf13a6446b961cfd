"""Blocks of heads and batch rows: units of work that fit in the cache and are distributed over threads.

Blocks are independent, and an array library multiplies a stack of matrices one by one: the result does not depend on
the partition or on the number of threads. NumPy calls are partitioned, and CuPy calls whose chunks are all computed at
once, one block after the other; other libraries parallelise themselves.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable
from typing import NamedTuple

from ..runtime import blas, threads
from ..runtime.arrays import Array, is_cupy, is_numpy
from . import policy
from .types import Inputs, Plan


class Block(NamedTuple):
    """A slice of every batch axis and one of the groups of heads."""

    batch: tuple[slice, ...]
    groups: slice


WHOLE = Block((), slice(None))


def blocks_of(core: Inputs, plan: Plan, C: int) -> list[Block]:
    """The blocks of a call in chunks of C tokens."""
    *batch, G, R, T, V = core.v.shape
    heads = math.prod(batch) * G * R
    on_host = is_numpy(plan.xp)
    scans = max((policy.scan_bytes(core, s.stop - s.start) for s in plan.sequences
                 if policy.chunk_states(core, plan, s.stop - s.start) == "scan"), default=0)  # fmt: skip
    if heads * T == 0 or not (on_host or (is_cupy(plan.xp) and scans * heads > policy.SCAN_BYTES)):
        return [WHOLE]
    most = max(1, policy.BLOCK_ELEMENTS // (C * max(V, core.k.shape[-1], 1)))  # heads of a block
    most = most if on_host else max(1, policy.SCAN_BYTES // scans)
    share = threads.num_threads() if on_host and heads * T * V >= policy.THREADED_ELEMENTS else 1
    first = batch[0] if batch else 1
    rows, cuts = first, [(slice(None),) * len(batch)]
    if batch and core.u is None and all(y is None or y.ndim == core.v.ndim for y in core):  # all have batch axes
        rows = max(1, min(first, most * first // heads, -(-first * G // share)))
        cuts = [(slice(b, b + rows), *cuts[0][1:]) for b in range(0, first, rows)]
    each = max(1, min(G, most * G * first // (rows * heads), -(-G * len(cuts) // share)))
    return [Block(cut, slice(g, min(g + each, G))) for cut in cuts for g in range(0, G, each)]


def cut(y: Array | None, block: Block) -> Array | None:
    """The block's part of a core-layout array (..., G, R, a, b); an array without batch axes is shared."""
    if y is None or block is WHOLE:
        return y
    batch = block.batch[len(block.batch) - (y.ndim - 4) :] if y.ndim > 4 else ()
    return y[(*batch, block.groups, ...)]


def cut_all(core: Inputs, block: Block) -> Inputs:
    """The block's part of all arrays."""
    return core if block is WHOLE else Inputs._make([cut(y, block) for y in core])


def assemble(plan: Plan, blocks: list[Block], parts: list[Array], shape: tuple[int, ...]) -> Array:
    """The core-layout array whose blocks are `parts`."""
    if len(parts) == 1:
        return parts[0]
    whole = plan.xp.empty(shape, dtype=parts[0].dtype)
    for block, part in zip(blocks, parts, strict=True):
        whole[(*block.batch, block.groups, ...)] = part
    return whole


def run(jobs: list[Callable[[], None]], elements: int) -> None:
    """Run every job, on threads if there is enough work, in copies of the caller's context."""
    count = threads.num_threads() if elements >= policy.THREADED_ELEMENTS and len(jobs) > 1 else 1
    context = contextvars.copy_context()

    def work(first: int, last: int) -> None:
        for job in jobs[first:last]:
            context.copy().run(job)

    if count == 1:
        for job in jobs:
            job()
        return
    with blas.one_thread():
        threads.run(work, len(jobs), count)
