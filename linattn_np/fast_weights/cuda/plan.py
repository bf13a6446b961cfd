"""Constants of the kernels of linear learners: elements, widths, shared memory."""

from __future__ import annotations

from typing import Any

from ...runtime.cuda.elements import ELEMENTS, Constants
from ...runtime.cuda.launch import Kernel
from ..types import Learner, State

MOST = 16  # tokens of a mini-batch: rows of a product
EACH = 4  # mini-batches from one stored state to the next; a backward computes the others again
WIDTHS = (64,)  # channels of keys and values
FORWARD, BACKWARD = "fast_weights/linear.cu", "fast_weights/linear_vjp.cu"


def mark(D: int) -> int:
    """Numbers of a stored state, as the lanes hold them."""
    return (D // 2 + 2) * 2 * D


def kernel(dtype: str, D: int, back: bool) -> Kernel:
    """The kernel of one direction."""
    tile, warps = MOST * (D + 8), D // 16
    floats = 3 * tile + 2 * MOST + 6 * warps * MOST
    if back:
        floats = 7 * tile + 2 * D * (D + 8) + 5 * MOST + 14 * warps * MOST
    file, entry = (BACKWARD, "linear_vjp") if back else (FORWARD, "linear")
    constants: dict[str, Any] = {"LA_ELEMENT": ELEMENTS[dtype], "LA_D": D, "LA_EACH": EACH, "LA_SHARED": 4 * floats}
    return Kernel(file, entry, 2 * D).built(pairs(constants))


def pairs(constants: dict[str, Any]) -> Constants:
    """Constants in order."""
    return tuple(constants.items())


def before(f: Learner, begin: State, T: int) -> int:
    """Tokens before those of the kernels: weights that are one array with their anchor begin a mini-batch."""
    done = begin.n % f.mini_batch
    return 0 if begin.anchor is begin.weights and not done else min(f.mini_batch - done, T)
