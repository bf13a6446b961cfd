"""AdamW and the norm of a gradient on CuPy vectors (cuda_src/ops/optimiser.cu); the host does not wait."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...runtime.arrays import Array, dtype_name
from ...runtime.cuda import launch, record
from ...runtime.cuda.elements import Constants
from .arguments import OPTIMISER, address
from .formulas import KINDS
from .unit_rows import THREADS

SOURCE = "ops/optimiser.cu"
PER = 8  # numbers that a thread moves together
MOST_BLOCKS = 1024  # of the sums of squares: the same on every device, so that bits are
RATE, FIRST, SECOND, MOST, NORM, SCALE, COUNT = range(7)  # places in `numbers`


class Moments(NamedTuple):
    """Vectors of AdamW in float32, or float64: masters of parameters in 16 bits, or None, and the moments."""

    master: Array | None
    m: Array
    v: Array


def takes(p: Array, g: Array, *moments: Array | None) -> bool:
    """Whether the kernels support dense vectors of these dtypes."""
    own = [x for x in moments if x is not None]
    wide = "float64" if dtype_name(p) == "float64" else "float32"
    known = {dtype_name(p), dtype_name(g)} <= KINDS.keys() and {dtype_name(x) for x in own} <= {wide}
    return known and all(x.flags.c_contiguous for x in (p, g, *own)) and launch.unusable() is None


def constants(p: str, g: str, per: int = PER) -> Constants:
    """The constants of parameters and gradients of these dtypes."""
    return ("LA_DTYPE", KINDS[p]), ("LA_GRAD", KINDS[g]), ("LA_PER", per)


def numbers_of(step: int, rate: float, betas: tuple[float, float], most: float) -> np.ndarray:
    """The numbers of step `step`, from 1, that the host knows: rate, corrections of both moments, largest norm."""
    return np.array([rate, 1 / (1 - betas[0] ** step), (1 - betas[1] ** step) ** -0.5, most])


def norm(g: Array, numbers: Array) -> None:
    """Norm and scale of a step in `numbers` (COUNT,), float64."""
    blocks = min(-(-g.size // (PER * THREADS)), MOST_BLOCKS)
    sums = record.empty((max(blocks, 1),), np.dtype(np.float64))
    how: dict[str, Any] = {"g": g, "sums": sums, "numbers": numbers, "size": g.size, "blocks": blocks}
    own = constants(dtype_name(g), dtype_name(g), _per(g))
    _launch("squares", own, blocks, how)
    _launch("scaled", own, 1, how)


def adamw(p: Array, g: Array, moments: Moments, numbers: Array, decaying: int, decay: float,
          betas: tuple[float, float], eps: float) -> None:  # fmt: skip
    """A step of vectors (N,), the first `decaying` numbers of which decay; nothing if the norm is not finite."""
    per = _per(p, g, *moments)
    threads = p.size // per + p.size % per
    how: dict[str, Any] = {"p": p, "g": g, **moments._asdict(), "numbers": numbers, "size": p.size,
                           "decaying": decaying, "decay": decay, "a": 1 - betas[0], "b": 1 - betas[1],
                           "eps": eps}  # fmt: skip
    _launch("adamw", constants(dtype_name(p), dtype_name(g), per), -(-threads // THREADS), how)


def _per(*arrays: Array | None) -> int:
    return PER if all(x is None or x.data.ptr % 16 == 0 for x in arrays) else 1


def _launch(entry: str, how: Constants, blocks: int, given: dict[str, Any]) -> None:
    arrays = {n: given.get(n) for n in ("p", "g", "master", "m", "v", "sums", "numbers")}
    fields = dict.fromkeys(("size", "decaying", "blocks", "decay", "a", "b", "eps"), 0) | given
    packed = OPTIMISER.pack(**fields | {n: address(x) for n, x in arrays.items()})
    launch.launch(SOURCE, entry, how, blocks, THREADS, 0, packed, tuple(x for x in arrays.values() if x is not None))
