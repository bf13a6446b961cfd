"""The CUDA backend of the core: the recurrence for a few tokens, passes over chunks for more."""

from __future__ import annotations

import functools
import sys
from typing import Any

from ...ops.cuda import unit_rows as kernel
from ...runtime.arrays import Array, cast
from .. import policy
from .. import preprocess as steps
from ..types import Inputs, Plan, Saved, has_raw_gate
from .choose import family_of, family_of_gradients
from .portable import calls as portable
from .token import calls as token
from .token import gradients, wide

RAW = ("gates", "l2norm", "strengths", "micro_steps", "rotation")  # the kernel of a few tokens computes them forward


def _family(call: Any) -> Any:
    """The module that computes a call."""
    return family_of(call.x, call.plan).calls


def _reading(x: Inputs, plan: Plan) -> Inputs:
    """With queries: passes over chunks write a state and read it, so keys take their place where nothing is read."""
    return x._replace(q=x.k) if x.q is None and plan.causal and not policy.is_short_cuda(plan) else x


def unsupported_reason(call: Any) -> str | None:
    """Why the kernels do not cover a call; None where they do."""
    one = _part(call)
    return _family(one).unsupported_reason(one)


def _part(call: Any) -> Any:
    """The call of the first block of its keys."""
    return call._replace(x=_reading(steps.part(call.x, steps.cuts(call.x)[0]), call.plan))


def handles(call: Any) -> frozenset[str]:
    """The preprocessing steps that the kernels of a call, or of a block of its keys, include."""
    call = call._replace(x=_reading(call.x, call.plan))
    blocks, module = steps.cuts(call.x), _family(call)
    if len(blocks) == 1:
        return module.handles(call)
    if _is_wide(call.x, call.plan):
        return (module.handles(call) | {"wide_keys"}) - {"pools", *RAW}
    if module.unsupported_reason(call) is not None:
        call = call._replace(x=steps.part(call.x, blocks[0]))
        module = _family(call)
    return module.handles(call) - {"states_at", "pools", *RAW}


def form(call: Any) -> tuple[str, int | None]:
    """(form, tokens of a chunk or None)."""
    module = _family(call._replace(x=_reading(call.x, call.plan)))
    if module is token:
        return "recurrent form", None
    T = call.x.v.shape[-3]
    if module is portable:
        return "chunk form", min(policy.PORTABLE_CHUNK, max(T, 1))
    name = "parallel form in tiles" if policy.is_parallel(call.plan, T) else "chunk form"
    return name, min(policy.array_chunk(call.plan, T), max(T, 1))


def describe(call: Any) -> str:
    """The kernels of a supported call, in words."""
    handled = handles(call)
    blocks = steps.cuts(call.x)
    if "wide_keys" in handled and not _is_wide(call.x, call.plan):
        blocks = [slice(None)]
    one = _part(call) if len(blocks) > 1 else call._replace(x=_reading(call.x, call.plan))
    words = _family(one).how(one)
    if call.plan.micro_steps > 1 and "micro_steps" not in handled:
        words += ", after q and g have been expanded to the steps of their tokens"
    if call.plan.l2norm:
        words += f", {'which divide' if 'l2norm' in handled else 'after one that divides'} q and k by their length"
    return words if len(blocks) == 1 else f"{words}; keys of {call.x.k.shape[-1]} channels in {len(blocks)} blocks"


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Saved]:
    """(out, final state, saved)."""
    if _is_wide(x, plan):
        return wide.forward(x, plan, state)
    given = _reading(x, plan)
    out, end, saved = family_of(given, plan).calls.forward(given, plan, state)
    return (out, end, saved) if x.q is given.q else (None, end, saved._replace(x=saved.x._replace(q=None)))


def _is_wide(x: Inputs, plan: Plan) -> bool:
    """Whether a call is launches of the kernel of a few tokens, one for each block of keys."""
    return policy.is_short_cuda(plan) and plan.causal and wide.takes(x, plan)


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state."""
    if _is_wide(saved.x, saved.plan):
        return steps.wide_keys_vjp(backward, wide.residuals(saved), dout, dstate)
    if policy.is_short_cuda(saved.plan) and any(has_step(name, saved.x, saved.plan) for name in RAW):
        return _raw_vjp(saved, dout, dstate)
    given = _reading(saved.x, saved.plan)
    reads = given.q is saved.x.q
    saved = saved if reads else saved._replace(x=given)
    d, dstate = family_of_gradients(saved).calls.backward(saved, dout, dstate)
    return d if reads else d._replace(q=None), dstate


def _raw_vjp(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """backward behind the steps that the forward's kernel has computed."""
    found = [step for step in steps.PREPROCESSING if step.name in RAW and has_step(step.name, saved.x, saved.plan)]
    back: Any = backward
    begin: Any = lambda x, plan, state: (None, None, Saved(x, plan, state, None))  # noqa: E731
    for step in reversed(found):
        begin = functools.partial(step.forward, begin, sys.modules[__name__])
        back = functools.partial(step.backward, back)
    return back(begin(saved.x, saved.plan, saved.state)[2], dout, dstate)


def has_step(name: str, x: Inputs, plan: Plan) -> bool:
    """Whether a call has raw projections that a step is for."""
    return {"gates": has_raw_gate(x, plan), "l2norm": plan.l2norm, "strengths": plan.beta_sigmoid > 0,
            "micro_steps": plan.micro_steps > 1, "rotation": x.theta is not None}[name]  # fmt: skip


def gradients_by_array_calls(call: Any) -> str:
    """Why `backward` makes array calls for a call; "" where kernels compute the gradients, or there are few tokens."""
    saved = Saved(_part(call).x, call.plan, None, None)
    if policy.is_short_cuda(call.plan) or family_of_gradients(saved).calls is not token:
        return ""
    return gradients.unsupported_reason(saved) or ""


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
