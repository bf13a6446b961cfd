"""The recurrent form: one token after the other, each in one pass over the state.

A task is one sequence, one head of the state and some of its value columns. With
S~ = diag(e^{g_t}) S_{t-1} diag(e^{gv_t})

    DELTA   w_t = beta_t (v_t - r_t S~)    (or r_t S_{t-1})     S_t = S~ + k_t^T w_t
    FREE    w_t = v_t, y_t = a_t S_{t-1}                        S_t = S~ + k_t^T w_t + b_t^T y_t
    out_t = scale q_t S_t     or     scale (q_t S_{t-1} + (q_t (.) u) k_t^T v_t)

or, of writes with weights, S_t = S~ + weight_t k_t^T v_t, out_t = scale (q_t S~ + own_t q_t k_t^T v_t), where S~ of the
first token is e^{g_1} (S_0 + past_k^T past_v).

The pass that makes S_t also reads it for everybody who reads S_t: q_t or q_{t+1}, and r_{t+1} with its own decay put
on its weights; of weights it reads S~ for q_t. So T tokens are T passes, after one that reads S_0 where somebody does,
and one token is two: the first brings a block of columns into the cache, the second finds it there. The state is read
from where it lies and written to where it belongs; between two tokens of a call it stays in a dense block. Queries and
keys may be features, and outputs averages:

    z_t = z_{t-1} + k_t        d_t = scale q_t z_t + eps        out_t = scale q_t S_t / d_t

z being a column of the state behind its values.
"""

from __future__ import annotations

from ...ops.cpu.numbers import number
from ...ops.cpu.rows import add, clear, exp_rows, fill, hadamard_to, scale_columns, scaled
from ...ops.cpu.storage import load, save, save_column
from ...runtime.pieces.piece import Matrix, Whole, piece
from ...runtime.pieces.registers import NARROW, WIDE
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.views import as_row, columns, row, rows, start_of, tokens_of
from ..policy import STEP_TOKENS as TOKENS
from .averages import load_z, save_z
from .chunk import begin_task
from .maps import map_rows
from .passes import read_pass, write_state
from .raw import load_rows, load_scalar_decays, load_strengths, load_vector_decays, weigh_slab
from .workspace import MONOMIALS, Work


@piece(of="map")
def load_features(w: Work):
    """The features of a slab's keys and queries. For one token, `group` heads are mapped at once: W is read once."""
    each, c, head, given, queries = w.c_rows, w.c, w.HEAD, (0, w.given), w.queries if w.has_queries else 0
    is_known = w.known_batch == w.BATCH and w.known_t == w.t and w.known_head <= head < w.known_head + w.known
    count = w.known if is_known else min(w.group, w.H - head)
    w.c_rows = count * each
    out = columns(w.phi, w.skipped, w.K_lanes) if w.map == MONOMIALS else w.mapped
    if not is_known:
        for h in range(head, head + count):  # rows of a head: its keys, then its queries
            first = (h - head) * each
            load(w.in_k, (w.BATCH, h, w.t), given, rows(w.x, first, c))
            for j in range(queries):
                load(w.in_q, (w.BATCH, h * queries + j, w.t), given, rows(w.x, first + (1 + j) * c, c))
        map_rows(w, w.x, w.lengths, w.phi, w.angles, out)
        if w.group > 1:
            w.known, w.known_batch, w.known_t, w.known_head = count, w.BATCH, w.t, head
    first = (head - w.known_head) * each if w.known else 0
    scaled(rows(out, first, c), None, w.keys)
    for j in range(queries):
        scaled(rows(out, first + (1 + j) * c, c), None, rows(w.query, j * c, c))
    w.c_rows = each


@piece(of="averaged")
def find_averages(w: Work):
    """z after the slab; averages = d_t of its queries, stored for the adjoint, then scale / d_t, 0 of 0."""
    queries = w.queries if w.has_queries else 0
    for i in range(w.c):
        add(rows(w.keys, i, 1), as_row(w.z))
        for j in range(queries):
            total = w.scale * dot(row(w.query, j * w.c + i), w.z, w.K_lanes) + w.eps
            w.query_sums[j, i] = total
            w.shares[j * w.c + i] = w.scale / total if total != 0 else number(w.shares, 0)
    for j in range(queries):
        save_column(row(w.query_sums, j), w.out_sums, (w.BATCH, w.HEAD * w.queries + j, w.t))


@piece
def load_slab(w: Work):
    """The K-wide vectors of c tokens from t on, as the passes take them."""
    place, all_K = (w.BATCH, w.HEAD, w.t), (0, w.K)
    if w.map:
        load_features(w)
    else:
        load_rows(w, w.in_k, w.HEAD, w.keys)
    if w.vector:  # e^g
        load_vector_decays(w, w.decays)
        exp_rows(w.decays)
    else:
        fill(w.factor, 1.0)
        if w.scalar:
            load_scalar_decays(w, w.factor)
            exp_rows(as_row(w.factor))
        for i in range(w.c):
            fill(row(w.decays, i), w.factor[i])
    if w.erase:  # r or a, times e^g where r reads the decayed state
        if w.separate_erase_key:
            load(w.in_r, place, all_K, w.reads)
        else:
            scaled(w.keys, None, w.reads)
        if w.decay and not w.erase_reads:
            hadamard_to(w.decays, w.reads)
    if w.delta:
        load_strengths(w)
    elif w.free:
        load(w.in_b, place, all_K, w.pushes)
    if w.has_queries and not w.map:
        for j in range(w.queries):
            load_rows(w, w.in_q, w.HEAD * w.queries + j, rows(w.query, j * w.c, w.c))
    if w.weighted:
        weigh_slab(w)
    if w.bonus:
        load_bonus(w)
    if w.averaged:
        find_averages(w)


