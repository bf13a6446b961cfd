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

from ...pieces.numba_jit import apart, jit, kernel
from ...pieces.numba_lanes import exp_row
from ...pieces.numba_rows import clear, load, load_row
from ...pieces.numba_state import Reader, State, Token, block_columns, erase_block, read_block, write_block
from ...pieces.numba_tiles import Mat, line, row, size_of
from ..numba_decay import NO_DECAY, VECTOR
from .numba_chunk import address, load_bonus, load_column, load_tokens
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
    CHANNEL,
    CHUNK,
    COLUMNS,
    DECAY,
    DELTA,
    EARLY_QUERY,
    EARLY_READ,
    ERASE,
    FREE,
    HEAD,
    HEADS,
    IN_BETA,
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
    STORAGE,
    TOKEN,
    WITH_BONUS,
    WITH_FADE,
)


@jit
def _mat(base, w, name):
    """A matrix of the task in memory that begins at `base`."""
    return Mat(base + w[name, 0], w[name, 1], 1)


@jit
def _vector(one, base, w, name, i):
    """Address of its row i."""
    return base + w[name, 0] + size_of(one) * i * w[name, 1]


@jit
def _load_decays(one, arrays, n, w, base, batch, head, t, c):
    """e^{g} of c tokens; 1 where nothing decays."""
    if n[DECAY] == NO_DECAY:
        line(one, _vector(one, base, w, DECAYS, 0), 1)[0] = one
        return
    width = n[N_K] if n[DECAY] == VECTOR else 1
    load_tokens(one, arrays, IN_G, batch, head, t, c, c, 0, width, _mat(base, w, DECAYS))
    for i in range(c):
        exp_row(one, _vector(one, base, w, DECAYS, i), width)


@jit
def _load_readers(one, arrays, n, w, base, batch, head, t, c):
    """What c tokens read the state before them with: r or a, times e^{g} where r reads the decayed state."""
    K = n[N_K]
    reads, keys = _mat(base, w, READS), _mat(base, w, KEYS)
    if n[OWN_READ]:
        load_tokens(one, arrays, IN_READ, batch, head, t, c, c, 0, K, reads)
    for i in range(c):
        x = row(one, reads, i, K)
        if not n[OWN_READ]:
            k = row(one, keys, i, K)
            for d in range(K):
                x[d] = k[d]
        if not n[EARLY_READ] and n[DECAY] != NO_DECAY:
            e = row(one, _mat(base, w, DECAYS), i, K)
            if n[DECAY] == VECTOR:
                for d in range(K):
                    x[d] *= e[d]
            else:
                f = e[0]
                for d in range(K):
                    x[d] *= f


@jit
def _load_queries(one, arrays, n, w, base, batch, head, t, c):
    """q of c tokens, `QUERIES` of them a token, and (q (.) u) k^T."""
    K, per = n[N_K], n[QUERIES]
    at = _mat(base, w, QUERY)
    for j in range(per):
        first = Mat(_vector(one, base, w, QUERY, j), at.row * per, 1)
        load_tokens(one, arrays, IN_Q, batch, head * per + j, t, c, c, 0, K, first)
    if n[WITH_BONUS]:
        u, bonus = row(one, _mat(base, w, U), 0, K), row(one, _mat(base, w, BONUS), 0, c * per)
        load_bonus(one, arrays, n, head, u)
        for i in range(c):
            k = row(one, _mat(base, w, KEYS), i, K)
            for j in range(per):
                q, total = row(one, at, i * per + j, K), one - one
                for d in range(K):
                    total += q[d] * u[d] * k[d]
                bonus[i * per + j] = total


