"""Averages of the past with weights e^k that decay, in log space, and their adjoint: readouts/log_average.py.

    n_t = max(m_{t-1}, u + k_t):   p = scale e^{m_{t-1} - n_t},  r = e^{u + k_t - n_t}
    out_t = (p S_{t-1} + r v_t) / (p n_{t-1} + r)
    m_t = max(m_{t-1} - w, k_t):   f = e^{m_{t-1} - w - m_t},  e = e^{k_t - m_t}
    S_t = f S_{t-1} + e v_t,   n_t = f n_{t-1} + e

A job is a sequence and a block of its channels. m is rounded in every token, and f makes up for it, so calls of any
length have the same bits. Before every segment of tokens the states are kept if a backward follows; a segment goes
in columns of a few vectors. Backward, P and Q are the gradients of S_t and n_t at fixed m, which outputs do not depend
on, and c is that of m of the last token: it goes to the k_t that is the maximum, or else through m_{t-1} - w.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ...ops.cpu.numbers import OPTIONS, exp
from ...runtime.pieces.piece import Whole, piece, workspace_kind
from ...runtime.pieces.registers import NARROW, fma, load_part, registers, store, store_part, where_positive
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import columns, row, row_part, rows
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from .columns import zeros_of_one

zeros, load = registers(NARROW)
PARTS = 3  # of a state: S, n, m
KEPT = 5  # rows of a token in the backward: S, n and m before it, f, e
NOTHING = -1.0e30  # m without a token: e^m is 0, and a number less m is one
TOKENS = ("k", "v", "out", "dout", "dk", "dv")
STATES = ("start", "end")  # of each sequence PARTS rows
SIZES = ("jobs", "workers", "blocks", "each", "segment", "has_start")
AVERAGE = Workspace("average", SIZES, ("scale",), (), {"given": {
    **{name: Field("count", "D") for name in TOKENS}, "w": Field("one", "D"), "u": Field("one", "D"),
    **{f"{name}_{part}": Field("owners", "D") for name in STATES for part in "Snm"}, "marks": Field("marked", "D"),
    "dw": Field("owners", "D"), "du": Field("owners", "D"), "kept": Field("scratch", "column"),
    "spans": Field("owners", "span", dtype="int64"),
}})  # fmt: skip
Work = workspace_kind(AVERAGE)


@njit(**OPTIONS)
def weights(m: Any, own: Any, scale: Any) -> Any:
    """p, r"""
    most = where_positive(own - m, own, m)
    return scale * exp(m - most), exp(own - most)


@njit(**OPTIONS)
def advance(m: Any, w: Any, k: Any) -> Any:
    """m of the token, f, e"""
    faded = m - w
    most = where_positive(k - faded, k, faded)
    return most, exp((m - most) - w), exp(k - most)


@njit(**OPTIONS)
def tile(load: Any, save: Any, k: Any, v: Any, w: Any, u: Any, S: Any, n: Any, m: Any, out: Any, j: Any,
         scale: Any) -> None:  # fmt: skip
    """out and the states of a column."""
    a, b, c, fade, bonus = load(S, j), load(n, j), load(m, j), load(w, j), load(u, j)
    for t in range(len(k)):
        x, y = load(row(k, t), j), load(row(v, t), j)
        p, r = weights(c, bonus + x, scale)
        save(fma(p, a, r * y) / fma(p, b, r), row(out, t), j)
        c, f, e = advance(c, fade, x)
        a, b = fma(f, a, e * y), fma(f, b, e)
    save(a, S, j)
    save(b, n, j)
    save(c, m, j)


@njit(**OPTIONS)
def again(load: Any, save: Any, k: Any, v: Any, w: Any, S: Any, n: Any, m: Any, kept: Any, j: Any) -> None:
    """KEPT rows of every token, and the state after the last one.   S, n, m: before the first one"""
    a, b, c, fade = load(S, j), load(n, j), load(m, j), load(w, j)
    for t in range(len(k)):
        x, y = load(row(k, t), j), load(row(v, t), j)
        save(a, row(kept, t * KEPT), 0)
        save(b, row(kept, t * KEPT + 1), 0)
        save(c, row(kept, t * KEPT + 2), 0)
        c, f, e = advance(c, fade, x)
        save(f, row(kept, t * KEPT + 3), 0)
        save(e, row(kept, t * KEPT + 4), 0)
        a, b = fma(f, a, e * y), fma(f, b, e)
    save(a, row(kept, len(k) * KEPT), 0)
    save(b, row(kept, len(k) * KEPT + 1), 0)


@njit(**OPTIONS)
def back(load: Any, save: Any, zeros: Any, k: Any, v: Any, w: Any, u: Any, dout: Any, kept: Any, P: Any, Q: Any, c: Any,
         dk: Any, dv: Any, dw: Any, du: Any, is_first: Any, is_last: Any, j: Any, scale: Any) -> None:  # fmt: skip
    """dk, dv, and dw, du, P, Q, c of a column."""
    p, q, dm, fade, bonus, none = load(P, j), load(Q, j), load(c, j), load(w, j), load(u, j), zeros(k)
    dfade, dbonus = load(dw, j), load(du, j)
    if is_last:
        dm = dm - (p * load(row(kept, len(k) * KEPT), 0) + q * load(row(kept, len(k) * KEPT + 1), 0))
    for t in range(len(k) - 1, -1, -1):
        x, y, m = load(row(k, t), j), load(row(v, t), j), load(row(kept, t * KEPT + 2), 0)
        S, n = load(row(kept, t * KEPT), 0), load(row(kept, t * KEPT + 1), 0)
        f, e = load(row(kept, t * KEPT + 3), 0), load(row(kept, t * KEPT + 4), 0)
        past, own = weights(m, bonus + x, scale)
        total = fma(past, n, own)
        dvalues = load(row(dout, t), j) / total
        dtotal = -(dvalues * (fma(past, S, own * y) / total))
        here = own * fma(dvalues, y, dtotal)
        taken = where_positive(x - (m - fade), dm, none)
        dm = dm - taken
        save(fma(e, fma(p, y, q), here + taken), row(dk, t), j)
        save(fma(e, p, own * dvalues), row(dv, t), j)
        dfade = dfade - fma(f, fma(p, S, q * n), dm)
        dbonus = dbonus + here
        p, q = fma(f, p, past * dvalues), fma(f, q, past * dtotal)
    if is_first:
        dm = dm + (p * load(row(kept, 0), 0) + q * load(row(kept, 1), 0))
    save(p, P, j)
    save(q, Q, j)
    save(dm, c, j)
    save(dfade, dw, j)
    save(dbonus, du, j)


@njit(**OPTIONS)
def fill(x: Any, to: Any) -> None:
    for j in range(len(to)):
        to[j] = x


@piece
def begin(w: Work, n: Whole, first: Whole, width: Whole):
    """end = the initial state, or the gradient of the final one."""
    S, z, m = row_part(w.end_S, n, first, width), row_part(w.end_n, n, first, width), row_part(w.end_m, n, first, width)
    if w.has_start:
        for j in range(width):
            S[j], z[j], m[j] = w.start_S[n, first + j], w.start_n[n, first + j], w.start_m[n, first + j]
    else:
        fill(0.0, S)
        fill(0.0, z)
        fill(0.0 if len(w.kept) else NOTHING, m)


@piece
def mark_of(w: Work, place: Whole, n: Whole, first: Whole, width: Whole):
    """Keep the state."""
    place *= PARTS
    S, z = row_part(w.marks, place, first, width), row_part(w.marks, place + 1, first, width)
    m = row_part(w.marks, place + 2, first, width)
    for j in range(width):
        S[j], z[j], m[j] = w.end_S[n, first + j], w.end_n[n, first + j], w.end_m[n, first + j]


@piece
def job(w: Work, n: Whole, first: Whole, width: Whole):
    """out and the final state of a block of channels of sequence n."""
    segment, scale, one = w.segment, w.scale, BYTES // w.k.itemsize
    start, stop, mark = w.spans[n, 0], w.spans[n, 1], w.spans[n, 2]
    whole = width // (NARROW * one) * (NARROW * one)
    begin(w, n, first, width)
    fade, bonus = row_part(w.w, 0, first, width), row_part(w.u, 0, first, width)
    S, z, m = row_part(w.end_S, n, first, width), row_part(w.end_n, n, first, width), row_part(w.end_m, n, first, width)
    for t in range(start, stop, segment):
        count = min(segment, stop - t)
        if len(w.marks):
            mark_of(w, mark + (t - start) // segment, n, first, width)
        k, v = columns(rows(w.k, t, count), first, width), columns(rows(w.v, t, count), first, width)
        out = columns(rows(w.out, t, count), first, width)
        for j in range(0, whole, NARROW * one):
            tile(load, store, k, v, fade, bonus, S, z, m, out, j, scale)
        for j in range(whole, width, one):
            tile(load_part, store_part, k, v, fade, bonus, S, z, m, out, j, scale)


@piece
def job_back(w: Work, own: Whole, n: Whole, first: Whole, width: Whole):
    """Gradients of the tokens, sums of those of w and u, and the gradient of the initial state."""
    segment, scale, one = w.segment, w.scale, BYTES // w.k.itemsize
    start, stop, mark = w.spans[n, 0], w.spans[n, 1], w.spans[n, 2]
    whole, last = width // (NARROW * one) * (NARROW * one), (stop - start + segment - 1) // segment - 1
    begin(w, n, first, width)
    fade, bonus = row_part(w.w, 0, first, width), row_part(w.u, 0, first, width)
    P, Q, c = row_part(w.end_S, n, first, width), row_part(w.end_n, n, first, width), row_part(w.end_m, n, first, width)
    dw, du = row_part(w.dw, n, first, width), row_part(w.du, n, first, width)
    kept = rows(w.kept, own * (segment + 1) * KEPT, (segment + 1) * KEPT)
    fill(0.0, dw)
    fill(0.0, du)
    for s in range(last, -1, -1):
        t = start + s * segment
        count, place = min(segment, stop - t), (mark + s) * PARTS
        S, z = row_part(w.marks, place, first, width), row_part(w.marks, place + 1, first, width)
        m = row_part(w.marks, place + 2, first, width)
        k, v = columns(rows(w.k, t, count), first, width), columns(rows(w.v, t, count), first, width)
        dk, dv = columns(rows(w.dk, t, count), first, width), columns(rows(w.dv, t, count), first, width)
        dout = columns(rows(w.dout, t, count), first, width)
        for j in range(0, whole, NARROW * one):
            again(load, store, k, v, fade, S, z, m, kept, j)
            back(load, store, zeros, k, v, fade, bonus, dout, kept, P, Q, c, dk, dv, dw, du, s == 0, s == last, j,
                 scale)  # fmt: skip
        for j in range(whole, width, one):
            again(load_part, store_part, k, v, fade, S, z, m, kept, j)
            back(load_part, store_part, zeros_of_one, k, v, fade, bonus, dout, kept, P, Q, c, dk, dv, dw, du, s == 0,
                 s == last, j, scale)  # fmt: skip


@piece
def forward(w: Work, own: Whole, stop: Whole):
    """The jobs of workers own..stop."""
    for k in range(w.jobs * own // w.workers, w.jobs * stop // w.workers):
        first = k % w.blocks * w.each
        job(w, k // w.blocks, first, min(w.each, w.D - first))


@piece
def backward(w: Work, own: Whole, stop: Whole):
    """The jobs of workers own..stop, in the memory of the first one."""
    for k in range(w.jobs * own // w.workers, w.jobs * stop // w.workers):
        first = k % w.blocks * w.each
        job_back(w, own, k // w.blocks, first, min(w.each, w.D - first))
