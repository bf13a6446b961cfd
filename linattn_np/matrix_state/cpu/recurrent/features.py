"""Feature maps and averages of the recurrent form: queries and keys of a slab of tokens through a map.

    z_t = z_{t-1} + k_t        d_t = scale q_t z_t + eps        out_t = scale q_t S_t / d_t

k and q being features, z a column of the state behind its values.
"""

from __future__ import annotations

from ....ops.cpu.maps import MONOMIALS, map_rows
from ....ops.cpu.numbers import number
from ....ops.cpu.rows import scaled
from ....ops.cpu.storage import load, save_column
from ....runtime.pieces.piece import Whole, piece
from ....runtime.pieces.row_tiles import dot
from ....runtime.pieces.views import columns, row, rows
from ..workspace import Work


@piece(of="map")
def load_features(w: Work):
    """The features of a slab's keys and queries; of one token those of `group` heads at once."""
    each, c, head = w.c_rows, w.c, w.HEAD
    if w.known and w.known_batch == w.BATCH and w.known_t == w.t and w.known_head <= head < w.known_head + w.known:
        w.c_rows = w.known * each
    else:
        count = min(w.group, w.H - head)
        w.c_rows = count * each
        for n in range(count):
            load_rows(w, head + n, n * each)
        map_slab(w)
        if w.group > 1:
            w.known, w.known_batch, w.known_t, w.known_head = count, w.BATCH, w.t, head
    first = (head - w.known_head) * each if w.known else 0
    out = columns(w.phi, w.skipped, w.K_lanes) if w.map == MONOMIALS else w.mapped
    scaled(rows(out, first, c), None, w.keys)
    for j in range(w.queries if w.has_queries else 0):
        scaled(rows(out, first + (1 + j) * c, c), None, rows(w.query, j * c, c))
    w.c_rows = each


@piece
def load_rows(w: Work, head: Whole, first: Whole):
    """Keys and queries of a head, before the map, from row `first` on."""
    load(w.in_k, (w.BATCH, head, w.t), (0, w.given), rows(w.x, first, w.c))
    for j in range(w.queries if w.has_queries else 0):
        to = rows(w.x, first + (1 + j) * w.c, w.c)
        load(w.in_q, (w.BATCH, head * w.queries + j, w.t), (0, w.given), to)


@piece
def map_slab(w: Work):
    """The features of all rows in one product: a row of weights is read once."""
    how, tables = (w.map, w.given, w.K, w.half, w.segment_count), (w.in_map, w.in_segments)
    out = columns(w.phi, w.skipped, w.K_lanes) if w.map == MONOMIALS else w.mapped
    map_rows(how, w.x, tables, (w.lengths, w.map_numbers, w.map_weights), (w.phi, w.angles, out))


@piece(of="averaged")
def find_averages(w: Work):
    """z after the slab; averages = d_t of its queries, stored for the adjoint, then scale / d_t, 0 of 0."""
    z = w.z
    for i in range(w.c):
        k = row(w.keys, i)
        for d in range(len(z)):
            z[d] += k[d]
        for j in range(w.queries if w.has_queries else 0):
            x = j * w.c + i
            w.shares[x] = w.scale * dot(row(w.query, x), z, w.K_lanes) + w.eps
    for j in range(w.queries if w.has_queries else 0):
        for i in range(w.c):
            x = j * w.c + i
            total = w.shares[x]
            w.factor[i] = total
            w.shares[x] = w.scale / total if total != 0 else number(w.shares, 0)
        save_column(w.factor, w.out_sums, (w.BATCH, w.HEAD * w.queries + j, w.t))
