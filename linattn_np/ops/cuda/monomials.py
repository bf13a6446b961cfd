"""Monomials of up to two channels of rows of bfloat16, and their transpose (cuda_src/ops/monomials.cu)."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from ...runtime.arrays import Array
from ...runtime.cuda import launch
from ...runtime.cuda.elements import Constants
from .arguments import MONOMIALS, address
from .row_arrays import is_aligned, strided, strides_of

if TYPE_CHECKING:
    from ..map_steps import Steps

SOURCE = "ops/monomials.cu"
WIDEST = 32  # channels: a thread holds its row in registers
ROWS = 64  # of a block, one a thread


def takes(steps: Steps, K: int) -> bool:
    """Whether the kernels make the features of rows of K channels."""
    return steps.before is None and len(steps.arguments[0]) <= 3 and K <= WIDEST


def constants(steps: Steps, K: int, width: int) -> Constants:
    """The constants of monomials.cu, `width` features being stored."""
    degrees = sum(1 << p for p, c in enumerate(steps.arguments[0]) if c)
    return ("LA_DEGREES", degrees), ("LA_K", K), ("LA_WIDTH", width)


def call(entry: str, steps: Steps, x: Array, width: int, phi: Array | None, dphi: Array | None, dx: Array | None):
    """Launch `monomials`, which makes phi, or `monomials_vjp`, which makes dx; rows of phi and dphi are dense."""
    K, rows, root = x.shape[-1], prod(x.shape[:-1]), x.shape[-1] ** -0.25
    weights = [c**0.5 * root**p for p, c in enumerate((*steps.arguments[0], 0.0, 0.0)[:3])]
    inner, (x,) = strided(K, x if is_aligned(8, x) else x.copy())
    packed = MONOMIALS.pack(x=strides_of(x, K, inner), phi=address(phi), dphi=address(dphi), dx=address(dx), rows=rows,
                            inner=inner, constant=weights[0], linear=weights[1], quadratic=weights[2])  # fmt: skip
    named = tuple(y for y in (x, phi, dphi, dx) if y is not None)
    shared = ROWS * 16 * (width // 8 | 1)
    launch.launch(SOURCE, entry, constants(steps, K, width), -(-rows // ROWS), ROWS, shared, packed, named)
