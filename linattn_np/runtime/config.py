"""`la.config`: settings of the whole process that change memory or last bits, not which result is meant."""

from __future__ import annotations

import threading


class Config:
    """Settings of the process, read by every call and by any thread; a change holds for the calls that begin after it.

    cuda_saved_mib: MiB of factors and states of chunks that one forward on a GPU may store for its backward. Above it,
        the backward recomputes them. Default 1024; 0 stores none.
    training_bits: True: on a GPU a call without gradients has the bits of the same call under `vjp` in every case.
        False, the default: calls without gradients are faster, and last bits may differ with decays of the key channels
        in bfloat16 on compute capability 90 (`gla`, `rwkv6`, `hgrn2`, `gsa`), and for one token of `selective_scan`.

    values: (cuda_saved_mib, training_bits) at one time, part of the key of every call that is replayed on a GPU.
    Raises TypeError for a value of another type, ValueError for a negative number, AttributeError for other names.
    """

    __slots__ = ("_lock", "values")
    values: tuple[int, bool]

    def __init__(self) -> None:
        self._lock, self.values = threading.Lock(), (1024, False)

    @property
    def cuda_saved_mib(self) -> int:
        """MiB that a forward on a GPU may store for its backward."""
        return self.values[0]

    @cuda_saved_mib.setter
    def cuda_saved_mib(self, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"config: cuda_saved_mib is {value!r} of type {type(value).__name__}, expected an int")
        if value < 0:
            raise ValueError(f"config: cuda_saved_mib is {value}, expected at least 0 MiB")
        with self._lock:
            self.values = value, self.training_bits

    @property
    def training_bits(self) -> bool:
        """Whether calls without gradients have the bits of calls with them."""
        return self.values[1]

    @training_bits.setter
    def training_bits(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(
                f"config: training_bits is {value!r} of type {type(value).__name__}, expected True or False"
            )
        with self._lock:
            self.values = self.cuda_saved_mib, value

    def __repr__(self) -> str:
        return f"Config(cuda_saved_mib={self.cuda_saved_mib}, training_bits={self.training_bits})"


config = Config()
