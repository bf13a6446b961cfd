"""Carries out programs: one loop over operations, compiled once a dtype for every program there will be.

Each branch names its operands: registers are read as reg[...], matrices as mat(...) or rows(...).
"""

from __future__ import annotations

import numpy as np

from ..pieces.numba_jit import jit, kernel
from ..pieces.numba_rows import add_dots, add_times, clear, load, load_row, put, scaled, times
from ..pieces.numba_tiles import (
    PAD,
    Mat,
    Rows,
    line,
    product,
    row,
    size_of,
    solve_lower,
    solve_lower_transposed,
    transpose,
    turned,
)
from .numba_decay import channel_gram, channel_tables, pair_table, weigh
from .numba_decay_vjp import channel_crossings, channel_overlap, channel_pull, crossings, overlap, pull
from .numba_program import BATCH as BATCH_OF_TASK
from .numba_program import INPUTS, MINUS, ONE, OP, SCALE, TURNED

# columns of the table of arrays: address; bytes to the next batch row, token, head, channel; heads that share a head
AT, BATCH, TOKEN, HEADS, CHANNEL, SHARED, STORAGE = range(7)

(_HALT, _ADD, _MINUS, _LEAST, _TIMES, _WHOLE, _LESS, _PLACE, _POINT, _LOAD, _LOAD_COLUMN, _STATE, _STORE_STATE, _PUT,
 _CLEAR, _COPY, _PRODUCT, _SOLVE, _SOLVE_TRANSPOSED, _TRANSPOSE, _HADAMARD, _ADD_HADAMARD, _REACH, _DOTS, _DOTS_BELOW,
 _PAIRS, _WEIGH, _PULL, _CROSSINGS, _OVERLAP, _CHANNELS, _CHANNEL_GRAM, _CHANNEL_PULL, _CHANNEL_CROSSINGS,
 _CHANNEL_OVERLAP, _BONUS, _BONUS_PULL) = OP.values()  # fmt: skip


@jit
def mat(mats, i):
    """Matrix i."""
    return Mat(mats[i, 0], mats[i, 1], mats[i, 2])


@jit
def rows(mats, i):
    """Matrix i as a factor for each row."""
    return Rows(mats[i, 0], mats[i, 1])


