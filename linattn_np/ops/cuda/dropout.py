"""Dropout of CuPy arrays (cuda_src/nn/dropout.cu), with the mask that NumPy's default generator draws from a seed."""

from __future__ import annotations

import numpy as np

from ...runtime.arrays import Array
from ...runtime.cuda import record
from .arguments import DROPOUT, address
from .row_arrays import dense, is_aligned, kind_of, launched

SOURCE = "nn/dropout.cu"
THREADS, PER, PIECES = 256, 8, 8
MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645  # of PCG64
JUMPS = 48  # 2^48 draws
WORD = (1 << 64) - 1


def dropout(x: Array, seed: int, p: float) -> Array:
    """y, in the dtype of x; the same mask from the same seed."""
    x, y = dense(x), record.empty(tuple(x.shape), x.dtype)
    start = np.random.PCG64(seed).state["state"]
    constants = {"LA_DTYPE": kind_of(x), "LA_WIDE": int(is_aligned(PER, x, y))}
    packed = DROPOUT.pack(x=address(x), y=address(y), size=x.size, state_high=start["state"] >> 64,
                          state_low=start["state"] & WORD, jumps=_jumps(start["inc"]), factor=1 / (1 - p),
                          p=p)  # fmt: skip
    launched(SOURCE, "dropout", constants, -(-x.size // (THREADS * PER * PIECES)), THREADS, packed, x, y)
    return y


def _jumps(c: int) -> list[int]:
    """(A_i, c_i) of 2^i steps, i = 0, 1, .., each in two words: A_{i+1} = A_i^2, c_{i+1} = (A_i + 1) c_i."""
    a, words = MULTIPLIER, list[int]()
    for _ in range(JUMPS):
        words += [a >> 64, a & WORD, c >> 64, c & WORD]
        a, c = a * a % (1 << 128), (a + 1) * c % (1 << 128)
    return words
