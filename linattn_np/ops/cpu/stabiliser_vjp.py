"""The transposes of running maxima and sums in log space (stabiliser.py): one pass from the last token to the first."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime.arrays import name_of
from ...runtime.pieces.memory import working
from ...runtime.pieces.piece import Vector, Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.tiles import copy_row
from ...runtime.pieces.views import columns, row
from ...runtime.pieces.workspace import Matrix, Workspace
from .formulas import dense
from .numbers import exp, number
from .stabiliser import blocks_of, cuts

SIZES = ("count", "T", "H", "states", "sequences", "four", "blocks", "each")
CUTS = {"cuts": Matrix("sequences", "four", dtype="int64")}


def _declared(name: str, tokens: tuple[str, ...], states: tuple[str, ...]) -> Workspace:
    """The fields of a kernel: arrays of tokens, and of states."""
    arrays = {n: Matrix("count", "H") for n in tokens} | {n: Matrix("states", "H") for n in states}
    return Workspace(name, SIZES, (), (), {"given": CUTS | arrays})


MAXIMUM = _declared("maximum_vjp", ("a", "b", "m", "da", "db"), ("m_0", "dm", "dm_0"))
SUMS = _declared("shares_vjp", ("share", "g", "dshare", "dg", "ds"), ("N_0", "dN_0"))
OfMaximum, OfSums = workspace_kind(MAXIMUM), workspace_kind(SUMS)


@piece
def to_larger(a: Vector, b: Vector, before: Vector, dm: Vector, da: Vector, db: Vector):
    """dm of m_t = max(a_t + m_{t-1}, b_t) goes to the larger side: db, or da and dm of m_{t-1}, of equal ones too."""
    for h in range(len(dm)):
        d, none = dm[h], number(dm, 0)
        is_input = b[h] > a[h] + before[h]
        db[h] = d if is_input else none
        da[h] = none if is_input else d
        dm[h] = none if is_input else d


@piece
def of_maximum(w: OfMaximum, first: Whole, last: Whole):
    """Tasks first..last: a sequence and a block of columns."""
    for task in range(first, last):
        cut, c = row(w.cuts, task // w.blocks), task % w.blocks * w.each  # batch row, state, first token, the last + 1
        n = min(w.each, w.H - c)
        a, b, m, da, db = (columns(w.a, c, n), columns(w.b, c, n), columns(w.m, c, n), columns(w.da, c, n),
                           columns(w.db, c, n))  # fmt: skip
        m_0, dm = row(columns(w.m_0, c, n), cut[1]), row(columns(w.dm_0, c, n), cut[1])
        copy_row(row(columns(w.dm, c, n), cut[1]), dm, n)
        for back in range(cut[3] - cut[2]):
            t = cut[3] - 1 - back
            i = cut[0] * w.T + t
            before = row(m, i - 1) if t > cut[2] else m_0
            to_larger(row(a, i), row(b, i), before, dm, row(da, i), row(db, i))


@piece
def to_earlier(share: Vector, g: Vector, dshare: Vector, dg: Vector, y: Vector, ds: Vector):
    """ds_t, and y_t from y_{t+1}."""
    for j in range(len(y)):
        fade = exp(g[j])
        own = share[j] * (fade * dshare[j] - dg[j])
        ds[j] = own + share[j] * y[j]
        y[j] = fade * y[j] - own


@piece
def of_sums(w: OfSums, first: Whole, last: Whole):
    """Tasks first..last: a sequence and a block of columns."""
    for task in range(first, last):
        cut, c = row(w.cuts, task // w.blocks), task % w.blocks * w.each
        n = min(w.each, w.H - c)
        share, g, dshare, dg, ds = (columns(w.share, c, n), columns(w.g, c, n), columns(w.dshare, c, n),
                                    columns(w.dg, c, n), columns(w.ds, c, n))  # fmt: skip
        N_0, y = row(columns(w.N_0, c, n), cut[1]), row(columns(w.dN_0, c, n), cut[1])
        for j in range(n):
            y[j] = number(y, 0)
        for back in range(cut[3] - cut[2]):
            i = cut[0] * w.T + cut[3] - 1 - back
            to_earlier(row(share, i), row(g, i), row(dshare, i), row(dg, i), y, row(ds, i))
        for j in range(n):
            y[j] = number(y, 0) if N_0[j] <= 0 else y[j] / N_0[j]


def maximum_vjp(a: Any, b: Any, m: Any, m_0: Any, sequences: Any, dm: Any) -> tuple[Any, Any, Any]:
    """(da, db, dm_0) from dm (states, H) of the last tokens; a, b, m (..., T, H)."""
    dtype = np.dtype(np.float64)
    da, db, dm_0 = (working(y.shape, dtype) for y in (b, b, dm))
    if dm.size:
        tokens = {"a": a, "b": b, "m": m, "da": da, "db": db}
        _run(of_maximum, MAXIMUM, tokens, {"m_0": m_0, "dm": dm, "dm_0": dm_0}, sequences, dtype)
    return da, db, dm_0


def shares_vjp(share: Any, g: Any, N_0: Any, dshare: Any, dg: Any, sequences: Any) -> tuple[Any, Any]:
    """(ds, dN_0), all in the dtype of the shares (..., T, H); N_0 (states, H)."""
    ds, dN_0 = working(share.shape, share.dtype), working(N_0.shape, share.dtype)
    if N_0.size:
        tokens = {"share": share, "g": g, "dshare": dshare, "dg": dg, "ds": ds}
        _run(of_sums, SUMS, tokens, {"N_0": N_0, "dN_0": dN_0}, sequences, share.dtype)
    return ds, dN_0


def _run(kernel: Any, declaration: Workspace, tokens: dict[str, Any], states: dict[str, Any], sequences: Any,
         dtype: np.dtype) -> None:  # fmt: skip
    """A kernel over all sequences and blocks of columns."""
    (*_, T, H), count = next(iter(tokens.values())).shape, next(iter(states.values())).size
    batch = count // H if sequences[0].row is None else 1
    cut, blocks = cuts(batch, T, sequences), blocks_of(batch * T * H, H)
    sizes = {"count": batch * T, "T": T, "H": H, "states": count // H, "sequences": len(cut), "four": 4,
             "blocks": blocks, "each": -(-H // blocks), "cuts": cut}  # fmt: skip
    arrays = {n: dense(y, dtype) for n, y in (tokens | states).items()}
    over_matrices(kernel, declaration, sizes | arrays, len(cut) * blocks, name_of(dtype))
