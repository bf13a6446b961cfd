"""The recurrence and its adjoint, token by token, of a block of channels: definition.py has the equations.

A task is a sequence and `each` of its channels. Forward, with a backward to follow, the state before every `segment`
tokens is kept. Backward, from the last segment to the first, the states of a segment are computed again from there,
into the rows of dx, which lie in the second cache until p takes their place:

    dx_t = h_{t-1},  h_t = a_t h_{t-1} + x_t                       forwards
    p += scale dout_t,  da_t = p dx_t,  dx_t = p,  p = a_t p       backwards

A constant gate is one row for all tokens; each sequence sums its own row of dgate. Factors a = e^g have a row a
sequence. Complex numbers are pairs; D and `each` count real ones. A row of matrices is `block` times as wide.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ...ops.cpu.numbers import OPTIONS
from ...runtime.pieces.memory import STREAMED
from ...runtime.pieces.piece import Number, Truth, Vector, Whole, piece, workspace_kind
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import row_part as part
from ...runtime.pieces.views import start_of
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from .block_rows import back as block_back
from .block_rows import keep as block_keep
from .block_rows import of_constant as block_of_constant
from .block_rows import of_factor as block_of_factor
from .block_rows import step as block_step
from .complex_block_rows import back as complex_block_back
from .complex_block_rows import keep as complex_block_keep
from .complex_block_rows import of_constant as complex_block_of_constant
from .complex_block_rows import of_factor as complex_block_of_factor
from .complex_block_rows import step as complex_block_step
from .complex_rows import back as complex_back
from .complex_rows import keep as complex_keep
from .complex_rows import of_constant as complex_of_constant
from .complex_rows import of_factor as complex_of_factor
from .complex_rows import of_log as complex_of_log
from .complex_rows import power as complex_power
from .complex_rows import step as complex_step
from .rows import back, keep, of_constant, of_factor, of_log, power, step, stream, stream_back

FLAGS = ("is_log", "is_complex", "is_constant", "has_start")
SCAN = Workspace("scan", ("each", "blocks", "segment", "block", *FLAGS), ("scale",), (), {"given": {
    "gate": Field("gates", "wide"), "x": Field("count", "D"), "out": Field("count", "D"), "dout": Field("count", "D"),
    "dx": Field("count", "D"), "dgate": Field("dgates", "wide"), "factors": Field("owners", "D"),
    "start": Field("starts", "D"), "end": Field("N", "D"), "marks": Field("places", "D"),
    "spans": Field("N", "span", dtype="int64"),
}})  # fmt: skip
Work = workspace_kind(SCAN)


@njit(**OPTIONS)
def copy(x: Any, to: Any) -> None:
    for j in range(len(to)):
        to[j] = x[j]


@njit(**OPTIONS)
def clear(to: Any) -> None:
    for j in range(len(to)):
        to[j] = 0


@piece
def exponentials(g: Vector, is_complex: Truth, a: Vector):
    """a = e^g"""
    if is_complex:
        complex_power(g, a)
    else:
        power(g, a)


@piece
def begin(w: Work, n: Whole, first: Whole, width: Whole):
    """end_n = the initial state; the factors of a constant gate."""
    h = part(w.end, n, first, width)
    if w.has_start:
        copy(part(w.start, n, first, width), h)
    else:
        clear(h)
    if w.is_constant and w.is_log:
        exponentials(part(w.gate, 0, first, width), w.is_complex != 0, part(w.factors, n, first, width))


@piece
def is_streamed(w: Work, results: Whole, first: Whole, width: Whole) -> Whole:
    """Whether rows of results are vectors of memory, of an array larger than the caches, which begins at an address."""
    size, is_plain = w.x.itemsize, not w.is_complex and not w.is_constant and w.block == 1
    is_whole = (results | (w.D * size) | (first * size) | (width * size)) % BYTES == 0
    return 1 if is_plain and is_whole and w.count * w.D * size >= STREAMED else 0


@piece
def factor(w: Work, n: Whole, t: Whole, first: Whole, width: Whole):
    """The factors of token t, where they are exponentials."""
    if w.is_log and not w.is_constant:
        exponentials(part(w.gate, t, first, width), w.is_complex != 0, part(w.factors, n, first, width))


@piece
def step_of_blocks(a: Vector, x: Vector, h: Vector, out: Vector, scale: Number, N: Whole, is_complex: Truth):
    """`step` of matrices."""
    if is_complex:
        complex_block_step(a, x, h, out, scale, N)
    else:
        block_step(a, x, h, out, scale, N)


@piece
def keep_of_blocks(a: Vector, x: Vector, h: Vector, out: Vector, N: Whole, is_complex: Truth):
    """`keep` of matrices."""
    if is_complex:
        complex_block_keep(a, x, h, out, N)
    else:
        block_keep(a, x, h, out, N)


@piece
def back_of_blocks(a: Vector, dout: Vector, p: Vector, dx: Vector, d: Vector, scale: Number, N: Whole,
                   is_complex: Truth, is_constant: Truth):  # fmt: skip
    """`back` of matrices."""
    if is_complex:
        if is_constant:
            complex_block_back(complex_block_of_constant, a, dout, p, dx, d, scale, N)
        else:
            complex_block_back(complex_block_of_factor, a, dout, p, dx, d, scale, N)
    elif is_constant:
        block_back(block_of_constant, a, dout, p, dx, d, scale, N)
    else:
        block_back(block_of_factor, a, dout, p, dx, d, scale, N)


@piece
def forward(w: Work, first_task: Whole, last_task: Whole):
    """out and end of tasks."""
    for task in range(first_task, last_task):
        n, first = task // w.blocks, task % w.blocks * w.each
        width, scale, S, is_complex = min(w.each, w.D - first), w.scale, w.segment, w.is_complex != 0
        begin(w, n, first, width)
        row, stop, mark, h = w.spans[n, 0], w.spans[n, 1], w.spans[n, 2], part(w.end, n, first, width)
        past, step_of_gate = is_streamed(w, start_of(w.out, 0), first, width), 0 if w.is_constant else 1
        for t in range(row, stop):
            if S and (t - row) % S == 0:
                copy(h, part(w.marks, mark + (t - row) // S, first, width))
            x, out, later = part(w.x, t, first, width), part(w.out, t, first, width), min(t + 1, stop - 1)
            factor(w, n, t, first, width)
            a = (
                part(w.factors, n, first, width)
                if w.is_log
                else part(w.gate, t * step_of_gate, first * w.block, width * w.block)
            )
            if w.block > 1:
                step_of_blocks(a, x, h, out, scale, w.block, is_complex)
            elif is_complex:
                complex_step(a, x, h, out, scale)
            elif past:
                stream(a, x, h, out, scale, part(w.gate, later, first, width), part(w.x, later, first, width))
            else:
                step(a, x, h, out, scale)


@piece
def states(w: Work, n: Whole, t: Whole, last: Whole, mark: Whole, first: Whole, width: Whole):
    """dx = the states before tokens t..last, from a mark on."""
    copy(part(w.marks, mark, first, width), part(w.dx, t, first, width))
    for s in range(t, last - 1):
        h, x, out = part(w.dx, s, first, width), part(w.x, s, first, width), part(w.dx, s + 1, first, width)
        factor(w, n, s, first, width)
        at = 0 if w.is_constant else s
        a = part(w.factors, n, first, width) if w.is_log else part(w.gate, at, first * w.block, width * w.block)
        if w.block > 1:
            keep_of_blocks(a, x, h, out, w.block, w.is_complex != 0)
        elif w.is_complex:
            complex_keep(a, x, h, out)
        else:
            keep(a, x, h, out)


@piece
def token_back(w: Work, n: Whole, t: Whole, first: Whole, width: Whole, past: Whole):
    """dx_t and dgate_t; end: p of the token before."""
    dout, p, dx, scale = (
        part(w.dout, t, first, width),
        part(w.end, n, first, width),
        part(w.dx, t, first, width),
        w.scale,
    )
    factor(w, n, t, first, width)
    at = 0 if w.is_constant else t
    a = part(w.factors, n, first, width) if w.is_log else part(w.gate, at, first * w.block, width * w.block)
    d = part(w.dgate, n if w.is_constant else t, first * w.block, width * w.block)
    if w.block > 1:
        back_of_blocks(a, dout, p, dx, d, scale, w.block, w.is_complex != 0, w.is_constant != 0)
    elif w.is_constant:
        if w.is_complex:
            complex_back(complex_of_constant, a, dout, p, dx, d, scale)
        else:
            back(of_constant, a, dout, p, dx, d, scale)
    elif w.is_complex:
        if w.is_log:
            complex_back(complex_of_log, a, dout, p, dx, d, scale)
        else:
            complex_back(complex_of_factor, a, dout, p, dx, d, scale)
    elif w.is_log:
        if past:
            stream_back(of_log, a, dout, p, dx, d, scale)
        else:
            back(of_log, a, dout, p, dx, d, scale)
    elif past:
        stream_back(of_factor, a, dout, p, dx, d, scale)
    else:
        back(of_factor, a, dout, p, dx, d, scale)


@piece
def of_logarithms(a: Vector, is_complex: Truth, d: Vector):
    """d = a* d: the gradient of log factors from that of factors."""
    if is_complex:
        for j in range(len(d) // 2):
            d[2 * j], d[2 * j + 1] = complex_of_log(a[2 * j], a[2 * j + 1], d[2 * j], d[2 * j + 1], (d[0], d[0]))
    else:
        for j in range(len(d)):
            d[j] = a[j] * d[j]


@piece
def backward(w: Work, first_task: Whole, last_task: Whole):
    """dx, dgate; end: from the gradient of the final state to that of the initial one."""
    for task in range(first_task, last_task):
        n, first = task // w.blocks, task % w.blocks * w.each
        width, S = min(w.each, w.D - first), w.segment
        begin(w, n, first, width)
        row, stop, mark = w.spans[n, 0], w.spans[n, 1], w.spans[n, 2]
        past = is_streamed(w, start_of(w.dgate, 0), first, width)
        if w.is_constant:
            clear(part(w.dgate, n, first * w.block, width * w.block))
        for s in range((stop - row + S - 1) // S - 1, -1, -1):
            start, last = row + s * S, min(row + (s + 1) * S, stop)
            states(w, n, start, last, mark + s, first, width)
            for t in range(last - 1, start - 1, -1):
                token_back(w, n, t, first, width, past)
        if w.is_constant and w.is_log:
            of_logarithms(part(w.factors, n, first, width), w.is_complex != 0, part(w.dgate, n, first, width))
