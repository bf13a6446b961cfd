"""One chunk of one state in registers: what is loaded, what is erased, read and written.

The algebra is that of one_chunk.py and erase.py. A chunk of c tokens is padded to p, whole tiles, by tokens that are
zero and do not decay. numba_table.py says what the names stand for.
"""

from __future__ import annotations

import numpy as np

from ...pieces.numba_jit import jit, part
from ...pieces.numba_rows import load, load_row, scale_rows, times
from ...pieces.numba_tiles import (
    FULL,
    LEFT_LOWER,
    OUT_LOWER,
    PAD,
    Mat,
    Rows,
    line,
    moved,
    product,
    row,
    solve_lower,
    transpose,
    turned,
)
from ..numba_decay import SCALAR, VECTOR, channel_gram, channel_tables, pair_table, weigh
from .numba_table import (
    AT,
    BATCH,
    BETA,
    BONUS,
    BT,
    CHANNEL,
    CHUNK,
    CONSTANTS,
    DECAY,
    DELTA,
    EARLY_QUERY,
    EARLY_READ,
    END,
    ERASE,
    FACTOR,
    FAR,
    FART,
    FIRST,
    FREE,
    GATE,
    HAT,
    HEAD,
    IN_BETA,
    IN_BONUS,
    IN_G,
    IN_K,
    IN_PUSH,
    IN_READ,
    IN_V,
    KT,
    LAST,
    N_K,
    NEAR,
    NO_ERASE,
    OWN_READ,
    SHARED,
    START,
    STORAGE,
    SUMS,
    TOKEN,
    WITH_BONUS,
    B,
    E,
    G,
    K,
    N,
    P,
    Q,
    R,
    S,
    X,
    Y,
)


@jit
def mat(w, name):
    """A matrix of the task."""
    return Mat(w[name, 0], w[name, 1], 1)


@jit
def padded(c):
    """c tokens in whole tiles."""
    return (c + PAD - 1) // PAD * PAD


@jit
def constants(one, w):
    """Rows of 1, of the queries' scale and of -1."""
    at = mat(w, CONSTANTS)
    return Rows(at.at, 0), Rows(moved(one, at, 0, 1).at, 0), Rows(moved(one, at, 0, 2).at, 0)


@part
def start(one, scale, n, w):
    """Constants, and the tables where no token decays, or each channel on its own."""
    c = line(one, w[CONSTANTS, 0], 3)
    c[0], c[1], c[2] = one, scale, -one
    p = padded(n[CHUNK])
    g = line(np.float64(0), w[G, 0], p)
    for i in range(p):
        g[i] = 0
    pair_table(one, g, w[SUMS, 0], p, mat(w, E), mat(w, START), mat(w, END))


@part
def gram(one, n, w, x, y, yT, early, p, out):
    """out_ij: what x_i finds of y_j, but for a scalar decay (early: up to i - 1); to the tile of the diagonal."""
    if n[DECAY] == VECTOR:
        channel_gram(one, mat(w, x), mat(w, y), mat(w, GATE), early, p, n[N_K], mat(w, out), mat(w, NEAR), mat(w, FAR),
                     mat(w, FART), Rows(w[CONSTANTS, 0], 0))  # fmt: skip
    else:
        ones = Rows(w[CONSTANTS, 0], 0)
        product(one, OUT_LOWER, mat(w, x), mat(w, yT), p, p, n[N_K], ones, Mat(0, 0, 0), ones, mat(w, out))


@jit
def address(arrays, name, batch, token, head):
    """Of a token's vector of one head."""
    a = arrays[name]
    return a[AT] + batch * a[BATCH] + token * a[TOKEN] + head // a[SHARED] * a[HEAD]


@jit
def load_tokens(one, arrays, name, batch, head, t, c, p, column, width, out):
    """out (p, width): c tokens from t on, columns from `column` on, then zeros."""
    a = arrays[name]
    at = address(arrays, name, batch, t, head) + column * a[CHANNEL]
    load(one, out, c, p, width, a[STORAGE], at, a[TOKEN], a[CHANNEL])


@jit
def load_column(one, arrays, name, batch, head, t, c, p, out):
    """out[:p]: one number a token, then zeros."""
    a = arrays[name]
    load_row(out, c, a[STORAGE], address(arrays, name, batch, t, head), a[TOKEN])
    for i in range(c, p):
        out[i] = 0


