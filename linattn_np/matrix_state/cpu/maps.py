"""Queries and keys through a feature map, and the transpose. Features are never stored in main memory."""

from __future__ import annotations

import numpy as np

from ...ops.cpu.maps import exponentials, exponentials_vjp, monomials, monomials_vjp, waves, waves_vjp
from ...ops.cpu.products import FULL, product
from ...ops.cpu.rows import clear, fill, inverse_lengths, scale_rows, unit_vjp
from ...ops.cpu.storage import load, save
from ...runtime.pieces.piece import Matrix, Truth, Vector, Whole, piece
from ...runtime.pieces.views import columns, tokens_of
from .workspace import EXPONENTIALS, MONOMIALS, Work

SEGMENTS = np.int64(0)  # the dtype of rows (parent, channel, first feature)


@piece(of="map")
def map_rows(w: Work, x: Matrix, over: Vector, phi: Matrix, angle: Matrix, out: Matrix):
    """The features of rows x, and zeros behind them; monomials begin before the first feature."""
    first, n = (0, 0, 0), w.given
    if w.map == MONOMIALS:
        fill(over, w.map_numbers[0])
        scale_rows(x, over)
        monomials(x, n, tokens_of(w.in_segments, SEGMENTS, first, w.segment_count, (0, 3)), w.map_weights, phi)
    elif w.map == EXPONENTIALS:
        product(FULL, x, tokens_of(w.in_map, w.scale, first, n, (0, w.K)), out)
        exponentials(out, x, w.map_numbers)
    else:
        inverse_lengths(x, n, over)
        product(FULL, x, tokens_of(w.in_map, w.scale, first, n, (0, w.half)), angle, over)
        waves(angle, w.half, w.map_numbers[0], out)
    clear(columns(out, w.K, out.shape[1] - w.K))


@piece(of="map")
def features(w: Work, queries: Truth, head: Whole):
    """q or k of a chunk, from the rows as they are given."""
    x = w.x_q if queries else w.x_k
    load(w.in_q if queries else w.in_k, (w.BATCH, head, w.t), (0, w.given), x)
    if queries:
        map_rows(w, x, w.over_q, w.phi_q, w.angle, w.q)
    else:
        map_rows(w, x, w.over_k, w.phi_k, w.angle, w.k)


@piece(of="map")
def features_vjp(w: Work, queries: Truth, head: Whole):
    """The gradient of the rows from the gradient of their features, which is overwritten."""
    x, phi = w.x_q if queries else w.x_k, w.q if queries else w.k
    dphi, over = w.dq if queries else w.dk, w.over_q if queries else w.over_k
    place, given = (w.BATCH, head, w.t), (0, w.given)
    fill(w.row_sums, 1.0)
    if w.map == MONOMIALS:
        whole, dwhole = w.phi_q if queries else w.phi_k, w.phi_dq if queries else w.phi_dk
        clear(columns(dwhole, 0, w.skipped))
        clear(columns(dwhole, w.skipped + w.K, w.lane))
        clear(w.dx)
        segments = tokens_of(w.in_segments, SEGMENTS, (0, 0, 0), w.segment_count, (0, 3))
        monomials_vjp(x, w.given, segments, w.map_weights, whole, dwhole, w.dx)
        fill(w.row_sums, w.map_numbers[0])
    elif w.map == EXPONENTIALS:
        exponentials_vjp(dphi, phi, w.map_numbers, w.row_sums)
        WT = tokens_of(w.in_map_T, w.scale, (0, 0, 0), w.K, given)
        product(FULL, dphi, WT, w.dx, added=x, weights=w.row_sums)
        fill(w.row_sums, 1.0)
    else:
        waves_vjp(dphi, phi, w.half, w.angle)
        product(FULL, w.angle, tokens_of(w.in_map_T, w.scale, (0, 0, 0), w.half, given), w.dx)
        unit_vjp(x, w.given, over, w.dx)
    save(w.dx, w.out_dq if queries else w.out_dk, place, given, w.row_sums)
