"""Columns of real channels of the selective scan: four vectors in registers, or one that ends with the row.

    tile     out and the states after some tokens
    again    the states before each token, and after the last one; dC
    back     the gradients of the tokens, from the last one to the first
    channel  one token of one channel, whose numbers lie side by side

They take the functions that load and store a column, and those of its decays: e^{dt A} (`of_rates`) or 1 - dt B^2
(`of_keys`: nothing reads A or dA). selective.py has the equations.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ...ops.cpu.numbers import OPTIONS, exp
from ...runtime.pieces.piece import Matrix, Number, piece
from ...runtime.pieces.registers import NARROW, fma, folded, load_part, registers, store, store_part, total
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import row

zeros_of_one, _ = registers(1)
zeros, load = registers(NARROW)


@njit(**OPTIONS)
def of_rates(load: Any, rates: Any, j: Any, b: Any, step: Any) -> Any:
    """e^{dt A}"""
    return exp(step * load(rates, j))


@njit(**OPTIONS)
def of_keys(load: Any, rates: Any, j: Any, b: Any, step: Any) -> Any:
    """1 - dt B^2"""
    return fma(-(b * b), step, 1)


@njit(**OPTIONS)
def to_rates(load: Any, save: Any, rates: Any, drates: Any, j: Any, b: Any, step: Any, d: Any, decay: Any, h: Any,
             dstep: Any, db: Any) -> Any:  # fmt: skip
    """(ddt, db) with what the decay adds to them; d: the gradient of the state after the token, h: that before it."""
    dg = d * decay * h
    save(fma(step, dg, load(drates, j)), drates, j)
    return fma(dg, load(rates, j), dstep), db


@njit(**OPTIONS)
def to_keys(load: Any, save: Any, rates: Any, drates: Any, j: Any, b: Any, step: Any, d: Any, decay: Any, h: Any,
            dstep: Any, db: Any) -> Any:  # fmt: skip
    """The same of 1 - dt B^2."""
    da = d * h
    return fma(-(b * b), da, dstep), fma(-(b + b), step * da, db)


@njit(**OPTIONS)
def tile(load: Any, save: Any, zeros: Any, of: Any, x: Any, dt: Any, B: Any, C: Any, A: Any, h: Any, out: Any,
         j: Any, scale: Any) -> None:  # fmt: skip
    """out and h of a column of channels; rows of x, dt, B, C and out are tokens, those of A and h the N states."""
    for t in range(len(x)):
        step = load(row(dt, t), j)
        u = step * load(row(x, t), j)
        y = zeros(dt)
        for n in range(len(A)):
            own = row(h, n)
            state = fma(of(load, row(A, n), j, B[t, n], step), load(own, j), B[t, n] * u)
            save(state, own, j)
            y = fma(C[t, n], state, y)
        save(scale * y, row(out, t), j)


@njit(**OPTIONS)
def again(load: Any, save: Any, of: Any, x: Any, dt: Any, B: Any, A: Any, h: Any, dout: Any, states: Any, decays: Any,
          dC: Any, j: Any, scale: Any) -> None:  # fmt: skip
    """states: h before each token, and after the last one; decays; dC += <dout, h>.   h: before the first token"""
    N = len(A)
    for n in range(N):
        save(load(row(h, n), j), row(states, n), 0)
    for t in range(len(x)):
        step = load(row(dt, t), j)
        u, dy = step * load(row(x, t), j), scale * load(row(dout, t), j)
        for n in range(N):
            decay = of(load, row(A, n), j, B[t, n], step)
            state = fma(decay, load(row(states, t * N + n), 0), B[t, n] * u)
            save(decay, row(decays, t * N + n), 0)
            save(state, row(states, (t + 1) * N + n), 0)
            dC[t, n] += total(folded(dy * state))


@njit(**OPTIONS)
def back(load: Any, save: Any, zeros: Any, to: Any, x: Any, dt: Any, B: Any, C: Any, A: Any, P: Any, dout: Any,
         states: Any, decays: Any, dB: Any, dA: Any, dx: Any, ddt: Any, j: Any, scale: Any) -> None:  # fmt: skip
    """dx, ddt, and dA, dB, P of a column."""
    N = len(A)
    for t in range(len(x) - 1, -1, -1):
        step, own = load(row(dt, t), j), load(row(x, t), j)
        u, dy = step * own, scale * load(row(dout, t), j)
        du, dstep = zeros(dt), zeros(dt)
        for n in range(N):
            p, decay, before = row(P, n), load(row(decays, t * N + n), 0), load(row(states, t * N + n), 0)
            d = fma(C[t, n], dy, load(p, j))
            du = fma(B[t, n], d, du)
            dstep, db = to(load, save, row(A, n), row(dA, n), j, B[t, n], step, d, decay, before, dstep, u * d)
            dB[t, n] += total(folded(db))
            save(d * decay, p, j)
        save(step * du, row(dx, t), j)
        save(fma(own, du, dstep), row(ddt, t), j)


@njit(**OPTIONS)
def all_columns(of: Any, x: Any, dt: Any, B: Any, C: Any, A: Any, h: Any, out: Any, scale: Any) -> None:
    """out and h of some tokens of a block of channels."""
    one, width = BYTES // x.itemsize, x.shape[1]
    whole = width // (NARROW * one) * (NARROW * one)
    for j in range(0, whole, NARROW * one):
        tile(load, store, zeros, of, x, dt, B, C, A, h, out, j, scale)
    for j in range(whole, width, one):
        tile(load_part, store_part, zeros_of_one, of, x, dt, B, C, A, h, out, j, scale)


@njit(**OPTIONS)
def all_columns_back(of: Any, to: Any, x: Any, dt: Any, B: Any, C: Any, A: Any, h: Any, P: Any, dout: Any, states: Any,
                     decays: Any, dA: Any, dB: Any, dC: Any, dx: Any, ddt: Any, scale: Any) -> None:  # fmt: skip
    """The gradients of some tokens of a block of channels; h: before the first one."""
    one, width = BYTES // x.itemsize, x.shape[1]
    whole = width // (NARROW * one) * (NARROW * one)
    for j in range(0, whole, NARROW * one):
        again(load, store, of, x, dt, B, A, h, dout, states, decays, dC, j, scale)
        back(load, store, zeros, to, x, dt, B, C, A, P, dout, states, decays, dB, dA, dx, ddt, j, scale)
    for j in range(whole, width, one):
        again(load_part, store_part, of, x, dt, B, A, h, dout, states, decays, dC, j, scale)
        back(load_part, store_part, zeros_of_one, to, x, dt, B, C, A, P, dout, states, decays, dB, dA, dx, ddt, j,
             scale)  # fmt: skip


@piece(of="rates")
def columns_of_rates(x: Matrix, dt: Matrix, B: Matrix, C: Matrix, A: Matrix, h: Matrix, out: Matrix, scale: Number):
    """`all_columns` of the decays e^{dt A}."""
    all_columns(of_rates, x, dt, B, C, A, h, out, scale)


@piece(of="keys")
def columns_of_keys(x: Matrix, dt: Matrix, B: Matrix, C: Matrix, h: Matrix, out: Matrix, scale: Number):
    """`all_columns` of the decays 1 - dt B^2."""
    all_columns(of_keys, x, dt, B, C, h, h, out, scale)


@piece(of="rates")
def columns_of_rates_back(x: Matrix, dt: Matrix, B: Matrix, C: Matrix, A: Matrix, h: Matrix, P: Matrix, dout: Matrix,
                          states: Matrix, decays: Matrix, dA: Matrix, dB: Matrix, dC: Matrix, dx: Matrix, ddt: Matrix,
                          scale: Number):  # fmt: skip
    """`all_columns_back` of the decays e^{dt A}."""
    all_columns_back(of_rates, to_rates, x, dt, B, C, A, h, P, dout, states, decays, dA, dB, dC, dx, ddt, scale)


@piece(of="keys")
def columns_of_keys_back(x: Matrix, dt: Matrix, B: Matrix, C: Matrix, h: Matrix, P: Matrix, dout: Matrix,
                         states: Matrix, decays: Matrix, dB: Matrix, dC: Matrix, dx: Matrix, ddt: Matrix,
                         scale: Number):  # fmt: skip
    """`all_columns_back` of the decays 1 - dt B^2."""
    all_columns_back(of_keys, to_keys, x, dt, B, C, h, h, P, dout, states, decays, h, dB, dC, dx, ddt, scale)


@njit(**OPTIONS)
def channel(A: Any, B: Any, C: Any, step: Any, u: Any, old: Any, state: Any) -> Any:
    """<C, h> of one token of one channel, h = e^{step A} old + u B in `state`: rows of N numbers. Empty old: 0."""
    y = zeros_of_one(A)
    for j in range(0, len(A), BYTES // A.itemsize):
        h = u * load_part(B, j)
        if len(old):
            h = fma(exp(step * load_part(A, j)), load_part(old, j), h)
        store_part(h, state, j)
        y = fma(load_part(C, j), h, y)
    return total(y)
