"""The selective scan and its adjoint of real channels: readouts/selective.py has the equations.

complex_selective.py has those of complex channels, in the same memory: N counts real numbers.

A job is a sequence and a block of its channels. One token alone goes channel by channel (`token`),
unless it is to have the bits that it has among others (with `by_keys`, always). More go in segments,
and a segment in columns of a few vectors: the states of a column, N rows, stay in the first cache while its tokens
pass. Before every segment the states are kept if a backward follows. Backward, from the last segment to the first, a
column's states and decays are computed again from there, then

    P += C_t dout_t                                      P[n]: the gradient of h_t[n]
    dB_t = <u, P>,  du = sum_n B_t P,  q = e^{dt A} P,  dg = q h_{t-1},  dA += dt dg,  P = q
    dx = dt du,  ddt = x du + sum_n A dg

With `by_keys` decays are 1 - dt B^2, there is no A, and with da = P h_{t-1} before P = q

    dB_t = <u, P> - 2 B <dt, da>,  ddt = x du - sum_n B^2 da

dB and dC are sums of each block of channels, dA of each sequence: whoever adds them up does so in one order. A worker
has memory of its own and does its jobs in turn. columns.py has the loops over the tokens of a column.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ...ops.cpu.numbers import OPTIONS
from ...runtime.pieces.piece import Whole, piece, workspace_kind
from ...runtime.pieces.views import columns, row, row_part, rows
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from .columns import channel, columns_of_keys, columns_of_keys_back, columns_of_rates, columns_of_rates_back

TOKENS = ("x", "dt", "out", "dout", "dx", "ddt")
SIZES = ("jobs", "workers", "blocks", "each", "segment", "has_start", "in_columns", "is_constant", "by_keys")
SELECTIVE = Workspace("selective", SIZES, ("scale",), (), {"given": {
    **{name: Field("count", "D") for name in TOKENS}, "B": Field("inputs", "N"), "C": Field("inputs", "N"),
    "A": Field("D", "N"), "B_rows": Field("weights", "each"), "C_rows": Field("weights", "each"),
    "start": Field("starts", "DN"), "end": Field("owners", "DN"), "marks": Field("marked", "D"),
    "dA": Field("rows", "D"), "dB": Field("partial", "N"), "dC": Field("partial", "N"),
    "skip": Field("skips", "D"), "dskip": Field("dskips", "D"),
    "A_rows": Field("scratch", "each"), "h": Field("scratch", "each"),
    "states": Field("kept", "column"), "decays": Field("kept", "column"),
    "spans": Field("owners", "span", dtype="int64"),
}})  # fmt: skip
Work = workspace_kind(SELECTIVE)


@njit(**OPTIONS)
def clear(M: Any) -> None:
    for i in range(len(M)):
        for j in range(M.shape[1]):
            M[i, j] = 0


@njit(**OPTIONS)
def copy(M: Any, to: Any) -> None:
    for i in range(len(M)):
        for j in range(M.shape[1]):
            to[i, j] = M[i, j]


@piece
def begin(w: Work, own: Whole, n: Whole, first: Whole, width: Whole):
    """The rows of A and of the initial states, or of their gradients, of a worker."""
    N = w.N
    A, h = columns(rows(w.A_rows, own * N, N), 0, width), columns(rows(w.h, own * N, N), 0, width)
    for d in range(width):
        for k in range(N):
            if not w.by_keys:
                A[k, d] = w.A[first + d, k]
            h[k, d] = w.start[n, (first + d) * N + k] if w.has_start else 0


@piece
def finish(w: Work, own: Whole, n: Whole, first: Whole, width: Whole):
    """The final states, or the gradients of the initial ones, from the rows of a worker."""
    N = w.N
    h = rows(w.h, own * N, N)
    for d in range(width):
        for k in range(N):
            w.end[n, (first + d) * N + k] = h[k, d]


@piece
def token(w: Work, n: Whole, first: Whole, width: Whole):
    """`job` of a sequence of one token, channel by channel: states are read and written in place."""
    N, t, mark = w.N, w.spans[n, 0], w.spans[n, 2]
    B, C = row(w.B, t), row(w.C, t)
    for d in range(first, first + width):
        old, state = row_part(w.start, n, d * N, N if w.has_start else 0), row_part(w.end, n, d * N, N)
        step = w.dt[t, d]
        w.out[t, d] = w.scale * channel(row(w.A, d), B, C, step, step * w.x[t, d], old, state)
        if len(w.marks):
            for k in range(N):
                w.marks[mark * N + k, d] = old[k] if w.has_start else 0


@piece
def job(w: Work, own: Whole, n: Whole, first: Whole, width: Whole):
    """out and the final states of a block of channels of sequence n."""
    N, S = w.N, w.segment
    start, stop, mark = w.spans[n, 0], w.spans[n, 1], w.spans[n, 2]
    begin(w, own, n, first, width)
    A, h = columns(rows(w.A_rows, own * N, N), 0, width), columns(rows(w.h, own * N, N), 0, width)
    for t in range(start, stop, S):
        count = min(S, stop - t)
        if len(w.marks):
            copy(h, columns(rows(w.marks, (mark + (t - start) // S) * N, N), first, width))
        x, dt = columns(rows(w.x, t, count), first, width), columns(rows(w.dt, t, count), first, width)
        B, C, out = rows(w.B, t, count), rows(w.C, t, count), columns(rows(w.out, t, count), first, width)
        if w.by_keys:
            columns_of_keys(x, dt, B, C, h, out, w.scale)
        else:
            columns_of_rates(x, dt, B, C, A, h, out, w.scale)
    finish(w, own, n, first, width)


@piece
def job_back(w: Work, own: Whole, n: Whole, block: Whole, first: Whole, width: Whole):
    """Gradients of the tokens, sums of those of A, B and C, and the gradients of the initial states."""
    N, S = w.N, w.segment
    start, stop, mark = w.spans[n, 0], w.spans[n, 1], w.spans[n, 2]
    begin(w, own, n, first, width)
    A, P = columns(rows(w.A_rows, own * N, N), 0, width), columns(rows(w.h, own * N, N), 0, width)
    low = own * (S + 1) * N
    states, decays = rows(w.states, low, (S + 1) * N), rows(w.decays, low, (S + 1) * N)
    dA = columns(rows(w.dA, 0 if w.by_keys else n * N, 0 if w.by_keys else N), first, width)
    clear(dA)
    for s in range((stop - start + S - 1) // S - 1, -1, -1):
        t = start + s * S
        count, at = min(S, stop - t), block * w.count + t
        h = columns(rows(w.marks, (mark + s) * N, N), first, width)
        x, dt = columns(rows(w.x, t, count), first, width), columns(rows(w.dt, t, count), first, width)
        dx, ddt = columns(rows(w.dx, t, count), first, width), columns(rows(w.ddt, t, count), first, width)
        B, C, dout = rows(w.B, t, count), rows(w.C, t, count), columns(rows(w.dout, t, count), first, width)
        dB, dC = rows(w.dB, at, count), rows(w.dC, at, count)
        clear(dB)
        clear(dC)
        if w.by_keys:
            columns_of_keys_back(x, dt, B, C, h, P, dout, states, decays, dB, dC, dx, ddt, w.scale)
        else:
            columns_of_rates_back(x, dt, B, C, A, h, P, dout, states, decays, dA, dB, dC, dx, ddt, w.scale)
    finish(w, own, n, first, width)


@piece
def forward(w: Work, own: Whole, stop: Whole):
    """The jobs of workers own..stop, in the memory of the first one."""
    for k in range(w.jobs * own // w.workers, w.jobs * stop // w.workers):
        n, first = k // w.blocks, k % w.blocks * w.each
        width = min(w.each, w.D - first)
        if w.spans[n, 1] - w.spans[n, 0] == 1 and not w.in_columns:
            token(w, n, first, width)
        else:
            job(w, own, n, first, width)


@piece
def backward(w: Work, own: Whole, stop: Whole):
    """The jobs of workers own..stop, in the memory of the first one."""
    for k in range(w.jobs * own // w.workers, w.jobs * stop // w.workers):
        first = k % w.blocks * w.each
        job_back(w, own, k // w.blocks, k % w.blocks, first, min(w.each, w.D - first))
