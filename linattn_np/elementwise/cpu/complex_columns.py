"""The functions of columns.py for complex channels: rows 2 n and 2 n + 1 are the two parts of number n.

    h_n <- a_n h_n + u B_n,   out = sum_n Re(C_n h_n),   P_n += dout C_n*
    dB_n = u P_n,   dC_n = dout h_n*,   du = sum_n Re(B_n* P_n),   q = a_n* P_n,   dg = q h_n*,   P_n = q

u and dout are real. The decays a = e^{dt A} of a few tokens are rows of memory, `every` rows apart, 0 where all have
the same. B and C are those of the token, or of the channel: `of` reads them, `add` adds to their gradients.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ...ops.cpu.numbers import OPTIONS, exp, number, sine_cosine
from ...runtime.pieces.registers import NARROW, fma, folded, load_part, registers, store, store_part, total
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import row, row_part, rows
from .columns import zeros_of_one

zeros, load = registers(NARROW)


@njit(**OPTIONS)
def of_token(load: Any, B: Any, t: Any, n: Any, j: Any) -> Any:
    return B[t, n]


@njit(**OPTIONS)
def of_channel(load: Any, B: Any, t: Any, n: Any, j: Any) -> Any:
    return load(row(B, n), j)


@njit(**OPTIONS)
def to_token(load: Any, save: Any, dB: Any, t: Any, n: Any, j: Any, x: Any) -> None:
    dB[t, n] += total(folded(x))


@njit(**OPTIONS)
def to_channel(load: Any, save: Any, dB: Any, t: Any, n: Any, j: Any, x: Any) -> None:
    save(load(row(dB, n), j) + x, row(dB, n), j)


@njit(**OPTIONS)
def power(u: Any, v: Any, step: Any, re: Any, im: Any) -> None:
    """e^{step (u + iv)}; 0 where its size is 0, whatever the angle."""
    for c in range(len(step)):
        size, (sine, cosine) = exp(step[c] * u[c]), sine_cosine(step[c] * v[c])
        re[c] = size * cosine if size > 0 else size
        im[c] = size * sine if size > 0 else size


@njit(**OPTIONS)
def powers(A: Any, dt: Any, decays: Any, j: Any, width: Any) -> None:
    """The decays of the tokens of dt, of columns j .. j + width; 0 behind the last channel."""
    N, count = len(A), min(width, A.shape[1] - j)
    for t in range(len(dt)):
        for n in range(0, N, 2):
            re, im = row_part(decays, t * N + n, 0, width), row_part(decays, t * N + n + 1, 0, width)
            for c in range(count, width):
                re[c], im[c] = 0, 0
            power(row_part(A, n, j, count), row_part(A, n + 1, j, count), row_part(dt, t, j, count),
                  row_part(decays, t * N + n, 0, count), row_part(decays, t * N + n + 1, 0, count))  # fmt: skip


@njit(**OPTIONS)
def tile(load: Any, save: Any, zeros: Any, of: Any, x: Any, dt: Any, B: Any, C: Any, decays: Any, every: Any, h: Any,
         out: Any, j: Any, scale: Any) -> None:  # fmt: skip
    """out and h of a column."""
    for t in range(len(x)):
        u, y = load(row(dt, t), j) * load(row(x, t), j), zeros(dt)
        for n in range(0, len(h), 2):
            a, b = load(row(decays, t * every + n), 0), load(row(decays, t * every + n + 1), 0)
            re, im = load(row(h, n), j), load(row(h, n + 1), j)
            r = fma(a, re, fma(-b, im, of(load, B, t, n, j) * u))
            i = fma(a, im, fma(b, re, of(load, B, t, n + 1, j) * u))
            save(r, row(h, n), j)
            save(i, row(h, n + 1), j)
            y = fma(-of(load, C, t, n + 1, j), i, fma(of(load, C, t, n, j), r, y))
        save(scale * y, row(out, t), j)


@njit(**OPTIONS)
def again(load: Any, save: Any, of: Any, add: Any, x: Any, dt: Any, B: Any, decays: Any, every: Any, h: Any, dout: Any,
          states: Any, dC: Any, j: Any, scale: Any) -> None:  # fmt: skip
    """states: h before each token, and after the last one; dC += dout h*.   h: before the first token"""
    N = len(h)
    for n in range(N):
        save(load(row(h, n), j), row(states, n), 0)
    for t in range(len(x)):
        u, dy = load(row(dt, t), j) * load(row(x, t), j), scale * load(row(dout, t), j)
        for n in range(0, N, 2):
            a, b = load(row(decays, t * every + n), 0), load(row(decays, t * every + n + 1), 0)
            re, im = load(row(states, t * N + n), 0), load(row(states, t * N + n + 1), 0)
            r = fma(a, re, fma(-b, im, of(load, B, t, n, j) * u))
            i = fma(a, im, fma(b, re, of(load, B, t, n + 1, j) * u))
            save(r, row(states, (t + 1) * N + n), 0)
            save(i, row(states, (t + 1) * N + n + 1), 0)
            add(load, save, dC, t, n, j, dy * r)
            add(load, save, dC, t, n + 1, j, -(dy * i))


@njit(**OPTIONS)
def back(load: Any, save: Any, zeros: Any, of: Any, add: Any, x: Any, dt: Any, B: Any, C: Any, A: Any, P: Any,
         dout: Any, states: Any, decays: Any, every: Any, dB: Any, dA: Any, dx: Any, ddt: Any, j: Any,
         scale: Any) -> None:  # fmt: skip
    """dx, dA, dB, P of a column, and ddt unless all tokens have one decay."""
    N = len(A)
    for t in range(len(x) - 1, -1, -1):
        step, own = load(row(dt, t), j), load(row(x, t), j)
        u, dy = step * own, scale * load(row(dout, t), j)
        du, dstep = zeros(dt), zeros(dt)
        for n in range(0, N, 2):
            p, q = row(P, n), row(P, n + 1)
            re = fma(of(load, C, t, n, j), dy, load(p, j))
            im = fma(-of(load, C, t, n + 1, j), dy, load(q, j))
            add(load, save, dB, t, n, j, u * re)
            add(load, save, dB, t, n + 1, j, u * im)
            du = fma(of(load, B, t, n + 1, j), im, fma(of(load, B, t, n, j), re, du))
            a, b = load(row(decays, t * every + n), 0), load(row(decays, t * every + n + 1), 0)
            r, i = load(row(states, t * N + n), 0), load(row(states, t * N + n + 1), 0)
            y, z = fma(a, re, b * im), fma(a, im, -(b * re))
            save(y, p, j)
            save(z, q, j)
            v, w = fma(y, r, z * i), fma(z, r, -(y * i))
            dstep = fma(load(row(A, n + 1), j), w, fma(load(row(A, n), j), v, dstep))
            save(fma(step, v, load(row(dA, n), j)), row(dA, n), j)
            save(fma(step, w, load(row(dA, n + 1), j)), row(dA, n + 1), j)
        save(step * du, row(dx, t), j)
        if every:
            save(fma(own, du, dstep), row(ddt, t), j)


@njit(**OPTIONS)
def all_columns(of: Any, x: Any, dt: Any, B: Any, C: Any, A: Any, decays: Any, every: Any, h: Any, out: Any,
                scale: Any) -> None:  # fmt: skip
    """out and h of some tokens of a block of channels."""
    one, width, steps = BYTES // x.itemsize, x.shape[1], rows(dt, 0, len(x) if every else 1)
    whole = width // (NARROW * one) * (NARROW * one)
    for j in range(0, whole, NARROW * one):
        powers(A, steps, decays, j, NARROW * one)
        tile(load, store, zeros, of, x, dt, B, C, decays, every, h, out, j, scale)
    for j in range(whole, width, one):
        powers(A, steps, decays, j, one)
        tile(load_part, store_part, zeros_of_one, of, x, dt, B, C, decays, every, h, out, j, scale)


@njit(**OPTIONS)
def all_columns_back(of: Any, add: Any, x: Any, dt: Any, B: Any, C: Any, A: Any, h: Any, P: Any, dout: Any,
                     states: Any, decays: Any, every: Any, dA: Any, dB: Any, dC: Any, dx: Any, ddt: Any,
                     scale: Any) -> None:  # fmt: skip
    """The gradients of some tokens of a block of channels; h: before the first one."""
    one, width, steps = BYTES // x.itemsize, x.shape[1], rows(dt, 0, len(x) if every else 1)
    whole = width // (NARROW * one) * (NARROW * one)
    for j in range(0, whole, NARROW * one):
        powers(A, steps, decays, j, NARROW * one)
        again(load, store, of, add, x, dt, B, decays, every, h, dout, states, dC, j, scale)
        back(load, store, zeros, of, add, x, dt, B, C, A, P, dout, states, decays, every, dB, dA, dx, ddt, j, scale)
    for j in range(whole, width, one):
        powers(A, steps, decays, j, one)
        again(load_part, store_part, of, add, x, dt, B, decays, every, h, dout, states, dC, j, scale)
        back(load_part, store_part, zeros_of_one, of, add, x, dt, B, C, A, P, dout, states, decays, every, dB, dA, dx,
             ddt, j, scale)  # fmt: skip


@njit(**OPTIONS)
def channel(A: Any, B: Any, C: Any, step: Any, u: Any, old: Any, state: Any, a: Any) -> Any:
    """Re <C, h> of one token of one channel, h = e^{step A} old + u B in `state`; a: memory. Empty old: 0."""
    for n in range(len(old) // 2):
        size, (sine, cosine) = exp(step * A[2 * n]), sine_cosine(step * A[2 * n + 1])
        a[2 * n] = size * cosine if size > 0 else size
        a[2 * n + 1] = size * sine if size > 0 else size
    y = number(A, 0)
    for n in range(0, len(A), 2):
        r, i = B[n] * u, B[n + 1] * u
        if len(old):
            r = fma(a[n], old[n], fma(-a[n + 1], old[n + 1], r))
            i = fma(a[n], old[n + 1], fma(a[n + 1], old[n], i))
        state[n], state[n + 1] = r, i
        y = fma(-C[n + 1], i, fma(C[n], r, y))
    return y
