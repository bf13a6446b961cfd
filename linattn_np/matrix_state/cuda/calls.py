"""The CUDA backend of the core: the recurrence for a few tokens, passes over chunks for more."""

from __future__ import annotations

import sys

from ...ops.cuda import unit_rows as kernel
from ...runtime.arrays import Array, cast
from .. import policy
from .. import preprocess as steps
from ..types import Erase, Inputs, Plan, Saved, has_raw_gate
from .choose import family_of, family_of_gradients
from .portable import calls as portable
from .portable import columns
from .token import calls as token
from .token import gradients, wide

RAW = ("gates", "l2norm", "strengths", "micro_steps", "rotation")  # the kernel of a few tokens computes them forward


def _reading(x: Inputs, plan: Plan) -> Inputs:
    """With queries: passes over chunks write a state and read it, so keys take their place where nothing is read."""
    return x._replace(q=x.k) if x.q is None and plan.causal and not policy.is_short_cuda(plan) else x


def unsupported_reason(x: Inputs, plan: Plan) -> str | None:
    """Why the kernels do not cover a call; None where they do."""
    x = _part(_plain(x, plan), plan)
    return family_of(x, plan).unsupported_reason(x, plan)


def _plain(x: Inputs, plan: Plan) -> Inputs:
    """The inputs of the launches of a call: without the erase term where they compute it as values."""
    return wide.without_erase(x, plan) if policy.is_short_cuda(plan) and wide.takes(x, plan) else x


def _part(x: Inputs, plan: Plan) -> Inputs:
    """The inputs of the first block of keys."""
    return _reading(steps.part(x, steps.cuts(x)[0]), plan)


def handles(x: Inputs, plan: Plan) -> frozenset[str]:
    """The preprocessing steps that the kernels of a call, or of a block of its keys, include."""
    x = _reading(_plain(x, plan), plan)
    blocks, family = steps.cuts(x), family_of(x, plan)
    if len(blocks) == 1:
        return family.handles(x, plan)
    if _is_wide(x, plan):
        return (family.handles(x, plan) | {"wide_keys"}) - {"pools", "neighbours", *RAW}
    if family.unsupported_reason(x, plan) is not None:
        x = steps.part(x, blocks[0])
        family = family_of(x, plan)
    return family.handles(x, plan) - {"states_at", "pools", "neighbours", *RAW}


def form(x: Inputs, plan: Plan) -> tuple[str, int | None]:
    """(form, tokens of a chunk or None)."""
    x = _reading(x, plan)
    family, T = family_of(x, plan), x.v.shape[-3]
    if family is token:
        return "recurrent form", None
    if family in (portable, columns):
        return "chunk form", min(policy.PORTABLE_CHUNK, max(T, 1))
    name = "parallel form in tiles" if policy.is_parallel(plan, T) else "chunk form"
    return name, min(policy.array_chunk(plan, T), max(T, 1))


def describe(x: Inputs, plan: Plan) -> str:
    """The kernels of a supported call, in words."""
    handled = handles(x, plan)
    x = _plain(x, plan)
    blocks = steps.cuts(x)
    if "wide_keys" in handled and not _is_wide(x, plan):
        blocks = [slice(None)]
    one = _part(x, plan) if len(blocks) > 1 else _reading(x, plan)
    words = family_of(one, plan).how(one, plan)
    if plan.micro_steps > 1 and "micro_steps" not in handled:
        words += ", after q and g have been expanded to the steps of their tokens"
    if plan.l2norm:
        words += f", {'which divide' if 'l2norm' in handled else 'after one that divides'} q and k by their length"
    return words if len(blocks) == 1 else f"{words}; keys of {x.k.shape[-1]} channels in {len(blocks)} blocks"


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Saved]:
    """(out, final state, saved)."""
    if _is_wide(x, plan):
        return wide.forward(x, plan, state)
    given = _reading(x, plan)
    out, end, saved = family_of(given, plan).forward(given, plan, state)
    return (out, end, saved) if x.q is given.q else (None, end, saved._replace(x=saved.x._replace(q=None)))


def _is_wide(x: Inputs, plan: Plan) -> bool:
    """Whether a call is launches of the kernel of a few tokens, one for each block of keys."""
    return policy.is_short_cuda(plan) and plan.causal and wide.takes(x, plan)


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state."""
    if _is_wide(saved.x, saved.plan) and saved.x.erase is Erase.NONE:
        return steps.wide_keys_vjp(backward, wide.residuals(saved), dout, dstate)
    raw = [name for name in RAW if has_step(name, saved.x, saved.plan)] if policy.is_short_cuda(saved.plan) else []
    if raw:  # the forward's kernel has computed these steps
        return steps.backward_behind(raw, sys.modules[__name__], saved._replace(starts=None), dout, dstate)
    given = _reading(saved.x, saved.plan)
    reads = given.q is saved.x.q
    saved = saved if reads else saved._replace(x=given)
    d, dstate = family_of_gradients(given, saved.plan).backward(saved, dout, dstate)
    return d if reads else d._replace(q=None), dstate


def has_step(name: str, x: Inputs, plan: Plan) -> bool:
    """Whether a call has raw projections that a step is for."""
    return {"gates": has_raw_gate(x, plan), "l2norm": plan.l2norm, "strengths": plan.beta_sigmoid > 0,
            "micro_steps": plan.micro_steps > 1, "rotation": x.theta is not None}[name]  # fmt: skip


def gradients_by_array_calls(x: Inputs, plan: Plan) -> str:
    """Why `backward` makes array calls for a call; "" where kernels compute the gradients, or there are few tokens."""
    x = _part(x, plan)
    if policy.is_short_cuda(plan) or family_of_gradients(x, plan) is not token:
        return ""
    return gradients.unsupported_reason(x, plan) or ""


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
