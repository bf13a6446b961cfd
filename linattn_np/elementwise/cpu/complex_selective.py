"""The selective scan and its adjoint of complex channels: as selective.py, whose memory it has; N counts real numbers.

Of a constant system A, B and C are those of the channels (D, N), and dt is 1: decays are computed once for each column
of a segment, and all three gradients are sums over the tokens of a sequence, one after the other in dA. It may have a
skip connection: out += D x.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ...ops.cpu.numbers import OPTIONS
from ...runtime.pieces.piece import Whole, piece
from ...runtime.pieces.views import columns, numbers_at, row, row_part, rows, start_of
from .complex_columns import all_columns, all_columns_back, channel, of_channel, of_token, to_channel, to_token
from .selective import Work, begin, clear, copy, finish


@njit(**OPTIONS)
def add_skip(out: Any, D: Any, x: Any) -> None:
    """out += D x"""
    for t in range(len(x)):
        for d in range(x.shape[1]):
            out[t, d] += D[0, d] * x[t, d]


@njit(**OPTIONS)
def sum_skip(dD: Any, dout: Any, x: Any) -> None:
    """dD += sum_t dout x, from the last token to the first"""
    for t in range(len(x) - 1, -1, -1):
        for d in range(x.shape[1]):
            dD[0, d] += dout[t, d] * x[t, d]


@piece
def weights(w: Work, own: Whole, first: Whole, width: Whole):
    """The rows of B and C of a constant system."""
    B, C = rows(w.B_rows, own * w.N, w.N), rows(w.C_rows, own * w.N, w.N)
    for d in range(width):
        for n in range(w.N):
            B[n, d], C[n, d] = w.B[first + d, n], w.C[first + d, n]


@piece
def token(w: Work, own: Whole, n: Whole, first: Whole, width: Whole):
    """`job` of a sequence of one token, channel by channel, with the same bits: states are used in place."""
    N, t, mark = w.N, w.spans[n, 0], w.spans[n, 2]
    decays = numbers_at(row(w.A, 0), start_of(w.A_rows, own * N), N)
    for d in range(first, first + width):
        old, state = row_part(w.start, n, d * N, N if w.has_start else 0), row_part(w.end, n, d * N, N)
        step, place = w.dt[t, d], d if w.is_constant else t
        y = channel(row(w.A, d), row(w.B, place), row(w.C, place), step, step * w.x[t, d], old, state, decays)
        w.out[t, d] = w.scale * y
        if len(w.marks):
            for k in range(N):
                w.marks[mark * N + k, d] = old[k] if w.has_start else 0
    if len(w.skip):
        out, x = columns(rows(w.out, t, 1), first, width), columns(rows(w.x, t, 1), first, width)
        add_skip(out, columns(rows(w.skip, 0, 1), first, width), x)


@piece
def job(w: Work, own: Whole, n: Whole, first: Whole, width: Whole):
    """out and the final states of a block of channels of sequence n."""
    N, S = w.N, w.segment
    start, stop, mark = w.spans[n, 0], w.spans[n, 1], w.spans[n, 2]
    begin(w, own, n, first, width)
    A, h = columns(rows(w.A_rows, own * N, N), 0, width), columns(rows(w.h, own * N, N), 0, width)
    decays = rows(w.decays, own * (S + 1) * N, (S + 1) * N)
    if w.is_constant:
        weights(w, own, first, width)
    for t in range(start, stop, S):
        count = min(S, stop - t)
        if len(w.marks):
            copy(h, columns(rows(w.marks, (mark + (t - start) // S) * N, N), first, width))
        x, dt = columns(rows(w.x, t, count), first, width), columns(rows(w.dt, t, count), first, width)
        out = columns(rows(w.out, t, count), first, width)
        if w.is_constant:
            B, C = columns(rows(w.B_rows, own * N, N), 0, width), columns(rows(w.C_rows, own * N, N), 0, width)
            all_columns(of_channel, x, dt, B, C, A, decays, 0, h, out, w.scale)
        else:
            B, C = rows(w.B, t, count), rows(w.C, t, count)
            all_columns(of_token, x, dt, B, C, A, decays, N, h, out, w.scale)
        if len(w.skip):
            add_skip(out, columns(rows(w.skip, 0, 1), first, width), x)
    finish(w, own, n, first, width)


@piece
def job_back(w: Work, own: Whole, n: Whole, block: Whole, first: Whole, width: Whole):
    """Gradients of the tokens, sums of those of A, B and C, and the gradients of the initial states."""
    N, S, kinds = w.N, w.segment, 3 if w.is_constant else 1
    start, stop, mark, low = w.spans[n, 0], w.spans[n, 1], w.spans[n, 2], own * (S + 1) * N
    begin(w, own, n, first, width)
    A, P = columns(rows(w.A_rows, own * N, N), 0, width), columns(rows(w.h, own * N, N), 0, width)
    sums = columns(rows(w.dA, n * kinds * N, kinds * N), first, width)
    dA, states, decays = rows(sums, 0, N), rows(w.states, low, (S + 1) * N), rows(w.decays, low, (S + 1) * N)
    clear(sums)
    if len(w.skip):
        clear(columns(rows(w.dskip, n, 1), first, width))
    if w.is_constant:
        weights(w, own, first, width)
    for s in range((stop - start + S - 1) // S - 1, -1, -1):
        t = start + s * S
        count, at = min(S, stop - t), block * w.count + t
        h = columns(rows(w.marks, (mark + s) * N, N), first, width)
        x, dt = columns(rows(w.x, t, count), first, width), columns(rows(w.dt, t, count), first, width)
        dx, dout = columns(rows(w.dx, t, count), first, width), columns(rows(w.dout, t, count), first, width)
        if w.is_constant:
            B, C = columns(rows(w.B_rows, own * N, N), 0, width), columns(rows(w.C_rows, own * N, N), 0, width)
            all_columns_back(of_channel, to_channel, x, dt, B, C, A, h, P, dout, states, decays, 0, dA,
                             rows(sums, N, N), rows(sums, 2 * N, N), dx, dx, w.scale)  # fmt: skip
        else:
            B, C, dB, dC = rows(w.B, t, count), rows(w.C, t, count), rows(w.dB, at, count), rows(w.dC, at, count)
            clear(dB)
            clear(dC)
            all_columns_back(of_token, to_token, x, dt, B, C, A, h, P, dout, states, decays, N, dA, dB, dC, dx,
                             columns(rows(w.ddt, t, count), first, width), w.scale)  # fmt: skip
        if len(w.skip):
            add_skip(dx, columns(rows(w.skip, 0, 1), first, width), dout)
            sum_skip(columns(rows(w.dskip, n, 1), first, width), dout, x)
    finish(w, own, n, first, width)


@piece
def forward(w: Work, own: Whole, stop: Whole):
    """The jobs of workers own..stop, in the memory of the first one."""
    for k in range(w.jobs * own // w.workers, w.jobs * stop // w.workers):
        n, first = k // w.blocks, k % w.blocks * w.each
        width = min(w.each, w.D - first)
        if w.spans[n, 1] - w.spans[n, 0] == 1:
            token(w, own, n, first, width)
        else:
            job(w, own, n, first, width)


@piece
def backward(w: Work, own: Whole, stop: Whole):
    """The jobs of workers own..stop, in the memory of the first one."""
    for k in range(w.jobs * own // w.workers, w.jobs * stop // w.workers):
        first = k % w.blocks * w.each
        job_back(w, own, k // w.blocks, k % w.blocks, first, min(w.each, w.D - first))
