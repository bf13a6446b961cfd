"""Feature maps of queries and keys, and outputs divided by the sum of their weights.

    S_t = e^{g_t} S_{t-1} + phi(k_t)^T v_t        z_t = z_{t-1} + phi(k_t)
    out_t = scale phi(q_t) S_t                    with eps: the same / (scale phi(q_t) z_t^T + eps)

The compiled loops compute features chunk by chunk, or token by token, and divide when they store
(matrix_state/cpu/maps.py, averages.py, recurrent.py). Array calls go chunk by chunk where phi(q) . phi(k) is a
polynomial of q . k (polynomial.py). Other backends get all features and values with a column of ones, whose output
divides the others. z is the state's last column.

Features of a polynomial have terms that cancel where q . k is small: of float32 rows they, and states, are float64.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...core import Explained, StatesAt, register
from ...ops.averages import divide, divide_vjp, with_ones, with_sums
from ...ops.map_steps import Steps
from ...runtime.arrays import Array, cast, is_numpy, sum_dtype
from ...runtime.pieces.memory import empty
from .. import core, policy
from ..types import Average, Inputs, Plan
from . import averages, polynomial


class MappedInputs(NamedTuple):
    """Arrays (..., T, heads, width), or their gradients, and a feature map that has steps."""

    q: Array  # (..., T, Hq, K)  None: write without reading
    k: Array  # (..., T, Hk, K)
    v: Array  # (..., T, H, V)
    g: Array = None  # (..., T, H, 1)
    map: Any = None  # (f, f_vjp)
    eps: float | None = None  # added to the sum of weights that outputs are divided by; None: no division
    is_narrow: bool = False  # CUDA kernels may take float32 features: q and k are stored in 16 bits

    @property
    def is_polynomial(self) -> bool:
        """Whether phi(q) . phi(k) is a polynomial of q . k, of a degree whose terms cancel."""
        return self.steps.kind == "monomials" and len(self.steps.arguments[0]) > 2

    def widened(self, plan: Plan) -> Plan:
        """The plan in the dtype of features and states."""
        exact = self.is_polynomial and not self.is_narrow
        return plan._replace(dtype=sum_dtype(plan.xp, self.v)) if exact and plan.dtype == plan.xp.float32 else plan

    @property
    def steps(self) -> Steps:
        return self.map[0].steps

    def memories(self, xp: Any) -> list[Inputs]:
        """The core's inputs, with views of the right shapes in place of features and values."""
        M, V = self.steps.width(self.k.shape[-1]), self.v.shape[-1] + (self.eps is not None)
        pairs = ((self.q, M), (self.k, M), (self.v, V))
        q, k, v = (None if x is None else _of_width(xp, x, width) for x, width in pairs)
        return [Inputs(q, k, v, self.g)]


def _of_width(xp: Any, x: Array, width: int) -> Array:
    """A view (..., width) on x's device without memory of its own; its numbers mean nothing."""
    first = x[..., :1] if x.shape[-1] else xp.zeros((*x.shape[:-1], 1), dtype=x.dtype)
    return xp.broadcast_to(first, (*x.shape[:-1], width))


class MappedResiduals(NamedTuple):
    """Residuals of a forward pass."""

    x: MappedInputs
    plan: Plan
    core_residuals: Any
    out: Array | None
    sums: Array | None  # the denominators; None without eps
    features: tuple[Array | None, Array] | None  # phi(q), phi(k), if computed outside the backend
    dtype: Any  # that of the call; plan.dtype is that of features


def is_compiled(fn: str, x: MappedInputs, plan: Plan, wanted: str | None) -> bool:
    """Whether the backend computes features itself, chunk by chunk."""
    if plan.chunk_size == 1 or 0 in (*x.v.shape, *x.k.shape) or not plan.causal or not is_numpy(plan.xp):
        return False
    one = x.memories(plan.xp)[0]
    return "features" in core.choose(fn, one, plan, wanted).handles(one, plan)


def in_chunks(fn: str, x: MappedInputs, plan: Plan, wanted: str | None) -> bool:
    """Whether array calls compute a polynomial of q . k chunk by chunk."""
    if not x.is_polynomial or plan.chunk_size == 1 or any(y is not None and 0 in y.shape for y in (x.q, x.k, x.v)):
        return False
    if is_compiled(fn, x, plan, wanted) or (x.is_narrow and x.steps.width(x.k.shape[-1]) <= policy.WIDEST_CUDA):
        return wanted == "chunks"
    return wanted in (None, "chunks")


