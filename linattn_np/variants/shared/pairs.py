"""Weights that are a polynomial of q . k of degree 2 or less, for every pair of tokens: no features and no state.

    w_ij = scale (c_0 + c_1 z_ij + c_2 z_ij^2), z = q k / sqrt(K);  out_i = sum_j w_ij v_j / (sum_j w_ij + eps)

The CUDA kernels of softmax attention compute it (cuda_src/softmax/polynomial.cuh), in time that grows with T^2, where
features are not kernels and the call has no states. The length of a sequence does not decide: bits of a token would
depend on later ones. A gradient of the final state goes through the features.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any, NamedTuple

from ...core import Explained, register
from ...matrix_state.readouts import mapped
from ...matrix_state.readouts.mapped import MappedInputs
from ...matrix_state.types import Plan
from ...runtime.arrays import Array, cast, dtype_name
from ...softmax.readouts import polynomial
from ...softmax.types import Inputs, SoftmaxPlan


class PairInputs(MappedInputs):
    """MappedInputs whose weights are computed pair by pair."""

    __slots__ = ()


class Residuals(NamedTuple):
    """What a backward needs."""

    fn: str
    x: PairInputs
    plan: Plan
    out: Array
    logs: Any  # of the kernels


def takes(x: MappedInputs, plan: Plan) -> bool:
    """Whether the kernels compute a call: rows that are stored in 16 bits, values in bfloat16, and no states."""
    if x.q is None or x.g is not None or not plan.causal:
        return False
    names = {dtype_name(x.q), dtype_name(x.k)}
    narrow = x.is_narrow and names <= {"bfloat16", "float32"} and dtype_name(x.v) == "bfloat16"
    known = narrow and x.is_polynomial and len(x.steps.arguments[0]) == 3 and x.steps.before is None
    if not known or plan.has_state or plan.returns_state or plan.states_at is not None or plan.dtype != plan.xp.float32:
        return False
    if 0 in (*x.q.shape, *x.k.shape, *x.v.shape):
        return False
    like = plan.xp.broadcast_to(x.v[..., :1], (*x.v.shape[:-1], x.k.shape[-1]))  # q and k in the dtype of v
    return polynomial.unsupported_reason(Inputs(like, like, x.v), plan_of(x, plan)) is None


def rows_of(x: MappedInputs, plan: Plan) -> Inputs:
    """q, k and v in the dtype of v."""
    return Inputs(*(cast(plan.xp, y, x.v.dtype) for y in (x.q, x.k, x.v)))


def plan_of(x: MappedInputs, plan: Plan) -> SoftmaxPlan:
    """The plan of the softmax core."""
    c_0, c_1, c_2 = (plan.scale * c * x.k.shape[-1] ** (-0.5 * p) for p, c in enumerate(x.steps.arguments[0]))
    return SoftmaxPlan(
        plan.xp, plan.dtype, 1.0, chunk_size=plan.chunk_size, sequences=plan.sequences,
        gradients=plan.gradients, returns_state=False, normalize=x.eps is not None, polynomial=(c_0, c_1, c_2),
        eps=x.eps or 0.0)  # fmt: skip


def forward(fn: str, x: PairInputs, plan: Plan, state: None, wanted: str | None) -> tuple[Array, Array, Residuals]:
    """(out, an array of the shape of the final state, residuals)."""
    out, logs = polynomial.forward(plan_of(x, plan), rows_of(x, plan))
    lead = (len(plan.sequences),) if plan.is_ragged else tuple(x.v.shape[:-3])
    shape = (*lead, x.v.shape[-2], x.steps.width(x.k.shape[-1]), x.v.shape[-1] + (x.eps is not None))
    end = plan.xp.broadcast_to(logs.logs.reshape(-1)[:1], shape) if plan.gradients else None
    return out, end, Residuals(fn, x, plan, out, logs)


def backward(residuals: Residuals, dout: Array | None, dstate: Array | None) -> tuple[MappedInputs, Array | None]:
    """Gradients of every input."""
    fn, x, plan, out, logs = residuals
    if dout is None or dstate is not None:
        given = MappedInputs(*x)
        d, dS = mapped.backward(mapped.forward(fn, given, plan, None, None)[2], dout, dstate)
        return PairInputs(*d), dS
    grads = polynomial.backward(plan_of(x, plan), rows_of(x, plan), out, logs, dout)
    dq, dk, dv = (cast(plan.xp, dy, y.dtype) for dy, y in zip(grads, (x.q, x.k, x.v), strict=False))
    return PairInputs(dq, dk, dv), None


def explain(fn: str, x: PairInputs, plan: Plan, wanted: str | None) -> Explained:
    """2 (K + V) operations for each pair of tokens."""
    heads = max(x.q.shape[-2], x.v.shape[-2]) * prod(x.v.shape[:-3])
    pairs, tile = polynomial.pairs(plan_of(x, plan), Inputs(x.q, x.k, x.v))
    total = 2.0 * (x.k.shape[-1] + x.v.shape[-1]) * pairs * heads
    others = dict.fromkeys(("reference", "chunks"), "covers the call too") | {"numba": "it takes NumPy arrays"}
    reason = "requested" if wanted else "the default path"
    tokens = sum(s.stop - s.start for s in plan.sequences) * heads
    words = "weights pair by pair, in time that grows with T^2; other last bits than with states or chunk_size"
    return Explained("cuda", f"{reason}; {words}", others, "tiles", tile, total, total / max(tokens, 1))


def gives_states(fn: str, x: PairInputs, plan: Plan, wanted: str | None) -> bool:
    """Whether forward takes plan.states_at."""
    return False


def reads_out(residuals: Residuals) -> bool:
    """Whether backward reads the output."""
    return residuals.x.eps is not None


def reads_end(residuals: Residuals) -> bool:
    """Whether backward reads the final state."""
    return False


register(sys.modules[__name__], PairInputs)
