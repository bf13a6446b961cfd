"""The CUDA backend of the core: the recurrence for a few tokens, passes over chunks for more."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...ops.cuda import unit_rows as kernel
from ...runtime.arrays import Array, cast, is_deferred
from .. import policy
from .. import preprocess as steps
from ..types import Decay, Erase, Inputs, Plan, Saved
from .deferred import calls as deferred_calls
from .deferred import solved as deferred_solved
from .delta import calls as delta
from .free import calls as free
from .free import delta as free_delta
from .portable import calls as portable
from .scan import calls as scan
from .token import calls as step
from .token import gradients as recurrence
from .vector import calls as vector
from .vector import delta as vector_delta
from .vector import value as vector_value
from .vector import widths as vector_widths


class Call(NamedTuple):
    """The inputs and the plan of one call."""

    x: Inputs
    plan: Plan


def _chunks_of(x: Inputs, plan: Plan) -> Any:
    if x.erase is Erase.FREE:
        return free
    if x.decay is Decay.VECTOR:
        if x.erase is Erase.DELTA and not plan.erases_key:
            return free_delta
        if vector_widths.needed(x):
            return vector_widths
        return vector_delta if x.erase is Erase.DELTA else vector
    if x.gv is not None and x.erase is Erase.NONE:
        return vector_value
    return delta if x.erase is Erase.DELTA else scan


def _of(x: Inputs, plan: Plan) -> Any:
    """The module of a call. Decays of channels go in warpgroups' chunks, else in portable ones, else token by token."""
    if policy.is_short_cuda(plan):
        return step
    chunks = _chunks_of(x, plan)
    if plan.chunk_size is not None or chunks.unsupported_reason(Call(x, plan)) is None:
        return chunks
    if portable.unsupported_reason(Call(x, plan)) is None:
        return portable
    return step if policy.recurs_cuda(x, plan) else chunks


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
    if module is step and is_deferred(call.plan.xp):
        handled.add("recompute")
    if module is vector_widths or (module is step and is_deferred(call.plan.xp) and call.x.q is not None):
        handled.add("wide_keys")
    return frozenset(handled)


def form(call: Any) -> tuple[str, int | None]:
    """(form, tokens of a chunk or None)."""
    if _of(*call) is step:
        return "recurrent form", None
    T = call.x.v.shape[-3]
    if _of(*call) is portable:
        return "chunk form", min(policy.PORTABLE_CHUNK, max(T, 1))
    name = "parallel form in tiles" if policy.is_parallel(call.plan, T) else "chunk form"
    return name, min(policy.array_chunk(call.plan, T), max(T, 1))


def describe(call: Any) -> str:
    """The kernels of a supported call, in words."""
    handled = handles(call)
    blocks = [slice(None)] if "wide_keys" in handled else steps.cuts(call.x)
    one = call._replace(x=steps.part(call.x, blocks[0])) if len(blocks) > 1 else call
    module = _of(*one)
    few = "a few tokens" if policy.is_short_cuda(call.plan) else "token by token"
    words = f"{few} in one kernel" if module is step else module.how(one)
    if call.plan.micro_steps > 1 and "micro_steps" not in handled:
        words += ", after q and g have been expanded to the steps of their tokens"
    if call.plan.l2norm:
        words += f", {'which divide' if 'l2norm' in handled else 'after one that divides'} q and k by their length"
    return words if len(blocks) == 1 else f"{words}; keys of {call.x.k.shape[-1]} channels in {len(blocks)} blocks"


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Saved]:
    """(out, final state, saved)."""
    if is_deferred(plan.xp):
        return deferred_calls.forward(_of(x, plan), x, plan, state)
    return _of(x, plan).forward(x, plan, state)


def solve_one(x: Any, plan: Plan, Z: Any) -> tuple[Any, Any]:
    """(x_t, Z after the token) of a SOLVED read-out on deferred arrays."""
    return deferred_solved.solve(x, plan, Z)


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state."""
    chunks = _chunks_of(saved.x, saved.plan)
    # few tokens are one chunk: a backward by chunks needs no residuals of it
    if saved.x.q is not None and chunks.unsupported_reason(saved) is None:
        return chunks.backward(saved, dout, dstate)
    if not policy.is_short_cuda(saved.plan) and portable.backward_unsupported_reason(saved) is None:
        return portable.backward(saved, dout, dstate)
    return recurrence.backward(saved, dout, dstate)


def gradients_by_array_calls(call: Any) -> str:
    """Why `backward` makes array calls for a call; "" where kernels compute the gradients, or there are few tokens."""
    x, plan = steps.part(call.x, steps.cuts(call.x)[0]), call.plan
    saved = Saved(x, plan, None, None)
    if policy.is_short_cuda(plan) or (x.q is not None and _chunks_of(x, plan).unsupported_reason(saved) is None):
        return ""
    if portable.backward_unsupported_reason(saved) is None:
        return ""
    return recurrence.unsupported_reason(saved) or ""


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