@part
def load_decay(one, arrays, n, w, batch, head, t, c, p):
    """The tables of e^s of a chunk."""
    if n[DECAY] == SCALAR:
        g = line(np.float64(0), w[G, 0], p)
        load_column(np.float64(0), arrays, IN_G, batch, head, t, c, p, g)
        pair_table(one, g, w[SUMS, 0], p, mat(w, E), mat(w, START), mat(w, END))
    elif n[DECAY] == VECTOR:
        load_tokens(one, arrays, IN_G, batch, head, t, c, p, 0, n[N_K], mat(w, GATE))
        channel_tables(one, p, n[N_K], mat(w, GATE), mat(w, FIRST), mat(w, LAST))


@jit
def as_reader(one, n, w, X, early, p):
    """x_i e^{s(start, i)} where the decay is a channel's (early: to i - 1); X itself where `reach` does it."""
    if n[DECAY] != VECTOR:
        return X
    times(one, X, moved(one, mat(w, FIRST), -early, 0), p, n[N_K], mat(w, HAT))
    return mat(w, HAT)


@jit
def reach(one, w, early, p, sign, by):
    """Factors sign by_i e^{s(start, i)} of rows (early: to i - 1)."""
    f = line(one, w[FACTOR, 0], p)
    e = line(one, moved(one, mat(w, START), 0, 1 - early).at, p)
    b = line(one, by.at, p * by.step + 1)
    for i in range(p):
        f[i] = sign * b[i * by.step] * e[i]
    return Rows(w[FACTOR, 0], 1)


@part
def load_writes(one, arrays, n, w, batch, head, t, c, p, column, V):
    """Loads the chunk's k, v, g and erase vectors, and its decay."""
    load_tokens(one, arrays, IN_K, batch, head, t, c, p, 0, n[N_K], mat(w, K))
    load_tokens(one, arrays, IN_V, batch, head, t, c, p, column, V, mat(w, X))
    load_decay(one, arrays, n, w, batch, head, t, c, p)
    transpose(one, mat(w, K), p, n[N_K], mat(w, KT))
    if n[ERASE] != NO_ERASE and n[OWN_READ]:
        load_tokens(one, arrays, IN_READ, batch, head, t, c, p, 0, n[N_K], mat(w, R))
    if n[ERASE] == DELTA:
        load_column(one, arrays, IN_BETA, batch, head, t, c, p, line(one, w[BETA, 0], p))
    if n[ERASE] == FREE:
        load_tokens(one, arrays, IN_PUSH, batch, head, t, c, p, 0, n[N_K], mat(w, B))
        transpose(one, mat(w, B), p, n[N_K], mat(w, BT))


@part
def erase(one, n, w, p, V):
    """What the chunk writes, from the incoming state S.

    DELTA  (1 + diag(beta) N) X = diag(beta) (v - r^ S)        N = gram(r, k), X: v on entry
    FREE   (1 - gram(a, b)) Y = a^ S + gram(a, k) v
    """
    ones, _, minus = constants(one, w)
    early, none, beta = n[EARLY_READ], Mat(0, 0, 0), Rows(w[BETA, 0], 1)
    decays, v = moved(one, mat(w, E), -early, 0), mat(w, X)
    if n[ERASE] == DELTA:
        gram(one, n, w, R, K, KT, early, p, N)
        weigh(one, mat(w, N), decays, p, 1, beta)
        hat = as_reader(one, n, w, mat(w, R), early, p)
        product(one, FULL, hat, mat(w, S), p, V, n[N_K], reach(one, w, early, p, -one, beta), v, beta, v)
        solve_lower(one, mat(w, N), v, p, V)
    elif n[ERASE] == FREE:
        gram(one, n, w, R, K, KT, 1, p, P)
        weigh(one, mat(w, P), decays, p, 1, ones)
        gram(one, n, w, R, B, BT, 1, p, N)
        weigh(one, mat(w, N), decays, p, 1, minus)
        hat = as_reader(one, n, w, mat(w, R), 1, p)
        product(one, FULL, hat, mat(w, S), p, V, n[N_K], reach(one, w, 1, p, one, ones), none, ones, mat(w, Y))
        product(one, LEFT_LOWER, mat(w, P), v, p, V, p, ones, mat(w, Y), ones, mat(w, Y))
        solve_lower(one, mat(w, N), mat(w, Y), p, V)


