"""A few tokens as one CUDA kernel on CuPy arrays: the recurrence, for every decay, erase and read (token/step.cu)."""

from __future__ import annotations

from typing import Any

from ....runtime.arrays import Array, cast
from ....runtime.cuda import launch
from ... import policy
from ...types import WITHOUT_GATES, Inputs, Plan, Saved
from . import gradients
from .launch import launched


def unsupported_reason(x: Inputs, plan: Plan) -> str | None:
    """Why the kernel does not support a call in recurrent form; None if it does."""
    if not plan.xp.__name__.endswith("cupy"):
        return "the arrays are not CuPy arrays"
    if plan.dtype == plan.xp.float64:
        return "float64 is computed by the definition in CuPy"
    K, V = x.k.shape[-1], x.v.shape[-1]
    if max(K, V) > policy.WIDEST_CUDA:
        return f"keys are {K} and values {V} wide, the kernels support up to {policy.WIDEST_CUDA}"
    if 0 in (*x.v.shape, *x.k.shape) or (x.q is not None and 0 in x.q.shape):
        return "there is nothing to compute"
    if any(y is not None and y.shape[-2] > x.v.shape[-2] for n, y in zip(WITHOUT_GATES, x, strict=False) if n != "q"):
        return "there are more heads of keys or gates than of values"
    if not policy.is_short_cuda(plan) and plan.chunk_size is not None:
        return f"chunk_size={plan.chunk_size!r}: the kernel of such calls goes token by token"
    if not (policy.is_short_cuda(plan) or policy.recurs_cuda(x, plan)):
        return "float32 sequences of this length go by array calls: decays that are rounded at every token add up"
    if max(x.v.shape[-2], 0 if x.q is None else x.q.shape[-2]) >= 1 << 16:
        return "there are 65536 heads or more"
    if x.v.device.id != launch.current_device():
        return f"the arrays are on device {x.v.device.id}, the current one is {launch.current_device()}"
    return launch.unusable()


def how(x: Inputs, plan: Plan) -> str:
    """The kernel of a call that is covered, in words."""
    return f"{'a few tokens' if policy.is_short_cuda(plan) else 'token by token'} in one kernel"


def handles(x: Inputs, plan: Plan) -> frozenset[str]:
    """The preprocessing steps that the kernel includes, forward. Its backward needs the inputs alone."""
    found = {"recompute"}
    if plan.causal:
        found.add("pools")
        if policy.is_short_cuda(plan):
            found |= {"gates", "l2norm", "strengths", "micro_steps", "rotation"}
    return frozenset(found)


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Saved]:
    """(out, final state, saved); the final state is `state` itself if the plan allows overwriting, else float32.

    A state stored in 16 bits is read as it is; if overwritten, it is rounded once, when it is stored.
    """
    out, end, _ = launched(x, plan, state)
    return None if out is None else cast(plan.xp, out, x.v.dtype), end, Saved(x, plan, state, None)


def backward(saved: Saved, dout: Array | None, dstate: Any) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state: by the kernels, else by array calls."""
    return gradients.backward(saved, dout, dstate)
