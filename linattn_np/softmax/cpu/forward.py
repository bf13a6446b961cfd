"""Forward: a task is a block of time of one sequence and head; keys come block by block, nearest first.

m' = max(m, max_j z_ij),   e_ij = e^{z_ij - m'},   l' = e^{m - m'} l + sum_j e_ij,   O' = e^{m - m'} O + e V
"""

from __future__ import annotations

import numpy as np

from ...ops.cpu.numbers import exp, log, number
from ...ops.cpu.products import FULL, LEFT_LOWER, product
from ...ops.cpu.rows import clear
from ...ops.cpu.storage import load_column, save, save_column
from ...runtime.pieces.piece import Whole, piece
from ...runtime.pieces.tiles import max_of, sum_of
from ...runtime.pieces.views import row
from .tile import before, begin_task, bias, leave_block, load_keys, load_queries, logits, pair_sums, rotate_keys
from .workspace import Work


@piece
def begin_rows(w: Work):
    """m, l and O of the sink, before the first key."""
    load_queries(w)
    clear(w.O)
    w.between = 0.0
    for i in range(w.c):
        w.m[i], w.l[i] = -np.inf, 0
    if w.sinks and w.normalize:
        load_column(w.in_sinks, (0, w.h, 0), w.fade)
        for i in range(w.c):
            w.m[i], w.l[i] = w.fade[0], 1


@piece
def weights(w: Work):
    """Z <- e^{z - m'} of a tile; m, l, and the factor of O."""
    load_keys(w)
    rotate_keys(w)
    if w.gated and w.is_diagonal:
        pair_sums(w)
    logits(w)
    low = number(w.Z, -np.inf)
    for i in range(w.c):
        bias(w, i)
        z, old = row(w.Z, i), w.m[i]
        most = max_of(z, w.n)
        most = most if most > old else old
        shift = number(w.Z, 0) if most == low else most
        for j in range(w.n):
            z[j] = exp(z[j] - shift)
        w.fade[i] = exp(old - shift)
        w.l[i] = w.fade[i] * w.l[i] + sum_of(z, w.n)
        w.m[i] = most


@piece
def add_keys(w: Work):
    """A tile: m, l and O with n more keys."""
    weights(w)
    product(LEFT_LOWER if w.is_diagonal else FULL, w.Z, w.v, w.O, added=w.O, weights=w.fade)
    before(w)


@piece
def last_factors(w: Work):
    """What O is multiplied by at the end: 1 / l, 1 where no key is read, e^m for the numerator."""
    low = number(w.Z, -np.inf)
    for i in range(w.c):
        none = w.m[i] == low
        if not w.normalize:
            w.fade[i], w.m[i], w.l[i] = exp(w.m[i]), 0, 1
        elif none:  # of the log sum inf, so that p = e^{z - inf} = 0
            w.fade[i], w.m[i], w.l[i] = 1, np.inf, 1
        else:
            w.fade[i] = 1 / w.l[i]


@piece
def end_rows(w: Work):
    """out and the logs of the block."""
    place = (w.BATCH, w.h, w.FIRST + w.i)
    last_factors(w)
    save(w.O, w.out, place, (0, w.V), w.fade)
    save_logs(w)


@piece
def save_logs(w: Work):
    """m + log l of the block."""
    for i in range(w.c):
        w.m[i] += log(w.l[i])
    save_column(w.m, w.logs, (w.BATCH, w.h, w.FIRST + w.i))


@piece
def forward(w: Work, first: Whole, last: Whole):
    """Outputs of the tasks first..last."""
    for n in range(first, last):
        begin_task(w, n)
        w.h, w.i = w.HEAD, w.FROM
        while w.i < w.TO:
            w.c = min(w.C, w.TO - w.i)
            begin_rows(w)
            stop = min(w.i + w.c, w.T) if w.causal else w.T
            lowest = max(w.i - w.window + 1, 0) if w.window else 0
            w.is_past, w.j = 0, (stop - 1) // w.N * w.N
            while w.j >= 0 and w.j + w.N > lowest:
                w.n = min(w.N, stop - w.j)
                w.is_diagonal = 1 if w.causal and w.C == w.N and w.j == w.i else 0
                add_keys(w)
                if w.mapped and (w.j > 0 or w.L > 0):
                    leave_block(w)
                w.j -= w.N
            w.is_past, w.is_diagonal = 1, 0
            for j in range(0, w.L, w.N):
                w.j, w.n = j, min(w.N, w.L - j)
                add_keys(w)
            end_rows(w)
            w.i += w.C
