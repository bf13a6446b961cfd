"""What a traced call keeps between its forward and its backward: one tensor of a graph, one byte long.

A graph needs the shapes of its tensors before a call runs, but how much a forward keeps is known only then. On the host
the storage of the tensor owns the pullback. On a device, where a CUDA graph repeats launches without Python, the
storage holds the residuals after the byte. A backward that finds neither, because somebody copied the byte, or that
gets its arrays at other addresses than the forward, recomputes the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...call import vjp
from ...call.foreign import leaves
from ...spec import VariantSpec
from .autograd import cotangents, likes
from .views import Tensor

Keywords = dict[str, Any]


def computed(spec: VariantSpec, keywords: Keywords) -> tuple[list[Tensor | None], Tensor] | None:
    """(results, the tensor that keeps residuals); None if the backward has to recompute the forward."""
    if keywords[spec.change.value].is_cuda:
        return _on_device(spec, keywords)
    result, pullback = vjp.run_vjp(spec, (), keywords)
    owner = torch.zeros(1, dtype=torch.uint8)
    vars(owner.untyped_storage())["pullback"] = _addresses(keywords), likes(result), pullback
    return leaves(result), owner


def gradients(
    spec: VariantSpec, keywords: Keywords, residuals: Tensor, given: Sequence[Tensor | None]
) -> list[Tensor] | None:
    """The gradients of the arrays given and of the state, in this order; None if there are no residuals."""
    if keywords[spec.change.value].is_cuda:
        return _device_gradients(spec, keywords, residuals, given)
    addresses, like, pullback = vars(residuals.untyped_storage()).get("pullback", (None, None, None))
    if addresses != _addresses(keywords):
        return None
    grads = pullback(*cotangents(like, given, residuals.device))
    return leaves(tuple(getattr(grads, n) for n in (*spec.arrays, "state")))


def _addresses(keywords: Keywords) -> list[int]:
    """Of all tensors; a graph may reuse the memory of a tensor that it does not hand to the backward."""
    return [x.data_ptr() for y in keywords.values() for x in leaves(y) if isinstance(x, Tensor)]


# CUDA


def _device_gradients(
    spec: VariantSpec, keywords: Keywords, residuals: Tensor, given: Sequence[Tensor | None]
) -> list[Tensor] | None:
    plan, _ = _plan(spec, keywords)
    if plan is None:
        return None
    memory = _whole(residuals, plan.memory_bytes) if plan.memory_bytes else None
    if plan.memory_bytes and memory is None:
        return None
    grads = plan.gradients(_given(keywords), [None] * plan.read_count, memory, given)
    return None if grads is None else [getattr(grads, n) for n in plan.names]


def _plan(spec: VariantSpec, keywords: Keywords) -> tuple[Any, Any]:
    """(the recorded forward of a call, its signature); (None, None) without one that reads none of its results."""
    from .cuda import replays

    signature = replays.signature(spec, (), keywords, follows=False)
    plan = None if signature is None else replays.forward_of(signature)
    return (None, None) if plan is None or plan.reads_results else (plan, signature)


def _given(keywords: Keywords) -> list[Tensor]:
    return [x for x in keywords.values() if isinstance(x, Tensor)]


def _on_device(spec: VariantSpec, keywords: Keywords) -> Any:
    plan, signature = _plan(spec, keywords)
    if plan is None:
        return None
    results, _, memory = plan.launched(_given(keywords), signature[2])
    first = keywords[spec.change.value]
    memory = first.new_empty(1, dtype=torch.uint8) if memory is None else memory
    return [x for x in results if x is not None], memory[:1]


def _whole(residuals: Tensor, size: int) -> Tensor | None:
    """The storage of a tensor; None if it has another size."""
    storage = residuals.untyped_storage()
    if storage.nbytes() != size:
        return None
    return torch.empty(0, dtype=torch.uint8, device=residuals.device).set_(storage, 0, (size,), (1,))
