"""The CUDA backend of the core: the recurrence for a few tokens, passes over chunks for more."""

from __future__ import annotations

from typing import Any

from ...ops.cuda import unit_rows as kernel
from ...runtime.arrays import Array, cast
from .. import policy
from .. import preprocess as steps
from ..types import Decay, Erase, Inputs, Plan, Saved
from . import delta, free, scan, step, vector, vector_delta


def _chunks_of(x: Inputs) -> Any:
    if x.erase is Erase.FREE:
        return free
    if x.decay is Decay.VECTOR:
        return vector_delta if x.erase is Erase.DELTA else vector
    return delta if x.erase is Erase.DELTA else scan


def _of(x: Inputs, plan: Plan) -> Any:
    return step if policy.is_short_cuda(plan) else _chunks_of(x)


def unsupported_reason(call: Any) -> str | None:
    """Why the kernels do not cover a call; None where they do."""
    x = steps.part(call.x, steps.cuts(call.x)[0])
    return _of(x, call.plan).unsupported_reason(call._replace(x=x))


def handles(call: Any) -> frozenset[str]:
    """The preprocessing steps that the kernels of a call include."""
    handled, module = set(), _of(*call)
    chunks = vector if module is vector_delta else module
    if module is delta:
        handled |= {"l2norm"} if delta.divides(*call) else set()
        handled |= {"micro_steps"} if delta.skips(*call) else set()
    if module is not step and len(steps.cuts(call.x)) == 1 and chunks.gives_states(call):
        handled.add("states_at")
    if module is step and call.plan.causal and len(steps.cuts(call.x)) == 1:
        handled.add("pools")
    return frozenset(handled)


def form(call: Any) -> tuple[str, int | None]:
    """(form, tokens of a chunk or None)."""
    if policy.is_short_cuda(call.plan):
        return "recurrent form", None
    T = call.x.v.shape[-3]
    name = "parallel form in tiles" if policy.is_parallel(call.plan, T) else "chunk form"
    return name, min(policy.array_chunk(call.plan, T), max(T, 1))


def describe(call: Any) -> str:
    """The kernels of a supported call, in words."""
    blocks, handled = steps.cuts(call.x), handles(call)
    one = call._replace(x=steps.part(call.x, blocks[0]))
    words = "a few tokens in one kernel" if policy.is_short_cuda(call.plan) else _chunks_of(one.x).how(one)
    if call.plan.micro_steps > 1 and "micro_steps" not in handled:
        words += ", after q and g have been expanded to the steps of their tokens"
    if call.plan.l2norm:
        words += f", {'which divide' if 'l2norm' in handled else 'after one that divides'} q and k by their length"
    return words if len(blocks) == 1 else f"{words}; keys of {call.x.k.shape[-1]} channels in {len(blocks)} blocks"


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Saved]:
    """(out, final state, saved)."""
    return _of(x, plan).forward(x, plan, state)


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state."""
    chunks = _chunks_of(saved.x)
    # few tokens are one chunk: a backward by chunks needs no residuals of it
    of_chunks = not policy.is_short_cuda(saved.plan) or (
        saved.x.q is not None and chunks.unsupported_reason(saved) is None)
    return (chunks if of_chunks else step).backward(saved, dout, dstate)


def unit_rows(plan: Plan, rows: steps.Rows) -> steps.Rows:
    """Rows divided by their L2 norm, in their own dtype."""
    if kernel.takes(plan.xp, rows):
        return kernel.unit_rows(plan.xp, rows, plan.l2norm_eps)
    results = steps.unit_rows(plan, rows)
    return tuple(None if y is None else cast(plan.xp, z, y.dtype) for y, z in zip(rows, results, strict=True))


def unit_rows_vjp(plan: Plan, rows: steps.Rows, grads: steps.Rows) -> steps.Rows:
    """The transpose, in the dtype of the rows."""
    if kernel.takes(plan.xp, rows) and kernel.takes(plan.xp, grads):
        return kernel.unit_rows_vjp(plan.xp, rows, grads, plan.l2norm_eps)
    return steps.unit_rows_vjp(plan, rows, grads)
