"""What a traced call keeps between its forward and its backward: one tensor of a graph.

A graph needs the shapes of its tensors before a call runs, but how much a forward keeps is known only then. The tensor
is therefore one byte long, at the beginning of a storage that holds everything. A backward finds it there. If somebody
copied the byte, into a storage of another size, it recomputes the forward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from ...call.binding import flatten
from ...spec import VariantSpec
from ..programs import Program, Signature
from ..shapes import Abstract
from .eager import loaded
from .views import Tensor, tensor, view

ALIGNED = 64  # bytes of the widest vector
Keywords = dict[str, Any]


def computed(spec: VariantSpec, keywords: Keywords) -> tuple[list[Tensor | None], Tensor] | None:
    """(results, residuals); None if the backward has to recompute the forward."""
    first = keywords[spec.change.value]
    return _on_device(spec, keywords) if first.is_cuda else _on_host(spec, keywords)


def gradients(
    spec: VariantSpec, keywords: Keywords, residuals: Tensor, cotangents: Sequence[Tensor | None]
) -> list[Tensor] | None:
    """The gradients of the arrays given and of the state, in this order; None if there are no residuals."""
    first = keywords[spec.change.value]
    return (_device_gradients if first.is_cuda else _host_gradients)(spec, keywords, residuals, cotangents)


# CPU


@functools.lru_cache(maxsize=256)
def _program(signature: Signature, given: tuple[Abstract, ...]) -> Program:
    return Program(signature, given)


def _of(spec: VariantSpec, keywords: Keywords) -> tuple[Program, list[np.ndarray]]:
    """(the program of a call, its arrays, in C order and read-only, as the program expects)."""
    given = {n: x for n, x in keywords.items() if isinstance(x, Tensor) and n in spec.arrays}
    state = keywords.get("state")
    given |= {} if state is None else flatten("state", state)
    options = tuple((n, x) for n, x in keywords.items() if n not in given and n != "state")
    arrays = [np.ascontiguousarray(view(x)) for x in given.values()]
    for x in arrays:
        x.flags.writeable = False
    signature = Signature(spec, tuple(given), type(state) if isinstance(state, tuple) else None, options)
    return _program(signature, tuple(Abstract(x.shape, x.dtype) for x in arrays)), arrays


def _on_host(spec: VariantSpec, keywords: Keywords) -> Any:
    program, arrays = _of(spec, keywords)
    if program.saved is None:
        return None
    results = [np.empty(x.shape, x.dtype) for x in program.results]
    memory = torch.empty(_places(program)[1], dtype=torch.uint8)
    rest, count = _rest(program, memory), len(program.saved_results)
    program.saving([*results, *rest[count:]], arrays)
    for x, n in zip(rest, program.saved_results, strict=False):
        x[...] = results[n]  # a graph may reuse its memory
    return [tensor(x) for x in results], memory[:1]


def _host_gradients(
    spec: VariantSpec, keywords: Keywords, residuals: Tensor, cotangents: Sequence[Tensor | None]
) -> Any:
    program, arrays = _of(spec, keywords)
    memory = _whole(residuals, _places(program)[1])
    if program.saved is None or memory is None:
        return None
    grads = [np.empty(x.shape, x.dtype) for x in program.given]
    d = [None if x is None else np.ascontiguousarray(view(x)) for x in cotangents]
    program.backward(grads, [*arrays, *_rest(program, memory), *d])
    return [tensor(x) for x in grads]


def _places(program: Program) -> tuple[list[int], int]:
    """(where each residual begins, the size of all)."""
    places, size = [], 0
    for x in program.residuals:
        places.append(size)
        size += -(-prod(x.shape) * x.dtype.itemsize // ALIGNED) * ALIGNED
    return places, size


def _rest(program: Program, memory: Tensor) -> list[np.ndarray]:
    """The residuals of a program in their memory."""
    flat, places = memory.numpy(), _places(program)[0]
    return [np.ndarray(x.shape, x.dtype, flat, at) for x, at in zip(program.residuals, places, strict=True)]


def _whole(residuals: Tensor, size: int) -> Tensor | None:
    """The storage of a tensor; None if it has another size."""
    storage = residuals.untyped_storage()
    if storage.nbytes() != size:
        return None
    return torch.empty(0, dtype=torch.uint8, device=residuals.device).set_(storage, 0, (size,), (1,))


# CUDA


def _plan(spec: VariantSpec, keywords: Keywords) -> tuple[Any, Any]:
    """(the recorded forward of a call, its signature); (None, None) without one that reads none of its results."""
    signature = loaded().signature(spec, (), keywords, follows=False)
    plan = None if signature is None else loaded().forward_of(signature)
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


def _device_gradients(
    spec: VariantSpec, keywords: Keywords, residuals: Tensor, cotangents: Sequence[Tensor | None]
) -> Any:
    plan, _ = _plan(spec, keywords)
    if plan is None:
        return None
    memory = _whole(residuals, plan.memory_bytes) if plan.memory_bytes else None
    if plan.memory_bytes and memory is None:
        return None
    grads = plan.gradients(_given(keywords), [None] * plan.read_count, memory, cotangents)
    return None if grads is None else [getattr(grads, n) for n in plan.names]
