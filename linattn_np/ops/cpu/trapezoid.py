"""Rotated keys and weighted values that come one token late, and their transpose: one pass each (ops/trapezoid.py).

A task is a sequence, or some of its heads: its tokens in turn forward; backward the angles in turn, then the tokens
from the last to the first, since an angle turns all later ones. Rows are the tokens of the batch, one after the other;
row r of a token's R, of head h, is at column (r H + h) of its arrays, at (h R + r) of what is of a head.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit

from ...runtime import threads
from ...runtime.arrays import name_of
from ...runtime.constants import constant_zeros
from ...runtime.pieces import vectors
from ...runtime.pieces.memory import empty, working
from ...runtime.pieces.piece import Matrix, Number, Vector, Whole, piece, workspace_kind
from ...runtime.pieces.registers import fma, load_part, registers, store, store_part
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.tiles import dot, sum_of
from ...runtime.pieces.vectors import BYTES, I64, Array, Builder, Value, constant, converted, emitted, lanes, loop
from ...runtime.pieces.views import as_row, columns, row, row_part, rows
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from .formulas import dense
from .numbers import OPTIONS, exp, number, sigmoid, sine_cosine, tanh
from .rowwise import rotated
from .stabiliser import cuts
from .storage import load as load_rows

no_numbers, load = registers(1)
ROWS = {"H": ("dt", "trap", "ddt", "dtrap", "dA", "written", "weights", "owns", "dweights", "downs"), "RH": ("g",),
        "HRR": ("shares", "later"), "HP": ("angle", "dangle", "dangles"),
        "RHK": ("q", "k", "dq", "dk", "dB", "dC"), "RHV": ("x", "v", "dv", "dout", "dx"),
        "RHkK": ("B",), "RHqK": ("C",), "HPP": ("rotations",)}  # fmt: skip
ENDS = {"H": ("end_own", "dend_own"), "RHK": ("past_k", "end_k", "dpast_k", "dend_k"),
        "RHV": ("past_v", "end_v", "dpast_v", "dend_v", "begin_v", "dbegin_v"), "HP": ("dend_theta",),
        "HPP": ("end_rotation",)}  # fmt: skip
SUMS = ("theta", "dend_theta")  # in float64
ANGLES = {"theta": "HP", "near": "HP", "span": "HP", "sine": "HP", "rotation": "HPP"}  # scratch of each sequence
SCRATCH = {"key": "K", "late": "RK", "back": "RV", "own": "two"}  # of each head of each sequence
SMALL = 2**15  # numbers of states that one thread computes
TASK = ("STATE", "LOW", "HIGH", "START", "STOP")  # of its sequence; heads LOW .. HIGH, rows START .. STOP
TRAPEZOID = Workspace(
    "trapezoid", (*TASK, "T", "R", "H", "Hk", "Hq", "K", "V", "P", "blocks", "each", "reads", "begun", "ended", "skips",
                  "shifts"),
    ("scale",), ("in_x", "in_B"), {"given": {
        **{name: Field("count", width) for width, names in ROWS.items() for name in names},
        **{name: Field("states", width, dtype="float64" if name in SUMS else "") for width, names in ENDS.items()
           for name in names},
        "A": Field("rates", "H"), "D": Field("one", "H"), "none": Field("one", "widest"),
        **{name: Field("states", width, dtype="float64" if name in SUMS else "") for name, width in ANGLES.items()},
        **{name: Field("all", width) for name, width in SCRATCH.items()},
        "cuts": Field("sequences", "four", dtype="int64"),
    }})  # fmt: skip
Work = workspace_kind(TRAPEZOID)


@njit(**OPTIONS)
def tangents(x: Any, out: Any) -> None:
    """tanh x"""
    for j in range(len(out)):
        out[j] = tanh(x[j])


@njit(**OPTIONS)
def add_angles(x: Any, dt: Any, theta: Any, out: Any) -> None:
    """theta += pi x dt; out = theta less whole turns."""
    for p in range(len(out)):
        total = theta[p] + math.pi * np.float64(dt[p]) * np.float64(x[p])
        theta[p] = total
        out[p] = total - 2 * math.pi * np.rint(total * (0.5 / math.pi))


@njit(**OPTIONS)
def cosines_and_sines(x: Any, cosines: Any, sines: Any) -> None:
    for p in range(len(x)):
        sines[p], cosines[p] = sine_cosine(x[p])


@njit(**OPTIONS)
def whole_of(x: Any) -> Any:
    """The numbers of a row in whole vectors: no mask, whose stores the next load of a row waits for."""
    return len(x) // (BYTES // x.itemsize) * (BYTES // x.itemsize)


@njit(**OPTIONS)
def copied(x: Any, a: Any, out: Any) -> None:
    """a x"""
    whole = whole_of(out)
    for j in range(0, whole, BYTES // out.itemsize):
        store(a * load(x, j), out, j)
    if whole < len(out):
        store_part(a * load_part(x, whole), out, whole)


@njit(**OPTIONS)
def add(x: Any, a: Any, out: Any) -> None:
    """out += a x"""
    whole = whole_of(out)
    for j in range(0, whole, BYTES // out.itemsize):
        store(fma(a, load(x, j), load(out, j)), out, j)
    if whole < len(out):
        store_part(fma(a, load_part(x, whole), load_part(out, whole)), out, whole)


@piece
def rotate(x: Vector, rotation: Vector, back: Whole, out: Vector):
    """The pairs of a row by the angles of a token; the other channels as they are."""
    n, rest = len(rotation) // 2, len(out) - len(rotation)
    rotated(rows(x, 0, 2 * n), rows(rotation, 0, n), rows(rotation, n, n), back, rows(out, 0, 2 * n))
    copied(rows(x, 2 * n, rest), number(out, 1), rows(out, 2 * n, rest))


# The angles of all heads of a task are one row of numbers: loops over those of one head are too short for vectors.


@njit(**OPTIONS)
def spread(x: Any, P: Any, out: Any) -> None:
    """out = P times each number of x"""
    each = BYTES // out.itemsize
    whole = P // each * each
    for h in range(len(x)):
        for p in range(h * P, h * P + whole, each):
            store(no_numbers(out) + x[h], out, p)
        for p in range(h * P + whole, (h + 1) * P):
            out[p] = x[h]


@njit(**OPTIONS)
def alternate(x: Any, y: Any, P: Any, out: Any) -> None:
    """out = P numbers of x, P of y, the next P of x, ..."""
    each = BYTES // out.itemsize
    whole = P // each * each
    for first in range(0, len(x), max(P, 1)):
        for p in range(first, first + whole, each):
            store(load(x, p), out, first + p)
            store(load(y, p), out, first + P + p)
        for p in range(first + whole, first + P):
            out[first + p], out[first + P + p] = x[p], y[p]


@piece
def advance(w: Work, i: Whole, rotations: Matrix, to: Whole):
    """theta += pi tanh(angle) dt of row i; row `to` of rotations: the cosines of each head, then its sines."""
    n, P, heads = w.STATE, w.P, w.HIGH - w.LOW
    first, count = w.LOW * P, heads * P
    near, span, sine = (
        row_part(w.near, n, first, count),
        row_part(w.span, n, first, count),
        row_part(w.sine, n, first, count),
    )
    spread(row_part(w.dt, i, w.LOW, heads), P, span)
    tangents(row_part(w.angle, i, first, count), near)
    add_angles(near, span, row_part(w.theta, n, first, count), near)
    cosines_and_sines(near, span, sine)
    alternate(span, sine, P, row_part(rotations, to, 2 * first, 2 * count))


@njit(**OPTIONS)
def slopes(dt: Any, total: Any, own: Any, dangle: Any) -> None:
    """dangle = pi (1 - own^2) dt total, own = tanh angle; own = pi own total, whose sum is a part of ddt."""
    for p in range(len(dangle)):
        slope = np.float64(own[p])
        dangle[p] = math.pi * np.float64(dt[p]) * (1 - slope * slope) * total[p]
        own[p] = math.pi * slope * total[p]


@piece
def advance_vjp(w: Work, i: Whole):
    """dangle of row i, and its part of ddt; theta is the sum of the gradients of this angle and all later ones."""
    n, P, heads = w.STATE, w.P, w.HIGH - w.LOW
    first, count = w.LOW * P, heads * P
    near, span = row_part(w.near, n, first, count), row_part(w.span, n, first, count)
    spread(row_part(w.dt, i, w.LOW, heads), P, span)
    tangents(row_part(w.angle, i, first, count), near)
    slopes(span, row_part(w.theta, n, first, count), near, row_part(w.dangle, i, first, count))
    for h in range(w.LOW, w.HIGH):
        w.ddt[i, h] += sum_of(row_part(w.near, n, h * P, P), P)


@piece
def begin_task(w: Work, task: Whole):
    """A sequence and `each` of its heads, before its first token."""
    cut = row(w.cuts, task // w.blocks)  # batch row, state, first token, last + 1
    w.STATE, w.START, w.STOP = cut[1], cut[0] * w.T + cut[2], cut[0] * w.T + cut[3]
    w.LOW = task % w.blocks * w.each
    w.HIGH = min(w.LOW + w.each, w.H)
    for h in range(w.LOW, w.HIGH):
        begin(w, h)


@piece
def begin(w: Work, h: Whole):
    """Head h before the first token: no angle, the last keys, their gamma in the state."""
    n, K, none = w.STATE, w.K, row(w.none, 0)
    at = n * w.H + h
    theta, one = row_part(w.theta, n, h * w.P, w.P), number(none, 1)
    for p in range(len(theta)):
        theta[p] = 0
    w.own[at, 0] = 0
    for r in range(w.R):
        key = row(columns(w.past_k, (h * w.R + r) * K, K), n) if w.begun else rows(none, 0, K)
        copied(key, one, rows(row(w.late, at), r * K, K))


@piece
def token(w: Work, i: Whole, h: Whole):
    """q, k, v, g, shares and later of head h of row i."""
    n, R, K, V, one = w.STATE, w.R, w.K, w.V, number(row(w.none, 0), 1)
    at = n * w.H + h
    B, C, hk, hq = w.B, w.C, h * w.Hk // w.H, h * w.Hq // w.H
    rotation, late = row_part(w.rotation, n, 2 * h * w.P, 2 * w.P), row(w.late, at)
    dt, before = w.dt[i, h], w.own[at, 0]
    own, g = dt * sigmoid(w.trap[i, h]), dt * w.A[i if w.shifts else 0, h]
    weight = exp(g) * ((dt - own) + before)
    w.own[at, 0] = own
    for r in range(R):
        value = rows(row(w.none, 0), 0, V)
        if i > w.START:
            value = row(columns(w.x, (r * w.H + h) * V, V), i - 1)
        elif w.begun:
            value = row(columns(w.past_v, (h * R + r) * V, V), n)
        w.g[i, r * w.H + h] = g if r == 0 else number(late, 0)
        copied(rows(late, r * K, K), one, row(columns(w.k, (r * w.H + h) * K, K), i))
        copied(value, weight, row(columns(w.v, (r * w.H + h) * V, V), i))
    if w.reads:
        for r in range(R):
            query, q = row(columns(C, (r * w.Hq + hq) * K, K), i), row(columns(w.q, (r * w.H + h) * K, K), i)
            rotate(query, rotation, 0, q)
            for s in range(R):
                pair = (h * R + r) * R + s
                if R > 1:
                    w.later[i, pair] = w.scale * dot(q, rows(late, s * K, K), K) if s > r else number(late, 0)
                share = w.scale * own * dot(query, row(columns(B, (s * w.Hk + hk) * K, K), i), K)
                w.shares[i, pair] = share + w.D[0, h] if w.skips and s == r else share
    for r in range(R):
        rotate(row(columns(B, (r * w.Hk + hk) * K, K), i), rotation, 0, rows(late, r * K, K))


@piece
def end(w: Work, h: Whole):
    """Keys, values, gamma and rotation of the last token, or of the state if there is none."""
    n, last, R, K, V, P, none = w.STATE, w.STOP - 1, w.R, w.K, w.V, w.P, row(w.none, 0)
    at, has_tokens = n * w.H + h, w.STOP > w.START
    rotation, one, batch = row_part(w.rotation, n, 2 * h * P, 2 * P), number(none, 1), last // w.T
    for r in range(R):
        k, v = row_part(w.end_k, n, (h * R + r) * K, K), row_part(w.end_v, n, (h * R + r) * V, V)
        if has_tokens:
            load_rows(w.in_B, (batch, r * w.Hk + h * w.Hk // w.H, last % w.T), (0, K), as_row(k))
            load_rows(w.in_x, (batch, r * w.H + h, last % w.T), (0, V), as_row(v))
        else:
            copied(rows(row(w.late, at), r * K, K), one, k)
            copied(row(columns(w.past_v, (h * R + r) * V, V), n) if w.begun else rows(none, 0, V), one, v)
    if not has_tokens:
        for p in range(P):
            rotation[p], rotation[P + p] = 1, 0
    w.end_own[n, h] = w.own[at, 0]
    copied(rotation, one, row_part(w.end_rotation, n, 2 * h * P, 2 * P))


@piece
def forward(w: Work, first: Whole, last: Whole):
    """q, k, v, g, shares and the last tokens of tasks first..last."""
    for task in range(first, last):
        begin_task(w, task)
        for i in range(w.START, w.STOP):
            advance(w, i, w.rotation, w.STATE)
            for h in range(w.LOW, w.HIGH):
                token(w, i, h)
        for h in range(w.LOW, w.HIGH):
            end(w, h)


def _crossed_vectors(x: Any, d: Any, count: int, total: Any) -> None:
    even, odd, x, d = slice(0, 2 * count, 2), slice(1, 2 * count, 2), np.asarray(x, float), np.asarray(d, float)
    total[:count] += x[even] * d[odd] - x[odd] * d[even]


@emitted(_crossed_vectors)
def crossed_vectors(b: Builder, x: Array, d: Array, count: Value, total: Array) -> None:
    """`crossed` of `count` pairs, in whole vectors of the sums."""
    W, pairs = total.vector.count, ir.VectorType(x.number, 2 * total.vector.count)

    def every_other(y: Array, p: Value, first: int) -> Value:
        both = b.load(b.inttoptr(y.at(b.mul(p, I64(2))), pairs.as_pointer()), align=y.size)
        half = b.shuffle_vector(both, constant(pairs, ir.Undefined), lanes(range(first, 2 * W, 2)))
        return converted(b, half, total.vector)

    with loop(b, 0, count, W) as p:
        less = b.fmul(every_other(x, p, 1), every_other(d, p, 0))
        more = b.fsub(total.load(total.at(p)), less)
        total.store(vectors.fma(b, every_other(x, p, 0), every_other(d, p, 1), more), total.at(p))


@njit(**OPTIONS)
def crossed(x: Any, d: Any, total: Any) -> None:
    """total += the gradient of an angle, x_even d_odd - x_odd d_even."""
    each = BYTES // total.itemsize
    whole = len(total) // each * each
    crossed_vectors(x, d, whole, total)
    for p in range(whole, len(total)):
        total[p] += (np.float64(x[2 * p]) * np.float64(d[2 * p + 1])
                     - np.float64(x[2 * p + 1]) * np.float64(d[2 * p]))  # fmt: skip


@piece
def reads_vjp(w: Work, i: Whole, h: Whole) -> Number:
    """Gradients of what the queries of row i read beside the state; returns that of gamma.

    late and back: of the late keys and values, to which those of the rows s > r are added.
    """
    at, R, K, V, H = w.STATE * w.H + h, w.R, w.K, w.V, w.H
    hk, hq, none, one = h * w.Hk // w.H, h * w.Hq // w.H, number(row(w.none, 0), 0), number(row(w.none, 0), 1)
    rotation, total = row(columns(w.rotations, 2 * h * w.P, 2 * w.P), i), row_part(w.theta, w.STATE, h * w.P, w.P)
    key = row(w.key, at)
    late, back, own = row(w.late, at), row(w.back, at), w.dt[i, h] * sigmoid(w.trap[i, h])
    down, along = none, none
    for r in range(R):
        C, dC = row(columns(w.C, (r * w.Hq + hq) * K, K), i), row(columns(w.dC, (r * H + h) * K, K), i)
        dout, dq = row(columns(w.dout, (r * H + h) * V, V), i), row(columns(w.dq, (r * H + h) * K, K), i)
        if r + 1 < R:
            copied(dq, one, key)
            q = row(columns(w.q, (r * H + h) * K, K), i)
            for s in range(r + 1, R):
                d = w.scale * dot(dout, row(columns(w.v, (s * H + h) * V, V), i), V)
                add(row(columns(w.k, (s * H + h) * K, K), i), d, key)
                add(q, d, rows(late, s * K, K))
                add(dout, w.later[i, (h * R + r) * R + s], rows(back, s * V, V))
            rotate(key, rotation, 1, dC)
        else:
            rotate(dq, rotation, 1, dC)
        crossed(C, dC, total)
        for s in range(R):
            B, dB = row(columns(w.B, (s * w.Hk + hk) * K, K), i), row(columns(w.dB, (s * H + h) * K, K), i)
            x, dx = row(columns(w.x, (s * H + h) * V, V), i), row(columns(w.dx, (s * H + h) * V, V), i)
            written, overlap = dot(dout, x, V), w.scale * dot(C, B, K)
            down += overlap * written
            share = overlap * own
            if r == s:
                along += written
                share = share + w.D[0, h] if w.skips else share
            add(dout, share, dx)
            add(C, w.scale * own * written, dB)
            add(B, w.scale * own * written, dC)
    w.written[i, h] = along
    return down


@piece
def token_vjp(w: Work, i: Whole, h: Whole):
    """Gradients of row i of head h, after those of all later rows."""
    n, R, K, V, P, H, none, hk = w.STATE, w.R, w.K, w.V, w.P, w.H, row(w.none, 0), h * w.Hk // w.H
    at, one, rotation = n * H + h, number(none, 1), row(columns(w.rotations, 2 * h * P, 2 * P), i)
    total, late, back = row_part(w.theta, n, h * P, P), row(w.late, at), row(w.back, at)
    # of the token after: e^g dw, w, and the gradients of its late keys and values
    dt, lam, down, weight = w.dt[i, h], sigmoid(w.trap[i, h]), w.own[at, 0], w.own[at, 1]
    for r in range(R):
        dB, dx = row(columns(w.dB, (r * H + h) * K, K), i), row(columns(w.dx, (r * H + h) * V, V), i)
        if i + 1 < w.STOP:
            rotate(rows(late, r * K, K), rotation, 1, dB)
            crossed(row(columns(w.B, (r * w.Hk + hk) * K, K), i), dB, total)
            copied(rows(back, r * V, V), weight, dx)
        elif w.ended:
            copied(row(columns(w.dend_k, (h * R + r) * K, K), n), one, dB)
            copied(row(columns(w.dend_v, (h * R + r) * V, V), n), one, dx)
        else:
            copied(rows(none, 0, K), one, dB)
            copied(rows(none, 0, V), one, dx)
        copied(row(columns(w.dk, (r * H + h) * K, K), i), one, rows(late, r * K, K))
        copied(row(columns(w.dv, (r * H + h) * V, V), i), one, rows(back, r * V, V))
    own, rate, before = lam * dt, w.A[i if w.shifts else 0, h], number(none, 0)
    if i > w.START:
        before = w.dt[i - 1, h] * sigmoid(w.trap[i - 1, h])
    fade = exp(dt * rate)
    weight = fade * ((dt - own) + before)
    w.own[at, 1] = weight
    if w.reads:
        down += reads_vjp(w, i, h)
    dw = number(none, 0)
    for r in range(R):
        value = rows(none, 0, V)
        if i > w.START:
            value = row(columns(w.x, (r * H + h) * V, V), i - 1)
        elif w.begun:
            value = row(columns(w.past_v, (h * R + r) * V, V), n)
        dw += dot(rows(back, r * V, V), value, V)
    later = fade * dw
    w.own[at, 0] = later
    dg = w.g[i, h] + weight * dw
    w.ddt[i, h] = lam * down + (one - lam) * later + rate * dg
    w.dtrap[i, h] = lam * (one - lam) * dt * (down - later)
    w.dA[i, h] = dt * dg


@piece
def begin_vjp(w: Work, h: Whole):
    """Gradients of the last keys and values before the first token."""
    n, R, K, V, none = w.STATE, w.R, w.K, w.V, row(w.none, 0)
    at = n * w.H + h
    for r in range(R):
        dk, dv, by = rows(none, 0, K), rows(none, 0, V), number(none, 1)
        if w.ended:
            dk, dv = row(columns(w.dend_k, (h * R + r) * K, K), n), row(columns(w.dend_v, (h * R + r) * V, V), n)
        if w.STOP > w.START:
            dk, dv, by = rows(row(w.late, at), r * K, K), rows(row(w.back, at), r * V, V), w.own[at, 1]
        copied(dk, number(none, 1), row(columns(w.dpast_k, (h * R + r) * K, K), n))
        copied(dv, by, row(columns(w.dpast_v, (h * R + r) * V, V), n))


@piece
def backward(w: Work, first: Whole, last: Whole):
    """Gradients of the tokens, and of the last key and value before them, of tasks first..last."""
    for task in range(first, last):
        begin_task(w, task)
        for i in range(w.START, w.STOP):
            advance(w, i, w.rotations, i)
        for h in range(w.LOW, w.HIGH):
            at = w.STATE * w.H + h
            begin(w, h)  # the theta of a head is now the sum of the gradients of later angles
            w.own[at, 1] = 0
            if w.ended:
                w.own[at, 0] = w.dend_own[w.STATE, h]
                for p in range(h * w.P, (h + 1) * w.P):
                    w.theta[w.STATE, p] = w.dend_theta[w.STATE, p]
        for i in range(w.STOP - 1, w.START - 1, -1):
            for h in range(w.LOW, w.HIGH):
                token_vjp(w, i, h)
            advance_vjp(w, i)
        if w.begun:
            for h in range(w.LOW, w.HIGH):
                begin_vjp(w, h)


# one row a token: weights and rotations alone, where the core rotates and weighs rows as it loads them


@njit(**OPTIONS)
def own_shares(dt: Any, trap: Any, rate: Any, own: Any, g: Any) -> None:
    """gamma and g"""
    for h in range(len(dt)):
        own[h] = dt[h] * sigmoid(trap[h])
        g[h] = dt[h] * rate[h]


@njit(**OPTIONS)
def next_shares(dt: Any, own: Any, before: Any, out: Any) -> None:
    """h + gamma of the row before"""
    for h in range(len(dt)):
        out[h] = (dt[h] - own[h]) + before[h]


@piece
def own_token(w: Work, i: Whole):
    """g, gamma and the rotations of row i, and h + gamma of the row before."""
    low, count = w.LOW, w.HIGH - w.LOW
    advance(w, i, w.rotations, i)
    dt, own = row_part(w.dt, i, low, count), row_part(w.owns, i, low, count)
    rate = row_part(w.A, i if w.shifts else 0, low, count)
    own_shares(dt, row_part(w.trap, i, low, count), rate, own, row_part(w.g, i, low, count))
    if i > w.START:
        next_shares(dt, own, row_part(w.owns, i - 1, low, count), row_part(w.weights, i - 1, low, count))


@piece
def first_share(w: Work, h: Whole) -> Number:
    """h of the first row, 0 where there is none."""
    i = w.START
    return w.dt[i, h] - w.dt[i, h] * sigmoid(w.trap[i, h]) if i < w.STOP else number(row(w.none, 0), 0)


@piece
def numbers(w: Work, first: Whole, last: Whole):
    """Numbers and rotations of tasks first..last, h x of the tokens before them, and their last tokens."""
    for task in range(first, last):
        begin_task(w, task)
        n, P, V, last = w.STATE, w.P, w.V, w.STOP - 1
        for i in range(w.START, w.STOP):
            own_token(w, i)
        for h in range(w.LOW, w.HIGH):
            rotation = row_part(w.rotation, n, 2 * h * P, 2 * P)
            if w.STOP > w.START:
                w.weights[last, h] = 0
                w.own[n * w.H + h, 0] = w.owns[last, h]
                copied(row_part(w.rotations, last, 2 * h * P, 2 * P), number(rotation, 1), rotation)
            end(w, h)
            if w.begun:
                copied(row(columns(w.past_v, h * V, V), n), first_share(w, h), row(columns(w.begin_v, h * V, V), n))


@piece
def own_token_vjp(w: Work, i: Whole, h: Whole, again: Number, later: Number):
    """Gradients of row i of head h but for its angles; again: of its h, later: of gamma in the state."""
    dt, lam, rate = w.dt[i, h], sigmoid(w.trap[i, h]), w.A[i if w.shifts else 0, h]
    down, one = w.downs[i, h] + later, number(row(w.none, 0), 1)
    w.ddt[i, h] = lam * down + (one - lam) * again + rate * w.g[i, h]
    w.dtrap[i, h] = lam * (one - lam) * dt * (down - again)
    w.dA[i, h] = dt * w.g[i, h]


@njit(**OPTIONS)
def add_wide(x: Any, total: Any) -> None:
    """total += x"""
    for p in range(len(total)):
        total[p] += np.float64(x[p])


@piece
def numbers_vjp(w: Work, first: Whole, last: Whole):
    """The transpose; B and x are their gradients, to which those of the last token are added, or else to the past's."""
    H, K, V, P = w.H, w.K, w.V, w.P
    for task in range(first, last):
        begin_task(w, task)
        n, start, stop = w.STATE, w.START, w.STOP
        for h in range(w.LOW, w.HIGH):
            hk = h * w.Hk // H
            if w.begun:
                copied(row(columns(w.dbegin_v, h * V, V), n), first_share(w, h), row(columns(w.dpast_v, h * V, V), n))
            if w.ended:
                one = number(row(w.none, 0), 1)
                for p in range(h * P, (h + 1) * P):
                    w.theta[n, p] = w.dend_theta[n, p]
                dk, dv = row(columns(w.dend_k, h * K, K), n), row(columns(w.dend_v, h * V, V), n)
                if stop > start:
                    add(dk, one, row(columns(w.B, hk * K, K), stop - 1))
                    add(dv, one, row(columns(w.x, h * V, V), stop - 1))
                elif w.begun:
                    add(dk, one, row(columns(w.dpast_k, h * K, K), n))
                    add(dv, one, row(columns(w.dpast_v, h * V, V), n))
        for i in range(stop - 1, start - 1, -1):
            for h in range(w.LOW, w.HIGH):
                again, later = number(row(w.none, 0), 0), number(row(w.none, 0), 0)
                if i > start:
                    again = w.dweights[i - 1, h]
                elif w.begun:
                    again = dot(row(columns(w.dbegin_v, h * V, V), n), row(columns(w.past_v, h * V, V), n), V)
                if i + 1 < stop:
                    later = w.dweights[i, h]
                elif w.ended:
                    later = w.dend_own[n, h]
                own_token_vjp(w, i, h, again, later)
            first, count = w.LOW * P, (w.HIGH - w.LOW) * P
            if P:
                add_wide(row_part(w.dangles, i, first, count), row_part(w.theta, n, first, count))
                advance_vjp(w, i)


