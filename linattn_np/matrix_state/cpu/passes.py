"""One pass over a block of columns of a state: each of its rows is decayed, written to and read once.

A block is a few vectors wide. The values to write and the sums of the reads stay in registers while the loop goes down
the K rows. Each element read is one chain of fused multiply-adds over the rows, in every kind of pass and at every
width: reads of the same state with the same weights have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ops.cpu.storage import load as load_rows
from ...runtime.pieces.piece import Matrix, piece
from ...runtime.pieces.registers import LINE, NARROW, WIDE, fma, registers, store
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import as_row, prefetch_line, row
from .workspace import Work


def block_pass(name: str, build: Callable[..., Any], of: str = "", **how: Any) -> Any:
    """A pass of wide and of narrow blocks, build(L, ahead, **how).

    ahead: bytes that a pass prefetches for each row, from `following` on: half a row of a wide block, else none.
    """

    def named(body: Any, width: str) -> Any:
        body.__name__ = name + width
        return piece(body, of=of)

    wide = named(build(WIDE, WIDE * BYTES // 2, **how), "_wide")
    narrow = named(build(NARROW, 0, **how), "_narrow")

    def either(w: Work, S: Matrix, to: Matrix = None):
        if w.wide:
            wide(w, S, to)
        else:
            narrow(w, S, to)

    return named(either, "")


def _read(L: int, ahead: int) -> Any:
    zeros, load = registers(L)

    def read(w: Work, S: Matrix, to: Matrix = None):
        """seen = q S of a row of queries; without one: predicted = r S."""
        x, out = (row(w.query, w.q_row), w.seen) if w.q_row >= 0 else (row(w.reads, 0), w.predicted)
        following, sums = w.following, zeros(S)
        for i in range(len(S)):
            for byte in range(0, ahead, LINE):
                prefetch_line(following + i * ahead + byte)
            sums = fma(x[i], load(row(S, i), 0), sums)
        store(sums, out, 0)

    return read


def _write(L: int, ahead: int, readers: int = 1, fades: bool = False, pushes: bool = False,
           before: bool = False) -> Any:  # fmt: skip
    """The pass of a token that is written: read by its query, or by that and the next token.

    before: the query reads the state before k^T w is added.
    """
    zeros, load = registers(L)

    def write(w: Work, S: Matrix, to: Matrix = None):
        """to = diag(decay) S diag(fade) + k^T w + b^T y, seen = q to, predicted = r to"""
        K = len(S)
        following, seen, predicted = w.following + K * ahead, zeros(S), zeros(S)
        k, decay = row(w.keys, w.i), row(w.decays, w.i)
        q, r = row(w.query, w.q_row) if w.q_row >= 0 else w.nobody, row(w.reads, w.i + 1 if readers == 2 else w.i)
        new, fade = load(w.written if w.delta else w.values, 0), load(row(w.fade, w.i), 0)
        b, y = row(w.pushes, w.i), load(w.predicted, 0)
        for i in range(K):
            for byte in range(0, ahead, LINE):
                prefetch_line(following + i * ahead + byte)
            s = load(row(S, i), 0)
            if fades:
                s = s * fade
            if before:
                s = decay[i] * s
                if pushes:
                    s = fma(b[i], y, s)
                seen = fma(q[i], s, seen)
                s = fma(k[i], new, s)
            else:
                s = fma(k[i], new, decay[i] * s)
                if pushes:
                    s = fma(b[i], y, s)
                seen = fma(q[i], s, seen)
            store(s, row(to, i), 0)
            if readers == 2:
                predicted = fma(r[i], s, predicted)
        store(seen, w.seen, 0)
        if readers == 2:
            store(predicted, w.predicted, 0)

    return write


read_pass = block_pass("read", _read)
one_reads, two_read = block_pass("one_reads", _write), block_pass("two_read", _write, readers=2)
one_reads_faded = block_pass("one_reads_faded", _write, "value_decay", fades=True)
one_reads_pushed = block_pass("one_reads_pushed", _write, "free", pushes=True)
two_read_pushed = block_pass("two_read_pushed", _write, "free", readers=2, pushes=True)
one_weighted = block_pass("one_weighted", _write, "weighted", before=True)
first_weighted = block_pass("first_weighted", _write, "preceded", pushes=True, before=True)


@piece
def write_state(w: Work, S: Matrix, to: Matrix):
    """The pass of token i for this kind of call. No token follows the last one, so nothing is read with r after it."""
    alone = not w.erase or w.is_last
    if w.preceded and w.t + w.i == w.FIRST and not w.EARLIER:
        load_rows(w.in_past_v, (w.STATE, w.HEAD, 0), (w.column, w.width), as_row(w.predicted))
        first_weighted(w, S, to)
    elif w.weighted:
        one_weighted(w, S, to)
    elif w.value_decay:
        one_reads_faded(w, S, to)
    elif w.free and alone:
        one_reads_pushed(w, S, to)
    elif w.free:
        two_read_pushed(w, S, to)
    elif alone:
        one_reads(w, S, to)
    else:
        two_read(w, S, to)
