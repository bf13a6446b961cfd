"""A step of conjugate gradients on one row: x (A + diag(d)) = b, with the vectors in whole registers."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from .passes import NARROW, WIDE
from .row_tiles import number_of
from .vectors import BYTES, I64, Array, broadcast, emitted, fma, loop, total
from .views import same


def _aligned(A: np.ndarray) -> np.ndarray:
    at = -A.ctypes.data % BYTES // A.itemsize
    return np.lib.stride_tricks.as_strided(A.reshape(-1)[at:], (A.shape[0] - 1, A.shape[1]), A.strides)


@emitted(_aligned, same)
def aligned(b: ir.IRBuilder, A: Array) -> Any:
    """A from the first address on that is a multiple of a vector, without its last row."""
    start = b.and_(b.add(A.start, I64(BYTES - 1)), I64(-BYTES))
    return start, [b.sub(A.shape[0], I64(1)), A.shape[1]], A.steps


def _formed(S, decay, k, w, A, out):  # type: ignore[no-untyped-def]
    A[...] = (decay * S if len(S) else 0) + k[: len(A), None] * w[: A.shape[1]]
    out[...] = A


def form_pass(lanes: int) -> Any:
    """A = decay S + k^T w for a block of columns, and a copy of it; no S: zeros."""

    @emitted(_formed)
    def form(b: ir.IRBuilder, S: Array, decay: ir.Value, k: Array, w: Array, A: Array, out: Array) -> None:
        by, written = broadcast(b, decay, A.vector), [w.load(w.start, n) for n in range(lanes)]

        def go_by(i: ir.Value, rows: list[ir.Value]) -> None:
            key = k.broadcast(k.at(i))
            for n, (x, y) in enumerate(zip(rows, written, strict=True)):
                made = fma(b, key, y, x)
                A.store(made, A.at(i), n)
                out.store(made, out.at(i), n)

        with b.if_else(S.given) as (begun, empty):
            with begun, loop(b, 0, A.shape[0]) as i:
                go_by(i, [b.fmul(by, S.load(S.at(i), n)) for n in range(lanes)])
            with empty, loop(b, 0, A.shape[0]) as i:
                go_by(i, [A.zero()] * lanes)

    return form


form_wide, form_narrow = form_pass(WIDE), form_pass(NARROW)


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


def _moved(step, p, pA, x, r):  # type: ignore[no-untyped-def]
    x += step * p
    r -= step * pA
    return r @ r


@emitted(_moved, lambda step, p, *_: p.dtype)
def move(b: ir.IRBuilder, step: ir.Value, p: Array, pA: Array, x: Array, r: Array) -> ir.Value:
    """x += step p, r -= step pA; r . r"""
    forth, back, squares = broadcast(b, step, p.vector), broadcast(b, b.fneg(step), p.vector), p.sum()
    with p.vectors(I64(0), p.shape[0]) as j:
        x.store(fma(b, forth, p.load(p.at(j)), x.load(x.at(j))), x.at(j))
        y = fma(b, back, pA.load(pA.at(j)), r.load(r.at(j)))
        r.store(y, r.at(j))
        b.store(fma(b, y, y, b.load(squares)), squares)
    return total(b, b.load(squares))


def _turned(ratio, r, p):  # type: ignore[no-untyped-def]
    p[...] = r + ratio * p


@emitted(_turned)
def turn(b: ir.IRBuilder, ratio: ir.Value, r: Array, p: Array) -> None:
    """p = r + ratio p"""
    by = broadcast(b, ratio, p.vector)
    with p.vectors(I64(0), p.shape[0]) as j:
        p.store(fma(b, by, p.load(p.at(j)), r.load(r.at(j))), p.at(j))
