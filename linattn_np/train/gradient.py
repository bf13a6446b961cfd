"""The gradient of a step: the mean over its batches, which ranks share.

g = ((g_0 + g_1) + (g_2 + g_3)) / 4                  of 4 batches, on 1, 2 or 4 ranks
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from ..distributed import Comm
from ..runtime.arrays import compat
from .flat import on_host
from .run import Run


class Alone:
    """The communicator of one rank."""

    rank, size = 0, 1

    def all_gather(self, x: Any) -> Any:
        return x[None]


ALONE = Alone()


def gradient(one: Callable[[int], tuple[Any, Any]], count: int, comm: Comm, to: Any = None) -> tuple[Any, Any]:
    """(the sum of the vectors of `count` batches, their losses in float64); each rank computes as many of them.

    one(n): (loss, vector) of batch n, whose vector is written over. Halves are added, and halves of these: the bits
    are those of one rank on 2, 4, 8, ... ranks.   to: where the sum is written, of 2 batches or more.
    """
    losses, each = list[Any](), count // comm.size

    def vector(n: int) -> Any:
        loss, g = one(n)
        losses.append(loss)
        return g

    total = summed(vector, comm.rank * each, (comm.rank + 1) * each, to if comm.size == 1 else None)
    xp = compat.array_namespace(total)
    found = xp.stack([xp.asarray(x, dtype=xp.float64) for x in losses])
    if comm.size > 1:
        N = total.size
        every = comm.all_gather(xp.concat([total, xp.astype(found, total.dtype)]))
        total = summed(lambda rank: every[rank, :N], 0, comm.size, to)
        found = xp.astype(xp.reshape(every[:, N:], (-1,)), xp.float64)
    return total, found


def summed(one: Callable[[int], Any], first: int, last: int, to: Any = None) -> Any:
    """one(first) + ... + one(last - 1), the halves added; the vectors are written over.   to: where the sum is."""
    if last - first == 1:
        return one(first)
    middle = (first + last) // 2
    total = summed(one, first, middle)
    other = summed(one, middle, last)
    return compat.array_namespace(total).add(total, other, out=total if to is None else to)


def check_alike(run: Run, comm: Comm) -> None:
    """Raise ValueError unless all ranks have the same step, parameters and moments."""
    xp, vectors = compat.array_namespace(run.params.vector), [run.params, *run.moments.values()]
    own = [run.step, run.position, *(zlib.crc32(on_host(x.vector).tobytes()) for x in vectors)]
    every = on_host(comm.all_gather(xp.asarray(own, dtype=xp.int64)))
    if (every != every[0]).any():
        raise ValueError("fit: the runs of the ranks differ, expected the same seed, or the same file")
