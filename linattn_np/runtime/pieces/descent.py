"""A product of conjugate gradients on one row: p (A + diag(d)), with the sums in whole registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .passes import NARROW, WIDE
from .row_tiles import number_of
from .vectors import I64, Array, emitted, fma, loop, total


def _applied(A, p, own, diagonal, out):  # type: ignore[no-untyped-def]
    n = A.shape[1]
    out[:n] = p[: len(A)] @ A + diagonal[:n] * own[:n]
    return own[:n] @ out[:n]


def apply_pass(lanes: int) -> Any:
    """out = p A + own (.) diagonal for a block of columns of A, own being those of p; own . out.

    Even and odd rows of a narrow block have sums of their own, so that additions do not wait for each other.
    """
    together = WIDE // lanes

    @emitted(_applied, number_of)
    def apply(b: ir.IRBuilder, A: Array, p: Array, own: Array, diagonal: Array, out: Array) -> ir.Value:
        sums = [[A.sum() for _ in range(lanes)] for _ in range(together)]

        def add(i: ir.Value, to: list[ir.Value]) -> None:
            weight = p.broadcast(p.at(i))
            for n, place in enumerate(to):
                b.store(fma(b, weight, A.load(A.at(i), n), b.load(place)), place)

        whole = b.and_(A.shape[0], I64(-together))
        with loop(b, 0, whole, together) as i:
            for n, to in enumerate(sums):
                add(b.add(i, I64(n)), to)
        with loop(b, whole, A.shape[0]) as i:
            add(i, sums[0])
        curve = A.sum()
        for n in range(lanes):
            y, x = b.load(sums[0][n]), own.load(own.start, n)
            for more in sums[1:]:
                y = b.fadd(y, b.load(more[n]))
            y = fma(b, x, diagonal.load(diagonal.start, n), y)
            out.store(y, out.start, n)
            b.store(fma(b, x, y, b.load(curve)), curve)
        return total(b, b.load(curve))

    return apply


apply_wide, apply_narrow = apply_pass(WIDE), apply_pass(NARROW)
