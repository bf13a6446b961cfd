"""Recorded plans of calls on tensors on a device: launches on their pointers, with outputs by torch.empty.

No CuPy array is made. The plans are those that the calls on CuPy views recorded (call/replay).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from math import prod
from typing import Any

import torch

from ....call import vjp
from ....call.dispatch import new
from ....call.options import PLAIN as PLAIN_OPTIONS
from ....call.options import is_plain_tuple, types_in
from ....call.replay import plans
from ....call.replay.vjp import Forward
from ....call.results import Result, StatesResult
from ....runtime.config import config
from ....runtime.cuda.record import LaunchSequence, get, places
from ....runtime.memory import is_on_device
from ....spec import VariantSpec
from ..autograd import Differentiable, Tensors
from ..views import PLAIN, Arrays, Keywords, Tensor, dense, is_followed, on_views
from .views import numpy_dtype, torch_dtype

# key, state, pointers of all tensors in order, whether autograd follows one of them
Signature = tuple[tuple[Any, ...], Any, list[int], bool]
ALIGNED = 512  # bytes, as PyTorch aligns its allocations
empty, uint8 = torch.empty, torch.uint8
current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
grad_mode = torch.is_grad_enabled


def signature(spec: VariantSpec, arrays: Arrays, keywords: Keywords, follows: bool = True) -> Signature | None:
    """The signature of a call on plain tensors of the current device that nothing traces or transforms.

    follows: whether autograd follows tensors that require grad.
    """
    positions = keywords.get("return_states_at")
    if keywords.get("cu_seqlens") is not None or type(positions) in PLAIN or is_followed():
        return None
    device, low, grad, followed = current_device(), 0, follows and grad_mode(), False
    parts: list[Any] = ["torch", spec.name, device, config.values, len(arrays), *keywords]
    pointers: list[int] = []
    try:
        for x in (*arrays, *keywords.values()) if arrays else keywords.values():
            if type(x) in PLAIN:
                if x.get_device() != device:
                    return None
                followed = followed or (grad and x.requires_grad)
                pointer, strides = x.data_ptr(), x.is_contiguous() or x.stride()
                if x.is_conj() or (strides is not True and x.is_neg()):
                    return None
                low |= pointer
                parts += x.shape, strides, x.dtype
                pointers.append(pointer)
            elif x is None:
                parts.append(None)
            elif type(x) in PLAIN_OPTIONS:
                parts += type(x), x
            elif is_plain_tuple(x) and x is not keywords.get("state_rows"):
                parts += types_in(x), x
            elif x is positions and isinstance(x, list) and is_plain_tuple(tuple(x)):
                parts += list, tuple(map(type, x)), tuple(x)
            else:
                return None
    except RuntimeError:  # a tensor without memory, or without strides
        return None
    if low & 15:
        parts += [pointer & 15 for pointer in pointers]
    return tuple(parts), keywords.get("state"), pointers, followed


def replayed(signature: Signature, arrays: Arrays, keywords: Keywords) -> Any:
    """The result by the recorded plan, followed by autograd if the call is; None without one."""
    key, state, pointers, followed = signature
    if followed:
        plan = forward_of(signature)
        return None if plan is None else plan.differentiated(arrays, keywords, pointers)
    plan = plans.by_key.get(key)
    return None if plan is None else plan(None, state, pointers)


def record(known: Signature | None, spec: VariantSpec, views: tuple[Arrays, Keywords]) -> None:
    """Record the plan of a call that was just computed on CuPy views, under the signature of its tensors."""
    if known is None or known[0] in plans.by_key or not plans.ENABLED:
        return
    plan: Any = plans.computed_in_full
    own = plans.signature_of(spec, *views)
    found = None if own is None else plans.by_key.get(own[0])
    if isinstance(found, LaunchSequence):
        at = {n - found.count for x in found.results for n in places(x) if n >= found.count}
        plan = Launches(found, known[0][2], at).call
    plans.store(known[0], plan)


class Launches:
    """Launches in tensors: (pointers) -> (tensors in the place of the allocated arrays, memory that stays).

    own: the allocated arrays that get a tensor each, the results. stays: those that a pullback reads, in one piece of
    memory; all others are in a second one, which is free again when the launches are in their stream.
    """

    def __init__(self, sequence: LaunchSequence, index: int, own: Iterable[int], stays: Iterable[int] = ()):
        """index: of the device."""
        self._launch, self._index, self._device = sequence.launch, index, torch.device("cuda", index)
        self._sequence, self._given = sequence, [None] * sequence.count
        self._steps: list[tuple[int, Any, Any]] = []  # (0, shape, dtype), or (1 other memory or 2 what stays, offset)
        self._sizes = [0, 0, 0]
        own, stays = set(own), set(stays)
        for n, (shape, dtype) in enumerate(sequence.allocations):
            if n in own:
                self._steps.append((0, shape, torch_dtype(dtype)))
                continue
            which = 2 if n in stays else 1
            self._steps.append((which, self._sizes[which], None))
            self._sizes[which] += -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED

    def __call__(self, pointers: list[int]) -> tuple[list[Any], Tensor | None]:
        allocated: list[Any] = []
        device, index = self._device, self._index
        rest, memory = [empty(n, dtype=uint8, device=device) if n else None for n in self._sizes[1:]]
        bases = 0, 0 if rest is None else rest.data_ptr(), 0 if memory is None else memory.data_ptr()
        for which, place, dtype in self._steps:
            if which:
                allocated.append(None)
                pointers.append(bases[which] + place)
            else:
                x = empty(place, dtype=dtype, device=device)
                allocated.append(x)
                pointers.append(x.data_ptr())
        self._launch(pointers, current_stream(index))
        return allocated, memory

    @property
    def memory_bytes(self) -> int:
        """The size of the memory that stays."""
        return self._sizes[2]

    def place(self, n: int) -> int:
        """The offset of an allocated array in its piece of memory."""
        return self._steps[n][1]

    def call(self, given: None, state: Any, pointers: list[int]) -> Any:
        """The public result; None if the call must be computed in full."""
        if self._sequence.overwritten and self._sequence.overlaps(pointers):
            return None
        found = self._sequence.get(self._given + self(pointers)[0])
        return found._replace(state=state) if self._sequence.overwritten and isinstance(found, Result) else found


# vjp


def forward(signature: Signature, arrays: Arrays, keywords: Keywords) -> Any:
    """(result, the function of a tuple of cotangents that returns the gradients) by recorded plans; None without."""
    recorded = plans.by_key.get(_vjp_key(signature))
    return None if recorded is None else recorded(arrays, keywords, signature[2])


def record_forward(known: Signature | None, spec: VariantSpec, views: tuple[Arrays, Keywords]) -> None:
    """Record the forward of a vjp, and its pullbacks, if the pullbacks of the call on CuPy views are recorded."""
    own = None if known is None or not plans.ENABLED else plans.signature_of(spec, *views)
    plan = None if own is None else plans.by_key.get(plans.vjp_key(own))
    if known is not None and type(plan) is Forward and plan.replayable:
        plans.store(_vjp_key(known), ReplayedForward(plan, known[0][2], spec, views))


def forward_of(signature: Signature) -> Any:
    """The recorded forward of a vjp whose results and gradients are dense tensors; None without."""
    plan = plans.by_key.get(_vjp_key(signature))
    return plan if plan is not None and plan.differentiable else None


def is_known(signature: Signature, bound: Signature | None) -> bool:
    """Whether the forward of a vjp is recorded; bound: of the same call with every array by name."""
    key = _vjp_key(signature)
    if bound is not None and key not in plans.by_key and (plan := plans.by_key.get(_vjp_key(bound))) is not None:
        plans.store(key, plan)
    return key in plans.by_key


def _vjp_key(signature: Signature) -> Any:
    return "vjp", signature[0]


class ReplayedForward:
    """A recorded forward on tensors, and its pullbacks by the layout of their cotangents."""

    def __init__(self, plan: Forward, index: int, spec: VariantSpec, views: tuple[Arrays, Keywords]):
        """index: of the device. views: the call that was recorded."""
        arrays, keywords = views
        named = [*zip(spec.arrays, arrays, strict=False), *keywords.items()]
        given = {n: x for n, x in named if is_on_device(x)}
        self.spec, self.names = spec, [*given]
        self.layouts = [(tuple(x.shape), tuple(n // x.itemsize for n in x.strides)) for x in given.values()]
        self._plan, self._index, self._count = plan, index, (count := len(self.names))
        self._results, self._residuals = plan.sequence.results, plan.sequence.places_held
        own = {n - count for x in self._results for n in places(x) if n >= count}
        self._launches = Launches(plan.sequence, index, own, {n - count for n in self._residuals} - own)
        self._pullbacks: dict[Any, Any] = {}
        self.reads_results = not own.isdisjoint(n - count for n in self._residuals)
        self.memory_bytes, self.read_count = self._launches.memory_bytes, len(self._residuals)
        dense = all(x is None or (type(x) is int and x >= count) for x in self._results)
        self._has_gradients = dense and {*self.names} <= {*spec.arrays, "state"}

    @property
    def differentiable(self) -> bool:
        """Whether `differentiated` can compute the call."""
        return self._has_gradients and self._plan.replayable

    def __call__(self, arrays: Arrays, keywords: Keywords, pointers: list[int]) -> Any:
        """(result, the function of a tuple of cotangents that returns the gradients); None without plans."""
        if not self._plan.replayable:
            return None
        given = [x for x in (*arrays, *keywords.values()) if type(x) in PLAIN]
        results, read, memory = self.launched(given, pointers)
        known = pointers[: self._count] + [pointers[n] for n in self._residuals]
        return self.public(results, keywords), functools.partial(self._pullback, given + read, known, memory)

    def launched(self, given: list[Any], pointers: list[int]) -> tuple[list[Any], list[Any], Tensor | None]:
        """(the results, the residuals: None for those in the memory that stays, that memory)."""
        allocated, memory = self._launches(pointers)
        pool = given + allocated
        results = [pool[x] if type(x) is int else get(x, pool) for x in self._results]
        return results, [pool[n] for n in self._residuals], memory

    def public(self, results: Iterable[Any], keywords: Keywords) -> Any:
        """What the public function returns."""
        out, end, *states = results
        if states:
            return new(StatesResult, (out, end, *states))
        return new(Result, (out, end)) if out is None or keywords.get("return_state") else out

    def differentiated(self, arrays: Arrays, keywords: Keywords, pointers: list[int]) -> Any:
        """The result, which autograd follows."""
        given, options = [], {}
        for n, x in (*zip(self.spec.arrays, arrays, strict=False), *keywords.items()):
            if type(x) in PLAIN:
                given.append(x)
            else:
                options[n] = x
        forward = functools.partial(self._forward, pointers)
        backward = functools.partial(self._backward, pointers[: self._count], options)
        each = iter(Differentiable.apply(self.spec.name, forward, backward, *given))
        return self.public([None if x is None else next(each) for x in self._results], keywords)

    def _forward(self, pointers: list[int], given: Tensors) -> tuple[Tensors, Tensors]:
        """(the tensors of the result, what a backward reads: tensors too, so that hooks for saved ones reach it)."""
        results, read, memory = self.launched(list(given), pointers)
        return tuple(x for x in results if x is not None), (*read, memory)

    def _backward(
        self, pointers: list[int], options: Keywords, given: Tensors, saved: Tensors, cotangents: Tensors
    ) -> list[Any]:
        """The gradients. pointers: of the tensors given to forward; options: the keywords that are no tensors."""
        *read, memory = saved
        if any(x.data_ptr() != pointer for x, pointer in zip(given, pointers, strict=True)):
            given = tuple(_like(x, *layout) for x, layout in zip(given, self.layouts, strict=True))
        if (grads := self.gradients(list(given), read, memory, cotangents)) is None:  # the forward is recomputed
            rule = functools.partial(vjp.run_vjp, self.spec)
            keywords = dict(zip(self.names, given, strict=True)) | dict(options)
            grads = on_views(rule, given[0].device, (), keywords)[1](*self.cotangents(cotangents))
        return [getattr(grads, n) for n in self.names]

    def gradients(
        self, given: list[Any], read: list[Any], memory: Tensor | None, cotangents: Iterable[Tensor | None]
    ) -> Any:
        """The gradients from the inputs, what `launched` returned, and the cotangents of the results that there are.

        None without a recorded pullback.
        """
        base = 0 if memory is None else memory.data_ptr()
        known = [x.data_ptr() for x in given]
        known += [base + self._launches.place(n - self._count) if x is None else x.data_ptr()
                  for n, x in zip(self._residuals, read, strict=True)]  # fmt: skip
        return self._pullback(given + read, known, memory, self.cotangents(cotangents))

    def cotangents(self, given: Iterable[Tensor | None]) -> tuple[Any, ...]:
        """The arguments of a pullback from the cotangents of the results that there are."""
        each = iter(given)
        return tuple(None if x is None else next(each) for x in self._results)

    def _pullback(self, held: list[Any], known: list[int], memory: Any, cotangents: tuple[Any, ...]) -> Any:
        """The gradients; None without a recorded pullback. memory: memory that it reads."""
        cotangents = tuple(map(dense, cotangents))
        given = [x for x in cotangents if x is not None]
        if (layout := self._layout(cotangents)) is None:
            return None
        if (found := self._pullbacks.get(layout)) is None and (found := self._of(layout, len(held), given)) is None:
            return None
        launches, plan = found
        return plan.get(held + given + launches([*known, *[x.data_ptr() for x in given]])[0])

    def _layout(self, cotangents: tuple[Any, ...]) -> Any:
        """The key of a pullback on CuPy arrays (replay/vjp.py); None unless all are plain tensors of the device."""
        key: list[Any] = [current_device()]
        for x in cotangents:
            if x is None:
                continue
            if type(x) not in PLAIN or x.get_device() != self._index:
                return None
            size = x.element_size()
            strides = x.is_contiguous() or tuple(n * size for n in x.stride())
            if x.is_conj() or (strides is not True and x.is_neg()):
                return None
            key += tuple(x.shape), strides, numpy_dtype(x.dtype), x.data_ptr() & 15, self._index
        return tuple([x is None for x in cotangents]), tuple(key)

    def _of(self, layout: Any, held: int, given: list[Any]) -> Any:
        """(launches, type of the gradients, where each is) of a pullback; None if a gradient is no new array."""
        if (plan := self._plan.pullbacks.get(layout)) is None:
            return None
        first = held + len(given)
        at = {n for x in plan.results for n in places(x)}
        if any(n < first for n in at):
            return None
        self._pullbacks[layout] = Launches(plan, self._index, {n - first for n in at}), plan
        return self._pullbacks[layout]


def _like(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """A saved tensor with the strides of the recorded call: a hook may have stored it otherwise."""
    if x.stride() == strides and not x.data_ptr() & 15:
        return x
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device).copy_(x)
