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

from ...pieces.numba_fetch import answer_row, copy_rows, error_row, fetch, fill, times_row
from ...pieces.numba_jit import apart, jit, kernel, part
from ...pieces.numba_lanes import exp_row
from ...pieces.numba_state import (
    BLOCK,
    Reader,
    State,
    Token,
    erase_block,
    fade_block,
    push_block,
    read_block,
    write_block,
)
from ...pieces.numba_tiles import line, size_of
from ..numba_decay import NO_DECAY, VECTOR
from .numba_step_table import (
    BETA,
    BONUS,
    DECAYS,
    FADE,
    KEYS,
    NOTHING,
    PACKED,
    PUSHES,
    QUERY,
    READS,
    RECALLED,
    SEEN,
    VALUES,
    WRITTEN,
    U,
)
from .numba_table import (
    ASKED,
    AT,
    BATCH,
    BLOCKS,
    CHUNK,
    COLUMNS,
    DECAY,
    DELTA,
    DIRECT,
    EARLY_QUERY,
    EARLY_READ,
    ERASE,
    FREE,
    HEAD,
    HEADS,
    IN_BETA,
    IN_BONUS,
    IN_FADE,
    IN_G,
    IN_K,
    IN_PUSH,
    IN_Q,
    IN_READ,
    IN_STATE,
    IN_V,
    N_K,
    N_V,
    NO_ERASE,
    OUT,
    OUT_STATE,
    OWN_READ,
    QUERIES,
    STARTED,
    TOKEN,
    WITH_BONUS,
    WITH_FADE,
)


