"""Ranks of torch.distributed, by any of its backends."""

from __future__ import annotations

import datetime
from typing import Any

from array_api_compat import array_namespace

from .comm import TIMEOUT, RankError


class TorchDistributed:
    """A process group of torch.distributed; None: the default one.

    timeout   seconds that a rank waits for the others, then it raises a RankError (NCCL groups end the process: that is
              torch's own watchdog)
    """

    def __init__(self, group: Any = None, timeout: float = TIMEOUT):
        import torch.distributed as dist

        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._timeout = group, datetime.timedelta(seconds=timeout)

    def all_gather(self, x: Any) -> Any:
        import torch
        import torch.distributed as dist

        sent = torch.from_dlpack(x)
        every = torch.empty((self.size, *sent.shape), dtype=sent.dtype, device=sent.device)
        try:
            if every.is_cuda:
                dist.all_gather_into_tensor(every, sent, group=self._group)
            else:
                dist.all_gather(list(every), sent, group=self._group, async_op=True).wait(self._timeout)
        except RuntimeError as error:
            raise RankError(f"distributed: rank {self.rank}: {error}") from error
        return array_namespace(x).from_dlpack(every)
