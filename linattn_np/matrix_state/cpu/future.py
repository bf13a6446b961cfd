"""Where fewer heads than threads go backward: what the future asks of the state at the end of each strip, found first.

Where nothing is erased, dS of the incoming state is carry(dS) + q^^T dout, chunk after chunk: a small part of a chunk's
work, and value columns do not meet in it. With dS known between strips, and the states kept by the forward pass, strips
are independent. These are the operations of numba_backward.py on dS, in its order, so their bits are the same.
"""

from __future__ import annotations

import functools

from ...runtime.compiled.tiles import FULL
from ..types import Decay
from .chunk import Cell, Chunk
from .interpreter.program import (
    COLUMN,
    EARLIER,
    FIRST,
    FROM,
    HEAD,
    LATER,
    ONE,
    SCALE,
    STOP,
    TO,
    TURNED,
    WIDTH,
    Program,
)
from .slots import begin_states
from .sums import SumsPull
from .table import ENDS, IN_DOUT, IN_DSTATE, IN_Q


@functools.lru_cache(256)
def future_program(cell: Cell, dstate: bool) -> Program:
    """dS between strips: a task takes that of its end and leaves that of its beginning."""
    p = Program(cell.dtype)
    x, dS, zero, one, C = Chunk(p, cell), p.matrix(cell.K, cell.V), p.literal(0), p.literal(1), p.literal(cell.C)
    averaging = SumsPull(p, cell) if cell.averaged else None
    parts = [(dS, COLUMN, WIDTH)] + ([] if averaging is None else [(averaging.dz, WIDTH, one)])
    x.once()
    begin_states(p, parts, x.K, LATER, IN_DSTATE if dstate else None, (ENDS, TO))
    with p.only_if(zero, EARLIER):
        p.add(x.t, FIRST, zero)
        top = p.here()  # the last chunk's first token
        p.add(x.t, x.t, C)
        p.less(x.t, STOP, top)
        back = p.here()
        p.minus(x.t, x.t, C)
        x.begin()
        x.decays()
        if cell.decay is not Decay.NONE:
            p.copy(dS, x.K, WIDTH, dS, x.carry)

        def ask(j: int) -> None:
            q = x.take(IN_Q, cell.K, j)
            cotangent = x.take(IN_DOUT, cell.V, j, COLUMN, WIDTH) if averaging is None else averaging.ask(x, j)
            hat, factors = x.reader(q, cell.early_query), x.reach(cell.early_query, SCALE)
            hat, rows = x.asking(hat, factors)
            p.multiply(hat, cotangent, x.K, WIDTH, x.c, dS, rows, FULL + TURNED, added=dS, added_rows=ONE)
            if averaging is not None:
                averaging.read_pull(q, x.c)

        x.each_query(ask)
        p.less(FIRST, x.t, back)
        for part, column, columns in parts:
            p.store_state(part, ENDS, FROM, HEAD, x.K, column, columns)
    return p
