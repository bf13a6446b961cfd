"""The CUDA backend of the room: a few tokens go through the recurrence, more through passes over chunks."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...cuda import launch
from ...cuda.repeat import Allocating, Seen
from ...ground.namespace import Array
from ..kinds import Erase
from . import cuda_delta, cuda_kernels, cuda_step, steps, units
from .inputs import Inputs, Plan, Saved


def _chunks_of(x: Inputs) -> Any:
    return cuda_delta if x.erase is Erase.DELTA else cuda_kernels


def _of(x: Inputs, plan: Plan) -> Any:
    return cuda_step if cuda_step.takes(plan) else _chunks_of(x)


def refuses(call: Any) -> str | None:
    """Why the kernels do not cover a call; None where they do."""
    return _of(call.x, call.plan).refuses(call)


def how(call: Any) -> str:
    """Which kernels a covered call takes, in words."""
    words = "a few tokens in one kernel" if cuda_step.takes(call.plan) else _chunks_of(call.x).how(call)
    if call.plan.steps > 1 and not _skips(*call):
        words += ", after q and g have been spread over the steps of their tokens"
    if not call.plan.unit:
        return words
    return f"{words}, {'which divide' if _divides(*call) else 'after one that divides'} q and k by their length"


class Watched(NamedTuple):
    """What a forward pass keeps, and what it launched."""

    starts: Any
    seen: Seen


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Saved]:
    """(out, final state, saved)."""
    if plan.gradients and not plan.watched:
        return _forward(x, plan, state)
    with launch.written() as launches:
        xp = Allocating(plan.xp)
        out, end, saved = _forward(x, plan._replace(xp=xp), state)
    return out, end, saved._replace(plan=plan, starts=Watched(saved.starts, Seen(launches, xp.made)))


class Changed(NamedTuple):
    """q, k and g as the kernels read them, where these were made, and what was kept of the call with them."""

    q: Array | None
    k: Array
    g: Array | None
    starts: Any


def _divides(x: Inputs, plan: Plan) -> bool:
    """Whether the kernels of a call take the lengths out of q and k themselves."""
    return _of(x, plan) is cuda_delta and cuda_delta.divides(x, plan)


def _forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Saved]:
    own, apart = _own(x, plan)
    if own.unit == plan.unit and not apart:
        return _of(x, plan).forward(x, plan, state)
    y = x if own.unit == plan.unit else units.forward(x, plan, units.in_kernels)
    if apart:
        y = steps.forward(y, plan)
    out, end, saved = _of(y, own).forward(y, own, state)
    return steps.of_last(plan, out) if apart else out, end, Saved(x, plan, state, Changed(y.q, y.k, y.g, saved.starts))


def _own(x: Inputs, plan: Plan) -> tuple[Plan, bool]:
    """(the plan of the kernels' own call, whether they read after every step of a token)."""
    unit, apart = plan.unit and _divides(x, plan), plan.steps > 1 and not _skips(x, plan)
    return plan._replace(unit=unit, steps=1 if apart else plan.steps), apart


def _skips(x: Inputs, plan: Plan) -> bool:
    """Whether the kernels of a call read after the last step of a token alone."""
    return _of(x, plan) is cuda_delta and cuda_delta.skips(x, plan)


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state."""
    if isinstance(saved.starts, Watched):
        saved = saved._replace(starts=saved.starts.starts)
    if isinstance(saved.starts, Changed):
        x, plan, state, (q, k, g, starts) = saved
        own, apart = _own(x, plan)
        made = x._replace(q=q, k=k, g=g, r=k if x.r is x.k else x.r)
        grads, first = backward(Saved(made, own, state, starts), steps.at_last(plan, dout) if apart else dout, dstate)
        if apart:
            grads = steps.backward(grads, plan)
        return grads if own.unit == plan.unit else units.backward(x, plan, grads, units.in_kernels_vjp), first
    chunks = _chunks_of(saved.x)
    # few tokens are one chunk, of which nothing needs to be kept
    of_chunks = not cuda_step.takes(saved.plan) or (saved.x.q is not None and chunks.refuses(saved) is None)
    return (chunks if of_chunks else cuda_step).backward(saved, dout, dstate)
