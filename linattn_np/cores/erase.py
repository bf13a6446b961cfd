"""What a chunk writes: pairs (write vector, value) after erasing, and the transpose.

NONE: (k, v).   DELTA: (k, U), U_i = beta_i (v_i - r_i S).   FREE: (k, v), (b, X), X_i = a_i S_{i-1}.
Inside a chunk the state that r or a reads is the incoming one, handed in as `recalled`, plus the chunk's own writes:

    DELTA   (I + diag(beta) N) U = diag(beta) (v - recalled)      N = gram(r, k)
    FREE    (I - A) X = recalled + gram(a, k) v                   A = gram(a, b)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..ground.namespace import Array, Namespace
from ..pieces.triangular import UnitLower, solve, solve_vjp, unit_lower
from .kinds import Erase, Row


class Write(NamedTuple):
    """Write vectors y (..., C, K) and their values w (..., C, V): S gains y^T w."""

    name: str  # the input that y is: "k" or "b"
    y: Array
    w: Array


class System(NamedTuple):
    """What a chunk's erase knows before it sees a state: the system that its writes solve."""

    lower: UnitLower  # DELTA: I + diag(beta) N; FREE: I - gram(a, b)
    N: Array  # DELTA: gram(r, k); FREE: -gram(a, b)
    inner: Array | None = None  # FREE: gram(a, k)


class Erased(NamedTuple):
    """The writes of a chunk, and what their transpose needs again."""

    writes: list[Write]
    system: System | None = None
    recalled: Array | None = None


def system(xp: Namespace, x: Any, D: Any, row: Row) -> System | None:
    """The system of a chunk; None where nothing is erased."""
    if x.erase is Erase.NONE:
        return None
    if x.erase is Erase.DELTA:
        N = D.gram(x.r, x.k, row)
        return System(unit_lower(xp, x.beta * N), N)
    N = -D.gram(x.a, x.b, row)
    return System(unit_lower(xp, N), N, D.gram(x.a, x.k, row))


def erase(xp: Namespace, x: Any, found: System | None, recalled: Array | None) -> Erased:
    """The writes of a chunk whose erase vectors recalled `recalled` (..., C, V) from the incoming state."""
    if found is None:
        return Erased([Write("k", x.k, x.v)])
    if x.erase is Erase.DELTA:
        U = solve(xp, found.lower, x.beta * (x.v - recalled))
        return Erased([Write("k", x.k, U)], found, recalled)
    X = solve(xp, found.lower, recalled + found.inner @ x.v)
    return Erased([Write("k", x.k, x.v), Write("b", x.b, X)], found, recalled)


def erase_vjp(
    xp: Namespace, x: Any, D: Any, row: Row, saved: Erased, dw: list[Array]
) -> tuple[dict[str, Array | None], Array | None]:
    """Gradients by input name, and the cotangent of `recalled`, from the cotangents dw of the written values."""
    T, found = xp.matrix_transpose, saved.system
    if found is None:
        return {"v": dw[0]}, None
    if x.erase is Erase.DELTA:
        U = saved.writes[0].w
        dM, dY = solve_vjp(xp, found.lower, U, dw[0])  # M = diag(beta) N
        error = x.v - saved.recalled - found.N @ U
        dE = x.beta * dY
        dr, dk, dg = D.gram_vjp(x.beta * dM, x.r, x.k, row, found.N)
        dbeta = xp.sum(dY * error, axis=-1, keepdims=True)
        return {"v": dE, "beta": dbeta, "r": dr, "k": dk, "g": dg}, -dE
    dN, dY = solve_vjp(xp, found.lower, saved.writes[1].w, dw[1])  # N = -A
    dv = dw[0] + T(found.inner) @ dY
    da, dk, dg = D.gram_vjp(dY @ T(x.v), x.a, x.k, row, found.inner)
    da_b, db, dg_b = D.gram_vjp(-dN, x.a, x.b, row, -found.N)
    dg = None if dg is None else dg + dg_b
    return {"v": dv, "a": da + da_b, "b": db, "k": dk, "g": dg}, dY
