"""SOLVED read-out: two memories of the room, and between them a system for each token.

    Z_t = e^{g_t} Z_{t-1} + k_t^T beta_t k_t        x_t (Z_t + diag(ridge_t)) = q_t
    S_t = e^{g_t} S_{t-1} + k_t^T beta_t v_t        out_t = scale x_t S_t

The values of the memories are beta k and beta v; x takes the place of the queries. The adjoint solves once more,
y_t (Z_t + diag(ridge_t))^T = dx_t, and then

    dq_t = y_t        dridge_t = -x_t (.) y_t        dZ_t = -x_t^T y_t

the last being the adjoint of a reader x_t of Z_t whose cotangent is -y_t.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import array_api_compat as compat

from ...ground.backend import Choice, Later
from ...ground.namespace import Array, Namespace, add_to, sum_to
from . import NUMBA, systems
from . import backward as room_backward
from . import choose as room_choose
from . import forward as room_forward
from . import keep as room_keep
from .inputs import Inputs, Plan
from .systems import singular

COMPILED = Later(f"{__package__}.numba_systems")


class SolvedInputs(NamedTuple):
    """Arrays (..., T, heads, width), or their gradients; None where there is none."""

    q: Array  # (..., T, Hq, K)
    k: Array  # (..., T, Hk, K)
    v: Array  # (..., T, H, V)
    g: Array  # (..., T, H, 1)
    beta: Array  # (..., T, H, 1)
    ridge: Array  # (1, H, K), or (..., T, H, K)
    solver: Any = None  # a Solver, of inputs; None of gradients
    may_be_singular: bool = False  # some ridge is 0

    def memory(self, values: Array) -> Inputs:
        """The room's inputs of one memory, in the dtype of `values`."""
        H = self.v.shape[-2]
        return Inputs(self.q, self.k, self.beta * spread(values, H), self.g)


class Starts(NamedTuple):
    """What backward needs beside the inputs."""

    read: Array | None  # x_t
    of_values: Any  # what the room keeps of S
    Z: Array | None  # Z_0


class Saved(NamedTuple):
    """What a forward pass keeps for its backward."""

    x: SolvedInputs
    plan: Plan
    starts: Starts


class Kept(NamedTuple):
    """The room's, so that a call looks the same from outside."""

    saved: Saved
    q: None = None


def choose(fn: str, x: SolvedInputs, plan: Plan, wanted: str | None) -> Choice:
    """The backend of the memories: of inputs of their shapes."""
    return room_choose(fn, Inputs(x.q, x.k, x.v, x.g), plan, wanted)


def forward(
    fn: str, x: SolvedInputs, plan: Plan, state: tuple[Array, Array] | None, wanted: str | None
) -> tuple[Array | None, tuple[Array, Array], Kept]:
    """(out, (S, Z) after the last token, kept).   Raises ValueError where a ridge of 0 leaves a system singular."""
    S, Z = (None, None) if state is None else state
    keys, read = x.memory(x.k), None
    if x.q is None:
        _, Z_end, _ = room_forward(fn, keys, plan._replace(overwrite=False), Z, wanted)
    else:
        at = singular(keys, x.ridge, plan, Z) if x.may_be_singular else None
        if at is not None:
            raise ValueError(f"{fn}: the system of token {at[0]}, head {at[1]} is singular: ridge is 0 in channels "
                             "that the keys so far do not span, expected ridge > 0 there")
        read, Z_end = _solve(fn, keys, x, plan, Z, wanted)
    out, S_end, of_values = room_forward(fn, x.memory(x.v)._replace(q=read), plan, S, wanted)
    return out, (S_end, Z_end), Kept(Saved(x, plan, Starts(read, (fn, wanted, of_values), Z)))


def _solve(
    fn: str, keys: Inputs, x: SolvedInputs, plan: Plan, Z: Array | None, wanted: str | None
) -> tuple[Array, Array]:
    """(x_t, Z after the last token).   Raises ValueError where the array library finds a system singular."""
    try:
        return (COMPILED if iterates_compiled(fn, x, plan, wanted) else systems).solve(keys, x.ridge, x.solver, plan, Z)
    except Exception as error:
        if "LinAlgError" not in type(error).__name__:
            raise
        raise ValueError(f"{fn}: a system is singular in the numbers of its dtype, expected a larger ridge") from error


