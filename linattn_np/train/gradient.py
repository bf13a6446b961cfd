"""The gradient of a step: the mean over its batches, which ranks share.

g = ((g_0 + g_1) + (g_2 + g_3)) / 4                  of 4 batches, on 1, 2 or 4 ranks
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from ..call.vjp import vjp
from ..distributed import Comm
from ..layers import Layer
from ..runtime.arrays import compat
from ..runtime.unchanged import marked_by_caller
from .data import Batch
from .flat import Flat, on_host
from .run import Run


class Alone:
    """The communicator of one rank."""

    rank, size = 0, 1

    def all_gather(self, x: Any) -> Any:
        return x[None]


ALONE = Alone()


class Gradient(NamedTuple):
    """Of all parameters, with the mean loss and the tokens of this rank."""

    of: Flat
    loss: float
    tokens: int


def gradient(loss: Layer, params: Flat, batch: Batch, first: int, count: int, comm: Comm) -> Gradient:
    """The mean over the batches first .. first + count - 1; each rank computes as many of them.

    Halves are added, and halves of these: the bits are those of one rank on 2, 4, 8, ... ranks.
    """
    xp, losses, tokens = compat.array_namespace(params.vector), list[float](), 0

    def one(n: int) -> Any:
        nonlocal tokens
        ids, labels = map(xp.asarray, batch(first + n))
        with marked_by_caller():  # nobody writes to the parameters before the pullback
            found, pullback = vjp(loss, params.arrays, ids, labels)
        losses.append(float(found))
        tokens += ids.size
        return params.joined(pullback(1.0 / count).params)

    each = count // comm.size
    total = summed(one, comm.rank * each, (comm.rank + 1) * each)
    if comm.size > 1:
        N = total.size
        every = comm.all_gather(xp.concat([total, xp.asarray(losses, dtype=total.dtype)]))
        total = summed(lambda rank: every[rank, :N], 0, comm.size)
        losses = on_host(every[:, N:]).reshape(-1).tolist()
    return Gradient(params.like(total), sum(x / count for x in losses), tokens)


def summed(one: Callable[[int], Any], first: int, last: int) -> Any:
    """one(first) + ... + one(last - 1), the halves added; the vectors are written over."""
    if last - first == 1:
        return one(first)
    middle = (first + last) // 2
    total = summed(one, first, middle)
    total += summed(one, middle, last)
    return total


def check_alike(run: Run, comm: Comm) -> None:
    """Raise ValueError unless all ranks have the same step, parameters and moments."""
    xp, vectors = compat.array_namespace(run.params.vector), [run.params, *run.moments.values()]
    own = [run.step, run.position, *(zlib.crc32(on_host(x.vector).tobytes()) for x in vectors)]
    every = on_host(comm.all_gather(xp.asarray(own, dtype=xp.int64)))
    if (every != every[0]).any():
        raise ValueError("fit: the runs of the ranks differ, expected the same seed, or the same file")