def explain(fn: str, x: MappedInputs, plan: Plan, wanted: str | None) -> Explained:
    """Backend, form and operations, and where features are computed."""
    x = _for(x, wanted)
    words = "features by array calls"
    if x.widened(plan).dtype != plan.dtype:
        words = "in float64, since terms of features cancel; " + words
    if in_chunks(fn, x, plan, wanted):
        others = core.reasons_against(core.CHUNKS, x.memories(plan.xp)[0], plan)
        return polynomial.explain(core.reason_for(wanted), others, _polynomial(x, plan), plan)
    plan = x.widened(plan)
    if is_compiled(fn, x, plan, wanted):
        forms = [core.form(fn, memory, plan, wanted) for memory in x.memories(plan.xp)]
        each = "token by token" if forms[0][1] is None else "chunk by chunk"
        words = words.replace("features by array calls", f"features {each}")
        return core.explain_memories(fn, x.memories(plan.xp), plan, wanted, words, forms)
    memory = x.memories(plan.xp)[0]
    apart = averages.AveragedInputs(memory.q, memory.k, x.v, x.g, eps=x.eps or 0.0)
    if x.eps is not None and averages.has_kernels(apart, plan, wanted):
        return core.explain_memories(fn, [apart.core], plan, wanted, f"{averages.APART}; {words}")
    return core.explain_memories(fn, [memory], plan, wanted, words)


def _for(x: MappedInputs, wanted: str | None) -> MappedInputs:
    """The inputs of a call: the CUDA kernels, if they are asked for, take float32 features."""
    return x._replace(is_narrow=True) if wanted == "cuda" else x


def _polynomial(x: MappedInputs, plan: Plan) -> polynomial.Polynomial:
    """The rows of a call in chunks, after the norm before the map."""
    q, k = x.q, x.k
    if x.steps.before is not None:
        q, k = (None if y is None else x.steps.before[0](cast(plan.xp, y, plan.dtype)) for y in (q, k))
    exact = x.widened(plan).dtype != plan.dtype
    return polynomial.Polynomial(q, k, x.v, x.steps.arguments[0], x.eps, exact)


def forward(
    fn: str, x: MappedInputs, plan: Plan, state: Array | None, wanted: str | None
) -> tuple[Array | None, Array, Any]:
    """(out, final state with z, residuals)."""
    x = _for(x, wanted)
    if in_chunks(fn, x, plan, wanted):
        return _forward_in_chunks(x, plan, state)
    if not is_compiled(fn, x, plan, wanted):
        return _forward_of_features(fn, x, plan, state, wanted)
    return _forward_compiled(fn, x, plan, state, wanted)


class InChunks(NamedTuple):
    """Residuals of a polynomial that array calls compute chunk by chunk."""

    x: MappedInputs
    plan: Plan
    rest: polynomial.PolynomialResiduals


def _forward_in_chunks(x: MappedInputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, InChunks]:
    out, end, rest = polynomial.forward(_polynomial(x, plan), plan, state)
    return out, end, InChunks(x, plan, rest)


def _backward_in_chunks(residuals: InChunks, dout: Array | None, dstate: Array | None) -> tuple[MappedInputs, Array]:
    x, plan, rest = residuals
    d, dS = polynomial.backward(rest, dout, dstate)
    dq, dk = _before_vjp(x, plan, d.q, d.k)
    return MappedInputs(dq, dk, d.v), dS


def _before_vjp(x: MappedInputs, plan: Plan, dq: Array | None, dk: Array) -> tuple[Array | None, Array]:
    """The transpose of the norm before the map."""
    before = x.steps.before
    if before is None:
        return dq, dk
    dq, dk = (None if dy is None else before[1](cast(plan.xp, y, dy.dtype), dy) for y, dy in ((x.q, dq), (x.k, dk)))
    return dq, dk


def _forward_compiled(
    fn: str, x: MappedInputs, plan: Plan, state: Array | None, wanted: str | None
) -> tuple[Array | None, Array, MappedResiduals]:
    """forward with features computed by the backend."""
    narrow, plan = plan.dtype, x.widened(plan)
    dtype, sums = np.dtype(plan.dtype), None
    v = cast(np, x.v, dtype) if x.eps is not None or narrow != dtype else x.v  # averages: in the compute dtype
    q, k, before = x.q, x.k, x.steps.before
    if before is not None:
        q, k = (None if y is None else before[0](cast(np, y, dtype)) for y in (q, k))
    inner = plan._replace(features=x.steps._replace(before=None))
    if x.eps is not None:
        if x.q is not None:
            heads = max(x.v.shape[-2], x.q.shape[-2])
            sums = empty((*x.v.shape[:-2], heads, 1), dtype)
        inner = inner._replace(average=Average(x.eps, sums))
    out, end, core_residuals = core.forward(fn, Inputs(q, k, v, x.g), inner, state, wanted)
    return *_narrowed(plan, narrow, out, end), MappedResiduals(x, plan, core_residuals, out, sums, None, narrow)


def _narrowed(plan: Plan, dtype: Any, out: Array | None, end: Any) -> tuple[Array | None, Any]:
    """Output and final states in the dtype of the call, if features have another one."""
    if plan.dtype == dtype:
        return out, end
    narrow = lambda y: None if y is None else cast(plan.xp, y, dtype)  # noqa: E731
    return narrow(out), StatesAt(*map(narrow, end)) if isinstance(end, StatesAt) else narrow(end)


