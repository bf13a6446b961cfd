"""The tensors among the arguments of a call: whether the bridge can view them, and the call on their views."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ...call.foreign import leaves, mapped
from . import views
from .views import PLAIN, Tensor, dense

Arrays = tuple[Any, ...]
Keywords = Mapping[str, Any]
modes, tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
functorch = torch._C._functorch
transforms = functorch.peek_interpreter_stack
ON_HOST = ("cu_seqlens", "state_rows", "fresh")  # may lie on the host beside arrays on a device


def is_followed() -> bool:
    """Whether a mode, a transform or a tracer of PyTorch may follow operations on plain tensors."""
    return bool(transforms() is not None or modes() or tracing() is not None or forward_ad._current_level >= 0)


class Given(NamedTuple):
    """The tensors of a call, all on one device, and whether PyTorch is to differentiate it."""

    first: Tensor
    device: torch.device
    requires_grad: bool

    @property
    def differentiable(self) -> bool:
        """Whether autograd follows the call."""
        return self.requires_grad and torch.is_grad_enabled()


def given(name: str, arrays: Arrays, keywords: Keywords) -> Given | None:
    """The tensors of a call; None unless all its arrays are plain tensors on one CPU or CUDA device.

    Raises TypeError for a sparse tensor and for one that `vmap` batches.
    """
    first, wanted, transformed = None, False, False
    for key, x in (*((f"array {n}", x) for n, x in enumerate(arrays)), *keywords.items()):
        for y in leaves(x):
            if type(y) not in PLAIN:
                if hasattr(y, "__dlpack__"):  # an array of another library, or a subclass
                    return None
            elif key not in ON_HOST:
                if y.layout is not torch.strided:
                    raise TypeError(f"{name}: {key} is a tensor with the layout {y.layout}, expected a dense one")
                if first is not None and y.device != first.device:
                    return None
                transformed = is_transformed(name, key, y) or transformed
                first, wanted = y if first is None else first, wanted or y.requires_grad
    if transformed or first is None or first.device.type not in ("cpu", "cuda"):
        return None
    return Given(first, first.device, wanted)


def is_transformed(name: str, key: str, x: Tensor) -> bool:
    """Whether torch.func or forward-mode differentiation follows operations on x.   Raises TypeError under vmap."""
    if transforms() is not None and functorch.is_functorch_wrapped_tensor(x):
        inner = x
        while functorch.is_functorch_wrapped_tensor(inner):  # grad within vmap, too
            if functorch.is_batchedtensor(inner):
                raise TypeError(
                    f"{name}: {key} is batched by vmap, expected a batch axis of its own: arrays are "
                    "(..., T, H, K), with any number of batch axes"
                )
            inner = functorch.get_unwrapped(inner)
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


class TensorViews:
    """The arguments of a call as arrays of NumPy, or of CuPy on a device, and the way back.

    An array of the result that is one of the arguments, as an overwritten state is, becomes the caller's tensor.
    """

    def __init__(self, device: torch.device):
        self._owners: dict[int, tuple[Any, Tensor]] = {}  # by the id of a view: the view and its tensor
        self._tensor = views.tensor
        self.context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if device.type == "cuda":
            from .cuda import views as on_device

            self._tensor, self.context = on_device.tensor, on_device.Context(device)

    def enter(self, x: Any) -> Any:
        """An argument, with views in the place of tensors."""
        return mapped(self._enter, x)

    def call(self, arrays: Arrays, keywords: Keywords) -> tuple[Arrays, dict[str, Any]]:
        """The arguments of a call."""
        return tuple(map(self.enter, arrays)), {n: self.enter(x) for n, x in keywords.items()}

    def leave(self, x: Any) -> Any:
        """A result, with tensors in the place of arrays."""
        return mapped(self._leave, x)

    def _enter(self, x: Any) -> Any:
        if type(x) not in PLAIN:
            return x
        if x.is_cuda:
            from .cuda import views as on_device

            y = on_device.view(x)
        else:
            y = views.view(x)
        self._owners[id(y)] = y, x
        return y

    def _leave(self, y: Any) -> Any:
        if y is None:
            return None
        own = self._owners.get(id(y))
        return self._tensor(y) if own is None else own[1]


def on_views(
    rule: Callable[..., Any], device: torch.device, arrays: Arrays, keywords: Keywords,
    record: Callable[[tuple[Arrays, Keywords]], None] | None = None,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
    """(result, pullback) of a rule on views, in tensors; record: gets the call on views, in its context."""
    entered = TensorViews(device)
    with entered.context():
        own = entered.call(arrays, keywords)
        result, pullback = rule(*own)
        if record is not None:
            record(own)
        result = entered.leave(result)

    def of_tensors(*cotangents: Any, **named: Any) -> Any:
        given = TensorViews(device)
        with given.context():
            if device.type == "cuda":
                cotangents = tuple(mapped(dense, d) for d in cotangents)
            d, more = given.call(cotangents, named)
            return given.leave(pullback(*d, **more))

    return result, of_tensors
