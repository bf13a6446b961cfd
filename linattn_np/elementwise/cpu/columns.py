"""Columns of real channels of the selective scan: four vectors in registers, or one that ends with the row.

    tile     out and the states after some tokens
    again    the states before each token, and after the last one; dC
    back     the gradients of the tokens, from the last one to the first
    channel  one token of one channel, whose numbers lie side by side

They take the functions that load and store a column. selective.py has the equations.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ...ops.cpu.numbers import OPTIONS, exp
from ...runtime.pieces.registers import fma, folded, load_part, registers, store_part, total
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import row

zeros_of_one, _ = registers(1)


@njit(**OPTIONS)
def tile(load: Any, save: Any, zeros: Any, x: Any, dt: Any, B: Any, C: Any, A: Any, h: Any, out: Any, j: Any,
         scale: Any) -> None:  # fmt: skip
    """out and h of a column of channels; rows of x, dt, B, C and out are tokens, those of A and h the N states."""
    for t in range(len(x)):
        step = load(row(dt, t), j)
        u = step * load(row(x, t), j)
        y = zeros(dt)
        for n in range(len(A)):
            own = row(h, n)
            state = fma(exp(step * load(row(A, n), j)), load(own, j), B[t, n] * u)
            save(state, own, j)
            y = fma(C[t, n], state, y)
        save(scale * y, row(out, t), j)


@njit(**OPTIONS)
def again(load: Any, save: Any, x: Any, dt: Any, B: Any, A: Any, h: Any, dout: Any, states: Any, decays: Any, dC: Any,
          j: Any, scale: Any) -> None:  # fmt: skip
    """states: h before each token, and after the last one; decays; dC += <dout, h>.   h: before the first token"""
    N = len(A)
    for n in range(N):
        save(load(row(h, n), j), row(states, n), 0)
    for t in range(len(x)):
        step = load(row(dt, t), j)
        u, dy = step * load(row(x, t), j), scale * load(row(dout, t), j)
        for n in range(N):
            decay = exp(step * load(row(A, n), j))
            state = fma(decay, load(row(states, t * N + n), 0), B[t, n] * u)
            save(decay, row(decays, t * N + n), 0)
            save(state, row(states, (t + 1) * N + n), 0)
            dC[t, n] += total(folded(dy * state))


@njit(**OPTIONS)
def back(load: Any, save: Any, zeros: Any, x: Any, dt: Any, B: Any, C: Any, A: Any, P: Any, dout: Any, states: Any,
         decays: Any, dB: Any, dA: Any, dx: Any, ddt: Any, j: Any, scale: Any) -> None:  # fmt: skip
    """dx, ddt, and dA, dB, P of a column."""
    N = len(A)
    for t in range(len(x) - 1, -1, -1):
        step, own = load(row(dt, t), j), load(row(x, t), j)
        u, dy = step * own, scale * load(row(dout, t), j)
        du, dstep = zeros(dt), zeros(dt)
        for n in range(N):
            p, rate, dgate = row(P, n), row(A, n), row(dA, n)
            d = fma(C[t, n], dy, load(p, j))
            dB[t, n] += total(folded(u * d))
            du = fma(B[t, n], d, du)
            q = d * load(row(decays, t * N + n), 0)
            dg = q * load(row(states, t * N + n), 0)
            dstep = fma(dg, load(rate, j), dstep)
            save(fma(step, dg, load(dgate, j)), dgate, j)
            save(q, p, j)
        save(step * du, row(dx, t), j)
        save(fma(own, du, dstep), row(ddt, t), j)


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