@jit
def _load_slab(one, arrays, n, w, base, batch, head, t, c):
    """The K-wide vectors of c tokens from t on, as the passes take them."""
    apart()
    load_tokens(one, arrays, IN_K, batch, head, t, c, c, 0, n[N_K], _mat(base, w, KEYS))
    _load_decays(one, arrays, n, w, base, batch, head, t, c)
    if n[ERASE] != NO_ERASE:
        _load_readers(one, arrays, n, w, base, batch, head, t, c)
    if n[ERASE] == DELTA:
        load_column(one, arrays, IN_BETA, batch, head, t, c, c, line(one, _vector(one, base, w, BETA, 0), c))
    if n[ERASE] == FREE:
        load_tokens(one, arrays, IN_PUSH, batch, head, t, c, c, 0, n[N_K], _mat(base, w, PUSHES))
    if n[ASKED]:
        _load_queries(one, arrays, n, w, base, batch, head, t, c)


@jit
def _load_values(one, arrays, n, w, base, batch, head, t, i, column, V):
    """Token t, i of its slab: v, what is written with k, and e^{gv}, V columns of each."""
    a = arrays[IN_V]
    v = line(one, _vector(one, base, w, VALUES, 0), V)
    load_row(v, V, a[STORAGE], address(arrays, IN_V, batch, t, head) + column * a[CHANNEL], a[CHANNEL])
    if n[ERASE] == DELTA:
        recalled = line(one, _vector(one, base, w, RECALLED, 0), V)
        written = line(one, _vector(one, base, w, WRITTEN, 0), V)
        beta = line(one, _vector(one, base, w, BETA, 0), i + 1)[i]
        for d in range(V):
            written[d] = beta * (v[d] - recalled[d])
    if n[WITH_FADE]:
        f, a = _vector(one, base, w, FADE, 0), arrays[IN_FADE]
        load_row(line(one, f, V), V, a[STORAGE], address(arrays, IN_FADE, batch, t, head) + column * a[CHANNEL],
                 a[CHANNEL])  # fmt: skip
        exp_row(one, f, V)


@jit
def _give_out(one, scale, arrays, n, w, base, batch, head, t, i, j, column, V):
    """out_t = scale (seen + bonus v) of query j; out is of the computation's dtype, its columns side by side."""
    at = address(arrays, OUT, batch, t, head * n[QUERIES] + j) + column * size_of(one)
    out, seen = line(one, at, V), line(one, _vector(one, base, w, SEEN, 0), V)
    if n[WITH_BONUS]:
        v, x = line(one, _vector(one, base, w, VALUES, 0), V), i * n[QUERIES] + j
        bonus = line(one, _vector(one, base, w, BONUS, 0), x + 1)[x]
        for d in range(V):
            out[d] = scale * (seen[d] + bonus * v[d])
    else:
        for d in range(V):
            out[d] = scale * seen[d]


@jit
def _ask(one, scale, arrays, n, w, base, S, first, batch, head, t, i, column, V):
    """What token t's queries read of S; the first one has been read already if first = 1."""
    for j in range(n[QUERIES]):
        if j >= first:
            at = _vector(one, base, w, QUERY, i * n[QUERIES] + j)
            read_block(one, S, Reader(at, _vector(one, base, w, SEEN, 0)), V, n[N_K])
        _give_out(one, scale, arrays, n, w, base, batch, head, t, i, j, column, V)


@jit
def _pass(one, n, w, base, S, to, i, c, V):
    """to = S_t, read by q_t or q_{t+1} and by r_{t+1}: token i of c."""
    seen, nobody = _vector(one, base, w, SEEN, 0), _vector(one, base, w, NOTHING, 0)
    q = i + n[EARLY_QUERY]
    q = Reader(_vector(one, base, w, QUERY, q * n[QUERIES]) if n[ASKED] and q < c else nobody, seen)
    recalled = _vector(one, base, w, RECALLED, 0)
    r = Reader(_vector(one, base, w, READS, i + 1) if i + 1 < c else nobody, recalled)
    decays = n[DECAY] != NO_DECAY
    written = _vector(one, base, w, WRITTEN if n[ERASE] == DELTA else VALUES, 0)
    step = size_of(one) if n[DECAY] == VECTOR else 0
    token = Token(_vector(one, base, w, DECAYS, i if decays else 0), step, _vector(one, base, w, FADE, 0),
                  _vector(one, base, w, KEYS, i), written, _vector(one, base, w, PUSHES, i), recalled)  # fmt: skip
    if n[ERASE] == NO_ERASE:
        write_block(one, S, to, token, n[WITH_FADE], q, V, n[N_K])
    else:
        erase_block(one, S, to, token, n[ERASE] == FREE, q, r, V, n[N_K])