@jit
def _address(arrays, name, batch, token, head):
    """Of a token's vector of one head; for states, of row `token` of state `batch`."""
    return (arrays[name, AT] + batch * arrays[name, BATCH] + token * arrays[name, TOKEN]
            + head // arrays[name, SHARED] * arrays[name, HEADS])  # fmt: skip


@jit
def _control(op, reg, a, b, c):
    """Whole numbers: register a from b and c."""
    if op == _ADD:
        reg[a] = reg[b] + reg[c]
    elif op == _MINUS:
        reg[a] = reg[b] - reg[c]
    elif op == _LEAST:
        reg[a] = min(reg[b], reg[c])
    elif op == _TIMES:
        reg[a] = reg[b] * reg[c]
    elif op == _WHOLE:
        reg[a] = (reg[b] + PAD - 1) // PAD * PAD


@jit
def _move(one, op, reg, mats, arrays, a, b, c, d, e, f, g):
    """Between the arrays of a call and matrices."""
    size, batch = size_of(one), reg[BATCH_OF_TASK]
    if op == _PLACE:  # matrix, base, number, bytes apart
        mats[a, 0], mats[a, 1], mats[a, 2] = mats[b, 0] + reg[c] * d, mats[b, 1], mats[b, 2]
    elif op == _POINT:  # matrix, array, token, head, column
        mats[a, 0] = _address(arrays, b, batch, reg[c], reg[d]) + reg[e] * arrays[b, CHANNEL]
        mats[a, 1], mats[a, 2] = arrays[b, TOKEN] // size, 1
    elif op == _LOAD or op == _STATE:  # matrix, array, token or state, head, rows, column, columns
        at = _address(arrays, b, batch, reg[c], reg[d]) if op == _LOAD else _address(arrays, b, reg[c], 0, reg[d])
        at += reg[f] * arrays[b, CHANNEL]
        load(one, mat(mats, a), reg[e], reg[g], arrays[b, STORAGE], at, arrays[b, TOKEN], arrays[b, CHANNEL])
    elif op == _LOAD_COLUMN:  # vector, array, token, head, rows
        at = _address(arrays, b, batch, reg[c], reg[d])
        load_row(line(one, mats[a, 0], reg[e]), reg[e], arrays[b, STORAGE], at, arrays[b, TOKEN])
    elif op == _STORE_STATE:  # matrix, array, state, head, rows, column, columns
        at = _address(arrays, b, reg[c], 0, reg[d]) + reg[f] * arrays[b, CHANNEL]
        put(one, mat(mats, a), rows(mats, ONE), reg[e], reg[g], at, arrays[b, TOKEN], 0)
    elif op == _PUT:  # matrix, array, token, head, rows, columns, factors: added to what heads before it have put
        at = _address(arrays, b, batch, reg[c], reg[d])
        put(one, mat(mats, a), rows(mats, g), reg[e], reg[f], at, arrays[b, TOKEN], reg[d] % arrays[b, SHARED])


@jit
def _multiply(one, op, reg, mats, a, b, c, d, e, f, g, h, i, j):
    """Products and solves."""
    if op == _PRODUCT:  # half, A, B, m, n, k, rows, added, rows of added, out
        A = mat(mats, b)
        if a & TURNED:
            A = turned(A)
        product(one, a & ~TURNED, A, mat(mats, c), reg[d], reg[e], reg[f], rows(mats, g), mat(mats, h),
                rows(mats, i), mat(mats, j))  # fmt: skip
    elif op == _SOLVE:  # N, X, m, n
        solve_lower(one, mat(mats, a), mat(mats, b), reg[c], reg[d])
    elif op == _SOLVE_TRANSPOSED:
        solve_lower_transposed(one, mat(mats, a), mat(mats, b), reg[c], reg[d])
    elif op == _TRANSPOSE:  # A, m, n, out
        transpose(one, mat(mats, a), reg[b], reg[c], mat(mats, d))


@jit
def _combine(one, op, reg, mats, a, b, c, d, e, f):
    """Element by element, and sums along rows."""
    if op == _CLEAR:  # matrix, first row, end, columns
        clear(one, mat(mats, a), reg[b], reg[c], reg[d])
    elif op == _COPY:  # X, m, n, out, factors
        scaled(one, mat(mats, a), rows(mats, e), reg[b], reg[c], mat(mats, d))
    elif op == _HADAMARD:  # X, F, m, n, out
        times(one, mat(mats, a), mat(mats, b), reg[c], reg[d], mat(mats, e))
    elif op == _ADD_HADAMARD:
        add_times(one, mat(mats, a), mat(mats, b), reg[c], reg[d], mat(mats, e))
    elif op == _REACH:  # out, x, y, m, sign: out_i = sign x_i y_i
        scaled(one, mat(mats, b), rows(mats, c), reg[d], 1, mat(mats, a))
        if e < 0:
            scaled(one, mat(mats, a), rows(mats, MINUS), reg[d], 1, mat(mats, a))
    elif op == _DOTS or op == _DOTS_BELOW:  # out, X, Y, m, n, sign; below the diagonal
        add_dots(one, mat(mats, a), mat(mats, b), mat(mats, c), reg[d], reg[e], op == _DOTS_BELOW, f)


@jit
def _by_token(one, op, reg, mats, arrays, a, b, c, d, e, f, g, h, i, j):
    """Decay by token: tables, and the transpose of what they are used for."""
    batch = reg[BATCH_OF_TASK]
    if op == _PAIRS:  # array or none, token, head, rows, float64 g, sums, E, start, end, carry
        m = reg[d]
        x = line(np.float64(0), mats[e, 0], m)
        if a >= 0:
            at = _address(arrays, a, batch, reg[b], reg[c])
            load_row(x, m, arrays[a, STORAGE], at, arrays[a, TOKEN])
        else:
            for t in range(m):
                x[t] = 0
        pair_table(one, x, mats[f, 0], m, mat(mats, g), mat(mats, h), mat(mats, i), mat(mats, j))
    elif op == _WEIGH:  # P, E, rows, whole rows, strict, factors
        weigh(one, mat(mats, a), mat(mats, b), reg[c], e, rows(mats, f))
        clear(one, mat(mats, a), reg[c], reg[d], reg[d])
    elif op == _PULL:  # dP, P, E, rows, strict, factors, crossed
        pull(one, mat(mats, a), mat(mats, b), mat(mats, c), reg[d], e, rows(mats, f), mat(mats, g))
    elif op == _CROSSINGS:  # array, token, head, rows, crossed, readers, writers, all, sums
        at = _address(arrays, a, batch, reg[b], reg[c])
        crossings(one, mat(mats, e), mat(mats, f), mat(mats, g), mat(mats, h), mat(mats, i), reg[d], at,
                  arrays[a, TOKEN], reg[c] % arrays[a, SHARED])  # fmt: skip
    elif op == _OVERLAP:  # S, dS, m, n, carry, out
        overlap(one, mat(mats, a), mat(mats, b), reg[c], reg[d], mat(mats, e), mat(mats, f))


@jit
def _by_channel(one, op, reg, mats, arrays, a, b, c, d, e, f, g, h, i, j, k):
    """Decay by channel, and the bonus."""
    if op == _CHANNELS:  # gates, rows, K, start, end, carry
        channel_tables(one, reg[b], reg[c], mat(mats, a), mat(mats, d), mat(mats, e), mat(mats, f))
    elif op == _CHANNEL_GRAM:  # X, Y, gates, early, rows, K, out, near, far, far turned
        channel_gram(one, mat(mats, a), mat(mats, b), mat(mats, c), d, reg[e], reg[f], mat(mats, g), mat(mats, h),
                     mat(mats, i), mat(mats, j), rows(mats, ONE))  # fmt: skip
    elif op == _CHANNEL_PULL:  # P, X, Y, gates, early, rows, K, dX, dY, crossed, scratch
        channel_pull(one, mat(mats, a), mat(mats, b), mat(mats, c), mat(mats, d), e, reg[f], reg[g], mat(mats, h),
                     mat(mats, i), mat(mats, j), mat(mats, k), rows(mats, ONE))  # fmt: skip
    elif op == _CHANNEL_CROSSINGS:  # array, token, head, rows, K, gates, crossed, readers, writers, all
        at = _address(arrays, a, reg[BATCH_OF_TASK], reg[b], reg[c])
        channel_crossings(one, mat(mats, f), mat(mats, g), mat(mats, h), mat(mats, i), mat(mats, j), reg[d], reg[e],
                          at, arrays[a, TOKEN], reg[c] % arrays[a, SHARED])  # fmt: skip
    elif op == _CHANNEL_OVERLAP:  # S, dS, m, n, carry, out
        channel_overlap(one, mat(mats, a), mat(mats, b), reg[c], reg[d], mat(mats, e), mat(mats, f))
    elif op == _BONUS:  # P, Q, K, u, rows, columns
        _bonus(one, mats, a, b, c, d, reg[e], reg[f])
    elif op == _BONUS_PULL:  # dP, Q, K, u, rows, columns, dQ, dK, du
        _bonus_pull(one, mats, a, b, c, d, reg[e], reg[f], g, h, i)


@jit
def _bonus(one, mats, P, Q, K, u, m, n):
    """P_ii = scale sum_d q_id u_d k_id"""
    factor, scale = row(one, mat(mats, u), 0, n), line(one, mats[SCALE, 0], 1)[0]
    for i in range(m):
        q, k, total = row(one, mat(mats, Q), i, n), row(one, mat(mats, K), i, n), one - one
        for d in range(n):
            total += q[d] * factor[d] * k[d]
        row(one, mat(mats, P), i, i + 1)[i] = scale * total


@jit
def _bonus_pull(one, mats, dP, Q, K, u, m, n, dQ, dK, dU):
    """Its transpose, from s_i = scale dP_ii: dq += s u k, dk += s u q, du += s q k."""
    factor, total, scale = row(one, mat(mats, u), 0, n), row(one, mat(mats, dU), 0, n), line(one, mats[SCALE, 0], 1)[0]
    for i in range(m):
        s, q, k = scale * row(one, mat(mats, dP), i, i + 1)[i], row(one, mat(mats, Q), i, n), row(one, mat(mats, K), i, n)
        dq, dk = row(one, mat(mats, dQ), i, n), row(one, mat(mats, dK), i, n)
        for d in range(n):
            y = s * factor[d]
            dq[d] += y * k[d]
            dk[d] += y * q[d]
            total[d] += s * q[d] * k[d]


@kernel
def carry_out(one, scale, code, first_registers, mats, arrays, tasks, first, last):
    """The program `code` for each of the tasks first..last: rows of a table that fill the first registers."""
    reg = first_registers.copy()
    line(one, mats[ONE, 0], 1)[0] = one
    line(one, mats[SCALE, 0], 1)[0] = scale
    line(one, mats[MINUS, 0], 1)[0] = -one
    for task in range(first, last):
        for n in range(INPUTS):
            reg[n] = tasks[task, n]
        at = 0
        while code[at, 0] != _HALT:
            op, a, b, c, d, e = code[at, 0], code[at, 1], code[at, 2], code[at, 3], code[at, 4], code[at, 5]
            f, g, h, i, j, k = code[at, 6], code[at, 7], code[at, 8], code[at, 9], code[at, 10], code[at, 11]
            at += 1
            if op == _LESS:
                if reg[a] < reg[b]:
                    at = c
            elif op < _LESS:
                _control(op, reg, a, b, c)
            elif op <= _PUT:
                _move(one, op, reg, mats, arrays, a, b, c, d, e, f, g)
            elif op <= _COPY:
                _combine(one, op, reg, mats, a, b, c, d, e, f)
            elif op <= _TRANSPOSE:
                _multiply(one, op, reg, mats, a, b, c, d, e, f, g, h, i, j)
            elif op <= _DOTS_BELOW:
                _combine(one, op, reg, mats, a, b, c, d, e, f)
            elif op <= _OVERLAP:
                _by_token(one, op, reg, mats, arrays, a, b, c, d, e, f, g, h, i, j)
            else:
                _by_channel(one, op, reg, mats, arrays, a, b, c, d, e, f, g, h, i, j, k)
