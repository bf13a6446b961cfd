"""The writes of a chunk: pairs (write vector, value) after erasing, and their transpose.

NONE: (k, v).   DELTA: (k, U), U_i = beta_i (v_i - r_i S).   FREE: (k, v), (b, X), X_i = a_i S_{i-1}.
Inside a chunk the state that r or a reads is the incoming state plus the chunk's own writes. `predicted` is what the
erase vectors read of the incoming state; with Gamma(x, y) the gram matrix of readers x and writers y:

    DELTA   (I + A) U = diag(beta) (v - predicted)        A = diag(beta) Gamma(r, k)
    FREE    (I + A) X = predicted + Gamma(a, k) v         A = -Gamma(a, b)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...ops.triangular import UnitLower, solve, solve_vjp, unit_lower
from ...runtime.arrays import Array, Namespace
from ..types import Erase, ReadState


class Write(NamedTuple):
    """Write vectors y (..., C, K) and their values w (..., C, V): S gains y^T w."""

    name: str  # the input that y is: "k" or "b"
    y: Array
    w: Array


class System(NamedTuple):
    """The unit lower system that a chunk's writes solve; it does not depend on the state."""

    lower: UnitLower  # I + A
    gram: Array  # DELTA: Gamma(r, k); FREE: -Gamma(a, b)
    value_gram: Array | None = None  # FREE: Gamma(a, k)


class Erased(NamedTuple):
    """The writes of a chunk, and the residuals of their transpose."""

    writes: list[Write]
    system: System | None = None
    predicted: Array | None = None


def system(xp: Namespace, x: Any, D: Any, reads: ReadState) -> System | None:
    """The system of a chunk; None if the variant does not erase."""
    if x.erase is Erase.NONE:
        return None
    if x.erase is Erase.DELTA:
        gram = D.gram(x.r, x.k, reads)
        return System(unit_lower(xp, x.beta * gram), gram)
    gram = -D.gram(x.a, x.b, reads)
    return System(unit_lower(xp, gram), gram, D.gram(x.a, x.k, reads))


def erase(xp: Namespace, x: Any, solved: System | None, predicted: Array | None) -> Erased:
    """The writes of a chunk; predicted (..., C, V): the erase vectors times the incoming state."""
    if solved is None:
        return Erased([Write("k", x.k, x.v)])
    if x.erase is Erase.DELTA:
        U = solve(xp, solved.lower, x.beta * (x.v - predicted))
        return Erased([Write("k", x.k, U)], solved, predicted)
    X = solve(xp, solved.lower, predicted + solved.value_gram @ x.v)
    return Erased([Write("k", x.k, x.v), Write("b", x.b, X)], solved, predicted)


def erase_vjp(
    xp: Namespace, x: Any, D: Any, reads: ReadState, erased: Erased, dw: list[Array]
) -> tuple[dict[str, Array | None], Array | None]:
    """Gradients by input name, and the cotangent of `predicted`, from the cotangents dw of the written values."""
    T, solved = xp.matrix_transpose, erased.system
    if solved is None:
        return {"v": dw[0]}, None
    if x.erase is Erase.DELTA:
        U = erased.writes[0].w
        dA, dR = solve_vjp(xp, solved.lower, U, dw[0])
        error = x.v - erased.predicted - solved.gram @ U
        dE = x.beta * dR
        dr, dk, dg = D.gram_vjp(x.beta * dA, x.r, x.k, reads, solved.gram)
        dbeta = xp.sum(dR * error, axis=-1, keepdims=True)
        return {"v": dE, "beta": dbeta, "r": dr, "k": dk, "g": dg}, -dE
    dA, dR = solve_vjp(xp, solved.lower, erased.writes[1].w, dw[1])
    dv = dw[0] + T(solved.value_gram) @ dR
    da, dk, dg = D.gram_vjp(dR @ T(x.v), x.a, x.k, reads, solved.value_gram)
    da_b, db, dg_b = D.gram_vjp(-dA, x.a, x.b, reads, -solved.gram)
    dg = None if dg is None else dg + dg_b
    return {"v": dv, "a": da + da_b, "b": db, "k": dk, "g": dg}, dR