@jit
def _walk_block(one, scale, arrays, n, w, base, begin, end, batch, head, t, c, column, V):
    """c tokens from t on over V columns, a block at most, from the state at `begin` to `end`."""
    apart()
    S, inside = begin, State(base + w[PACKED, 0], size_of(one) * w[PACKED, 1])
    early = n[ASKED] and n[EARLY_QUERY]
    if n[ERASE] != NO_ERASE:
        at = Reader(_vector(one, base, w, READS, 0), _vector(one, base, w, RECALLED, 0))
        read_block(one, S, at, V, n[N_K])
    for i in range(c):
        _load_values(one, arrays, n, w, base, batch, head, t + i, i, column, V)
        if early:
            _ask(one, scale, arrays, n, w, base, S, 1 if i else 0, batch, head, t + i, i, column, V)
        to = end if i + 1 == c else inside
        _pass(one, n, w, base, S, to, i, c, V)
        S = to
        if n[ASKED] and not early:
            _ask(one, scale, arrays, n, w, base, S, 1, batch, head, t + i, i, column, V)


@jit
def _state_at(one, arrays, name, state, head, column):
    a = arrays[name]
    return State(a[AT] + state * a[BATCH] + head * a[HEAD] + column * a[CHANNEL], a[TOKEN])


@jit
def _begin(one, arrays, n, w, base, state, head, column, V):
    """Where the incoming state lies: in place if its columns are side by side, else a copy; zeros if there is none."""
    a, block = arrays[IN_STATE], _mat(base, w, PACKED)
    at = _state_at(one, arrays, IN_STATE, state, head, column)
    own = a[STORAGE] == arrays[OUT_STATE, STORAGE] and a[CHANNEL] == size_of(one)
    if n[STARTED] and own:
        return at
    if n[STARTED]:
        load(one, block, n[N_K], n[N_K], V, a[STORAGE], at.at, a[TOKEN], a[CHANNEL])
    else:
        clear(one, block, 0, n[N_K], V)
    return State(block.at, size_of(one) * block.row)


@jit
def _copy(one, S, to, K, V):
    """to = S, which may be where it is."""
    for i in range(K):
        x, y = line(one, S.at + i * S.row, V), line(one, to.at + i * to.row, V)
        for d in range(V):
            y[d] = x[d]


@jit
def _walk(one, scale, arrays, n, w, base, sequence, head, column):
    apart()
    batch, first, stop, state = sequence[0], sequence[1], sequence[2], sequence[3]
    V, step = min(n[COLUMNS], n[N_V] - column), block_columns(one)
    for t in range(first, max(stop, first + 1), n[CHUNK]):
        c = min(n[CHUNK], stop - t)
        if c:
            _load_slab(one, arrays, n, w, base, batch, head, t, c)
        for j in range(column, column + V, step):
            m = min(step, column + V - j)
            end = _state_at(one, arrays, OUT_STATE, state, head, j)
            begin = end
            if t == first:
                begin = _begin(one, arrays, n, w, base, state, head, j, m)
            if c:
                _walk_block(one, scale, arrays, n, w, base, begin, end, batch, head, t, c, j, m)
            elif begin.at != end.at:
                _copy(one, begin, end, n[N_K], m)


@kernel
def step_tasks(one, scale, arrays, n, sequences, w, base, first, last):
    """Tasks first..last of (sequence, head, column block), the last running fastest, in memory from `base` on."""
    clear(one, _mat(base, w, NOTHING), 0, 1, n[N_K])
    for task in range(first, last):
        column = task % n[BLOCKS] * n[COLUMNS]
        head = task // n[BLOCKS] % n[HEADS]
        _walk(one, scale, arrays, n, w, base, sequences[task // n[BLOCKS] // n[HEADS]], head, column)
