"""How the kernels of the systems are cut up. Pure functions of dtype and shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ....runtime.cuda.launch import Kernel
from ... import policy

STATES, ITERATE = "systems/states.cu", "systems/iterate.cu"
COLUMNS = 32  # of the matrix that a block of states.cu has
TERMS = {"bfloat16": (2, 1), "float16": (2, 2), "tf32": (2, 2), "float32": (3, 3)}  # bfloat16 of a number, of a key
RESERVED = 1024  # bytes of shared memory that a block has besides
TERM_BITS = 9  # of a number that a term takes: 8, and the nearest is half a unit away


class SystemsKernels(NamedTuple):
    """The kernels of a call."""

    states: Kernel
    iterate: Kernel
    C: int  # tokens of a chunk
    eps: float  # of the products: a smaller residual is a rounding error


def widened(K: int) -> int:
    """Columns of a row in shared memory."""
    return 64 if K <= 64 else 128


def shared_bytes(K: int, C: int, terms: int, key_terms: int) -> int:
    """iterate.cu: terms of the matrix and of the keys; x and r of every token; sums of decays, beta."""
    row = widened(K)
    return 2 * row * (terms * row + key_terms * C) + 2 * 4 * C * row + 3 * 4 * C


@functools.cache
def kernels_of(K: int, element: str, pairs: bool, limit: int) -> SystemsKernels | None:
    """Of systems of K unknowns; None where a block does not fit. pairs: rows are read two numbers at a time."""
    terms, key_terms = TERMS[element]
    fitting = (C for C in policy.SYSTEM_CHUNKS if shared_bytes(K, C, terms, key_terms) <= limit)
    if not 0 < K <= policy.WIDEST_SYSTEM or (C := next(fitting, None)) is None:
        return None
    shared, sizes = shared_bytes(K, C, terms, key_terms), {"LA_C": C, "LA_K": K}
    blocks = 2 if widened(K) == 64 and 2 * (shared + RESERVED) <= limit + RESERVED else 1
    constants = sizes | {
        "LA_BLOCKS": blocks,
        "LA_KEY_TERMS": key_terms,
        "LA_PAIRS": int(pairs),
        "LA_SHARED": shared,
        "LA_TERMS": terms,
    }
    return SystemsKernels(
        Kernel(STATES, "states", 256, tuple(sorted(sizes.items())), 0, -(-K // COLUMNS)),
        Kernel(ITERATE, "iterate", 2 * C, tuple(sorted(constants.items())), shared),
        C,
        max(2.0 ** (1 - TERM_BITS * terms), 2.0**-23),
    )
