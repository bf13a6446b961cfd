"""Recorded calls that autograd follows: launches in forward and in backward, and nothing else.

What the forward keeps is saved as a tensor, so that hooks for saved tensors (checkpointing) reach it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ....call import vjp
from ..arguments import on_views
from ..autograd import once
from ..views import Tensor


class Replayed(torch.autograd.Function):
    """A call whose forward and pullback are recorded."""

    @staticmethod
    def forward(ctx: Any, plan: Any, options: dict[str, Any], pointers: list[int], *given: Tensor) -> Any:
        """The tensors of the result.   plan: a `replays.ReplayedForward`; options: the keywords that are no tensors."""
        results, read, memory = plan.launched(list(given), pointers)
        ctx.plan, ctx.options, ctx.pointers = plan, options, pointers[: len(given)]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, *read, memory)  # raises in backward if one of them was changed
        return tuple(x for x in results if x is not None)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """The gradients."""
        plan, names = ctx.plan, ctx.plan.names
        *saved, memory = ctx.saved_tensors
        given, read = saved[: len(names)], saved[len(names) :]
        if all(d is None for d in cotangents):
            return (None,) * (3 + len(names))
        if any(x.data_ptr() != pointer for x, pointer in zip(given, ctx.pointers, strict=True)):
            given = [_like(x, *layout) for x, layout in zip(given, plan.layouts, strict=True)]
        if (grads := plan.gradients(given, read, memory, cotangents)) is None:
            grads = in_full(plan, dict(zip(names, given, strict=True)) | ctx.options, plan.cotangents(cotangents))
        found = once(plan.spec.name, [getattr(grads, n) for n in names], (*given, *cotangents))
        needs = ctx.needs_input_grad
        return None, None, None, *[d if needs[n] else None for n, d in enumerate(found, 3)]


def _like(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """A saved tensor with the strides of the recorded call: a hook may have stored it otherwise."""
    if x.stride() == strides and not x.data_ptr() & 15:
        return x
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def in_full(plan: Any, keywords: dict[str, Any], cotangents: tuple[Any, ...]) -> Any:
    """The gradients of a call for cotangents whose pullback is not recorded yet: its forward is recomputed."""
    with torch.no_grad():
        rule = functools.partial(vjp.run_vjp, plan.spec)
        device = next(iter(keywords.values())).device
        return on_views(rule, device, (), keywords)[1](*cotangents)