@piece(of="bonus")
def load_bonus(w: Work):
    """(q (.) u) k^T of each query."""
    for i in range(w.c * w.queries):
        scale_columns(rows(w.query, i, 1), row(w.u, 0), as_row(w.predicted_weights))
        w.bonuses[i] = dot(w.predicted_weights, row(w.keys, i % w.c), w.K)


@piece
def answer(w: Work, S: Matrix, i: Whole, first: Whole):
    """out_t = scale (q_t S + bonus v) for token i of the slab; its first query has read S already if first = 1."""
    for j in range(w.queries):
        x = j * w.c + i
        if j >= first:
            w.q_row = x
            read_pass(w, S)
        if w.bonus or w.weighted:
            f, seen, values = w.bonuses[x], w.seen, w.values
            for d in range(len(seen)):
                seen[d] += f * values[d]
        if w.averaged:
            w.scales[0] = w.shares[x]
        place = (w.BATCH, w.HEAD * w.queries + j, w.t + i)
        save(columns(as_row(w.seen), 0, w.width), w.out, place, (w.column, w.width), w.scales)


@piece
def scan(w: Work, begin: Matrix, end: Matrix, packed: Matrix):
    """c tokens from t on over V columns, a block at most, from the state at `begin` to `end`."""
    early, late = w.has_queries and w.query_reads, w.has_queries and not w.query_reads
    if w.erase:
        w.q_row = -1
        read_pass(w, begin)
    if w.value_decay:  # e^gv
        load(w.in_gv, (w.BATCH, w.HEAD, w.t), (w.column, w.width), w.fade)
        exp_rows(w.fade)
    for i in range(w.c):
        S, to, last = begin if i == 0 else packed, end if i + 1 == w.c else packed, i + 1 == w.c
        load(w.in_v, (w.BATCH, w.HEAD, w.t + i), (w.column, w.width), as_row(w.values))
        if w.delta:  # w = beta (v - prediction)
            beta, values, predicted, written = w.beta[i], w.values, w.predicted, w.written
            for d in range(len(written)):
                written[d] = beta * (values[d] - predicted[d])
        if early:
            answer(w, S, i, 0 if i == 0 else 1)
        w.i, w.is_last, w.q_row = i, last, -1  # q_row: who reads S_t, this token's query or the next one's
        if late or (early and not last):
            w.q_row = i if late else i + 1
        write_state(w, S, to)
        if late:
            answer(w, to, i, 1)


@piece
def step_block(w: Work, begins: Whole):
    """c tokens over one block. The state is read and written in place where the block is whole, else through a copy."""
    place, own = (w.TO, w.HEAD, 0), (w.column, w.width)
    first, given, direct, packed = (w.STATE, w.HEAD, 0), w.started, w.direct, w.packed
    if w.EARLIER or not begins:  # the state that the segment or slab before has stored
        first, given, direct = (w.FROM if begins else w.TO, w.HEAD, 0), 1, 1
    source = w.starts if w.EARLIER or not begins else w.in_state
    final, whole = tokens_of(w.starts, w.scale, place, w.K, own), packed.shape[1] == w.width
    there = tokens_of(source, w.scale, first, w.K, own) if given else final
    usable = whole and given and direct
    begin, end = there if usable else packed, final if whole else packed
    if given and not usable:
        load(source, first, own, packed)
    elif not given:
        clear(packed)
    w.following = start_of(begin, w.K) + (w.K - 1) * w.column * packed.itemsize
    if w.c:
        scan(w, begin, end, packed)
    after = end if w.c else begin
    if start_of(after, 0) != start_of(final, 0):
        save(columns(after, 0, w.width), w.starts, place, own)
    if w.AT:
        save(columns(after, 0, w.width), w.out_states, (w.AT - 1, w.HEAD, 0), own)


@piece
def step_sequence(w: Work):
    """A sequence: its tokens slab by slab, its columns block by block: wide ones while they last."""
    end, wide, narrow = w.COLUMN + w.V, WIDE * w.lane, NARROW * w.lane
    if w.averaged:
        source, state, given = (w.starts, w.FROM, 1) if w.EARLIER else (w.in_state, w.STATE, w.started)
        load_z(source, (state, w.HEAD, 0), w.V, w.z, given)
    for t in range(w.FIRST, max(w.STOP, w.FIRST + 1), TOKENS):
        w.t, w.c = t, min(w.STOP - t, TOKENS)
        w.c_queries = w.c * w.queries
        w.c_rows = w.c + (w.c_queries if w.has_queries else 0)
        if w.c:
            load_slab(w)
        w.column = w.COLUMN
        while w.column < end:
            w.wide = 1 if end - w.column >= wide else 0
            w.width_lanes = wide if w.wide else narrow
            w.width = min(end - w.column, w.width_lanes)
            step_block(w, 1 if t == w.FIRST else 0)
            w.column += w.width
    if w.averaged:
        save_z(w.z, w.starts, (w.TO, w.HEAD, 0), w.V)
        if w.AT:
            save_z(w.z, w.out_states, (w.AT - 1, w.HEAD, 0), w.V)


@piece
def step(w: Work, first: Whole, last: Whole):
    """Output and final state of the tasks first..last."""
    w.c = 1
    w.scales[0] = w.scale
    clear(as_row(w.nobody))
    if w.map:
        load(w.in_numbers, (0, 0, 0), (0, len(w.map_numbers)), as_row(w.map_numbers))
    for n in range(first, last):
        begin_task(w, n)
        step_sequence(w)
