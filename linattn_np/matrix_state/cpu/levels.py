"""States by levels, token by token (readouts/levels): each level is a state of its own.

With p tokens before token t, level l >= 1 has tokens where bit l - 1 of p is 1. For each such level, and for level 0

    S_l <- e^{g_t} S_l,   S_l <- S_l - k_t^T beta_t (k_t S_l)           S_0 = k_t^T beta_t v_t
    out_t = scale sum_l lam_t[l] q_t S_l
    S_n <- S_0 + sum_{l < n} S_l            n = 1 + trailing ones of p: level n is empty, those below it are not

A task is one sequence and one head. Levels lie one under the other, K rows each: (levels K, width), a block of value
columns. Nothing is computed where a sequence has more tokens than levels count: `flag` says so.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ...ops.cpu.numbers import OPTIONS, exp
from ...ops.cpu.rows import clear, fill, times
from ...ops.cpu.storage import load, load_column, save
from ...runtime.pieces.piece import Matrix, Number, Truth, Vector, Whole, piece, workspace_kind
from ...runtime.pieces.registers import NARROW, fma, registers, store
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.views import address_of, columns, row, rows, tokens_of, words
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace

TRACE, RUN = 4, 64  # tokens whose states a backward stores at once; tokens from one stored state to the next
SEQUENCE = ("BATCH", "STATE", "FIRST", "STOP")  # batch row, state, first token, last + 1
WHOLES = ("HEAD", "H", "levels", "queries", "K", "V", "column", "width", "given", "delta", "is_direct", "in_place",
          "has_end", "has_dend", "reads", "positioned")  # fmt: skip
ARRAYS = ("q", "k", "v", "g", "beta", "lam", "state", "position", "flag", "out", "end", "end_position", "dout", "dend",
          "dq", "dk", "dv", "dg", "dbeta", "dlam", "dstate")  # fmt: skip

F = Field
LEVELS = Workspace("levels", (*SEQUENCE, *WHOLES), ("scale",), ARRAYS, {
    "given": {"sequences": F("N", "four", dtype="int64")},
    "": {
        "keys": F("c", "K_lanes"), "query": F("c_queries", "K_lanes"), "values": F("c", "width_lanes"),
        "fade": F("c"), "betas": F("c"), "weights": F("c", "level_lanes"), "outs": F("c_queries", "width_lanes"),
        "work": F("level_rows", "width_lanes"), "written": F("width_lanes"),
        "predictions": F("read_rows", "width_lanes"), "erased": F("width_lanes"),
        "seen": F("width_lanes"), "factors": F("c"),
    },
    "adjoint": {
        "grads": F("gradient_rows", "width_lanes"), "trace": F("trace_rows", "width_lanes"),
        "marks": F("mark_rows", "width_lanes"), "starts": F("start_rows", "width_lanes"),
        "dwrites": F("levels", "width_lanes"), "read": F("width_lanes"), "into": F("width_lanes"),
        "dquery": F("c_queries", "K_lanes"), "dkeys": F("c", "K_lanes"), "dvalues": F("c", "width_lanes"),
        "dfade": F("c"), "dbetas": F("c"), "dweights": F("c", "level_lanes"),
    },
})  # fmt: skip
Work = workspace_kind(LEVELS)
zeros, load_block = registers(NARROW)


# positions


@piece
def position_of(w: Work, n: Whole) -> Whole:
    """Tokens before sequence n."""
    return words(address_of(w.position, (0, 0, row(w.sequences, n)[1]), 0), 1)[0] if w.positioned else 0


@njit(**OPTIONS)
def has(position: Any, level: Any) -> Any:
    """Whether a level from 1 on has tokens after `position` tokens."""
    return (position >> (level - 1)) & 1


@njit(**OPTIONS)
def merged_level(position: Any) -> Any:
    """The level that the next token is written to, with all levels below it."""
    n = 1
    while has(position, n):
        n += 1
    return n


@piece
def is_refused(w: Work) -> Whole:
    """Whether a sequence has more tokens than levels count; sets the flag."""
    for n in range(w.N):
        cut, position = row(w.sequences, n), position_of(w, n)
        if position < 0 or (cut[3] > cut[2] and position + cut[3] - cut[2] > 1 << (w.levels - 1)):
            words(address_of(w.flag, (0, 0, 0), 0), 1)[0] = 1
            return 1
    return 0


# one token


@piece
def read_level(S: Matrix, x: Vector, out: Vector):
    """out = x S"""
    total = zeros(S)
    for i in range(len(S)):
        total = fma(x[i], load_block(row(S, i), 0), total)
    store(total, out, 0)


@piece
def decay_level(S: Matrix, decay: Number, to: Matrix, adds: Truth):
    """to = decay S; adds: to += decay S"""
    if adds:
        for i in range(len(S)):
            store(fma(decay, load_block(row(S, i), 0), load_block(row(to, i), 0)), row(to, i), 0)
    else:
        for i in range(len(S)):
            store(decay * load_block(row(S, i), 0), row(to, i), 0)


@piece(of="delta")
def erase_level(S: Matrix, decay: Number, k: Vector, erased: Vector, to: Matrix, adds: Truth):
    """to = decay S + k^T erased; adds: to += ..."""
    e = load_block(erased, 0)
    if adds:
        for i in range(len(S)):
            store(load_block(row(to, i), 0) + fma(k[i], e, decay * load_block(row(S, i), 0)), row(to, i), 0)
    else:
        for i in range(len(S)):
            store(fma(k[i], e, decay * load_block(row(S, i), 0)), row(to, i), 0)


@piece
def write_level(k: Vector, v: Vector, to: Matrix):
    """to = k^T v"""
    new = load_block(v, 0)
    for i in range(len(to)):
        store(k[i] * new, row(to, i), 0)


@piece
def add_weighted(a: Number, x: Vector, b: Number, y: Vector, out: Vector):
    """out += a x + b y"""
    for j in range(len(out)):
        out[j] += a * x[j] + b * y[j]


@piece
def token(w: Work, i: Whole, position: Whole, S: Matrix, to: Matrix, answers: Truth, predictions: Matrix):
    """Token i from the levels S to the levels `to`; answers: and its outputs. predictions: k S of each level."""
    into, k, decay, beta, weights = merged_level(position), row(w.keys, i), w.fade[i], w.betas[i], row(w.weights, i)
    queries, merged = w.queries if answers else 0, rows(to, (into - 1) * w.K, w.K)
    times(beta, row(w.values, i), None, w.written)
    fill(w.erased, 0.0)
    write_level(k, w.written, merged)
    for j in range(queries):
        out, q = row(w.outs, j * w.c + i), row(w.query, j * w.c + i)
        times(weights[0] * dot(q, k, w.K), w.written, None, out)
    for level in range(1, w.levels):
        if has(position, level):
            own = rows(S, (level - 1) * w.K, w.K)
            if w.delta:
                read_level(own, k, row(predictions, level))
                times(-(beta * decay), row(predictions, level), None, w.erased)
            for j in range(queries):
                q = row(w.query, j * w.c + i)
                read_level(own, q, w.seen)
                f = weights[level]
                if w.delta:
                    add_weighted(f * decay, w.seen, f * dot(q, k, w.K), w.erased, row(w.outs, j * w.c + i))
                else:
                    add_weighted(f * decay, w.seen, 0.0, w.erased, row(w.outs, j * w.c + i))
            target = merged if level < into else rows(to, (level - 1) * w.K, w.K)
            if w.delta:
                erase_level(own, decay, k, w.erased, target, level < into)
            else:
                decay_level(own, decay, target, level < into)


# a sequence


@piece
def load_tokens(w: Work):
    """Load the keys, queries, e^g, strengths and weights of all tokens: every block of columns reads them."""
    place = (w.BATCH, w.HEAD, w.FIRST)
    load(w.k, place, (0, w.K), w.keys)
    for j in range(w.queries):
        load(w.q, (w.BATCH, w.HEAD * w.queries + j, w.FIRST), (0, w.K), rows(w.query, j * w.c, w.c))
    load_column(w.g, place, w.fade)
    for i in range(w.c):
        w.fade[i] = exp(w.fade[i])
    fill(w.betas, 1.0)
    if w.delta:
        load_column(w.beta, place, w.betas)
    load(w.lam, place, (0, w.levels), w.weights)


@piece
def begin_sequence(w: Work, n: Whole):
    """Task n: a sequence and a head."""
    cut = row(w.sequences, n // w.H)
    w.BATCH, w.STATE, w.FIRST, w.STOP, w.HEAD = cut[0], cut[1], cut[2], cut[3], n % w.H
    w.c = w.STOP - w.FIRST
    w.c_queries = w.c * w.queries
    if w.c:
        load_tokens(w)


@piece
def begin_block(w: Work, column: Whole):
    """Value columns from `column` on."""
    w.column, w.width = column, min(w.V - column, w.width_lanes)


@piece
def forward(w: Work, first: Whole, last: Whole):
    """Outputs and final states of tasks first..last."""
    if is_refused(w):
        return
    for n in range(first, last):
        begin_sequence(w, n)
        fill(w.factors, w.scale)
        for column in range(0, w.V, w.width_lanes):
            begin_block(w, column)
            forward_block(w, position_of(w, n // w.H))


@piece
def forward_block(w: Work, position: Whole):
    """A block of columns. Levels are read and written in place where the block is whole, else through a copy."""
    place, own, all_rows = (w.STATE, w.HEAD, 0), (w.column, w.width), w.levels * w.K
    is_whole = w.is_direct and w.width == w.width_lanes and w.c > 0
    begin, end = w.work, w.work
    if w.given and is_whole:
        begin = tokens_of(w.state, w.scale, place, all_rows, own)
    if w.has_end and is_whole:
        end = tokens_of(w.end, w.scale, place, all_rows, own)
    if w.given and not is_whole:
        load_levels(w, position)
    if w.c:
        load(w.v, (w.BATCH, w.HEAD, w.FIRST), own, w.values)
    for i in range(w.c):
        token(w, i, position + i, begin if i == 0 else end, end, True, w.predictions)
    for j in range(w.queries if w.c else 0):
        out = columns(rows(w.outs, j * w.c, w.c), 0, w.width)
        save(out, w.out, (w.BATCH, w.HEAD * w.queries + j, w.FIRST), own, w.factors)
    if w.has_end:
        save_levels(w, position, is_whole)


@piece
def load_levels(w: Work, position: Whole):
    """The levels that have tokens, of a block of columns."""
    for level in range(1, w.levels + 1):
        if has(position, level):
            at = (level - 1) * w.K
            load(w.state, (w.STATE, w.HEAD, at), (w.column, w.width), rows(w.work, at, w.K))


@piece
def save_levels(w: Work, position: Whole, is_there: Truth):
    """Save the levels after the last token, unless they were written in place; empty levels become 0."""
    after, own = position + w.c, (w.column, w.width)
    for level in range(1, w.levels + 1):
        at = (level - 1) * w.K
        if has(after, level):
            if not is_there:
                save(columns(rows(w.work, at, w.K), 0, w.width), w.end, (w.STATE, w.HEAD, at), own)
        elif has(position, level) or not w.in_place:
            clear(tokens_of(w.end, w.scale, (w.STATE, w.HEAD, at), w.K, own))


@piece
def advance(w: Work, first: Whole, last: Whole):
    """The positions after sequences first..last."""
    if is_refused(w):
        return
    for n in range(first, last):
        cut = row(w.sequences, n)
        words(address_of(w.end_position, (0, 0, cut[1]), 0), 1)[0] = position_of(w, n) + cut[3] - cut[2]