# the state after the last token

STATES = Workspace(
    "states", ("R", "K", "V", "P"), (), (), {"given": {
        "begin": Field("rows", "V"), "S": Field("rows", "V"), "k": Field("all", "RK"), "v": Field("all", "RV"),
        "rotation": Field("all", "PP"), "own": Field("all", "one"),
    }})  # fmt: skip
Settling = workspace_kind(STATES)


@piece
def settle(w: Settling, first: Whole, last: Whole):
    """S of heads first..last: rows of P, of each pair rotated back, + sum_r gamma k_r^T v_r."""
    R, K, V, P = w.R, w.K, w.V, w.P
    for at in range(first, last):
        rotation, k, v, own = row(w.rotation, at), row(w.k, at), row(w.v, at), w.own[at, 0]
        for p in range(P):
            n, c, s = at * K + 2 * p, rotation[p], rotation[P + p]
            x, y, to_x, to_y = row(w.begin, n), row(w.begin, n + 1), row(w.S, n), row(w.S, n + 1)
            for j in range(0, V, BYTES // v.itemsize):
                even, odd = load_part(x, j), load_part(y, j)
                total, other = fma(s, odd, c * even), fma(-s, even, c * odd)
                for r in range(R):
                    value = load_part(rows(v, r * V, V), j)
                    total = fma(own * k[r * K + 2 * p], value, total)
                    other = fma(own * k[r * K + 2 * p + 1], value, other)
                store_part(total, to_x, j)
                store_part(other, to_y, j)
        for n in range(2 * P, K):
            x, to_x = row(w.begin, at * K + n), row(w.S, at * K + n)
            for j in range(0, V, BYTES // v.itemsize):
                total = load_part(x, j)
                for r in range(R):
                    total = fma(own * k[r * K + n], load_part(rows(v, r * V, V), j), total)
                store_part(total, to_x, j)


# Python


class Call(NamedTuple):
    """The arrays of a call and their sizes: rows (..., T, R, heads, width), states (..., H, R, width) or (N, ..)."""

    given: dict[str, Any]
    sizes: dict[str, int]
    lead: tuple[int, ...]  # batch axes of tokens
    owners: tuple[int, ...]  # those of states
    dtype: np.dtype

    def tokens(self, name: str, *own: str) -> np.ndarray:
        """A new array of tokens; own: the axes of one token, by default its heads and their columns."""
        H, width = self.sizes["H"], self.sizes[TRAPEZOID.matrices[name].columns]
        shape = [self.sizes[n] for n in own] if own else [H, width // H]
        return working((*self.lead, self.sizes["T"], *shape), self.dtype)

    def steps(self, name: str) -> np.ndarray:
        """A new array of the core's rows (..., T R, H, width)."""
        T, R, H, width = *(self.sizes[n] for n in "TRH"), self.sizes[TRAPEZOID.matrices[name].columns]
        return working((*self.lead, T * R, H, width // (R * H)), self.dtype)

    def states(self, name: str, *own: str) -> np.ndarray:
        """A new array of the ends of sequences."""
        H, width = self.sizes["H"], self.sizes[TRAPEZOID.matrices[name].columns]
        shape = [self.sizes[n] for n in own] if own else [H, width // H]
        return working((*self.owners, *shape), self.dtype)

    def run(self, kernel: Any, outputs: dict[str, np.ndarray]) -> None:
        """Heads are shared out where there are fewer sequences than threads; a head has the same bits in any share."""
        count, H, s = self.sizes["states"], self.sizes["H"], self.sizes
        each = -(-H // min(H, -(-threads.num_threads() // count)))
        sizes = s | {"each": each, "blocks": -(-H // each)}
        scratch = {n: working((count, s[width]), np.dtype(np.float64) if n in SUMS else self.dtype)
                   for n, width in ANGLES.items()}  # fmt: skip
        scratch |= {n: working((s["all"], s[width]), self.dtype) for n, width in SCRATCH.items()}
        arrays = {n: y if n in TRAPEZOID.arrays else y.reshape(self._shape(n))
                  for n, y in (self.given | outputs).items()}  # fmt: skip
        over_matrices(kernel, TRAPEZOID, sizes | arrays | scratch, count * sizes["blocks"], name_of(self.dtype))

    def _shape(self, name: str) -> tuple[int, int]:
        m = TRAPEZOID.matrices[name]
        return self.sizes[m.rows], self.sizes[m.columns]


def call_of(
    x: Any,
    last: Any,
    D: Any,
    scale: float,
    sequences: Any,
    dtype: Any,
    more: dict[str, Any] | None = None,
    rows: bool = True,
) -> Call:
    """The call of tokens x, the last keys and values before them, a skip connection D (H,); None: there are none.

    rows: whether it needs all rows of x and B; else the last tokens alone, as they are stored.
    """
    *lead, T, R, H, V = x.x.shape
    K, P, batch, dtype = x.B.shape[-1], x.angle.shape[-1], math.prod(lead), np.dtype(dtype)
    ragged = sequences[0].row is not None if sequences else True
    owners = (len(sequences),) if ragged else tuple(lead)
    cut, zeros = cuts(batch, T, sequences), constant_zeros(np, (1, max(K, V)), dtype, "cpu")
    given = {"dt": x.dt, "A": x.A, "trap": x.trap, "angle": x.angle} | (more or {})
    given |= {"x": x.x, "B": x.B} if rows else {}
    given |= {} if x.C is None else {"C": x.C}
    given |= {} if D is None else {"D": D}
    given |= {} if last is None else {"past_k": last[0], "past_v": last[1]}
    given = {n: dense(y, np.dtype(np.float64) if n in SUMS else dtype) for n, y in given.items()} | {
        "cuts": cut,
        "none": zeros,
    }
    stored = {n: given.get(n, y).reshape((batch, T, -1, y.shape[-1])) for n, y in (("x", x.x), ("B", x.B))}
    given |= {f"in_{n}": y for n, y in stored.items()}
    Hk, Hq, states = x.B.shape[-2], 1 if x.C is None else x.C.shape[-2], math.prod(owners)
    sizes = {"T": T, "R": R, "H": H, "Hk": Hk, "Hq": Hq, "K": K, "V": V, "P": P, "count": batch * T, "states": states,
             "sequences": states, "four": 4, "one": 1, "widest": max(K, V), "all": states * H, "two": 2,
             "RH": R * H, "HRR": H * R * R, "RHK": R * H * K, "RHV": R * H * V, "HP": H * P, "HPP": 2 * H * P,
             "RHkK": R * Hk * K, "RHqK": R * Hq * K, "RK": R * K, "RV": R * V,
             "rates": x.A.size // max(H, 1), "shifts": int(x.A.ndim > 1), "reads": int(x.C is not None),
             "begun": int(last is not None), "ended": int("dend_k" in given),
             "skips": int(D is not None), "scale": scale}  # fmt: skip
    return Call(given, sizes, tuple(lead), owners, dtype)


def late_writes(x: Any, last: Any, D: Any, scale: float, sequences: Any, dtype: Any) -> tuple[Any, ...]:
    """As ops/trapezoid.py: q, k, v, g, shares, later, and of the last token keys, values, gamma and rotation."""
    call = call_of(x, last, D, scale, sequences, dtype)
    pairs = () if x.C is None else ("shares",) if call.sizes["R"] == 1 else ("shares", "later")
    outputs = {n: call.steps(n) for n in ("k", "v", "g", *(() if x.C is None else ("q",)))}
    outputs |= {n: call.tokens(n, "H", "R", "R") for n in pairs}
    outputs |= {"end_k": call.states("end_k", "H", "R", "K"), "end_v": call.states("end_v", "H", "R", "V")}
    outputs |= {n: call.states(n) for n in ("end_own", "end_rotation")}
    call.run(forward, outputs)
    rotation = outputs["end_rotation"].reshape((*call.owners, call.sizes["H"], 2, call.sizes["P"]))
    return (outputs.get("q"), outputs["k"], outputs["v"], outputs["g"][..., 0], outputs.get("shares"),
            outputs.get("later"), outputs["end_k"],
            outputs["end_v"], outputs["end_own"], np.moveaxis(rotation, -2, 0))  # fmt: skip


def late_writes_vjp(
    x: Any, last: Any, D: Any, scale: float, sequences: Any, dtype: Any, d: Any, dout: Any, late: Any, ends: Any
) -> Any:
    """Gradients (of the tokens by name; of the last keys and values before them) from those of q, k, v, g and outputs.

    d: of the core's inputs. dout: of out and of what is read beside it, None without queries. late: if R > 1.
    ends: of the last tokens, or None.
    """
    more = {"dk": d.k, "dv": d.v, "g": d.g}
    more |= {} if ends is None else {f"dend_{n}": y for n, y in ends._asdict().items()}
    if x.C is not None:
        more |= {"dq": d.q, "dout": dout}
        more |= {} if late is None else {n: getattr(late, n) for n in ("q", "k", "v", "later")}
    call = call_of(x, last, D, scale, sequences, dtype, more)
    reads = () if x.C is None else ("dC",)
    outputs = {n: call.tokens(n) for n in ("ddt", "dtrap", "dA", "dangle", *(() if x.C is None else ("written",)))}
    outputs |= {n: call.tokens(n, "R", "H", "V" if n == "dx" else "K") for n in ("dx", "dB", *reads)}
    if last is not None:
        outputs |= {"dpast_k": call.states("dpast_k", "H", "R", "K"), "dpast_v": call.states("dpast_v", "H", "R", "V")}
    call.run(backward, outputs | {"rotations": call.tokens("rotations")})
    return {n: y[..., 0] if n in ("ddt", "dtrap", "dA", "written") else y for n, y in outputs.items()}


def late_weights(x: Any, last: Any, sequences: Any, dtype: Any) -> tuple[np.ndarray, ...]:
    """As ops/trapezoid.py."""
    call = call_of(x._replace(C=None), last, None, 1.0, sequences, dtype, rows=False)
    outputs = {n: call.tokens(n) for n in ("g", "weights", "owns", "rotations")}
    outputs |= {n: call.states(n) for n in ("end_own", "end_rotation")}
    outputs |= {"end_k": call.states("end_k", "H", "R", "K"), "end_v": call.states("end_v", "H", "R", "V")}
    outputs |= {} if last is None else {"begin_v": call.states("begin_v", "H", "R", "V")}
    call.run(numbers, outputs)
    rotation = np.moveaxis(outputs["end_rotation"].reshape((*call.owners, call.sizes["H"], 2, call.sizes["P"])), -2, 0)
    of_tokens = (outputs[n] for n in ("g", "weights", "owns", "rotations"))
    ends = (outputs[n] for n in ("end_k", "end_v", "end_own"))
    return *of_tokens, outputs.get("begin_v"), *ends, rotation


def late_weights_vjp(x: Any, last: Any, sequences: Any, dtype: Any, d: Any, ends: Any) -> dict[str, Any]:
    """Gradients by name from those of the core's inputs; ends: of the last tokens."""
    more = {"g": d.g, "dweights": d.weight, "downs": d.own}
    more |= {} if d.rotation is None else {"dangles": d.rotation}
    more |= {} if ends is None else {f"dend_{n}": y for n, y in ends._asdict().items()}
    more |= {} if last is None else {"dpast_k": d.past_k, "dbegin_v": d.past_v}
    grads = x._replace(x=d.v[..., None, :, :], B=d.k[..., None, :, :], C=None)
    call = call_of(grads, last, None, 1.0, sequences, dtype, more)
    outputs = {n: call.tokens(n) for n in ("ddt", "dtrap", "dA", "dangle")}
    outputs |= {} if last is None else {"dpast_v": call.states("dpast_v", "H", "R", "V")}
    call.run(numbers_vjp, outputs)
    found = {n: y if n in ("dangle", "dpast_v") else y[..., 0] for n, y in outputs.items()}
    found |= {"dx": call.given["x"], "dB": call.given["B"]}
    return found if last is None else found | {"dpast_k": call.given["dpast_k"]}


def settled(P: np.ndarray, k: np.ndarray, v: np.ndarray, own: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """S from P rotated back by `rotation`, + own k^T v of rows k, v (..., H, R, width)."""
    *lead, H, K, V = P.shape
    R, pairs, dtype = k.shape[-2], rotation.shape[-1], P.dtype
    heads = math.prod(lead) * H
    sizes = {"R": R, "K": K, "V": V, "P": pairs, "all": heads, "rows": heads * K, "RK": R * K, "RV": R * V,
             "PP": 2 * pairs, "one": 1}  # fmt: skip
    S, rotation = empty(P.shape, dtype), np.moveaxis(rotation, 0, -2)
    given = {"begin": P, "k": k, "v": v, "rotation": rotation, "own": own}
    arrays = {n: dense(y, dtype).reshape([sizes[m] for m in (STATES.matrices[n].rows, STATES.matrices[n].columns)])
              for n, y in (given | {"S": S}).items()}  # fmt: skip
    over_matrices(settle, STATES, sizes | arrays, heads, name_of(dtype), is_small=P.size <= SMALL)
    return S
