"""Feature maps and averages of the recurrent form: queries and keys of a slab of tokens through a map.

    z_t = z_{t-1} + k_t        d_t = scale q_t z_t + eps        out_t = scale q_t S_t / d_t

k and q being features, z a column of the state behind its values.
"""

from __future__ import annotations

from typing import Any

from ....ops.cpu.lengths import inverse_lengths
from ....ops.cpu.maps import exponentials, monomials, waves
from ....ops.cpu.numbers import number
from ....ops.cpu.products import FULL, product
from ....ops.cpu.rows import clear, fill, scale_rows, scaled
from ....ops.cpu.storage import load, save, save_column
from ....runtime.pieces.piece import Whole, piece
from ....runtime.pieces.row_tiles import dot
from ....runtime.pieces.views import as_row, columns, row, rows, rows_by, tokens_of, transposed
from ...types import Plan
from ..workspace import EXPONENTIALS, MONOMIALS
from .step_workspace import Steps


@piece(optional=True)
def load_map(w: Steps):
    """The numbers of the map."""
    load(w.in_numbers, (0, 0, 0), (0, w.number_count), as_row(w.map_numbers))


@piece(optional=True)
def load_features(w: Steps):
    """The features of a slab's keys and queries; of one token those of `group` heads at once."""
    each, c, head = w.c_rows, w.c, w.head
    if w.known and w.known_batch == w.batch and w.known_t == w.t and w.known_head <= head < w.known_head + w.known:
        w.c_rows = w.known * each
    else:
        count = min(w.group, w.H - head)
        w.c_rows = count * each
        for n in range(count):
            w.head = head + n
            load_rows(w, n * each)
        w.head = head
        map_rows(w)
        if w.group > 1:
            w.known, w.known_batch, w.known_t, w.known_head = count, w.batch, w.t, head
    first = (head - w.known_head) * each if w.known else 0
    out = w.mapped
    scaled(rows(out, first, c), None, w.keys)
    for j in range(w.queries if w.asked else 0):
        scaled(rows(out, first + (1 + j) * c, c), None, rows_by(w.query, j, w.queries, c))
    w.c_rows = each


@piece
def load_rows(w: Steps, first: Whole):
    """Keys and queries of a head, before the map, from row `first` on."""
    load(w.in_k, (w.batch, w.head, w.t), (0, w.given), rows(w.x, first, w.c))
    for j in range(w.queries if w.asked else 0):
        to = rows(w.x, first + (1 + j) * w.c, w.c)
        load(w.in_q, (w.batch, w.head * w.queries + j, w.t), (0, w.given), to)


@piece
def map_rows(w: Steps):
    """The features of all rows in one product: a row of weights is read once."""
    x, phi, over, out = w.x, w.phi, w.over, w.mapped
    if w.map == MONOMIALS:
        fill(over, w.map_numbers[0])
        scale_rows(x, over)
        monomials(x, w.given, w.map_segments, w.map_weights, phi)
        scaled(columns(phi, w.skipped, w.K_lanes), None, out)
    elif w.map == EXPONENTIALS:
        product(FULL, x, tokens_of(w.in_map, w.scale, (0, 0, 0), w.given, (0, w.K)), out)
        exponentials(out, x, w.map_numbers)
    else:
        inverse_lengths(x, w.given, over)
        product(FULL, x, tokens_of(w.in_map, w.scale, (0, 0, 0), w.given, (0, w.half)), w.angle, over)
        waves(w.angle, w.half, w.map_numbers[0], out)
    clear(columns(out, w.K, w.K_lanes - w.K))


@piece(optional=True)
def begin_sums(w: Steps):
    """z of the initial state; zeros without one."""
    z = w.z
    for d in range(len(z)):
        z[d] = 0
    if w.started:
        load(w.in_state, (w.from_state, w.head, 0), (w.V_all, 1), rows(transposed(as_row(z)), 0, w.K))


@piece(optional=True)
def end_sums(w: Steps):
    """z of the final state."""
    save(rows(transposed(as_row(w.z)), 0, w.K), w.out_state, (w.to_state, w.head, 0), (w.V_all, 1))


@piece(optional=True)
def find_averages(w: Steps):
    """z after the slab; averages = d_t of its queries, stored for the adjoint, then scale / d_t, 0 of 0."""
    z = w.z
    for i in range(w.c):
        k = row(w.keys, i)
        for d in range(len(z)):
            z[d] += k[d]
        for j in range(w.queries if w.asked else 0):
            x = i * w.queries + j
            w.averages[x] = w.scale * dot(row(w.query, x), z, w.K_lanes) + w.eps
    for j in range(w.queries if w.asked else 0):
        for i in range(w.c):
            x = i * w.queries + j
            total = w.averages[x]
            w.numbers[i] = total
            w.averages[x] = w.scale / total if total != 0 else number(w.averages, 0)
        save_column(w.numbers, w.out_sums, (w.batch, w.head * w.queries + j, w.t))


OF_MAPS = load_map, load_features
OF_AVERAGES = begin_sums, end_sums, find_averages


def pieces(plan: Plan) -> tuple[Any, ...]:
    """The optional pieces of a call."""
    found: tuple[Any, ...] = () if plan.features is None else OF_MAPS
    return found if plan.average is None else (*found, *OF_AVERAGES)
