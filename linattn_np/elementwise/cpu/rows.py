"""One token of real channels: four vectors in registers, then one at a time, cut off at the end of the row.

    step   h <- a h + x,  out = scale h
    keep   out = a h + x
    back   p <- p + scale dout,  dgate = d(a, p, b, dgate),  dx = p,  p <- a p     b: h of the token before, found in dx

d is one of the functions `of_...`. A channel has the same bits wherever it lies in a row.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ...ops.cpu.loops import over
from ...ops.cpu.numbers import OPTIONS, exp
from ...runtime.pieces.registers import NARROW, fma, load_part, registers, store, store_part, store_past_caches
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import prefetch_line, start_of

_, load = registers(NARROW)
_, load_one = registers(1)


@njit(**OPTIONS)
def _exp(x: Any, y: Any, z: Any, numbers: Any) -> Any:
    return exp(x)


@njit(**OPTIONS)
def power(g: Any, a: Any) -> None:
    """a = e^g"""
    over(_exp, g, g, g, 0, a)


@njit(**OPTIONS)
def step(a: Any, x: Any, h: Any, out: Any, scale: Any) -> None:
    one = BYTES // out.itemsize
    whole = len(out) // (NARROW * one) * (NARROW * one)
    for j in range(0, whole, NARROW * one):
        y = fma(load(a, j), load(h, j), load(x, j))
        store(y, h, j)
        store(scale * y, out, j)
    for j in range(whole, len(out), one):
        y = fma(load_part(a, j), load_part(h, j), load_part(x, j))
        store_part(y, h, j)
        store_part(scale * y, out, j)


@njit(**OPTIONS)
def stream(a: Any, x: Any, h: Any, out: Any, scale: Any, next_gate: Any, next_x: Any) -> None:
    """`step` of whole vectors; out goes past the caches, the rows of the next token are fetched."""
    to_gate, to_x = start_of(next_gate, 0), start_of(next_x, 0)
    for j in range(0, len(out), BYTES // out.itemsize):
        prefetch_line(to_gate + j * out.itemsize)
        prefetch_line(to_x + j * out.itemsize)
        y = fma(load_one(a, j), load_one(h, j), load_one(x, j))
        store(y, h, j)
        store_past_caches(scale * y, out, j)


@njit(**OPTIONS)
def keep(a: Any, x: Any, h: Any, out: Any) -> None:
    one = BYTES // h.itemsize
    whole = len(h) // (NARROW * one) * (NARROW * one)
    for j in range(0, whole, NARROW * one):
        store(fma(load(a, j), load(h, j), load(x, j)), out, j)
    for j in range(whole, len(h), one):
        store_part(fma(load_part(a, j), load_part(h, j), load_part(x, j)), out, j)


@njit(**OPTIONS)
def of_factor(a: Any, p: Any, b: Any, dgate: Any) -> Any:
    return p * b


@njit(**OPTIONS)
def of_log(a: Any, p: Any, b: Any, dgate: Any) -> Any:
    return a * (p * b)


@njit(**OPTIONS)
def of_constant(a: Any, p: Any, b: Any, dgate: Any) -> Any:
    return fma(p, b, dgate)


@njit(**OPTIONS)
def back(d: Any, a: Any, dout: Any, p: Any, dx: Any, dgate: Any, scale: Any) -> None:
    one = BYTES // dx.itemsize
    whole = len(dx) // (NARROW * one) * (NARROW * one)
    for j in range(0, whole, NARROW * one):
        factor, own = load(a, j), fma(scale, load(dout, j), load(p, j))
        store(d(factor, own, load(dx, j), load(dgate, j)), dgate, j)
        store(own, dx, j)
        store(factor * own, p, j)
    for j in range(whole, len(dx), one):
        factor, own = load_part(a, j), fma(scale, load_part(dout, j), load_part(p, j))
        store_part(d(factor, own, load_part(dx, j), load_part(dgate, j)), dgate, j)
        store_part(own, dx, j)
        store_part(factor * own, p, j)


@njit(**OPTIONS)
def stream_back(d: Any, a: Any, dout: Any, p: Any, dx: Any, dgate: Any, scale: Any) -> None:
    """`back` of whole vectors; dgate goes past the caches."""
    for j in range(0, len(dx), BYTES // dx.itemsize):
        factor, own = load_one(a, j), fma(scale, load_one(dout, j), load_one(p, j))
        store_past_caches(d(factor, own, load_one(dx, j), own), dgate, j)
        store(own, dx, j)
        store(factor * own, p, j)
