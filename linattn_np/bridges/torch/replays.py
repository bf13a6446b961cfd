"""Recorded plans of plain calls on tensors on a device: launches on their pointers, with outputs by torch.empty.

No CuPy array is made. The plan is the one that the call on CuPy views recorded (call/device_replay.py).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.autograd import forward_ad

from ...call import device_replay, replay
from ...call.dispatch import new
from ...call.results import Result
from ...spec import VariantSpec
from .arguments import Arrays, Keywords
from .device import torch_dtype
from .views import PLAIN, Tensor

Signature = tuple[tuple[Any, ...], Any, list[int]]  # key, state, pointers of all tensors in order
ALIGNED = 512  # bytes, as PyTorch aligns its allocations
current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
grad_mode, transforms = torch.is_grad_enabled, torch._C._functorch.peek_interpreter_stack
modes, tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state


def signature(spec: VariantSpec, arrays: Arrays, keywords: Keywords) -> Signature | None:
    """The signature of a call on plain tensors of the current device that nothing differentiates or traces."""
    if keywords.get("cu_seqlens") is not None:
        return None
    if transforms() is not None or modes() or tracing() is not None or forward_ad._current_level >= 0:
        return None
    device, low, grad = current_device(), 0, grad_mode()
    parts: list[Any] = ["torch", spec.name, device, len(arrays), *keywords]
    pointers: list[int] = []
    try:
        for x in (*arrays, *keywords.values()) if arrays else keywords.values():
            if type(x) in PLAIN:
                if x.get_device() != device or (grad and x.requires_grad):
                    return None
                pointer, strides = x.data_ptr(), x.is_contiguous() or x.stride()
                if strides is not True and x.is_neg():
                    return None
                low |= pointer
                parts += x.shape, strides, x.dtype
                pointers.append(pointer)
            elif x is None:
                parts.append(None)
            elif type(x) in replay.PLAIN:
                parts += type(x), x
            elif replay.is_plain_tuple(x) and x is not keywords.get("state_rows"):
                parts += tuple(map(type, x)), x
            else:
                return None
    except RuntimeError:  # a tensor without memory, or without strides
        return None
    if low & 15:
        parts += [pointer & 15 for pointer in pointers]
    return tuple(parts), keywords.get("state"), pointers


def replayed(signature: Signature) -> Any:
    """The result by the recorded plan; None without one."""
    key, state, pointers = signature
    if (recorded := replay.plans.get(key)) is None:
        return None
    if (found := recorded[0](None, state, pointers)) is None:
        return None
    return new(Result, found) if recorded[1] else found[0]


def record(known: Signature | None, spec: VariantSpec, views: tuple[Arrays, Keywords], result: Any) -> None:
    """Record the plan of a call that was just computed on CuPy views, under the signature of its tensors."""
    if known is None or known[0] in replay.plans or not replay.ENABLED:
        return
    plan: Any = replay.computed_in_full
    own = replay.signature(spec, *views)
    found = None if own is None else replay.plans.get(own[0])
    if found is not None and isinstance(of := getattr(found.plan, "__self__", None), device_replay.Plan):
        plan = of.by(launches(of, known[0][2])).run
    replay.store(known[0], replay.Recorded(plan, isinstance(result, Result), False))


def launches(plan: device_replay.Plan, index: int) -> Callable[[list[int]], list[Tensor | None]]:
    """The launches of a plan in tensors: one of its own for each result, one for everything else that is allocated."""
    device, empty, kept = torch.device("cuda", index), torch.empty, plan.results()
    steps: list[tuple[Any, Any]] = []  # (shape, dtype) of a result, (offset, None) of other memory
    total = 0
    for n, (shape, dtype) in enumerate(plan.sequence.allocations):
        steps.append((shape, torch_dtype(dtype)) if n in kept else (total, None))
        total += 0 if n in kept else -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
    launch = plan.sequence.launch

    def run(pointers: list[int]) -> list[Tensor | None]:
        made: list[Tensor | None] = []
        memory = empty(total, dtype=torch.uint8, device=device) if total else None
        base = 0 if memory is None else memory.data_ptr()
        for place, dtype in steps:
            x = None if dtype is None else empty(place, dtype=dtype, device=device)
            made.append(x)
            pointers.append(base + place if x is None else x.data_ptr())
        launch(pointers, current_stream(index))
        return made

    return run
