"""The recurrence of the coefficients (../masks.py) and its transpose, token by token, for all tiles at once."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...runtime.arrays import name_of
from ...runtime.pieces.memory import working
from ...runtime.pieces.piece import Vector, Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.views import row
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace

RECURRENCE = Workspace("recurrence", ("n", "B", "has_alpha", "has_mu", "has_beta"), (), (), {"given": {
    **{name: Field("tokens") for name in ("alpha", "mu", "beta")},
    **{name: Field("rows", "width") for name in ("w", "s")}}})  # fmt: skip
TRANSPOSE = Workspace("recurrence_vjp", ("n", "B", "rows", "has_alpha", "has_mu", "has_beta", "before", "decayed",
                                         "exact"), (), (), {"given": {
    **{name: Field("tokens") for name in ("alpha", "mu", "beta", "dalpha", "dmu", "dbeta")},
    **{name: Field("states", "width") for name in ("w", "s")}, "dread": Field("tokens", "width"),
    "d": Field("gradients", "width"), **{name: Field("tiles", "width") for name in ("dw", "ds")}}})  # fmt: skip
Work, Transpose = workspace_kind(RECURRENCE), workspace_kind(TRANSPOSE)


@piece
def forward(work: Work, first: Whole, last: Whole):
    """w_t = alpha_t w_{t-1} + beta_t s_t and s_t = mu_t s_{t-1} + e_t, t = 0 .. n, of the tiles first..last."""
    for tile in range(first, last):
        at = tile * (work.n + 1)
        w, s = row(work.w, at), row(work.s, at)
        for j in range(len(w)):
            w[j], s[j] = 0, 0
        w[0], s[1] = 1, 1
        for t in range(work.n):
            i = tile * work.n + t
            before, w, earlier, s = (
                row(work.w, at + t),
                row(work.w, at + t + 1),
                row(work.s, at + t),
                row(work.s, at + t + 1),
            )
            for j in range(len(s)):
                s[j] = work.mu[i] * earlier[j] if work.has_mu else 0
            s[work.B + t] += 1
            for j in range(len(w)):
                own = work.beta[i] * s[j] if work.has_beta else s[j]
                w[j] = own + (work.alpha[i] * before[j] if work.has_alpha else before[j])


def recurrence(alpha: Any, mu: Any, beta: Any, n: int, B: int) -> tuple[np.ndarray, np.ndarray]:
    """(w, s), (..., n + 1, B + n), from rates (..., n, 1); None: 1, without mu s_t is the step alone."""
    given = {"alpha": alpha, "mu": mu, "beta": beta}
    like = next(y for y in given.values() if y is not None)
    *lead, _, _ = like.shape
    outputs = {name: working((*lead, n + 1, B + n), like.dtype) for name in ("w", "s")}
    rates = {name: np.ascontiguousarray(y).reshape(-1) for name, y in given.items() if y is not None}
    matrices = {name: y.reshape(-1, B + n) for name, y in outputs.items()}
    sizes = {"n": n, "B": B, "tokens": like.size, "rows": len(matrices["w"]), "width": B + n}
    flags = {f"has_{name}": int(name in rates) for name in given}
    over_matrices(forward, RECURRENCE, sizes | flags | rates | matrices, prod(lead), name_of(like.dtype))
    return outputs["w"], outputs["s"]


@piece
def add(x: Vector, y: Vector):
    for j in range(len(y)):
        y[j] += x[j]


@piece
def step_back(work: Transpose, i: Whole, at: Whole, point: Whole, w: Vector, s: Vector):
    """Through token i, whose states before it are the rows at, and its gradients the row `point` of d."""
    width = len(w)
    if not work.before:
        add(row(work.dread, i), w)
    if work.has_beta:
        work.dbeta[i] = dot(w, row(work.s, at + 1), width)
    for j in range(width):
        s[j] += work.beta[i] * w[j] if work.has_beta else w[j]
    if work.has_alpha:
        work.dalpha[i] = dot(w, row(work.w, at), width)
        for j in range(width):
            w[j] *= work.alpha[i]
    if work.has_mu:
        work.dmu[i] = dot(s, row(work.s, at), width)
    for j in range(width):
        s[j] = work.mu[i] * s[j] if work.has_mu else 0
    if work.before:
        add(row(work.dread, i), w)
    if work.exact:
        d = row(work.d, point)
        if work.decayed and work.has_alpha:
            work.dalpha[i] += dot(d, row(work.w, at), width)
        for j in range(width):
            w[j] += work.alpha[i] * d[j] if work.decayed and work.has_alpha else d[j]


@piece
def backward(work: Transpose, first: Whole, last: Whole):
    """Gradients of the rates of the tiles first..last."""
    for tile in range(first, last):
        w, s, begin, n = row(work.dw, tile), row(work.ds, tile), tile * work.rows, work.n
        last_w, last_s = row(work.d, begin + n), row(work.d, begin + n + work.has_mu)
        for j in range(len(w)):
            w[j] = last_w[j]
            s[j] = last_s[j] if work.has_mu else 0
        for back in range(n):
            t = n - 1 - back
            step_back(work, tile * n + t, tile * (n + 1) + t, begin + work.rows - n + t, w, s)


def recurrence_vjp(
    rates: dict[str, Any], residuals: tuple[np.ndarray, np.ndarray], dread: Any, d: Any, flags: dict[str, bool]
) -> dict[str, np.ndarray]:
    """Gradients of the rates that there are, by name: alpha, mu, beta (..., n, 1).

    dread (..., n, B + n) are gradients of w_1 .. w_n, or with `before` of w_0 .. w_{n-1}; those of the last w, with mu
    of the last s, and with `exact` of the n rows of gradients follow behind n rows of d. `decayed`: those have alpha.
    """
    given = {name: y for name, y in rates.items() if y is not None}
    like = next(iter(given.values()))
    *lead, n, width = dread.shape
    outputs = {f"d{name}": working(like.shape, like.dtype) for name in given}
    flat = {name: np.ascontiguousarray(y).reshape(-1) for name, y in (given | outputs).items()}
    scratch = {name: working((prod(lead), width), like.dtype) for name in ("dw", "ds")}
    arrays = dict(zip(("w", "s"), residuals, strict=True)) | {"dread": dread, "d": d}
    matrices = {name: np.ascontiguousarray(y).reshape(-1, width) for name, y in arrays.items()} | scratch
    sizes = {"n": n, "B": width - n, "rows": d.shape[-2], "tokens": like.size, "states": len(matrices["w"]),
             "gradients": len(matrices["d"]), "tiles": prod(lead), "width": width}  # fmt: skip
    words = {f"has_{name}": int(name in given) for name in rates} | {name: int(y) for name, y in flags.items()}
    over_matrices(backward, TRANSPOSE, sizes | words | flat | matrices, prod(lead), name_of(like.dtype))
    return {name: outputs[f"d{name}"] for name in given}
