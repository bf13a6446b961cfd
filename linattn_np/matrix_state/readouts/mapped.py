"""Feature maps of queries and keys, and outputs divided by the sum of their weights.

    S_t = e^{g_t} S_{t-1} + phi(k_t)^T v_t        z_t = z_{t-1} + phi(k_t)
    out_t = scale phi(q_t) S_t                    with eps: the same / (scale phi(q_t) z_t^T + eps)

The compiled loops compute features chunk by chunk, or token by token, and divide when they store
(matrix_state/cpu/maps.py, averages.py, recurrent.py). Other backends get all features and values with a column
of ones, whose output divides the others. z is the state's last column.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...core import Computed, Explained, register
from ...ops.averages import divide, divide_vjp, with_ones
from ...ops.map_steps import Steps
from ...runtime.arrays import Array, cast
from ...runtime.memory import shares_memory
from ...runtime.pieces.memory import gap
from ...runtime.tracing import Trace
from .. import core
from ..types import Average, Inputs, NormalisedState, Plan
from .sums import joined


class MappedInputs(NamedTuple):
    """NumPy arrays (..., T, heads, width), or their gradients, and a feature map that has steps."""

    q: Array  # (..., T, Hq, K)  None: write without reading
    k: Array  # (..., T, Hk, K)
    v: Array  # (..., T, H, V)
    g: Array = None  # (..., T, H, 1)
    map: Any = None  # (f, f_vjp)
    eps: float | None = None  # added to the sum of weights that outputs are divided by; None: no division

    @property
    def steps(self) -> Steps:
        return self.map[0].steps

    def memories(self) -> list[Inputs]:
        """The core's inputs, with placeholders of the right shapes for features and values."""
        M, V = self.steps.width(self.k.shape[-1]), self.v.shape[-1] + (self.eps is not None)
        q, k, v = (None if x is None else np.broadcast_to(np.zeros((), x.dtype), (*x.shape[:-1], width))
                   for x, width in ((self.q, M), (self.k, M), (self.v, V)))  # fmt: skip
        return [Inputs(q, k, v, self.g)]


class Residuals(NamedTuple):
    """Residuals of a forward pass."""

    x: MappedInputs
    plan: Plan
    core_residuals: Any
    out: Array | None
    sums: Array | None  # the denominators; None without eps
    features: tuple[Array | None, Array] | None  # phi(q), phi(k), if computed outside the backend


def is_compiled(fn: str, x: MappedInputs, plan: Plan, wanted: str | None) -> bool:
    """Whether the backend computes features itself, chunk by chunk."""
    if plan.chunk_size == 1 or 0 in (*x.v.shape, *x.k.shape):
        return False
    one = x.memories()[0]
    return "features" in core.choose(fn, one, plan, wanted).handles(core.Call(one, plan))


def explain(fn: str, x: MappedInputs, plan: Plan, wanted: str | None) -> Explained:
    """Backend, form and operations, and where features are computed."""
    if is_compiled(fn, x, plan, wanted):
        forms = [core.form(fn, memory, plan, wanted) for memory in x.memories()]
        each = "token by token" if forms[0][1] is None else "chunk by chunk"
        return core.explain_memories(fn, x.memories(), plan, wanted, f"features {each}", forms)
    return core.explain_memories(fn, x.memories(), plan, wanted, "features by array calls")


def forward(
    fn: str, x: MappedInputs, plan: Plan, state: Array | None, wanted: str | None
) -> tuple[Array | None, Array, Residuals]:
    """(out, final state with z, residuals)."""
    if not is_compiled(fn, x, plan, wanted):
        run = lambda inputs, S: core.forward(fn, inputs, plan, S, wanted)  # noqa: E731
        return _forward_of_features(run, x, plan, state)
    return _forward_compiled(lambda inputs, inner, S: core.forward(fn, inputs, inner, S, wanted), x, plan, state)


def _forward_compiled(
    run: Callable[..., Computed], x: MappedInputs, plan: Plan, state: Array | None
) -> tuple[Array | None, Array, Residuals]:
    """forward with features computed by the backend; run(inputs, plan, state) is its forward."""
    dtype, sums = np.dtype(plan.dtype), None
    v = x.v if x.eps is None else cast(np, x.v, dtype)  # averages are stored in the compute dtype
    q, k, before = x.q, x.k, x.steps.before
    if before is not None:
        q, k = (None if y is None else before[0](cast(np, y, dtype)) for y in (q, k))
    inner = plan._replace(features=x.steps._replace(before=None))
    if x.eps is not None:
        if x.q is not None:
            heads = max(x.v.shape[-2], x.q.shape[-2])
            sums = np.empty((*x.v.shape[:-2], heads, 1), dtype)
        inner = inner._replace(average=Average(x.eps, sums))
    out, end, core_residuals = run(Inputs(q, k, v, x.g), inner, state)
    return out, end, Residuals(x, plan, core_residuals, out, sums, None)


def _forward_of_features(
    run: Callable[..., Computed], x: MappedInputs, plan: Plan, state: Array | None
) -> tuple[Array | None, Array, Residuals]:
    """forward with features computed by array calls first; run(inputs, state) is the core's."""
    q, k = (None if y is None else x.map[0](cast(np, y, plan.dtype)) for y in (x.q, x.k))
    v = x.v if x.eps is None else with_ones(np, cast(np, x.v, plan.dtype))
    out, end, core_residuals = run(Inputs(q, k, v, x.g), state)
    sums = None
    if x.eps is not None and out is not None:
        out, sums = divide(np, out, x.eps)
    return out, end, Residuals(x, plan, core_residuals, out, sums, (q, k))


