"""Traversals of the chunks of a task, forward and backward.

Forward, a task is a block of time of one sequence, one head of the state and some of its columns. Backward, it is a
block of time and the heads of a group, whose gradients of shared inputs add up in their order: its chunks are
recomputed forward, the state and the writes of each are stored in a slot, and then they are traversed backward.
"""

from __future__ import annotations

from ...ops.cpu.products import FULL, product
from ...ops.cpu.rows import add, add_weighted_rows, clear, scale_rows
from ...ops.cpu.storage import load, save
from ...runtime.pieces.piece import Matrix, Stored, Vector, Whole, piece
from ...runtime.pieces.views import as_row, rows, tokens_of, transposed
from .averages import averages_vjp, load_z, save_z
from .chunk import begin_chunk, begin_task, load_queries, load_tokens, once, read, write, writes
from .chunk_vjp import chunk_vjp, read_rows
from .decay import decays
from .raw import add_past, load_gate, past_vjp
from .systems import factor, form, solve_exactly, solve_rows
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
    """S before the task: the call's, or the one that the task before has stored."""
    source, state, given = (w.starts, w.FROM, 1) if w.EARLIER else (w.in_state, w.STATE, w.started)
    load_state(w, source, state, w.S, w.z, given)
    if w.preceded and not w.EARLIER:
        add_past(w)


@piece
def save_state(w: Work, S: Matrix, z: Vector, x: Stored, state: Whole):
    """A head's columns of a state = S, and the column behind its values = z where outputs are averages."""
    place = (state, w.HEAD, 0)
    save(rows(S, 0, w.K), x, place, (w.COLUMN, w.V))
    if w.averaged:
        save_z(z, x, place, w.V)


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
            writes(w)
            if w.formed:
                form(w)
            if w.exact:
                factor(w)
            for j in range(w.HEAD * w.queries, (w.HEAD + 1) * w.queries if w.has_queries else 0):
                if w.exact:
                    solve_exactly(w, j)
                elif w.iterations:
                    solve_rows(w, j)
                else:
                    read(w, j, tokens_of(w.out, w.scale, (w.BATCH, j, w.t), w.c, (w.COLUMN, w.V)))
            if not w.formed:
                write(w, w.S, w.z)
            w.t += w.c
        save_state(w, w.S, w.z, w.starts, w.TO)
        if w.AT:
            save_state(w, w.S, w.z, w.out_states, w.AT - 1)


# backward


@piece
def block_vjp(w: Work):
    """The chunks of a task forward into slots, and back."""
    w.t, n, w.returning = w.FIRST, 0, 0
    while w.t < w.STOP:
        w.slot, w.slot_after = n, n + 1
        begin_chunk(w)
        writes(w)
        n += 1
        w.t += w.c
        if w.t < w.STOP:
            write(w, w.S_after, w.z_after)
    w.returning = 1
    while n:
        n -= 1
        w.slot, w.slot_after = n, n + 1
        w.t = w.FIRST + n * w.C
        begin_chunk(w)
        load_tokens(w)
        if w.vector or w.value_decay:
            decays(w)
        chunk_vjp(w)


@piece
def begin_gradient(w: Work):
    """dS after the task: the call's, or the one that the task after has stored."""
    source, state, given = (w.out_dstate, w.STATE, 1) if w.LATER else (w.in_dstate, w.STATE, w.has_dstate)
    if w.LATER and w.apart:
        source, state = w.ends, w.TO
    load_state(w, source, state, w.dS, w.dz, given)
    if w.AT:  # and the gradient of the state at the position that the task ends at; S and z are lost
        load_state(w, w.in_dstates, w.AT - 1, w.S, w.z, 1)
        add(w.S, w.dS)
        if w.averaged:
            add(as_row(w.z), as_row(w.dz))


@piece
def backward(w: Work, first: Whole, last: Whole):
    """Every gradient of the tasks first..last."""
    once(w)
    for n in range(first, last):
        begin_task(w, n)
        head = w.HEAD
        for h in range(head, head + w.group):
            w.HEAD, w.slot = h, 0
            if w.raw_gate:
                load_gate(w)
            if w.bonus:
                load(w.in_u, (0, h, 0), (0, w.K), w.u)
                clear(w.du)
                if w.LATER:
                    load(w.out_du, (0, h, w.STATE), (0, w.K), w.du)
            begin_gradient(w)
            begin_state(w)
            block_vjp(w)
            if w.preceded and not w.EARLIER:
                past_vjp(w)
            if w.apart == 0 or w.EARLIER == 0:
                save_state(w, w.dS, w.dz, w.out_dstate, w.STATE)
            if w.bonus:
                save(w.du, w.out_du, (0, h, w.STATE), (0, w.K))


# Where fewer heads than threads go backward: gradients of the states between the blocks of time, found first. Where
# nothing is erased, dS of the state before a chunk is carry(dS) + q^^T dout: a small part of a chunk's work, in which
# value columns do not meet. With dS known, and the states stored by the forward pass, the blocks are independent. These
# are the operations of chunk_vjp.py on dS, in its order, so their bits are the same.


@piece
def carry_gradient(w: Work, j: Whole):
    """dS += the rows of query head j^T c"""
    load_queries(w, j)
    load(w.in_dout, (w.BATCH, j, w.t), (w.COLUMN, w.V), w.dout)
    if w.averaged:
        averages_vjp(w, j)
    read_rows(w, w.q, w.query_reads, w.scales, 1.0)
    product(FULL, transposed(w.decayed), w.dout, w.dS, added=w.dS)
    if w.averaged:
        add_weighted_rows(w.weights, w.q, w.scale, w.dz)


@piece
def reverse(w: Work, first: Whole, last: Whole):
    """dS between blocks of time: a task loads dS of its end and stores dS of its beginning."""
    once(w)
    for n in range(first, last):
        begin_task(w, n)
        begin_gradient(w)
        if w.EARLIER:
            count = -(-(w.STOP - w.FIRST) // w.C)
            for i in range(count - 1, -1, -1):
                w.t = w.FIRST + i * w.C
                begin_chunk(w)
                decays(w)
                if w.decay:
                    scale_rows(w.dS, w.carry)
                for j in range(w.HEAD * w.queries, (w.HEAD + 1) * w.queries):
                    carry_gradient(w, j)
            save_state(w, w.dS, w.dz, w.ends, w.FROM)