def iterates_compiled(fn: str, x: SolvedInputs, plan: Plan, wanted: str | None) -> bool:
    """Whether conjugate gradients run in compiled loops: where the memories do, if there is anything to solve."""
    return not x.solver.exact and choose(fn, x, plan, wanted).backend is NUMBA and 0 not in (*x.v.shape, *x.k.shape)


def how(fn: str, x: SolvedInputs, plan: Plan, wanted: str | None) -> str:
    """How the systems are solved, in words."""
    if x.solver.exact:
        return "every system is formed and solved by the array library"
    where = "compiled loops" if iterates_compiled(fn, x, plan, wanted) else "array calls"
    return f"systems by at most {x.solver.iterations} steps of conjugate gradients, in {where}"


def operations_per_token(x: SolvedInputs, C: int, readers: int) -> float:
    """Of writing Z and of solving for `readers` queries: 2 K^3 / 3, or products with Z_in and C tokens every step."""
    K = x.k.shape[-1]
    each = 2 * K**3 / 3 if x.solver.exact else x.solver.iterations * (2 * K * K + 4 * C * K)
    return 2 * K * K + readers * each


def backward(
    kept: Kept, dout: Array | None, dstate: tuple[Array, Array] | None
) -> tuple[SolvedInputs, tuple[Array, Array]]:
    """Gradients of every input, and of the initial (S, Z)."""
    x, plan, (read, (fn, wanted, of_values), Z) = kept.saved
    dS, dZ = (None, None) if dstate is None else dstate
    d, dS_0 = room_backward(of_values, dout, dS)
    y, keys = None, x.memory(x.k)
    if read is not None and dout is not None:
        transposed = None if Z is None else plan.xp.matrix_transpose(Z)
        y, _ = _solve(fn, keys._replace(q=d.q), x, plan, transposed, wanted)
    minus = plan._replace(scale=-1.0, overwrite=False)
    of_keys = room_keep(fn, keys._replace(q=None if y is None else read), minus, Z, wanted)
    e, dZ_0 = room_backward(of_keys, y, dZ)
    return _gradients(plan.xp, x, d, e, read, y), (dS_0, dZ_0)


def _gradients(
    xp: Namespace, x: SolvedInputs, d: Inputs, e: Inputs, read: Array, y: Array
) -> SolvedInputs:
    """From the gradients d of the memory of values (beta v) and e of that of keys (beta k)."""
    H, Hk = x.v.shape[-2], x.k.shape[-2]
    k = spread(x.k, H)
    dbeta = (xp.vecdot(d.v, x.v) + xp.vecdot(e.v, k))[..., None]
    if y is None:
        dq, dridge = None if x.q is None else xp.zeros_like(x.q), xp.zeros_like(x.ridge)
    else:
        dq = gather(y, x.q.shape[-2]) if x.q.shape[-2] < H else y
        dridge = sum_to(xp, gather(-read * y, H), x.ridge.shape)
    dk = add_to(add_to(gather(x.beta * e.v, Hk), d.k), e.k)
    return SolvedInputs(dq, dk, x.beta * d.v, add_to(d.g, e.g), dbeta, dridge)


def spread(y: Array, H: int) -> Array:
    """(..., T, Hk, D) for H heads, each of the Hk for a group of them."""
    *lead, Hk, D = y.shape
    if Hk == H:
        return y
    xp = compat.array_namespace(y)
    return xp.reshape(xp.broadcast_to(y[..., :, None, :], (*lead, Hk, H // max(Hk, 1), D)), (*lead, H, D))


def gather(y: Array, Hk: int) -> Array:
    """The transpose of spread: sums over the heads of a group."""
    *lead, H, D = y.shape
    if Hk == H:
        return y
    return compat.array_namespace(y).sum(compat.array_namespace(y).reshape(y, (*lead, Hk, H // max(Hk, 1), D)), axis=-2)
