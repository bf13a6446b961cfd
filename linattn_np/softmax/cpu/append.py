"""Tokens are appended to a cache: token p to slot p mod L, in its own memory, or in that of a cache with more slots.

The log decay b of a token is the sum of those of the tokens after it. A task is a range of slots of one sequence, in
its own memory all of them; positions are those of the last L tokens, less than 0 where a slot is empty.
"""

from __future__ import annotations

from ...ops.cpu.numbers import number
from ...ops.cpu.rows import clear
from ...ops.cpu.storage import Place, load, load_column, save, save_column
from ...runtime.pieces.piece import Matrix, Stored, Whole, piece
from ...runtime.pieces.tiles import copy_row
from ...runtime.pieces.views import field_of, row, tokens_of
from ...runtime.pieces.workspace import AT, CHANNEL, SHARED, STORAGE, TOKENS
from .tile import COUNT, begin_task
from .workspace import Work

NOTHING, OLD, NEW = range(3)  # what a slot gets


@piece
def copy_tokens(w: Work, x: Stored, source: Place, y: Stored, to: Place, A: Matrix, width: Whole):
    """n tokens of a head to slots, by way of A where they are converted."""
    if field_of(x, STORAGE) == field_of(y, STORAGE) and field_of(x, CHANNEL) == field_of(y, CHANNEL):
        rows, slots = tokens_of(x, w.scale, source, w.n, (0, width)), tokens_of(y, w.scale, to, w.n, (0, width))
        for i in range(w.n):
            copy_row(row(rows, i), row(slots, i), width)
    else:
        load(x, source, (0, width), A)
        save(A, y, to, (0, width))


@piece
def write(w: Work, what: Whole, source: Whole, slot: Whole):
    """n slots of a head from `slot` on, once for the heads that share them; of tokens, or slots, from `source` on."""
    new, old, to = (w.BATCH, w.h, w.FIRST + source), (w.ROW, w.h, source), (w.ROW, w.h, slot)
    is_first_k, is_first_v = w.h % field_of(w.end_k, SHARED) == 0, w.h % field_of(w.end_v, SHARED) == 0
    if what == NEW:
        if is_first_k:
            copy_tokens(w, w.in_k, new, w.end_k, to, w.k, w.K)
        if is_first_v:
            copy_tokens(w, w.in_v, new, w.end_v, to, w.v, w.V)
    elif what == OLD:
        if is_first_k:
            copy_tokens(w, w.past_k, old, w.end_k, to, w.k, w.K)
        if is_first_v:
            copy_tokens(w, w.past_v, old, w.end_v, to, w.v, w.V)
    else:
        if is_first_k:
            clear(tokens_of(w.end_k, w.scale, to, w.n, (0, w.K)))
        if is_first_v:
            clear(tokens_of(w.end_v, w.scale, to, w.n, (0, w.V)))


@piece
def write_tokens(w: Work, seen: Whole, first: Whole, last: Whole):
    """k and v of the positions first..last, of which those from `seen` on are new; none but those in place."""
    L, p = field_of(w.end_v, TOKENS), first
    while p < last:
        slot, source, what = p % L, p - seen, NEW
        w.n = min(w.N, last - p, L - slot)
        if p < max(seen - w.L, 0):
            w.n, what = min(w.n, max(seen - w.L, 0) - p), NOTHING
        elif p < seen:
            source, what = p % w.L, OLD
            w.n = min(w.n, seen - p, w.L - source)
        if what == NEW or field_of(w.end_v, AT) != field_of(w.past_v, AT):
            for h in range(w.HEAD, w.HEAD + w.heads):
                w.h = h
                write(w, what, source, slot)
        p += w.n


@piece
def write_decays(w: Work, seen: Whole, first: Whole, last: Whole):
    """b of the positions first..last of a head: sums over the later tokens; b + g_1 + ... + g_T of old ones."""
    L, i = field_of(w.end_b, TOKENS), w.T
    end = tokens_of(w.end_b, w.scale, (w.ROW, w.h, 0), L, (0, 1))
    w.passed = 0.0
    while i > max(first - seen, 0):
        w.n = min(w.N, i)
        i -= w.n
        load_column(w.in_g, (w.BATCH, w.h, w.FIRST + i), w.g_n)
        for j in range(w.n - 1, -1, -1):
            p = seen + i + j
            if first <= p and p < last:
                end[p % L, 0] = number(w.end, w.passed)
            w.passed = w.passed + w.g_n[j]
    oldest = max(seen - w.L, 0)
    for p in range(first, min(oldest, last)):
        end[p % L, 0] = 0
    p = max(first, oldest)
    while p < min(seen, last):
        slot, source = p % L, p % w.L
        w.n = min(w.N, min(seen, last) - p, L - slot, w.L - source)
        load_column(w.past_b, (w.ROW, w.h, source), w.end)
        for j in range(w.n):
            w.end[j] = number(w.end, w.end[j] + w.passed)
        save_column(w.end, w.end_b, (w.ROW, w.h, slot))
        p += w.n


@piece
def append(w: Work, first: Whole, last: Whole):
    """The tasks first..last; the number of tokens is written with the last slot."""
    for n in range(first, last):
        begin_task(w, n)
        seen = COUNT
        if field_of(w.past_length, TOKENS):
            seen = tokens_of(w.past_length, COUNT, (w.ROW, 0, 0), 1, (0, 1))[0, 0]
        L = field_of(w.end_v, TOKENS)
        low, high = seen + w.T - L + w.FROM, seen + w.T - L + w.TO
        if w.gated:
            for h in range(w.HEAD, w.HEAD + w.heads, field_of(w.end_b, SHARED)):
                w.h = h
                write_decays(w, seen, low, high)
        write_tokens(w, seen, low, high)
        if w.TO == L:
            length = tokens_of(w.end_length, COUNT, (w.ROW, 0, 0), 1, (0, 1))
            length[0, 0] = seen + w.T
