"""The CUDA backend of the room: a few tokens go through the recurrence, more through passes over chunks."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...cuda import launch
from ...cuda.repeat import Allocating, Seen
from ...ground.namespace import Array
from . import cuda_kernels, cuda_step
from .inputs import Inputs, Plan, Saved


def _of(plan: Plan) -> Any:
    return cuda_step if cuda_step.takes(plan) else cuda_kernels


def refuses(call: Any) -> str | None:
    """Why the kernels do not cover a call; None where they do."""
    return _of(call.plan).refuses(call)


def how(call: Any) -> str:
    """Which kernels a covered call takes, in words."""
    return "a few tokens in one kernel" if cuda_step.takes(call.plan) else cuda_kernels.how(call)


class Watched(NamedTuple):
    """What a forward pass keeps, and what it launched."""

    starts: Any
    seen: Seen


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Saved]:
    """(out, final state, saved)."""
    if plan.gradients:  # nothing is made again: the pullback is its own
        return _of(plan).forward(x, plan, state)
    with launch.written() as launches:
        xp = Allocating(plan.xp)
        out, end, saved = _of(plan).forward(x, plan._replace(xp=xp), state)
    return out, end, saved._replace(plan=plan, starts=Watched(saved.starts, Seen(launches, xp.made)))


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state."""
    if isinstance(saved.starts, Watched):
        saved = saved._replace(starts=saved.starts.starts)
    if not cuda_step.takes(saved.plan):
        return cuda_kernels.backward(saved, dout, dstate)
    passes = saved.x.q is not None and cuda_kernels.refuses(saved) is None  # few tokens are one chunk: nothing is kept
    return (cuda_kernels if passes else cuda_step).backward(saved, dout, dstate)
