"""Forward: a task is a block of time of one sequence, one head of the state and some of its columns, chunk by chunk."""

from __future__ import annotations

from ...ops.cpu.products import AT_ONCE, END, FIRST_LINE, NEXT
from ...ops.cpu.rows import clear
from ...ops.cpu.storage import load, save
from ...runtime.pieces.piece import Matrix, Stored, Vector, Whole, piece
from ...runtime.pieces.views import address_of, field_of, rows, tokens_of
from ...runtime.pieces.workspace import CHANNEL, TOKEN
from .averages import load_z, save_z
from .chunk import begin_chunk, begin_task, once, read, write, writes
from .systems import form, solve_rows
from .workspace import Work


@piece
def load_state(w: Work, x: Stored, state: Whole, S: Matrix, z: Vector, given: Whole):
    """S = a head's columns of a state, and z where outputs are averages; zeros where none is given, and beyond."""
    place = (state, w.HEAD, 0)
    if given:
        load(x, place, (w.COLUMN, w.V), rows(S, 0, w.K))
    else:
        clear(S)
    if w.averaged:
        load_z(x, place, w.V, z, given)


@piece
def begin_state(w: Work):
    """S before the task: the call's, or what another task has left."""
    if w.EARLIER:
        load_state(w, w.starts, w.FROM, w.S, w.z, 1)
    else:
        load_state(w, w.in_state, w.STATE, w.S, w.z, w.started)


@piece
def save_state(w: Work, S: Matrix, z: Vector, x: Stored, state: Whole):
    """A head's columns of a state = S, and the column behind its values = z where outputs are averages."""
    place = (state, w.HEAD, 0)
    save(rows(S, 0, w.K), x, place, (w.COLUMN, w.V))
    if w.averaged:
        save_z(z, x, place, w.V)


@piece
def prefetch(w: Work, x: Stored, head: Whole, first: Whole, count: Whole):
    """The lines of the next chunk's tokens, columns (first, count): products ask for some of them before each tile."""
    t, end, lines = w.t + w.c, w.lines[END], w.lines
    at, step = address_of(x, (w.BATCH, head, t), first), field_of(x, TOKEN)
    size = count * min(field_of(x, CHANNEL), w.S.itemsize)
    count = max(min(w.C, w.STOP - t), 0)
    for byte in range(0, size, 64):
        for i in range(count):
            lines[end + i] = at + i * step + byte
        end += count
    lines[END] = end


@piece
def prefetch_chunk(w: Work):
    """What the next chunk reads and writes."""
    w.lines[NEXT] = w.lines[END] = FIRST_LINE
    w.lines[AT_ONCE] = w.lines_at_once
    prefetch(w, w.in_k, w.HEAD, 0, w.given)
    prefetch(w, w.in_v, w.HEAD, w.COLUMN, w.V)
    if w.has_queries and w.queries == 1:
        prefetch(w, w.in_q, w.HEAD, 0, w.given)
        prefetch(w, w.out, w.HEAD, w.COLUMN, w.V)


@piece
def forward(w: Work, first: Whole, last: Whole):
    """Output and final state of the tasks first..last."""
    once(w)
    for n in range(first, last):
        begin_task(w, n)
        begin_state(w)
        w.t = w.FIRST
        while w.t < w.STOP:
            begin_chunk(w)
            if w.line_count:
                prefetch_chunk(w)
            writes(w)
            if w.formed:
                form(w)
            for j in range(w.HEAD * w.queries, (w.HEAD + 1) * w.queries if w.has_queries else 0):
                if w.iterations:
                    solve_rows(w, j)
                else:
                    read(w, w.S, j, tokens_of(w.out, w.scale, (w.BATCH, j, w.t), w.c, (w.COLUMN, w.V)))
            if not w.formed:
                write(w, w.S, w.z)
            w.t += w.c
        save_state(w, w.S, w.z, w.starts, w.TO)
        if w.AT:
            save_state(w, w.S, w.z, w.out_states, w.AT - 1)

