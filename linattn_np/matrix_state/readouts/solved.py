"""SOLVED read-out: two memories of the core and, between them, one linear system per token.

    Z_t = e^{g_t} Z_{t-1} + k_t^T beta_t k_t        x_t (Z_t + diag(ridge_t)) = q_t
    S_t = e^{g_t} S_{t-1} + k_t^T beta_t v_t        out_t = scale x_t S_t

The values of the memories are beta k and beta v; x replaces the queries. The adjoint solves the transposed system,
y_t (Z_t + diag(ridge_t))^T = dx_t, and then

    dq_t = y_t        dridge_t = -x_t (.) y_t        dZ_t = -x_t^T y_t

the last being the gradient of a read x_t Z_t with cotangent -y_t.
"""

from __future__ import annotations

import math
import sys
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...core import Explained, join_parts, register, split_parts
from ...ops.host import numpy_kernels
from ...ops.product import multiple, product, product_of_heads
from ...ops.step_size import skip_and_gate
from ...ops.sums import added, inner, sum_to
from ...runtime.arrays import Array, Namespace, cast, is_cupy, is_numpy
from ...runtime.recorder import refuse
from .. import core
from ..operations import readers_of
from ..types import Inputs, Plan
from . import systems
from .systems import singular


class SolvedInputs(NamedTuple):
    """Arrays (..., T, heads, width), or their gradients."""

    q: Array  # (..., T, Hq, K)  q, k and v as given, or in the compute dtype
    k: Array  # (..., T, Hk, K)
    v: Array  # (..., T, H, V)
    g: Array  # (..., T, H, 1)
    beta: Array  # (..., T, H, 1)
    ridge: Array  # (1, H, K), or (..., T, H, K)
    solver: Any = None  # a Solver for inputs; None for gradients
    least: Any = math.inf  # the least entry of ridge, an array (); or what `least_of` returns

    def memory(self, xp: Namespace, values: Array, stored: Any = None) -> Inputs:
        """The core's inputs of one memory, in the dtype of `values`, or that to which kernels round their factors."""
        dtype = values.dtype if stored is None else stored
        written = product_of_heads(xp, self.beta, values, dtype=dtype)
        q, k = (y if y is None or stored is None else cast(xp, y, dtype) for y in (self.q, self.k))
        return Inputs(q, k, written, self.g)


class SolvedResiduals(NamedTuple):
    """Residuals besides inputs and plan."""

    read: Array | None  # x_t
    stored: Array | None  # as kernels of the memory of values read it
    value_residuals: Any  # (name of the function, wanted backend, residuals of the memory S)
    Z: Array | None  # Z_0


class MesaResiduals(NamedTuple):
    """Residuals of a forward pass."""

    x: SolvedInputs
    plan: Plan
    solved: SolvedResiduals


def forward(
    fn: str, x: SolvedInputs, plan: Plan, state: tuple[Array, Array] | None, wanted: str | None
) -> tuple[Array | None, tuple[Array, Array], MesaResiduals]:
    """(out, (S, Z) after the last token, residuals).   Raises ValueError where a system is singular."""
    x, kernel = _given(x, plan, wanted)
    if kernel is not None:
        return _forward_by(kernel, fn, x, plan, state, wanted)
    (S, Z), least = (None, None) if state is None else state, least_of(fn, x.least)
    keys, read = x.memory(plan.xp, x.k), None
    if x.q is None:
        Z_end = _written(fn, keys, plan, Z, wanted)
    else:
        at = singular(keys, x.ridge, plan, Z) if least == 0 else None
        if at is not None:
            raise ValueError(
                f"{fn}: the system of token {at[0]}, head {at[1]} is singular: ridge is 0 in channels "
                "that the keys so far do not span, expected ridge > 0 there"
            )
        read, Z_end = _solve(fn, keys, x, plan, Z, wanted)
    out, S_end, value_residuals = core.forward(fn, x.memory(plan.xp, x.v)._replace(q=read), plan, S, wanted)
    inputs = x._replace(least=math.inf)  # which a backward does not read
    residuals = MesaResiduals(inputs, plan, SolvedResiduals(read, read, (fn, wanted, value_residuals), Z))
    return out, join_parts((S_end, Z_end)), residuals


def least_entry(fn: str, xp: Namespace, ridge: Array) -> Any:
    """The least entry of ridge, an array (), for `least_of`; on NumPy arrays what that returns."""
    if numpy_kernels(xp, ridge) is not None:  # before the core: a kernel, which a repeated call has, too
        from ..cpu.solve import is_positive

        if is_positive(ridge):
            return math.inf
    least = xp.min(ridge) if prod(ridge.shape) else math.inf
    return least_of(fn, least) if is_numpy(xp) else least


