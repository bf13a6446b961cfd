"""Tokens are appended to a cache in its own memory: token p to slot p mod L. A task is one sequence."""

from __future__ import annotations

from ...ops.cpu.storage import load, save
from ...runtime.pieces.piece import Whole, piece
from ...runtime.pieces.views import field_of, tokens_of
from ...runtime.pieces.workspace import SHARED
from .tile import COUNT, begin_task
from .workspace import Work


@piece
def write_tokens(w: Work, slot: Whole):
    """n tokens of a head from token i on, to the slots from `slot` on, once for the heads that share them."""
    place, to = (w.BATCH, w.h, w.FIRST + w.i), (w.ROW, w.h, slot)
    if w.h % field_of(w.past_k, SHARED) == 0:
        load(w.in_k, place, (0, w.K), w.k)
        save(w.k, w.past_k, to, (0, w.K))
    if w.h % field_of(w.past_v, SHARED) == 0:
        load(w.in_v, place, (0, w.V), w.v)
        save(w.v, w.past_v, to, (0, w.V))


@piece
def append(w: Work, first: Whole, last: Whole):
    """The tasks first..last; the number of tokens is changed when all heads are written."""
    for n in range(first, last):
        begin_task(w, n)
        length = tokens_of(w.past_length, COUNT, (w.ROW, 0, 0), 1, (0, 1))
        for h in range(w.HEAD, w.HEAD + w.heads):
            w.h, w.i = h, max(0, w.T - w.L)
            while w.i < w.T:
                slot = (length[0, 0] + w.i) % w.L
                w.n = min(w.N, w.T - w.i, w.L - slot)
                write_tokens(w, slot)
                w.i += w.n
        length[0, 0] += w.T
