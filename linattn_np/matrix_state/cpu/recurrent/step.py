"""The recurrent form: one token after the other, each in one pass over the state.

A task is one sequence, one head of the state and some of its value columns. With
S~ = diag(e^{g_t}) S_{t-1} diag(e^{gv_t})

    DELTA   w_t = beta_t (v_t - r_t S~)    (or r_t S_{t-1})     S_t = S~ + k_t^T w_t
    FREE    w_t = v_t, y_t = a_t S_{t-1}                        S_t = S~ + k_t^T w_t + b_t^T y_t
    out_t = scale q_t S_t     or     scale (q_t S_{t-1} + (q_t (.) u) k_t^T v_t)

the pass that makes S_t also reads it for everybody who reads S_t: q_t or q_{t+1}, and r_{t+1} with its own decay put
on its weights. So T tokens are T passes, after one that reads S_0, and one token is two: the first brings a block of
columns into the cache, the second finds it there. The state is read from where it lies and written to where it
belongs; between two tokens of a call it stays in a dense block.
"""

from __future__ import annotations

from numba import types

from ....ops.cpu.array_calls import array_calls
from ....ops.cpu.rows import clear, exp_rows, hadamard_to, scale_rows, scaled
from ....ops.cpu.storage import load, load_column, save
from ....runtime.pieces.passes import NARROW, WIDE, read_pass, rotate_pass, write_pass
from ....runtime.pieces.piece import Column, Kind, Matrix, Whole, piece
from ....runtime.pieces.row_tiles import copy_row, dot
from ....runtime.pieces.views import (
    address_of,
    as_row,
    columns,
    point,
    repeated,
    row,
    rows_by,
    start_of,
    table_of,
    tokens_of,
    words,
    workspace_at,
)
from ...policy import STEP_TOKENS as TOKENS
from ..averages import load_z, save_z
from ..table import FIRST as FIRST_TOKEN
from ..table import STATE, STOP, TO
from ..workspace import DELTA, FREE, SCALAR, VECTOR
from .features import find_averages, load_features
from .step_workspace import ARRAY_SLOTS, SIZE, TABLE_BYTES, VALUES, Steps

one_reads, two_read = write_pass(1), write_pass(2)
one_reads_faded = write_pass(1, fades=True)
one_reads_pushed, two_read_pushed = write_pass(1, pushes=True), write_pass(2, pushes=True)
Rows, Reads = (Kind(lambda f, n=n: types.UniTuple(f[::1], n)) for n in (5, 4))  # see passes.py


@piece
def load_slab(w: Steps):
    """The K-wide vectors of c tokens from t on, as the passes take them."""
    place, all_K = (w.batch, w.head, w.t), (0, w.K)
    if w.map:
        load_features(w)
    else:
        load(w.in_k, place, all_K, w.keys)
    if w.decay:  # e^g
        decays = w.decays if w.decay == VECTOR else columns(w.decays, 0, 1)
        load(w.in_g, place, (0, w.K if w.decay == VECTOR else 1), decays)
        exp_rows(decays)
    else:
        w.decays[0, 0] = 1
    if w.erase:  # r or a, times e^g where r reads the decayed state
        if w.separate_erase_key:
            load(w.in_r, place, all_K, w.reads)
        else:
            scaled(w.keys, None, w.reads)
        if not w.erase_reads and w.decay == VECTOR:
            hadamard_to(w.decays, w.reads)
        elif not w.erase_reads and w.decay == SCALAR:
            for i in range(w.c):
                w.numbers[i] = w.decays[i, 0]
            scale_rows(w.reads, w.numbers)
    if w.erase == DELTA:
        load_column(w.in_beta, place, w.beta)
    elif w.erase == FREE:
        load(w.in_b, place, all_K, w.pushes)
    if w.has_queries and not w.map:
        for j in range(w.queries):
            out = rows_by(w.query, j, w.queries, w.c)
            load(w.in_q, (w.batch, w.head * w.queries + j, w.t), all_K, out)
    if w.bonus:
        load_bonus(w)
    if w.averaged:
        find_averages(w)