def _forward_of_features(
    fn: str, x: MappedInputs, plan: Plan, state: Array | None, wanted: str | None
) -> tuple[Array | None, Array, MappedResiduals]:
    """forward with features computed by array calls first."""
    narrow, plan, xp = plan.dtype, x.widened(plan), plan.xp
    q, k = (None if y is None else x.map[0](cast(xp, y, plan.dtype)) for y in (x.q, x.k))
    v = x.v if plan.dtype == narrow else cast(xp, x.v, plan.dtype)
    apart = averages.AveragedInputs(q, k, v, x.g, eps=x.eps or 0.0)
    if x.eps is not None and averages.has_kernels(apart, plan, wanted):
        parts = None if state is None else (state[..., :-1], state[..., -1])
        out, (S, z), saved = averages.forward(fn, apart, plan, parts, wanted)
        residuals = MappedResiduals(x, plan, saved, None, None, (q, k), narrow)
        return *_narrowed(plan, narrow, out, with_sums(xp, S, z, plan.dtype, view=False)), residuals
    v = v if x.eps is None else with_ones(xp, cast(xp, v, plan.dtype))
    out, end, core_residuals = core.forward(fn, Inputs(q, k, v, x.g), plan, state, wanted)
    sums = None
    if x.eps is not None and out is not None:
        out, sums = divide(xp, out, x.eps)
    return *_narrowed(plan, narrow, out, end), MappedResiduals(x, plan, core_residuals, out, sums, (q, k), narrow)


def backward(residuals: Any, dout: Array | None, dstate: Any) -> tuple[MappedInputs, Array]:
    """Gradients of every input, and of the initial state with z."""
    if isinstance(residuals, InChunks):
        return _backward_in_chunks(residuals, dout, dstate)
    x, plan, core_residuals, out, sums, features, dtype = residuals
    xp, narrow = plan.xp, lambda y: None if y is None else cast(plan.xp, y, dtype)
    if features is None:
        within = None if x.eps is None else functools.partial(_backward_of_averages, out)
        d, dS = core.backward(core_residuals, dout, dstate, within)
        dq, dk = _before_vjp(x, plan, d.q, d.k)
        return MappedInputs(narrow(dq), narrow(dk), narrow(d.v), narrow(d.g)), narrow(dS)
    if isinstance(core_residuals, averages.Residuals):
        parts = None if dstate is None else (dstate[..., :-1], dstate[..., -1])
        through, (dS, dz) = averages.backward(core_residuals, dout, parts)
        return _mapped_vjp(residuals, through, through.v, with_sums(xp, dS, dz, plan.dtype, view=False))
    if x.eps is not None and dout is not None:
        dout = divide_vjp(xp, cast(xp, out, plan.dtype), sums, cast(xp, dout, plan.dtype))
    d, dS = core.backward(core_residuals, dout, dstate)
    return _mapped_vjp(residuals, d, d.v if x.eps is None else d.v[..., :-1], dS)


def _mapped_vjp(residuals: MappedResiduals, d: Any, dv: Array, dS: Array) -> tuple[MappedInputs, Array]:
    """Gradients in the dtype of the call from those of the features, of the values and of the initial state."""
    x, plan, xp, features = residuals.x, residuals.plan, residuals.plan.xp, residuals.features
    narrow = lambda y: None if y is None else cast(xp, y, residuals.dtype)  # noqa: E731
    takes = getattr(x.map[1], "takes_features", False)
    dq, dk = (None if y is None else x.map[1](cast(xp, y, plan.dtype), dphi, *((phi,) if takes else ()))
              for y, dphi, phi in zip((x.q, x.k), (d.q, d.k), features or (), strict=True))  # fmt: skip
    return MappedInputs(narrow(dq), narrow(dk), narrow(dv), narrow(d.g)), narrow(dS)


def _backward_of_averages(out: Array | None, run: Callable[..., Any], saved: Any, dout: Any, dstate: Any) -> Any:
    """The backend's backward, which reads the outputs that it has divided."""
    average = saved.plan.average._replace(out=out)
    return run(saved._replace(plan=saved.plan._replace(average=average)), dout, dstate)


def gives_states(fn: str, x: MappedInputs, plan: Plan, wanted: str | None) -> bool:
    """Whether the core returns states at positions."""
    return not in_chunks(fn, x, plan, wanted) and core.gives_states(fn, x.memories(plan.xp)[0], plan, wanted)


def reads_out(residuals: Any) -> bool:
    """Whether backward reads the output."""
    return not isinstance(residuals, InChunks) and residuals.out is not None and residuals.x.eps is not None


def reads_end(residuals: Any) -> bool:
    """Whether backward reads the final state."""
    if isinstance(residuals, InChunks) or isinstance(residuals.core_residuals, averages.Residuals):
        return False
    return core.reads_end(residuals.core_residuals)


register(sys.modules[__name__], MappedInputs)
