"""A tile: c queries from i on against n keys from j on, of the sequence or of the cache."""

from __future__ import annotations

import numpy as np

from ...ops.cpu.numbers import number
from ...ops.cpu.products import FULL, OUT_LOWER, product, transpose
from ...ops.cpu.rows import scale_rows, scaled
from ...ops.cpu.storage import load, load_column
from ...runtime.pieces.piece import Number, Whole, piece
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.views import row, tokens_of
from ..policy import FACTORS, FEW_ROWS
from .workspace import Work

COUNT = np.int64(0)


@piece
def begin_task(w: Work, n: Whole):
    """Task n: a row of the table of tasks."""
    x = row(w.tasks, n)
    w.BATCH, w.ROW, w.FIRST, w.T, w.HEAD, w.FROM, w.TO = x[0], x[1], x[2], x[3], x[4], x[5], x[6]
    w.MAPS = x[7]


@piece
def load_queries(w: Work):
    """q of the block times the scale; its log decays."""
    place = (w.BATCH, w.h, w.FIRST + w.i)
    load(w.in_q, place, (0, w.K), w.q)
    for i in range(w.c):
        w.one[i] = w.scale
    scale_rows(w.q, w.one)
    if w.gated:
        load_column(w.in_g, place, w.g)
        total = 0.0
        for i in range(w.c):
            before = total + common(w, w.g[i])
            total += w.g[i]
            w.start[i] = number(w.start, before if w.strict and w.normalize else total)
        w.passed = total


@piece
def common(w: Work, g: Number) -> Number:
    """What is left of a log decay that is common to all keys of a strict row, and cancels: -inf of a reset, else 0."""
    return number(w.g, 0) if g - g == 0 else g


@piece
def ages(w: Work):
    """How long ago the tokens of the slots from j on were; inf where there is none."""
    last = tokens_of(w.past_length, COUNT, (w.ROW, w.h, 0), 1, (0, 1))[0, 0] - 1
    for j in range(w.n):
        slot = w.j + j
        w.age[j] = number(w.age, 0.0 + (last - slot) % w.L if slot <= last else np.inf)


@piece
def load_keys(w: Work):
    """k and v of the block, its log decays, and how long ago a token of the cache was."""
    if w.is_past:
        place = (w.ROW, w.h, w.j)
        load(w.past_k, place, (0, w.K), w.k)
        load(w.past_v, place, (0, w.V), w.v)
        ages(w)
        if w.gated:
            load_column(w.past_b, place, w.end)
    else:
        place = (w.BATCH, w.h, w.FIRST + w.j)
        if w.mapped and not w.is_diagonal:
            load(w.in_end, place, (0, w.K), w.k)
        else:
            load(w.in_k, place, (0, w.K), w.k)
        load(w.in_v, place, (0, w.V), w.v)
        if w.gated:
            load_column(w.in_g, place, w.g_n)
            if w.strict and w.normalize and w.C < w.N and w.j + w.n > w.i:  # the one row's own
                w.g_n[w.n - 1] = common(w, w.g_n[w.n - 1])
            total = 0.0
            for j in range(w.n - 1, -1, -1):
                w.end[j] = number(w.end, total)
                total += w.g_n[j]


@piece
def logits(w: Work):
    """Z = scale q k^T; the pairs of a diagonal block up to its diagonal's tiles."""
    if w.c < FEW_ROWS:
        for i in range(w.c):
            q, z = row(w.q, i), row(w.Z, i)
            for j in range(w.n):
                z[j] = dot(q, row(w.k, j), w.K_lanes)
    else:
        product(OUT_LOWER if w.is_diagonal else FULL, w.q, w.kT, w.Z)
    if w.mapped and w.is_diagonal:  # less the parts along the directions of the maps between
        place = (w.BATCH, w.h, w.FIRST + w.i)
        load(w.in_E, place, (0, w.c), w.E)
        load(w.in_X, place, (0, w.c), w.X)
        product(OUT_LOWER, w.E, w.X, w.Z, w.one, w.Z)
    if w.biased and not w.is_past:
        add_bias(w)


@piece
def add_bias(w: Work):
    """Z + bias of a tile of the sequence."""
    load(w.in_bias, (w.BATCH, w.h, w.FIRST + w.i), (w.j, w.n), w.P)
    for i in range(w.c):
        z, p = row(w.Z, i), row(w.P, i)
        for j in range(w.n):
            z[j] += p[j]


@piece
def rotate_keys(w: Work):
    """k^T, where it is used."""
    if w.c >= FEW_ROWS:
        transpose(w.k, w.kT)


@piece
def pair_sums(w: Work):
    """D_ij = g_{j+1} + ... + g_i of a diagonal block, each by adding its own terms; of strict rows without g_i."""
    strict = w.strict and w.normalize
    for i in range(w.c):
        to, g = row(w.D, i), w.g[i - strict if i else 0]
        if i:
            above = row(w.D, i - 1)
            for j in range(i - strict):
                to[j] = above[j] + g
        if i and strict:
            to[i - 1] = 0
            for j in range(i):
                to[j] += common(w, w.g[i])
        to[i] = 0


@piece
def bias(w: Work, i: Whole):
    """What is added to the logits of row i; -inf where a key is not read."""
    z = row(w.Z, i)
    low, at = number(w.Z, -np.inf), w.i + i
    if w.gated:
        if w.is_diagonal:
            d = row(w.D, i)
            for j in range(i + 1):
                z[j] += d[j]
        else:
            far = number(w.start, w.between) if w.C < w.N else number(w.start, w.between + w.start[i])
            for j in range(w.n):
                z[j] += w.end[j] + far
    if w.is_past:
        reach = number(w.Z, w.reach - at - 1)
        for j in range(w.n):
            z[j] = z[j] if w.age[j] < reach else low
    else:
        for j in range(min(at - w.window + 1 - w.j, w.n) if w.window else 0):
            z[j] = low
        for j in range(max(at + 1 - w.strict - w.j, 0) if w.causal else w.n, w.n):
            z[j] = low


@piece
def before(w: Work):
    """The decay over a block, added to that of the blocks between: the next one is further away."""
    if w.gated and not w.is_past:
        total = 0.0
        for j in range(w.n):
            total += w.g_n[j]
        if not w.is_diagonal:
            w.between = w.between + total


@piece
def leave_block(w: Work):
    """After a tile: the queries as the keys of the block before it read them, q H_i ... or q R."""
    if w.is_diagonal:
        load(w.in_start, (w.BATCH, w.h, w.FIRST + w.i), (0, w.K), w.q)
        scale_rows(w.q, w.one)
    elif w.mapped == FACTORS:  # q - (q W^T) U
        place = (w.BATCH, w.h, w.FIRST + w.j)
        load(w.in_w, place, (0, w.K), w.k)
        transpose(w.k, w.kT)
        product(FULL, w.q, w.kT, w.Z)
        load(w.in_U, place, (0, w.K), w.k)
        product(FULL, w.Z, w.k, w.q, added=w.q)
    else:
        load_map(w, w.j)
        product(FULL, w.q, w.R, w.y)
        scaled(w.y, None, w.q)


@piece
def load_map(w: Work, j: Whole):
    """R of the block of keys from j on."""
    load(w.in_R, (w.BATCH, w.h, w.MAPS + j // w.N * w.K_lanes), (0, w.K), w.R)
