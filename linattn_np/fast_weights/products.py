"""Products with weights: those that all rows share, and those of each row.

    Shared   y_t = x_t W + b
    Masked   y_t = x_t W_t + b_t,   W_t = sum_n c_tn B_n + sum_j m_tj l_j^T r_j,   b_t likewise with l_j = 1

Masked products need no weight of a row: with P = (x l^T + 1 if there is a bias) * m,

    y = sum_n c_n (x B_n + b_n) + P r

is the dual form of gradient descent. Zeros above the diagonal of m keep later rows out. Transposes add to d (arrays in
the order of the tree) and, masked, to dc, dmasks and dfactors.
"""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Array, Namespace
from .fused import added_product, fused_of, matmul, more_product
from .models import Factors
from .types import Tree, more


class Shared:
    """Weights that all rows share; tree: matrices, each with its bias behind it if they are biased."""

    def __init__(self, xp: Namespace, tree: Tree, matrices: int) -> None:
        self.xp, self.tree, self.step = xp, tree, len(tree) // matrices
        self._d: list[Any] = [None] * len(tree)

    @property
    def d(self) -> Tree:
        """The gradients."""
        return tuple(0 * w if d is None else d for w, d in zip(self.tree, self._d, strict=True))

    def product(self, p: int, x: Array) -> Array:
        """x W + b."""
        y = self.without_bias(p, x)
        return y + self.tree[2 * p + 1] if self.step == 2 else y

    def without_bias(self, p: int, x: Array) -> Array:
        """x W."""
        return matmul(self.xp, x, self.tree[self.step * p])

    def transposed(self, p: int, d: Array | None) -> Any:
        """d W^T; None is 0."""
        return None if d is None else matmul(self.xp, d, self.xp.matrix_transpose(self.tree[self.step * p]))

    def add(self, p: int, x: Array, d: Array | None) -> None:
        """The transpose of `product`: dW += x^T d, db += sum d; None is 0."""
        if d is None:
            return
        self.add_product(p, x, d)
        if self.step == 2:
            self.add_bias(p, d)

    def add_product(self, p: int, x: Array, d: Array) -> None:
        """The transpose of `without_bias`: dW += x^T d."""
        n = self.step * p
        self._d[n] = more_product(self.xp, self._d[n], self.xp.matrix_transpose(x), d)

    def add_bias(self, p: int, d: Array) -> None:
        """db += sum d."""
        self._d[2 * p + 1] = more(self._d[2 * p + 1], self.xp.sum(d, axis=-2, keepdims=True))


class Masked:
    """Weights of each row: bases B_n with coefficients c (..., rows, 1), None: 1, and factors (l, r) with masks."""

    def __init__(self, bases: list[Shared], c: list[Array | None], masks: list[Array], factors: Factors) -> None:
        self.xp, self.bases, self.c, self.masks, self.factors = bases[0].xp, bases, c, masks, factors
        self.step = bases[0].step
        self.dc: list[Any] = [None] * len(c)
        self.dmasks: list[Any] = [None] * len(masks)
        self.dfactors: list[Any] = [(None, None)] * len(factors)

    def product(self, p: int, x: Array) -> Array:
        """x_t W_t + b_t."""
        y = matmul(self.xp, self._masked(p, self._scores(p, x)), self.factors[p][1])
        for c, w in zip(self.c, self.bases, strict=True):
            y = added_product(self.xp, y, x if c is None else c * x, w.tree[self.step * p])
            if self.step == 2:
                b = w.tree[2 * p + 1]
                y = y + (b if c is None else c * b)
        return y

    def transposed(self, p: int, d: Array) -> Array:
        """d_t W_t^T."""
        xp, (l, r) = self.xp, self.factors[p]
        x = matmul(xp, matmul(xp, d, xp.matrix_transpose(r)) * self.masks[p], l)
        for c, w in zip(self.c, self.bases, strict=True):
            x = added_product(xp, x, d if c is None else c * d, xp.matrix_transpose(w.tree[self.step * p]))
        return x

    def add(self, p: int, x: Array, d: Array) -> None:
        """The transpose of `product`, but dx."""
        xp, r, (dl, dr) = self.xp, self.factors[p][1], self.dfactors[p]
        S, G = self._scores(p, x), matmul(xp, d, xp.matrix_transpose(r))
        by_S = G * S if self.step == 1 else G * (S + 1)
        self.dmasks[p] = more(self.dmasks[p], by_S)
        dl = more_product(xp, dl, xp.matrix_transpose(G * self.masks[p]), x)
        self.dfactors[p] = dl, more_product(xp, dr, xp.matrix_transpose(self._masked(p, S)), d)
        for n, (c, w) in enumerate(zip(self.c, self.bases, strict=True)):
            if c is not None:
                self.dc[n] = more(self.dc[n], xp.sum(d * w.product(p, x), axis=-1, keepdims=True))
            w.add(p, x, d if c is None else c * d)

    def _scores(self, p: int, x: Array) -> Array:
        """x l^T."""
        return matmul(self.xp, x, self.xp.matrix_transpose(self.factors[p][0]))

    def _masked(self, p: int, S: Array) -> Array:
        """(S, and 1 more with a bias) m."""
        m = self.masks[p]
        if S.shape == m.shape and (fused := fused_of(self.xp, S, m)) is not None:
            return fused.masked(S, m, float(self.step == 2))
        return (S + 1) * m if self.step == 2 else S * m
