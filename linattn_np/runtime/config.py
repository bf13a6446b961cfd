"""`la.config`: settings of the whole process that change memory or last bits, not which result is meant."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple


class Values(NamedTuple):
    """The values of all settings at one time; part of the key of every call that is replayed on a GPU."""

    cuda_saved_mib: int
    training_bits: bool


class Config:
    """Settings of the process, read by every call and by any thread; a change holds for the calls that begin after it.

    cuda_saved_mib: MiB of factors and states of chunks that one forward on a GPU may store for its backward. Above it,
        the backward recomputes them. Default 1024; 0 stores none.
    training_bits: True: on a GPU a call without gradients has the bits of the same call under `vjp` in every case.
        False, the default: calls without gradients are faster, and last bits may differ with decays of the key channels
        in bfloat16 on compute capability 90 (`gla`, `rwkv6`, `hgrn2`, `gsa`).

    Raises TypeError for a value of another type, ValueError for a negative number, AttributeError for other names.
    """

    __slots__ = ("_lock", "values")
    values: Values

    def __init__(self) -> None:
        self._lock, self.values = threading.Lock(), Values(cuda_saved_mib=1024, training_bits=False)

    @property
    def cuda_saved_mib(self) -> int:
        """MiB that a forward on a GPU may store for its backward."""
        return self.values.cuda_saved_mib

    @cuda_saved_mib.setter
    def cuda_saved_mib(self, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"config: cuda_saved_mib is {value!r} of type {type(value).__name__}, expected an int")
        if value < 0:
            raise ValueError(f"config: cuda_saved_mib is {value}, expected at least 0 MiB")
        self._replace(cuda_saved_mib=value)

    @property
    def training_bits(self) -> bool:
        """Whether calls without gradients have the bits of calls with them."""
        return self.values.training_bits

    @training_bits.setter
    def training_bits(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(
                f"config: training_bits is {value!r} of type {type(value).__name__}, expected True or False"
            )
        self._replace(training_bits=value)

    def _replace(self, **changed: Any) -> None:
        with self._lock:
            self.values = self.values._replace(**changed)

    def __repr__(self) -> str:
        return repr(self.values).replace("Values", "Config", 1)


config = Config()