def least_of(fn: str, least: Any) -> float:
    """0 if an entry of ridge is 0, else infinity: a number that does not differ between calls.

    Raises ValueError for one below 0.
    """
    if type(least) is float:  # not a NumPy scalar
        return least
    refuse("the call looks at the least entry of ridge")
    if (found := float(least)) < 0:
        raise ValueError(f"{fn}: ridge has an entry {found:g}, expected none below 0")
    return 0.0 if found == 0 else math.inf


def _kernel(x: SolvedInputs, plan: Plan, wanted: str | None) -> Any:
    """The module whose kernels solve the systems of a call: of one token, or of chunks; None without."""
    if not is_cupy(plan.xp) or wanted not in (None, "cuda"):
        return None
    from ..cuda.systems import calls as of_chunks
    from ..cuda.token import solve as of_one

    return next((module for module in (of_one, of_chunks) if module.takes(x, plan)), None)


def _given(x: SolvedInputs, plan: Plan, wanted: str | None) -> tuple[SolvedInputs, Any]:
    """(rows as the kernels of chunks take them, else in the compute dtype; the kernels, None without)."""
    kernel = _kernel(x, plan, wanted)
    if kernel is None or kernel.stored(x) is None:
        wide = {n: cast(plan.xp, y, plan.dtype) for n in ("q", "k", "v") if (y := getattr(x, n)) is not None}
        x = x._replace(**wide)
    return x, kernel


def _forward_by(
    kernel: Any, fn: str, x: SolvedInputs, plan: Plan, state: Any, wanted: str | None
) -> tuple[Array | None, Any, MesaResiduals]:
    S, Z = (None, None) if state is None else state
    read, Z_end = kernel.solve(x, plan, Z)
    memory = x._replace(q=read).memory(plan.xp, x.v, kernel.stored(x))
    out, S_end, value_residuals = core.forward(fn, memory, plan, S, wanted)
    solved = SolvedResiduals(read, memory.q, (fn, wanted, value_residuals), Z)
    return out, join_parts((S_end, Z_end)), MesaResiduals(x._replace(least=math.inf), plan, solved)


def _written(fn: str, keys: Inputs, plan: Plan, Z: Array | None, wanted: str | None) -> Any:
    """Z after the last token, or a StatesAt, by a pass that reads nothing."""
    return core.forward(fn, keys._replace(q=None), plan._replace(overwrite=False), Z, wanted)[1]


def _solve(
    fn: str, keys: Inputs, x: SolvedInputs, plan: Plan, Z: Array | None, wanted: str | None, checks: bool = True
) -> tuple[Array, Any]:
    """(x_t, Z after the last token, or a StatesAt).   Raises ValueError where the library finds a system singular.

    checks: whether exact solutions of compiled loops are looked at; not those of a transpose, whose call was.
    """
    at, solver = plan.states_at, _iterating(fn, x, plan, wanted)
    apart = at is not None and (solver is systems or at[:1] in ((), (0,)))
    try:
        once = plan._replace(states_at=None) if apart else plan
        read, end = solver.solve(keys, x.ridge, x.solver, once, Z)
        if checks and x.solver.exact and solver is not systems and not _is_finite(read):
            systems.solve(keys, x.ridge, x.solver, once._replace(states_at=None), Z)  # raises if one is singular
        return read, _written(fn, keys, plan, Z, wanted) if apart else end
    except Exception as error:
        if "LinAlgError" not in type(error).__name__:
            raise
        words = "a system is singular in the numbers of its dtype, expected a larger ridge"
        raise ValueError(f"{fn}: {words}") from error


def _iterating(fn: str, x: SolvedInputs, plan: Plan, wanted: str | None) -> Any:
    """The module that solves: the memories' backend if it has conjugate gradients, else systems.py."""
    like = Inputs(x.q, x.k, x.v, x.g)  # of the memories' shapes
    backend = core.choose(fn, like, plan, wanted)
    iterates = "conjugate_gradients" in backend.handles(like, plan)
    return backend.load() if iterates and 0 not in (*x.v.shape, *x.k.shape) else systems


def _is_finite(read: Array) -> bool:
    """Whether all solutions are numbers: no pivot was 0. In a repeated call their kernel looks."""
    if not (found := bool(np.isfinite(read).all())):
        refuse("a solution of its systems is not finite")
    return found


def explain(fn: str, x: SolvedInputs, plan: Plan, wanted: str | None) -> Explained:
    """Backend, form and operations of the memory of values and of the systems, and how those are solved."""
    x, kernel = _given(x, plan, wanted)
    memory, solver = x.memory(plan.xp, x.v), x.solver
    where = "array calls" if _iterating(fn, x, plan, wanted) is systems else "compiled loops"
    words = (f"systems by at most {solver.iterations} steps of conjugate gradients, in {where}" if not solver.exact else
             f"every system is formed and factored, in {where}")  # fmt: skip
    if kernel is not None:
        words = kernel.how(x, plan)
    found = core.explain_memories(fn, [memory], plan, wanted, words)
    each = operations_per_token(x, found.chunk_size or 1, readers_of(memory))
    return found._replace(
        operations=found.operations + each * prod(x.v.shape[:-1]),
        operations_per_token=found.operations_per_token + each,
    )


