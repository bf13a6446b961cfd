"""PaTH in the compiled backend: the blocks of path/blocks.py as arrays (..., T, H, D) of a kernel, and their gradients.

in_start, in_end: q at the start, k at the end of their blocks. in_E = -E and in_X: (..., T, H, C). Queries pass a block
by in_R, K_lanes rows a block, or where 2 C < K by its factors in_w and in_U = -U.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ops.householder import blocks, tokens
from ...runtime.arrays import sum_to
from ...runtime.pieces.vectors import lane
from ..heads import groups, join, parts_of, split, tokens_of
from ..path.blocks import Mapped, MappedGradients, mapped, mapped_vjp
from ..policy import FACTORS, PRODUCTS
from ..types import Inputs, SoftmaxPlan
from .run import ArrayTable

OF_QUERIES, OF_KEYS = ("out_dq", "out_start", "out_E"), ("out_dk", "out_end", "out_X")


def how(kernel: str, C: int, x: Inputs) -> int:
    """How queries pass a block in a kernel: by its product or its factors; 0 without position maps."""
    if x.w is None:
        return 0
    return FACTORS if kernel == "forward" and x.k.shape[-1] > 2 * C else PRODUCTS


class Blocks:
    """The sequences of a call in blocks of C tokens."""

    def __init__(self, plan: SoftmaxPlan, x: Inputs, C: int):
        self.xp, self.x, self.C, self.K = plan.xp, x, C, x.k.shape[-1]
        self.dtype, self.G = np.dtype(plan.dtype), groups(x)
        self.lanes = -(-self.K // lane(self.dtype.name)) * lane(self.dtype.name)
        self.each: list[tuple[int, int, Mapped]] = []
        self.first_rows: list[int] = []  # of R, of each sequence
        rows = 0
        for s in plan.sequences:
            self.first_rows.append(rows)
            T = s.stop - s.start
            if T and 0 not in x.v.shape[:-1]:
                found = mapped(self.xp, parts_of(plan._replace(scale=1.0), tokens_of(x, s), None), C)
                self.each.append((s.start, T, found))
                rows += found.R.shape[-3] * self.lanes
        self.rows = rows

    def put(self, table: ArrayTable, kernel: str) -> None:
        """The arrays that a kernel reads."""
        if not self.each:
            return
        ms = [(T, m) for _, T, m in self.each]
        self._put(table, "in_start", [self._tokens(m.q, T) for T, m in ms])
        self._put(table, "in_end", [self._tokens(m.k, T) for T, m in ms])
        self._put(table, "in_E", [self._wide(-self._tokens(m.start[1], T)) for T, m in ms])
        self._put(table, "in_X", [self._wide(self._tokens(m.end[1], T)) for T, m in ms])
        if how(kernel, self.C, self.x) == FACTORS:
            self._put(table, "in_w", [self._tokens(m.factors.w, T) for T, m in ms])
            self._put(table, "in_U", [-self._tokens(m.factors.U, T) for T, m in ms])
        else:
            pad = [(0, 0)] * (self.each[0][2].R.ndim - 2) + [(0, self.lanes - self.K), (0, 0)]
            self._put(table, "in_R", [self._joined(np.pad(m.R, pad)) for _, m in ms])

    def zeros(self, heads: int) -> dict[str, np.ndarray]:
        """Memory for the gradients that a kernel forms, a row for each head."""
        lead, T = self.x.v.shape[:-3], self.x.v.shape[-3]
        widths = dict.fromkeys(("out_dq", "out_dk", "out_start", "out_end"), self.K)
        found = {n: np.zeros((*lead, T, heads, D), self.dtype)
                 for n, D in (widths | {"out_E": self.C, "out_X": self.C}).items()}  # fmt: skip
        return found | {"out_R": np.zeros((*lead, self.rows, heads, self.K), self.dtype)}

    def gradients(self, d: dict[str, np.ndarray]) -> dict[str, Any]:
        """Gradients of q, k, w and beta from the gradients that a kernel returns."""
        x = self.x
        found = {n: np.zeros(getattr(x, n).shape, self.dtype) for n in ("q", "k", "w", "beta")}
        first = 0
        for start, T, m in self.each:
            at, n = slice(start, start + T), m.R.shape[-3]
            dR = split(self.xp, d["out_R"][..., first : first + n * self.lanes, :, :], self.G)
            dR = dR.reshape((*dR.shape[:-2], n, self.lanes, self.K))[..., : self.K, :]
            first += n * self.lanes
            of_q, own = ({name: blocks(self.xp, split(self.xp, d[name][..., at, :, :], self.G), m.C) for name in names}
                         for names in (OF_QUERIES, OF_KEYS))  # fmt: skip
            of_k = {name: sum_to(self.xp, y, (*m.k.shape[:-1], y.shape[-1])) for name, y in own.items()}
            grads = MappedGradients(
                of_q["out_dq"],
                of_k["out_dk"],
                -of_q["out_E"][..., : m.C],
                of_k["out_X"][..., : m.C],
                of_q["out_start"],
                of_k["out_end"],
                sum_to(self.xp, dR, m.R.shape),
            )
            for name, y in mapped_vjp(self.xp, m, grads, T).items():
                like = found[name][..., at, :, :] if name != "beta" else found[name][..., at, :, None]
                like[...] = join(self.xp, y if name != "beta" else y[..., None], like.shape)
        return found

    def _tokens(self, y: np.ndarray, T: int) -> np.ndarray:
        """(..., G, R, n, C, D) as (..., T, H, D)."""
        return _heads_last(tokens(self.xp, y, T))

    def _joined(self, y: np.ndarray) -> np.ndarray:
        """(..., G, R, n, rows, D) as (..., n rows, H, D)."""
        return _heads_last(y.reshape((*y.shape[:-3], y.shape[-3] * y.shape[-2], y.shape[-1])))

    def _wide(self, y: np.ndarray) -> np.ndarray:
        """E or X of a sequence that is shorter than a block, with C columns."""
        return np.pad(y, [(0, 0)] * (y.ndim - 1) + [(0, self.C - y.shape[-1])])

    def _put(self, table: ArrayTable, name: str, parts: list[np.ndarray]) -> None:
        y = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-3)
        table.put(name, y)


def _heads_last(y: np.ndarray) -> np.ndarray:
    """(..., G, R, T, D) as (..., T, G R, D)."""
    *lead, G, R, T, D = y.shape
    return y.reshape((*lead, G * R, T, D)).swapaxes(-3, -2)
