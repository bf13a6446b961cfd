"""Monomials of up to two channels of rows of bfloat16, and their transpose (cuda_src/ops/monomials.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Rows(NamedTuple):
    """Rows x (..., K) and their features phi (..., width), or of a transpose dphi and dx too."""

    x: Array
    phi: Array | None
    dphi: Array | None = None
    dx: Array | None = None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return prod(self.x.shape[:-1])

    @property
    def arrays(self) -> list[Array]:
        """Those that are given."""
        return [y for y in self if y is not None]

    def strided(self) -> Rows:
        """With x that a kernel loads by pieces of 16 bytes."""
        _, (x,) = strided(self.x.shape[-1], self.x if is_aligned(8, self.x) else self.x.copy())
        return self._replace(x=x)


def packed_rows(rows: Sequence[Rows]) -> list[Any]:
    """The FEATURE_ROWS structs of one array or two."""
    packed = list[Any]()
    for of in rows:
        K = of.x.shape[-1]
        inner, (x,) = strided(K, of.x)
        packed += (*strides_of(x, K, inner), address(of.phi), address(of.dx), address(of.dphi), of.rows, inner)
    return packed + [0] * (len(packed) if len(rows) == 1 else 0)


def takes(steps: Steps, K: int) -> bool:
    """Whether the kernels make the features of rows of K channels."""
    return steps.before is None and len(steps.arguments[0]) <= 3 and K <= WIDEST


def constants(steps: Steps, K: int, width: int) -> Constants:
    """The constants of monomials.cu, `width` features being stored."""
    degrees = sum(1 << p for p, c in enumerate(steps.arguments[0]) if c)
    return ("LA_DEGREES", degrees), ("LA_K", K), ("LA_WIDTH", width)


def call(entry: str, steps: Steps, rows: Sequence[Rows], width: int) -> None:
    """Launch `monomials`, which makes phi, or `monomials_vjp`, which makes dx, of one array or two."""
    K, root = rows[0].x.shape[-1], rows[0].x.shape[-1] ** -0.25
    weights = [c**0.5 * root**p for p, c in enumerate((*steps.arguments[0], 0.0, 0.0)[:3])]
    rows = [of.strided() for of in rows]
    blocks = [-(-of.rows // ROWS) for of in rows]
    packed = MONOMIALS.pack(of=packed_rows(rows), first=blocks[0], constant=weights[0], linear=weights[1],
                            quadratic=weights[2])  # fmt: skip
    named, shared = tuple(y for of in rows for y in of.arrays), ROWS * 16 * (width // 8 | 1)
    launch.launch(SOURCE, entry, constants(steps, K, width), sum(blocks), ROWS, shared, packed, named)
