"""Levels 0 .. c: tokens of one aligned chunk of C = 2^c positions.

With A_ij = scale q_i M_i ... M_{j+1} k_j, the core's output for v = I, and Lam_ij = lam_i[level(i, j)],

    out = (A (.) Lam) v
    dLam = (dout v^T) (.) A,   dA = (dout v^T) (.) Lam,   dv = (A (.) Lam)^T dout
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ....runtime.arrays import Array, Namespace, cast
from ....runtime.shapes import Sequence
from ... import core
from .blocks import chunk_rows, level_of, one_hot
from .rows import Gradients, Row, placed, taken


class Saved(NamedTuple):
    """Residuals: chunks as rows of tokens, A, Lam (chunks, C, H, C), v (chunks, C, H, V), and those of the core."""

    at: np.ndarray
    A: Array
    Lam: Array
    v: Array
    core: Any


def forward(row: Row, c: int) -> tuple[Array, Saved]:
    """(out, residuals)."""
    xp, C, H = row.plan.xp, 1 << c, row.x.v.shape[-2]
    at = chunk_rows(row.spans, C)
    x = row.x.each(lambda y: _chunked(row, y, at))
    unit = xp.broadcast_to(row.constant(np.eye(C))[:, None, :], (len(at), C, H, C))
    A, _, saved = row.run(x.core._replace(v=unit), (Sequence(None, 0, C),), None, False)
    Lam = cast(xp, x.lam, row.plan.dtype) @ row.constant(_levels(C, row.levels))
    out = _by_head(xp, _by_head(xp, A * Lam) @ _by_head(xp, x.v))
    return _unchunked(row, out, at), Saved(at, A, Lam, x.v, saved)


def backward(row: Row, saved: Saved, dout: Array, d: Gradients) -> None:
    """Adds the gradients."""
    at, A, Lam, v, residuals = saved
    xp, T = row.plan.xp, row.plan.xp.matrix_transpose
    dout = _by_head(xp, _chunked(row, dout, at))
    dP = _by_head(xp, dout @ T(_by_head(xp, v)))
    dlam = (dP * A) @ T(row.constant(_levels(A.shape[-1], row.levels)))
    dv = _by_head(xp, T(_by_head(xp, A * Lam)) @ dout)
    dx, _ = core.backward(residuals, dP * Lam, None)
    d.add(q=_unchunked(row, dx.q, at), lam=_unchunked(row, dlam, at), v=_unchunked(row, dv, at))
    d.add_core(dx, lambda y: _unchunked(row, y, at))


def _levels(C: int, n: int) -> np.ndarray:
    """(C, n, C): 1 where level(i, j) = l."""
    at = np.arange(C)
    return one_hot(level_of(at[:, None], at), n)


def _by_head(xp: Namespace, y: Array) -> Array:
    """(n, C, H, D) as (n, H, C, D), and back."""
    return xp.permute_dims(y, (0, 2, 1, 3))


def _chunked(row: Row, y: Array, at: np.ndarray) -> Array:
    """Tokens (tokens, heads, D) by chunk, zeros where there is none: (chunks, C, heads, D)."""
    xp, has = row.plan.xp, np.flatnonzero(at >= 0)
    y = placed(row, cast(xp, y, row.plan.dtype), has, at.size) if has.size < at.size else y
    return xp.reshape(y, (*at.shape, *y.shape[1:]))


def _unchunked(row: Row, y: Array, at: np.ndarray) -> Array:
    """The transpose of _chunked."""
    return taken(row, row.plan.xp.reshape(y, (at.size, *y.shape[2:])), np.flatnonzero(at >= 0))
