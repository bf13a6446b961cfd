"""What a chunk writes: pairs (write vector, value) after erasing, and the transpose.

NONE: (k, v).   DELTA: (k, U), U_i = beta_i (v_i - r_i S).   FREE: (k, v), (b, X), X_i = a_i S_{i-1}.
Inside a chunk the state that r or a reads is the incoming one, handed in as `recalled`, plus the chunk's own writes:

    DELTA   (I + diag(beta) N) U = diag(beta) (v - recalled)      N = gram(r, k)
    FREE    (I - A) X = recalled + gram(a, k) v                   A = gram(a, b)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..ground.namespace import Array, Namespace
from ..pieces.triangular import solve_unit_lower, solve_unit_lower_vjp
from .kinds import Erase, Row


class Write(NamedTuple):
    """Write vectors y (..., C, K) and their values w (..., C, V): S gains y^T w."""

    name: str  # the input that y is: "k" or "b"
    y: Array
    w: Array


class Erased(NamedTuple):
    """The writes of a chunk, and what their transpose needs again."""

    writes: list[Write]
    N: Array | None = None
    recalled: Array | None = None
    inner: Array | None = None  # DELTA: N U; FREE: gram(a, k)


def erase(xp: Namespace, x: Any, D: Any, row: Row, recalled: Array | None) -> Erased:
    """The writes of a chunk whose erase vectors recalled `recalled` (..., C, V) from the incoming state."""
    if x.erase is Erase.NONE:
        return Erased([Write("k", x.k, x.v)])
    if x.erase is Erase.DELTA:
        N = D.gram(x.r, x.k, row)
        U = solve_unit_lower(xp, x.beta * N, x.beta * (x.v - recalled))
        return Erased([Write("k", x.k, U)], N, recalled, N @ U)
    N, A_ak = -D.gram(x.a, x.b, row), D.gram(x.a, x.k, row)
    X = solve_unit_lower(xp, N, recalled + A_ak @ x.v)
    return Erased([Write("k", x.k, x.v), Write("b", x.b, X)], N, recalled, A_ak)


def erase_vjp(
    xp: Namespace, x: Any, D: Any, row: Row, saved: Erased, dw: list[Array]
) -> tuple[dict[str, Array | None], Array | None]:
    """Gradients by input name, and the cotangent of `recalled`, from the cotangents dw of the written values."""
    T = xp.matrix_transpose
    if x.erase is Erase.NONE:
        return {"v": dw[0]}, None
    if x.erase is Erase.DELTA:
        dM, dY = solve_unit_lower_vjp(xp, x.beta * saved.N, saved.writes[0].w, dw[0])  # M = diag(beta) N
        error = x.v - saved.recalled - saved.inner
        dE = x.beta * dY
        dr, dk, dg = D.gram_vjp(x.beta * dM, x.r, x.k, row)
        dbeta = xp.sum(dY * error, axis=-1, keepdims=True)
        return {"v": dE, "beta": dbeta, "r": dr, "k": dk, "g": dg}, -dE
    dN, dY = solve_unit_lower_vjp(xp, saved.N, saved.writes[1].w, dw[1])  # N = -A
    dv = dw[0] + T(saved.inner) @ dY
    da, dk, dg = D.gram_vjp(dY @ T(x.v), x.a, x.k, row)
    da_b, db, dg_b = D.gram_vjp(-dN, x.a, x.b, row)
    dg = None if dg is None else dg + dg_b
    return {"v": dv, "a": da + da_b, "b": db, "k": dk, "g": dg}, dY
