"""Ranks of MPI, by mpi4py: `MPI(mpi4py.MPI.COMM_WORLD)`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ..runtime.arrays import is_cupy
from .comm import TIMEOUT, late

PAUSE = 2e-5  # seconds between two looks at an operation that takes longer than SPIN
SPIN = 1e-3


class MPI:
    """A communicator of mpi4py.

    comm      mpi4py.MPI.COMM_WORLD or another one
    timeout   seconds that a rank waits for the others, then it raises a RankError
    on_gpu    whether this MPI reads the memory of GPUs; otherwise CuPy arrays go through the host

    After a RankError an operation is still under way: end the process, as `comm.Abort()` does for all ranks.
    """

    def __init__(self, comm: Any, timeout: float = TIMEOUT, on_gpu: bool = False):
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._comm, self._timeout, self._on_gpu = comm, timeout, on_gpu

    def all_gather(self, x: Any) -> Any:
        xp = array_namespace(x)
        if is_cupy(xp) and not self._on_gpu:
            return xp.asarray(self.all_gather(x.get()))
        if is_cupy(xp):
            xp.cuda.get_current_stream().synchronize()  # MPI knows no streams
        every = xp.empty((self.size, *x.shape), dtype=x.dtype)
        self._wait(self._comm.Iallgather(_bytes(x), _bytes(every)))
        return every

    def _wait(self, request: Any) -> None:
        began = time.monotonic()
        while not request.Test():
            passed = time.monotonic() - began
            if passed > self._timeout:
                raise late(self.rank, self._timeout)
            if passed > SPIN:
                time.sleep(PAUSE)


def _bytes(x: Any) -> Any:
    """The memory of an array, whose dtype MPI need not know."""
    return x.reshape(-1).view(np.uint8)
