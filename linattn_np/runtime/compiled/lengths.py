"""Lengths of rows whose squares may be out of range: norms.py in compiled loops."""

from __future__ import annotations

from ..values import range_factors
from .emit import Emit, Value
from .rows import dot


def length_of(e: Emit, x: Value, n: Value) -> tuple[Value, Value]:
    """(|factor x| of n numbers; factor), factor the power of 2 that keeps squares in range (norms.py); (1, 1) for 0."""
    limit, up, down = range_factors(e.bits)
    factor, square = e.variable(e.number(1)), e.variable(dot(e, x, x, n))
    low, high = square.get() < limit**-2.0, square.get() > limit**2.0
    with e.when(low | high):
        f = e.select(low, e.number(up), e.number(down))
        square.set(scaled_dot(e, f, x, f, x, n))
        factor.set(e.select(square.get().equals(0.0), e.number(1), f))
    square = square.get()
    root = Value(e, e.b.call(e.function(f"llvm.sqrt.f{e.bits}", e.F, [e.F]), [square.v]))
    return e.select(square.equals(0.0), e.number(1), root), factor.get()


def scaled_dot(e: Emit, f: Value, x: Value, h: Value, y: Value, n: Value) -> Value:
    """(f x) . (h y)"""
    f, h, total = e.spread(f), e.spread(h), e.variable(e.zero())

    def add(j: Value, mask: Value | None) -> None:
        total.set(e.fma(f * e.load(x + j * e.size, mask), h * e.load(y + j * e.size, mask), total.get()))

    e.across(n, add)
    return e.sum(total.get())
