"""The recurrence of the coefficients (../masks.py), token by token, for all tiles at once."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...runtime.arrays import name_of
from ...runtime.pieces.memory import working
from ...runtime.pieces.piece import Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.views import row
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace

RECURRENCE = Workspace("recurrence", ("n", "B", "has_alpha", "has_mu", "has_beta"), (), (), {"given": {
    **{name: Field("tokens") for name in ("alpha", "mu", "beta")},
    **{name: Field("rows", "width") for name in ("w", "s")}}})  # fmt: skip
Work = workspace_kind(RECURRENCE)


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
