"""Rows of a pool of states, for torch tensors: gathered, and the final ones scattered where they lie."""

from __future__ import annotations

from typing import Any

import array_api_compat.torch as xp
import torch

from ..runtime.doorway import WHOLE, expect
from ..runtime.pools import NO_ROW, StateRows, check_rows, put_on_device, take_rows

Tensor = torch.Tensor


class Pool:
    """A pool (P, ...) and the rows of B sequences; one whose row is `pad_slot_id` has none, and begins at zero."""

    def __init__(self, fn: str, name: str, pool: Tensor, rows: Tensor, pad_slot_id: int, B: int):
        """name: of the rows, whose numbers are checked on the host, not on a device.

        Raises TypeError or ValueError unless they are B integers, in range and unique.
        """
        expect(fn, {"B": B}, WHOLE, **{name: (rows, "B")})
        at = torch.where(rows == pad_slot_id, NO_ROW, rows.long())
        if at.device.type == "cpu" and not torch.compiler.is_compiling():
            try:
                check_rows(fn, xp, (at, None), {"...": (B,)}, {name: (pool, "S " * (pool.ndim - 1))})
            except ValueError as error:
                raise ValueError(str(error).replace("state_rows", name)) from None
        self.pool, self.at = pool, at.to(pool.device)

    def states(self) -> Tensor:
        """The states (B, ...) that the sequences begin with."""
        state: Any = take_rows(xp, self.pool, StateRows(self.at), tuple(self.at.shape))
        return state

    def put(self, states: Tensor) -> None:
        """Write the final states; nothing for a sequence without a row."""
        put_on_device(xp, self.pool, self.at, states.to(self.pool.dtype))