@piece(of="bonus")
def load_bonus(w: Steps):
    """(q (.) u) k^T of each query."""
    load(w.in_u, (0, w.head, 0), (0, w.K), as_row(w.u))
    for i in range(w.c * w.queries):
        q, k, qu = row(w.query, i), row(w.keys, i // w.queries), w.predicted_weights
        for d in range(len(qu)):
            qu[d] = q[d] * w.u[d]
        w.bonuses[i] = dot(qu, k, w.K)


@piece
def write_state(w: Steps, S: Matrix, to: Matrix):
    """The pass of token i that is the call's; behind the last token nobody reads with r."""
    decay = repeated(row(w.decays, w.i if w.decay else 0), 1 if w.decay == VECTOR else 0)
    written = w.written if w.erase == DELTA else w.values
    alone = w.erase == 0 or w.last
    q, r = row(w.query, w.q_row) if w.q_row >= 0 else w.nobody, w.nobody if alone else row(w.reads, w.i + 1)
    given, reads = (row(w.keys, w.i), written, w.seen, w.seen, w.predicted), (q, w.seen, r, w.predicted)
    if w.value_decay:
        write_faded(w, S, to, decay, given, reads)
    elif w.rotates and w.last and w.t + w.c == w.stop:
        write_rotated(w, S, to, decay, given, reads)
    elif w.erase == FREE:
        write_free(w, S, to, decay, given, reads)
    elif alone:
        one_reads(S, to, decay, given, reads, w.following, w.wide)
    else:
        two_read(S, to, decay, given, reads, w.following, w.wide)


@piece(of="value_decay")
def write_faded(w: Steps, S: Matrix, to: Matrix, decay: Column, given: Rows, reads: Reads):
    """With a decay on the value axis."""
    given = (given[0], given[1], row(w.fade, w.i), given[3], given[4])
    one_reads_faded(S, to, decay, given, reads, w.following, w.wide)


@piece(of="rotates")
def write_rotated(w: Steps, S: Matrix, to: Matrix, decay: Column, given: Rows, reads: Reads):
    """The last pass, which rotates what it writes."""
    rotated = given[0], given[1], row(w.rotation, 0), row(w.rotation, 1)
    rotate_pass(S, to, decay, rotated, reads, w.following, w.wide)


@piece(of="free")
def write_free(w: Steps, S: Matrix, to: Matrix, decay: Column, given: Rows, reads: Reads):
    """With two writes."""
    given = (given[0], given[1], given[2], row(w.pushes, w.i), given[4])
    if w.last:
        one_reads_pushed(S, to, decay, given, reads, w.following, w.wide)
    else:
        two_read_pushed(S, to, decay, given, reads, w.following, w.wide)


@piece
def answer(w: Steps, S: Matrix, i: Whole, first: Whole):
    """out_t = scale (q_t S + bonus v) for token i of the slab; its first query has read S already if first = 1."""
    for j in range(w.queries):
        x = i * w.queries + j
        if j >= first:
            read_pass(S, row(w.query, x), w.seen, w.following, w.wide)
        if w.bonus:
            f, seen, values = w.bonuses[x], w.seen, w.values
            for d in range(len(seen)):
                seen[d] += f * values[d]
        if w.averaged:
            w.scales[0] = w.averages[x]
        place = (w.batch, w.head * w.queries + j, w.t + i)
        save(columns(as_row(w.seen), 0, w.V), w.out, place, (w.column, w.V), w.scales)


@piece
def load_values(w: Steps, i: Whole):
    """v of token i, where it lies if it is a whole block of numbers side by side."""
    place = (w.batch, w.head, w.t + i)
    if w.direct_v and len(w.values) == w.V:
        point(w, VALUES, address_of(w.in_v, place, w.column), w.values.itemsize)
    else:
        point(w, VALUES, start_of(w.values_own, 0), w.values.itemsize)
        if w.direct_v:
            copy_row(row(tokens_of(w.in_v, w.scale, place, 1, (w.column, w.V)), 0), w.values, w.V)
        else:
            load(w.in_v, place, (w.column, w.V), as_row(w.values))


@piece
def scan(w: Steps, begin: Matrix, end: Matrix, packed: Matrix):
    """c tokens from t on over V columns, a block at most, from the state at `begin` to `end`."""
    early, late = w.has_queries and w.query_reads, w.has_queries and not w.query_reads
    if w.erase:
        read_pass(begin, row(w.reads, 0), w.predicted, w.following, w.wide)
    if w.value_decay:  # e^gv
        load(w.in_gv, (w.batch, w.head, w.t), (w.column, w.V), w.fade)
        exp_rows(w.fade)
    for i in range(w.c):
        S, to, last = begin if i == 0 else packed, end if i + 1 == w.c else packed, i + 1 == w.c
        load_values(w, i)
        if w.erase == DELTA:  # w = beta (v - what is predicted)
            beta, values, predicted, written = w.beta[i], w.values, w.predicted, w.written
            for d in range(len(written)):
                written[d] = beta * (values[d] - predicted[d])
        if early:
            answer(w, S, i, 0 if i == 0 else 1)
        w.i, w.last, w.q_row = i, last, -1  # q_row: who reads S_t, this token's query or the next one's
        if late or (early and not last):
            w.q_row = (i if late else i + 1) * w.queries
        write_state(w, S, to)
        if late:
            answer(w, to, i, 1)


@piece
def step_block(w: Steps, begins: Whole):
    """c tokens over one block, from where the state lies, or a copy, or zeros, to where it belongs."""
    first, place, own = (w.from_state, w.head, 0), (w.to_state, w.head, 0), (w.column, w.V)
    packed = w.packed
    final = tokens_of(w.out_state, w.scale, place, w.K, own)
    there = tokens_of(w.in_state, w.scale, first, w.K, own) if begins and w.started else final
    whole = packed.shape[1] == w.V
    usable = whole and (not begins or (w.started and w.direct))
    begin, end = there if usable else packed, final if whole else packed
    if not usable:
        if begins and w.started:
            load(w.in_state, first, own, packed)
        elif begins:
            clear(packed)
        else:
            load(w.out_state, place, own, packed)
    w.following = start_of(begin, w.K) + (w.K - 1) * w.column * w.packed.itemsize
    if w.c:
        scan(w, begin, end, packed)
    made = end if w.c else begin
    if start_of(made, 0) != start_of(final, 0):
        save(columns(made, 0, w.V), w.out_state, place, own)


@piece
def step_sequence(w: Steps, n: Whole, head: Whole, first_column: Whole):
    """A sequence: its tokens slab by slab, its columns block by block: wide ones while they last."""
    sequence = row(w.sequences, n)
    start, stop = sequence[FIRST_TOKEN], sequence[STOP]
    w.stop = stop
    w.batch, w.head = sequence[0], head
    w.from_state, w.to_state = sequence[STATE], sequence[TO]
    last_column = min(first_column + w.columns, w.V_all)
    wide, narrow = WIDE * w.lane, NARROW * w.lane
    if w.averaged:
        load_z(w.in_state, (w.from_state, w.head, 0), w.V_all, w.z, w.started)
    for t in range(start, max(stop, start + 1), TOKENS):
        w.t, w.c = t, min(stop - t, TOKENS)
        w.c_queries = w.c * w.queries
        w.c_rows = w.c + (w.c_queries if w.has_queries else 0)
        if w.c:
            load_slab(w)
        column = first_column
        while column < last_column:
            w.wide = 1 if last_column - column >= wide else 0
            w.block = wide if w.wide else narrow
            w.column, w.V = column, min(last_column - column, w.block)
            step_block(w, 1 if t == start else 0)
            column += w.V
    if w.averaged:
        save_z(w.z, w.out_state, (w.to_state, w.head, 0), w.V_all)


@piece
def describe(w: Steps, told: Whole) -> Whole:
    """Add where the arrays lie to their offsets; 1 if what is overwritten shares memory with what is read.

    told: addresses of addresses; the one after `read_count` is what is overwritten.
    """
    table, given = words(table_of(w), SIZE), words(told, w.handle_count)
    for n in range(len(w.sources)):
        if w.sources[n] >= 0:
            table[ARRAY_SLOTS[0] + n * ARRAY_SLOTS[1]] += words(given[w.sources[n]], 1)[0]
    if w.read_count == 0:
        return 0
    at = words(given[w.read_count], 1)[0]
    low, high = at + w.extents[w.read_count, 0], at + w.extents[w.read_count, 1]
    for n in range(w.read_count):
        at = words(given[n], 1)[0]
        if at + w.extents[n, 0] < high and low < at + w.extents[n, 1]:
            return 1
    return 0


@piece
def step_tasks(w: Steps, told: Whole, base: Whole, first: Whole, last: Whole):
    """Tasks first..last of (sequence, head, column block), the last running fastest, in memory from `base` on.

    w is copied there. Where the state that is overwritten shares memory with one of the arrays that are read, nothing
    is done but to write 1 behind the handles.
    """
    template, table = words(table_of(w), SIZE), words(base, SIZE)
    for n in range(SIZE):
        table[n] = template[n]
    own = w.own
    for n in range(len(own)):
        table[own[n]] += base + TABLE_BYTES
    w = workspace_at(w, base)
    if describe(w, told):
        words(told, w.handle_count + 1)[w.handle_count] = 1
        return
    w.scales[0] = w.scale
    clear(as_row(w.nobody))
    if w.map:
        load(w.in_numbers, (0, 0, 0), (0, len(w.map_numbers)), as_row(w.map_numbers))
    if w.rotates:
        load(w.in_rotation, (0, 0, 0), (0, w.pairs), w.rotation)
    for task in range(first, last):
        state = task // w.blocks
        step_sequence(w, state // w.H, state % w.H, task % w.blocks * w.columns)


@piece
def step_between(w: Steps, told: Whole, base: Whole, last: Whole, before: Whole, after: Whole, buffer: Whole):
    """All tasks, between array calls: before and after are addresses of (table, rows)."""
    first, then = words(before, 2), words(after, 2)
    array_calls(first[0], first[1], told, buffer)
    step_tasks(w, told, base, 0, last)
    if not words(told, w.handle_count + 1)[w.handle_count]:
        array_calls(then[0], then[1], told, buffer)
