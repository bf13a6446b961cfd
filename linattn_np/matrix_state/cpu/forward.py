"""Forward: a task is a strip of one sequence, one head of the state and some of its value columns, chunk by chunk."""

from __future__ import annotations

import functools

from .chunk import Cell, Chunk
from .interpreter.program import COLUMN, EARLIER, FIRST, FROM, HEAD, STATE, STOP, TO, WIDTH, Program
from .table import IN_K, IN_Q, IN_STATE, IN_V, OUT, STARTS


@functools.lru_cache(256)
def forward_program(cell: Cell) -> Program:
    """Output and final state."""
    p = Program(cell.dtype)
    x, S, zero = Chunk(p, cell), p.matrix(cell.K, cell.V), p.literal(0)
    x.once()
    x.load_bonus()
    with p.only_if(EARLIER, x.one):
        if cell.started:
            p.state(S, IN_STATE, STATE, HEAD, x.K, COLUMN, WIDTH)
        else:
            p.clear(S, zero, x.K, WIDTH)
    with p.only_if(zero, EARLIER):
        p.state(S, STARTS, FROM, HEAD, x.K, COLUMN, WIDTH)
    if x.weights_sum is not None:
        x.weights_sum.load(x)
    p.add(x.t, FIRST, zero)
    with p.only_if(x.t, STOP):
        top = p.here()
        x.begin()
        x.expect(IN_K, IN_V, *((IN_Q, OUT) if cell.asked and cell.queries == 1 else ()))
        x.writers()
        x.decays()
        if x.N:
            x.erase(S, x.system())
        if cell.asked:
            x.each_query(lambda j: x.read(S, j))
        x.write(S, S)
        if x.weights_sum is not None:
            x.weights_sum.write(x)
        p.add(x.t, x.t, x.c)
        p.less(x.t, STOP, top)
    p.store_state(S, STARTS, TO, HEAD, x.K, COLUMN, WIDTH)
    if x.weights_sum is not None:
        x.weights_sum.store(x)
    return p
