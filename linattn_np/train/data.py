"""Tokens of files, memory-mapped; batch number n is a function of n alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Batch = Callable[[int], tuple[np.ndarray, np.ndarray]]  # n -> ids, labels (B, T)


class Tokens:
    """A sequence of whole numbers in one or more files, one after the other.

    `parts` are vectors of whole numbers, perhaps memory-mapped; first, last: which of their tokens.
    """

    def __init__(self, parts: Sequence[np.ndarray], first: int = 0, last: int | None = None):
        self.parts = [x for x in parts if len(x)]
        self.ends = np.cumsum([0, *map(len, self.parts)]).tolist()
        self.first, self.last = first, self.ends[-1] if last is None else last

    @classmethod
    def open(cls, paths: Sequence[str | Path], dtype: Any = np.uint8) -> Tokens:
        """Files: the bytes of a text, token ids in .npy, or in raw files of `dtype`.

        Raises OSError for a file that cannot be read, ValueError for an array that is no vector of whole numbers.
        """
        return cls([_mapped(Path(path), np.dtype(dtype)) for path in paths])

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, at: slice) -> np.ndarray:
        """Tokens first..last as int64."""
        begin, end, _ = at.indices(len(self))
        begin, end = begin + self.first, max(begin, end) + self.first
        found = []
        for n in range(max(bisect_right(self.ends, begin) - 1, 0), len(self.parts)):
            if self.ends[n] >= end:
                break
            found.append(self.parts[n][max(begin - self.ends[n], 0) : end - self.ends[n]])
        return np.concatenate([np.empty(0, np.int64), *found], dtype=np.int64)

    def split(self, share: float) -> tuple[Tokens, Tokens]:
        """The first share of the tokens, and the rest."""
        middle = self.first + round(share * len(self))
        return Tokens(self.parts, self.first, middle), Tokens(self.parts, middle, self.last)

    def batches(self, B: int, T: int, seed: int = 0) -> Batch:
        """Windows of T tokens and the tokens after them, each window once an epoch, in an order drawn from the seed.

        Epochs begin at tokens of their own, so that windows differ. Raises ValueError for fewer than T + 1 tokens.
        """
        if len(self) <= T:
            raise ValueError(f"batches: there are {len(self)} tokens, expected more than T = {T}")
        count = max(1, (len(self) - 1) // T - 1)
        orders: dict[int, tuple[np.ndarray, int]] = {}

        def window(n: int) -> np.ndarray:
            epoch, place = divmod(n, count)
            if epoch not in orders:
                rng = np.random.default_rng((seed, epoch))
                orders.clear()
                orders[epoch] = rng.permutation(count), int(rng.integers(min(T, len(self) - count * T)))
            order, shift = orders[epoch]
            start = int(order[place]) * T + shift
            return self[start : start + T + 1]

        def batch(n: int) -> tuple[np.ndarray, np.ndarray]:
            each = np.stack([window(B * n + b) for b in range(B)])
            return np.ascontiguousarray(each[:, :-1]), np.ascontiguousarray(each[:, 1:])

        return batch


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    if path.suffix != ".npy":
        if not path.stat().st_size:
            return np.empty(0, dtype)
        if path.stat().st_size % dtype.itemsize:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, expected a multiple of {dtype.itemsize}")
        return np.memmap(path, dtype, "r")
    x = np.load(path, mmap_mode="r", allow_pickle=False)
    if x.ndim != 1 or x.dtype.kind not in "iu":
        raise ValueError(f"{path} has shape {x.shape} and dtype {x.dtype}, expected a vector of whole numbers")
    return x