def operations_per_token(x: SolvedInputs, C: int, readers: int) -> float:
    """Operations of writing Z and of `readers` systems: 2 K^3 / 3 each, or products with Z_in and C tokens per step."""
    K = x.k.shape[-1]
    each = 2 * K**3 / 3 if x.solver.exact else x.solver.iterations * (2 * K * K + 4 * C * K)
    return 2 * K * K + readers * each


def backward(
    residuals: MesaResiduals, dout: Array | None, dstate: tuple[Array, Array] | None
) -> tuple[SolvedInputs, tuple[Array, Array]]:
    """Gradients of every input, and of the initial (S, Z)."""
    x, plan, (read, stored, (fn, wanted, value_residuals), Z) = residuals
    dS, dZ = split_parts(dstate, 2)
    d, dS_0 = core.backward(value_residuals, dout, dS)
    y, kernel = None, _kernel(x, plan, wanted)
    keys = x.memory(plan.xp, x.k, None if kernel is None else kernel.stored(x))
    if read is not None and dout is not None:
        transposed = None if Z is None else plan.xp.matrix_transpose(Z)
        if kernel is not None:
            y, _ = kernel.solve(x._replace(q=d.q), plan, transposed)
        else:
            y, _ = _solve(fn, keys._replace(q=d.q), x, plan._replace(states_at=None), transposed, wanted, False)
    minus = plan._replace(scale=-1.0, overwrite=False)
    along = None if y is None else cast(plan.xp, stored, keys.v.dtype)
    key_residuals = core.residuals_of(fn, keys._replace(q=along), minus, Z, wanted)
    e, dZ_0 = core.backward(key_residuals, y, dZ)
    return _gradients(plan, x, d, e, read, y), (dS_0, dZ_0)


def _gradients(plan: Plan, x: SolvedInputs, d: Inputs, e: Inputs, read: Array, y: Array) -> SolvedInputs:
    """From the gradients d of the memory of values (beta v) and e of that of keys (beta k)."""
    xp, dtype = plan.xp, plan.dtype
    H, Hk, dq, dridge = x.v.shape[-2], x.k.shape[-2], None, None
    along_k = inner(xp, _by_group(xp, e.v, Hk), x.k[..., :, None, :], None, None, dtype)
    dbeta = inner(xp, d.v, x.v, xp.reshape(along_k, x.v.shape[:-1]), None, dtype)[..., None]
    if y is None:
        dq, dridge = None if x.q is None else xp.zeros_like(x.q), xp.zeros_like(x.ridge)
    else:
        dq = sum_heads(xp, y, x.q.shape[-2]) if x.q.shape[-2] < H else y
        along = sum_to(xp, sum_heads(xp, product(xp, read, y, dtype=dtype), H), x.ridge.shape)
        dridge = multiple(xp, -1.0, along, dtype)
    dk = added(xp, d.k, e.k, dtype)
    if Hk == H:
        dk = skip_and_gate(xp, dk, x.beta, e.v, None, x.k.dtype)
    else:
        dk = added(xp, sum_heads(xp, product(xp, x.beta, e.v, dtype=dtype), Hk), dk)
    return SolvedInputs(dq, dk, product(xp, x.beta, d.v, dtype=x.v.dtype), added(xp, d.g, e.g), dbeta, dridge)


def _by_group(xp: Namespace, y: Array, Hk: int) -> Array:
    """(..., T, H, D) as (..., T, Hk, H / Hk, D): each of the Hk serves a group."""
    *lead, H, D = y.shape
    return xp.reshape(y, (*lead, Hk, H // max(Hk, 1), D))


def sum_heads(xp: Namespace, y: Array, Hk: int) -> Array:
    """A sum over each of Hk groups of heads."""
    *lead, H, D = y.shape
    if Hk == H:
        return y
    return xp.reshape(sum_to(xp, _by_group(xp, y, Hk), (*lead, Hk, 1, D)), (*lead, Hk, D))


def gives_states(fn: str, x: SolvedInputs, plan: Plan, wanted: str | None) -> bool:
    """Whether both memories return states at positions."""
    x, _ = _given(x, plan, wanted)
    memories = x.memory(plan.xp, x.v), x.memory(plan.xp, x.k)._replace(q=None)
    return all(core.gives_states(fn, memory, plan, wanted) for memory in memories)


def reads_out(residuals: MesaResiduals) -> bool:
    """Whether backward reads the output."""
    return False


def reads_end(residuals: MesaResiduals) -> bool:
    """Whether backward reads the final state."""
    return False


register(sys.modules[__name__], SolvedInputs)