@part
def read(one, arrays, n, w, head, c, p, V, out):
    """out = scale (q^ S + gram(q, k) X + gram(q, b) Y), with the bonus on the diagonal: Q is loaded, S is S_in."""
    ones, scale, _ = constants(one, w)
    early, none = n[EARLY_QUERY], Mat(0, 0, 0)
    decays = moved(one, mat(w, E), -early, 0)
    gram(one, n, w, Q, K, KT, early, p, P)
    weigh(one, mat(w, P), decays, p, early, scale)
    if n[WITH_BONUS]:
        add_bonus(one, arrays, n, w, head, c)
    hat = as_reader(one, n, w, mat(w, Q), early, p)
    product(one, FULL, hat, mat(w, S), c, V, n[N_K], reach(one, w, early, p, one, scale), none, ones, out)
    product(one, LEFT_LOWER, mat(w, P), mat(w, X), c, V, p, ones, out, ones, out)
    if n[ERASE] == FREE:
        gram(one, n, w, Q, B, BT, early, p, P)
        weigh(one, mat(w, P), decays, p, early, scale)
        product(one, LEFT_LOWER, mat(w, P), mat(w, Y), c, V, p, ones, out, ones, out)


@part
def add_bonus(one, arrays, n, w, head, c):
    """P_ii = scale sum_d q_id u_d k_id"""
    u, scale = row(one, mat(w, BONUS), 0, n[N_K]), line(one, w[CONSTANTS, 0], 2)[1]
    load_bonus(one, arrays, n, head, u)
    for i in range(c):
        q, k, total = row(one, mat(w, Q), i, n[N_K]), row(one, mat(w, K), i, n[N_K]), one - one
        for d in range(n[N_K]):
            total += q[d] * u[d] * k[d]
        row(one, mat(w, P), i, i + 1)[i] = scale * total


@jit
def load_bonus(one, arrays, n, head, u):
    """u of a head."""
    a = arrays[IN_BONUS]
    load_row(u, n[N_K], a[STORAGE], a[AT] + head // a[SHARED] * a[HEAD], a[CHANNEL])


@part
def write(one, n, w, p, V):
    """S <- carry(S) + k^^T X + b^^T Y; k and b become their hats y_j e^{s(j, end)}."""
    ones, _, _ = constants(one, w)
    carry = Rows(moved(one, mat(w, START), 0, p).at, 0)
    if n[DECAY] == VECTOR:
        carry = Rows(moved(one, mat(w, FIRST), p - 1, 0).at, 1)
    to_end(one, n, w, mat(w, K), p)
    product(one, FULL, turned(mat(w, K)), mat(w, X), n[N_K], V, p, ones, mat(w, S), carry, mat(w, S))
    if n[ERASE] == FREE:
        to_end(one, n, w, mat(w, B), p)
        product(one, FULL, turned(mat(w, B)), mat(w, Y), n[N_K], V, p, ones, mat(w, S), ones, mat(w, S))


@part
def to_end(one, n, w, X, p):
    """x_j <- x_j e^{s(j, end)}"""
    if n[DECAY] == VECTOR:
        times(one, X, mat(w, LAST), p, n[N_K], X)
    elif n[DECAY] == SCALAR:
        scale_rows(one, X, line(one, w[END, 0], p), p, n[N_K])


@part
def load_state(one, arrays, name, state, head, K, column, V, out):
    """out (K, V): columns from `column` on of a head's state."""
    a = arrays[name]
    at = a[AT] + state * a[BATCH] + head * a[HEAD] + column * a[CHANNEL]
    load(one, out, K, K, V, a[STORAGE], at, a[TOKEN], a[CHANNEL])


@part
def store_state(one, arrays, name, state, head, K, column, V, S):
    """The same way back: states are given out in the dtype of the computation."""
    a = arrays[name]
    at = a[AT] + state * a[BATCH] + head * a[HEAD] + column * a[CHANNEL]
    for i in range(K):
        x, y = row(one, S, i, V), line(one, at + i * a[TOKEN], V)
        for d in range(V):
            y[d] = x[d]
