"""Products of the maps H_t = I - beta_t w_t^T w_t over blocks of tokens, and their transposes.

With W the rows w_t of a block of C tokens, N = tril(W W^T, -1) and (I + diag(beta) N) U = diag(beta) W:

    H_C ... H_1 = R = I - W^T U
    q_i H_i ... H_1 = (Q - E U)_i,   E = tril(Q W^T)
    k_j H_{j+1} ... H_C = (K - X^T W)_j,   (I + diag(beta) N) X = diag(beta) tril(W K^T, -1)
    q_i H_i ... H_{j+1} k_j^T = (Q K^T - E X)_ij,   j <= i

Tokens with w = 0 are the identity. An array may have fewer heads than another; it is broadcast.
"""

from __future__ import annotations

from typing import NamedTuple

from ..runtime.arrays import Array, Namespace, device, keep_lower, sum_to
from .triangular import UnitLower, solve, solve_vjp, unit_lower


class Block(NamedTuple):
    """The maps of blocks of tokens, factorised."""

    w: Array  # (..., C, K)
    beta: Array  # (..., C, 1)
    N: Array  # (..., C, C) strictly lower
    lower: UnitLower  # I + diag(beta) N
    U: Array  # (..., C, K)


class HouseholderGradients:
    """The sums of the gradients of a Block: of w, beta, U, and of diag(beta) N."""

    def __init__(self, xp: Namespace, f: Block):
        self.xp, self.w, self.beta = xp, xp.zeros_like(f.w), xp.zeros_like(f.beta)
        self.U, self.A = xp.zeros_like(f.U), xp.zeros_like(f.N)

    def add(self, dw: Array, dU: Array) -> None:
        """Gradients of w and U, summed over the heads that share them."""
        self.w = self.w + sum_to(self.xp, dw, self.w.shape)
        self.U = self.U + sum_to(self.xp, dU, self.U.shape)


def factorised(xp: Namespace, w: Array, beta: Array) -> Block:
    """The maps of blocks: w (..., C, K), beta (..., C, 1)."""
    N = keep_lower(xp, w @ xp.matrix_transpose(w), strict=True)
    lower = unit_lower(xp, beta * N)
    return Block(w, beta, N, lower, solve(xp, lower, beta * w))


def factorised_vjp(f: Block, d: HouseholderGradients) -> tuple[Array, Array]:
    """(dw, dbeta) from the sums of the gradients."""
    xp = d.xp
    dA, dB = solve_vjp(xp, f.lower, f.U, d.U)
    dA = dA + d.A
    dbeta = d.beta + xp.sum(dB * f.w, axis=-1, keepdims=True) + xp.sum(dA * f.N, axis=-1, keepdims=True)
    dN = keep_lower(xp, f.beta * dA, strict=True)
    return d.w + f.beta * dB + (dN + xp.matrix_transpose(dN)) @ f.w, dbeta


def product(xp: Namespace, f: Block) -> Array:
    """R = H_C ... H_1, (..., K, K)."""
    eye = xp.eye(f.w.shape[-1], dtype=f.w.dtype, device=device(f.w))
    return eye - xp.matrix_transpose(f.w) @ f.U


def product_vjp(f: Block, d: HouseholderGradients, dR: Array) -> None:
    """Adds to the gradients of the block."""
    d.add(-f.U @ d.xp.matrix_transpose(dR), -f.w @ dR)


def to_start(xp: Namespace, f: Block, q: Array) -> tuple[Array, Array]:
    """(q_i H_i ... H_1 (..., C, K), E (..., C, C))."""
    E = keep_lower(xp, q @ xp.matrix_transpose(f.w))
    return q - E @ f.U, E


def to_start_vjp(
    f: Block, d: HouseholderGradients, saved: tuple[Array, Array], dy: Array, dE: Array | None = None
) -> Array:
    """dq; adds to the gradients of the block.   saved: q and E."""
    (q, E), T = saved, d.xp.matrix_transpose
    more = -dy @ T(f.U)
    dE = keep_lower(d.xp, more if dE is None else more + dE)
    d.add(T(dE) @ q, -T(E) @ dy)
    return dy + dE @ f.w


def to_end(xp: Namespace, f: Block, k: Array) -> tuple[Array, Array]:
    """(k_j H_{j+1} ... H_C (..., C, K), X (..., C, C)).   k has the heads of w."""
    T = xp.matrix_transpose
    X = solve(xp, f.lower, f.beta * keep_lower(xp, f.w @ T(k), strict=True))
    return k - T(X) @ f.w, X


def to_end_vjp(
    f: Block, d: HouseholderGradients, saved: tuple[Array, Array], dy: Array, dX: Array | None = None
) -> Array:
    """dk; adds to the gradients of the block.   saved: k and X."""
    (k, X), xp, T = saved, d.xp, d.xp.matrix_transpose
    more = -f.w @ T(dy)
    dA, dB = solve_vjp(xp, f.lower, X, more if dX is None else more + dX)
    d.A = d.A + dA
    d.beta = d.beta + xp.sum(dB * keep_lower(xp, f.w @ T(k), strict=True), axis=-1, keepdims=True)
    dN = keep_lower(xp, f.beta * dB, strict=True)
    d.w = d.w - X @ dy + dN @ k
    return dy + T(dN) @ f.w


def one_map(xp: Namespace, x: Array, w: Array, beta: Array) -> Array:
    """x H of rows x (..., n, K), w (..., 1, K), beta (..., 1, 1)."""
    return x - (beta * (x @ xp.matrix_transpose(w))) @ w


# tokens as blocks


def blocks(xp: Namespace, y: Array, C: int) -> Array:
    """(..., T, D) as (..., n, C, D), with zeros after the last token."""
    *lead, T, D = y.shape
    n = -(-T // C)
    if n * C > T:
        y = xp.concat([y, xp.zeros((*lead, n * C - T, D), dtype=y.dtype, device=device(y))], axis=-2)
    return xp.reshape(y, (*lead, n, C, D))


def tokens(xp: Namespace, y: Array, T: int) -> Array:
    """The inverse of blocks: the first T tokens."""
    *lead, n, C, D = y.shape
    return xp.reshape(y, (*lead, n * C, D))[..., :T, :]