def backward(residuals: Residuals, dout: Array | None, dstate: Array | None) -> tuple[MappedInputs, Array]:
    """Gradients of every input, and of the initial state with z."""
    x, plan, core_residuals, out, sums, features = residuals
    if features is None:
        within = None if x.eps is None else functools.partial(_backward_of_averages, out)
        d, dS = core.backward(core_residuals, dout, dstate, within)
        before, dq, dk = x.steps.before, d.q, d.k
        if before is not None:
            dq, dk = (None if y is None else before[1](cast(np, y, plan.dtype), dy) for y, dy in ((x.q, dq), (x.k, dk)))
        return MappedInputs(dq, dk, d.v, d.g), dS
    if x.eps is not None and dout is not None:
        dout = divide_vjp(np, cast(np, out, plan.dtype), sums, cast(np, dout, plan.dtype))
    d, dS = core.backward(core_residuals, dout, dstate)
    takes = getattr(x.map[1], "takes_features", False)
    dq, dk = (None if y is None else x.map[1](cast(np, y, plan.dtype), dphi, *((phi,) if takes else ()))
              for y, dphi, phi in zip((x.q, x.k), (d.q, d.k), features, strict=True))  # fmt: skip
    return MappedInputs(dq, dk, d.v if x.eps is None else d.v[..., :-1], d.g), dS


def _backward_of_averages(out: Array | None, run: Callable[..., Any], saved: Any, dout: Any, dstate: Any) -> Any:
    """The backend's backward, which reads the outputs that it has divided."""
    average = saved.plan.average._replace(out=out)
    return run(saved._replace(plan=saved.plan._replace(average=average)), dout, dstate)


def gives_states(fn: str, x: MappedInputs, plan: Plan, wanted: str | None) -> bool:
    """Whether the core returns states at positions."""
    return core.gives_states(fn, x.memories()[0], plan, wanted)


def reads_out(residuals: Residuals) -> bool:
    """Whether backward reads the output."""
    return residuals.x.eps is not None


def reads_end(residuals: Residuals) -> bool:
    """Whether backward reads the final state."""
    return core.reads_end(residuals.core_residuals)


def repeat(fn: str, plan: Plan, wanted: str | None, residuals: Residuals) -> Callable[[MappedInputs, Any], Computed]:
    """The forward (x, state) of further calls; the core's loops are recorded."""
    if residuals.features is not None:
        run = core.repeat(fn, plan, wanted, residuals.core_residuals)
        return lambda x, state: _forward_of_features(run, x, plan, state)
    path = residuals.core_residuals.path
    loops = core.RecordedLoops(path)

    def along(inputs: Inputs, inner: Plan, S: Any) -> Computed:
        return core.forward_along(path._replace(plan=inner), inputs, S, loops)

    return lambda x, state: _forward_compiled(along, x, plan, state)


def record(
    x: MappedInputs, plan: Plan, state: Any, residuals: Residuals, trace: Trace, then: Any = None
) -> None:
    """No plan for a state of the core: record_mapped has one for the public state."""


def record_mapped(
    x: MappedInputs, plan: Plan, state: Any, residuals: Residuals, trace: Trace, divide: Any
) -> Any:
    """The plan of a traced call: (arrays, state, pointers) -> (out, state); None without one.

    state: None, S, or (S, z), which are the last arrays of the trace if they lie apart. divide: of a state with z, what
    is done to outputs that the core has not divided.
    """
    if residuals.features is not None:
        return None
    dtype, heads, parts = np.dtype(plan.dtype), x.v.shape[-2], isinstance(state, tuple)
    q, k, before = x.q, x.k, x.steps.before
    if before is not None:
        q, k = (None if y is None else before[0](cast(np, y, dtype)) for y in (q, k))
    inner = plan._replace(features=x.steps._replace(before=None))
    if x.eps is not None:
        sums = None if q is None else trace.new((*x.v.shape[:-2], max(heads, q.shape[-2]), 1), dtype)
        inner = inner._replace(average=Average(x.eps, sums))
    if parts and not all(y.dtype == dtype for y in state):
        return None
    v = x.v if x.eps is None else cast(np, x.v, dtype)
    if parts and (both := joined(*state)) is not None:
        found = core.record(Inputs(q, k, v, x.g), inner, both, residuals.core_residuals, trace, divide)
        width = state[0].shape[-1] * dtype.itemsize
        return found and functools.partial(_with_sums, found, plan.overwrite, width)
    S = state
    if parts:
        S, z = trace.arrays[-2:]
        S = np.concatenate([S, z[..., None]], axis=-1)
    if divide is not None:
        inner = inner._replace(overwrite=False)
    found = core.record(Inputs(q, k, v, x.g), inner, S, residuals.core_residuals, trace, divide)
    return found if found is None or divide is None else functools.partial(_with_sums, found, plan.overwrite, 0)


def _with_sums(
    found: Any, overwrite: bool, width: int, arrays: list[np.ndarray], state: Any, pointers: None = None
) -> Any:
    """A recorded call whose state is (S, z); width: bytes from S to z if they are columns of one array, else 0."""
    if width and gap(state[0], state[1]) != width:
        return None
    if width:
        computed = found(arrays, state[0], None)
    elif overwrite and shares_memory(state, arrays):
        return None
    else:
        computed = found([*arrays, *(state or ())], None, None)
    if computed is None:
        return None
    out, end = computed
    parts = end[..., :-1], end[..., -1]
    if overwrite and not width:
        state[0][...], state[1][...] = parts
    return out, NormalisedState(*(state if overwrite else parts))


register(sys.modules[__name__], MappedInputs)