@part
def _load_slab(one, arrays, n, w, base, batch, head, t, c):
    """The K-wide vectors of c tokens from t on, as the passes take them."""
    K, size = n[N_K], size_of(one)
    keys, decays, reads, bonus = base + w[KEYS, 0], base + w[DECAYS, 0], base + w[READS, 0], base + w[BONUS, 0]
    row, per = w[KEYS, 1], n[QUERIES]
    fetch(one, arrays, IN_K, batch, t, head, 0, c, K, keys, row)
    if n[DECAY] == NO_DECAY:
        fill(one, one, decays, 1)
    else:  # e^g
        width = K if n[DECAY] == VECTOR else 1
        fetch(one, arrays, IN_G, batch, t, head, 0, c, width, decays, row)
        for i in range(c):
            exp_row(one, decays + i * row, width)
    if n[ERASE] != NO_ERASE:  # r or a, times e^g where r reads the decayed state
        if n[OWN_READ]:
            fetch(one, arrays, IN_READ, batch, t, head, 0, c, K, reads, row)
        else:
            copy_rows(one, keys, row, reads, row, c, K)
        if not n[EARLY_READ] and n[DECAY] != NO_DECAY:
            for i in range(c):
                times_row(one, reads + i * row, decays + i * row, n[DECAY] == VECTOR, reads + i * row, K)
    if n[ERASE] == DELTA:
        fetch(one, arrays, IN_BETA, batch, t, head, 0, c, 1, base + w[BETA, 0], size)
    elif n[ERASE] == FREE:
        fetch(one, arrays, IN_PUSH, batch, t, head, 0, c, K, base + w[PUSHES, 0], row)
    if n[ASKED]:
        for j in range(per):
            fetch(one, arrays, IN_Q, batch, t, head * per + j, 0, c, K, base + w[QUERY, 0] + j * row, per * row)
    for i in range(c * per if n[WITH_BONUS] else 0):  # (q (.) u) k^T
        fetch(one, arrays, IN_BONUS, 0, 0, head, 0, 1, K, base + w[U, 0], row)
        u, k = line(one, base + w[U, 0], K), line(one, keys + i // per * row, K)
        q, total = line(one, base + w[QUERY, 0] + i * row, K), one - one
        for d in range(K):
            total += q[d] * u[d] * k[d]
        line(one, bonus, i + 1)[i] = total


@jit
def _answer(one, scale, arrays, n, w, base, S, first, batch, head, t, i, column, V):
    """out_t = scale (q_t S + bonus v) for token t, i of its slab; its first query has read S already if first = 1."""
    apart()
    size, row, seen, values = size_of(one), w[KEYS, 1], base + w[SEEN, 0], base + w[NOTHING, 0]
    per, at, bonus = n[QUERIES], base + w[QUERY, 0] + i * n[QUERIES] * w[KEYS, 1], one - one
    for j in range(per):
        if j >= first:
            read_block(one, S, Reader(at + j * row, seen), n[N_K])
        if n[WITH_BONUS]:
            x = i * per + j
            bonus, values = line(one, base + w[BONUS, 0], x + 1)[x], base + w[VALUES, 0]
        answer_row(one, scale, seen, bonus, values, V)
        a = arrays[OUT]
        out = a[AT] + batch * a[BATCH] + t * a[TOKEN] + (head * per + j) * a[HEAD] + column * size
        copy_rows(one, seen, 0, out, 0, 1, V)


@part
def _walk_block(one, scale, arrays, n, w, base, begin, end, batch, head, t, c, column, V):
    """c tokens from t on over V columns, a block at most, from the state at `begin` to `end`."""
    K, size, row = n[N_K], size_of(one), w[KEYS, 1]
    keys, decays, pushes = base + w[KEYS, 0], base + w[DECAYS, 0], base + w[PUSHES, 0]
    reads, queries, nobody = base + w[READS, 0], base + w[QUERY, 0], base + w[NOTHING, 0]
    values, recalled, fades = base + w[VALUES, 0], base + w[RECALLED, 0], base + w[FADE, 0]
    written, seen = base + w[WRITTEN, 0] if n[ERASE] == DELTA else values, base + w[SEEN, 0]
    beta = line(one, base + w[BETA, 0], c)
    early, late = n[ASKED] and n[EARLY_QUERY], n[ASKED] and not n[EARLY_QUERY]
    S = begin
    if n[ERASE] != NO_ERASE:
        read_block(one, S, Reader(reads, recalled), K)
    for i in range(c):
        fetch(one, arrays, IN_V, batch, t + i, head, column, 1, V, values, 0)
        if n[ERASE] == DELTA:
            error_row(one, beta[i], values, recalled, written, V)
        if early:
            _answer(one, scale, arrays, n, w, base, S, 1 if i else 0, batch, head, t + i, i, column, V)
        to = end if i + 1 == c else State(base + w[PACKED, 0], w[PACKED, 1])
        asker = i if late else i + 1 if early and i + 1 < c else -1
        q = Reader(queries + asker * n[QUERIES] * row if asker >= 0 else nobody, seen)
        r = Reader(reads + (i + 1) * row if i + 1 < c else nobody, recalled)
        token = Token(decays + (0 if n[DECAY] == NO_DECAY else i * row), size if n[DECAY] == VECTOR else 0, fades,
                      keys + i * row, written, pushes + i * row, recalled)  # fmt: skip
        if n[WITH_FADE]:
            fetch(one, arrays, IN_FADE, batch, t + i, head, column, 1, V, fades, 0)
            exp_row(one, fades, V)
            fade_block(one, S, to, token, q, q, K)
        elif n[ERASE] == NO_ERASE or (n[ERASE] == DELTA and i + 1 == c):
            write_block(one, S, to, token, q, q, K)
        elif n[ERASE] == DELTA:
            erase_block(one, S, to, token, q, r, K)
        else:
            push_block(one, S, to, token, q, r, K)
        S = to
        if late:
            _answer(one, scale, arrays, n, w, base, S, 1, batch, head, t + i, i, column, V)


@part
def _walk(one, scale, arrays, n, w, base, sequence, head, first_column):
    """A sequence: its tokens slab by slab, its columns block by block."""
    batch, first, stop, state = sequence[0], sequence[1], sequence[2], sequence[3]
    size, K, last_column = size_of(one), n[N_K], min(first_column + n[COLUMNS], n[N_V])
    packed, a = State(base + w[PACKED, 0], w[PACKED, 1]), arrays[OUT_STATE]
    for t in range(first, max(stop, first + 1), n[CHUNK]):
        c = min(n[CHUNK], stop - t)
        if c > 0:
            _load_slab(one, arrays, n, w, base, batch, head, t, c)
        for column in range(first_column, last_column, BLOCK // size):
            V = min(BLOCK // size, last_column - column)
            final = State(a[AT] + state * a[BATCH] + head * a[HEAD] + column * size, a[TOKEN])
            begin = end = final if BLOCK // size == V else packed
            if t == first and not n[STARTED]:
                begin = packed
                for k in range(K):
                    fill(one, one - one, packed.at + k * packed.row, BLOCK // size)
            elif t == first and n[DIRECT] and BLOCK // size == V:
                b = arrays[IN_STATE]
                begin = State(b[AT] + state * b[BATCH] + head * b[HEAD] + column * size, b[TOKEN])
            elif t == first:
                begin = packed
                fetch(one, arrays, IN_STATE, state, 0, head, column, K, V, packed.at, packed.row)
            elif BLOCK // size > V:
                copy_rows(one, final.at, final.row, packed.at, packed.row, K, V)
            if c > 0:
                _walk_block(one, scale, arrays, n, w, base, begin, end, batch, head, t, c, column, V)
            else:
                end = begin
            if end.at != final.at:
                copy_rows(one, end.at, end.row, final.at, final.row, K, V)


@kernel
def step_tasks(one, scale, arrays, n, sequences, w, base, first, last):
    """Tasks first..last of (sequence, head, column block), the last running fastest, in memory from `base` on."""
    fill(one, one - one, base + w[NOTHING, 0], w[NOTHING, 1] // size_of(one))
    for task in range(first, last):
        column = task % n[BLOCKS] * n[COLUMNS]
        head = task // n[BLOCKS] % n[HEADS]
        _walk(one, scale, arrays, n, w, base, sequences[task // n[BLOCKS] // n[HEADS]], head, column)
