"""Sequences longer than one machine: a variant over ranks that each hold a part of the tokens."""

from __future__ import annotations

from .call import run as run
from .comm import Comm as Comm
from .comm import RankError as RankError
from .mpi import MPI as MPI
from .nccl import NCCL as NCCL
from .threads import Threads as Threads
from .threads import in_threads as in_threads
from .torch import TorchDistributed as TorchDistributed
