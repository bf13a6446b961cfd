"""PyTorch tensors as NumPy and CuPy arrays, and arrays as tensors, without a copy; the tensors among the arguments.

An array of a result that is one of the arguments, as an overwritten state is, becomes the caller's tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad

from ...call.foreign import leaves, mapped

Tensor = torch.Tensor
PLAIN = (Tensor, torch.nn.Parameter)  # tensors with memory of their own, and no code of somebody else's around calls
Arrays = tuple[Any, ...]
Keywords = Mapping[str, Any]
Owners = dict[int, tuple[Any, Tensor]]  # by the id of a view: the view and its tensor
modes, tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
functorch = torch._C._functorch
transforms = functorch.peek_interpreter_stack
ON_HOST = ("cu_seqlens", "state_rows", "fresh")  # may lie on the host beside arrays on a device


def bfloat16() -> np.dtype:
    """NumPy's bfloat16."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def view(x: Tensor) -> np.ndarray:
    """A CPU tensor as a NumPy array."""
    if x.requires_grad:
        x = x.detach()
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16).numpy().view(bfloat16())
    return x.numpy()


def tensor(y: np.ndarray) -> Tensor:
    """A result as a tensor; a copy where PyTorch has none like it: read-only, or with negative strides."""
    if not y.flags.writeable or min(y.strides, default=0) < 0:
        y = y.copy()
    if y.dtype.itemsize == 2 and y.dtype == bfloat16():
        return torch.from_numpy(y.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(y)


def dense(x: Any) -> Any:
    """A tensor; a copy if elements share memory, as in the gradient of a sum: kernels do not take it, plans neither."""
    return x.contiguous() if type(x) in PLAIN and not x.is_contiguous() and 0 in x.stride() else x


# arguments


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


def by_name(arrays: Arrays, keywords: Keywords) -> Iterator[tuple[str, Any]]:
    """The arguments of a call, with their names in messages."""
    yield from ((f"array {n}", x) for n, x in enumerate(arrays))
    yield from keywords.items()


def given(name: str, arrays: Arrays, keywords: Keywords) -> Given | None:
    """The tensors of a call; None unless all its arrays are plain tensors on one CPU or CUDA device.

    Raises TypeError for a sparse or nested tensor, for one that `vmap` batches, and for a state that is to be
    overwritten where its memory does not hold its numbers.
    """
    first, wanted, transformed = None, False, False
    for key, x in by_name(arrays, keywords):
        for y in leaves(x):
            if type(y) not in PLAIN:
                if hasattr(y, "__dlpack__"):  # an array of another library, or a subclass
                    return None
            elif key not in ON_HOST:
                refuse_nested(name, key, y)
                if y.layout is not torch.strided:
                    raise TypeError(f"{name}: {key} is a tensor with the layout {y.layout}, expected a dense one")
                if first is not None and y.device != first.device:
                    return None
                if key == "state" and keywords.get("overwrite_state") and (y.is_conj() or y.is_neg()):
                    raise TypeError(
                        f"{name}: state is conjugated or negated when it is read, expected one that can be written to: "
                        "x.resolve_conj() and x.resolve_neg() are copies that can"
                    )
                transformed = is_transformed(name, key, y) or transformed
                first, wanted = y if first is None else first, wanted or y.requires_grad
    if transformed or first is None or first.device.type not in ("cpu", "cuda"):
        return None
    return Given(first, first.device, wanted)


def refuse_nested(name: str, key: str, x: Tensor) -> None:
    """Raise TypeError for a nested tensor."""
    if x.is_nested:
        raise TypeError(
            f"{name}: {key} is a nested tensor, expected a dense one: the values and offsets of a jagged one are "
            "a packed row and its cu_seqlens"
        )


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


def context(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which CuPy computes a call on the tensors of a device; of the host, none."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    from .cuda import views as on_device

    return on_device.context(device)


def as_views(arrays: Arrays, keywords: Keywords) -> tuple[Arrays, dict[str, Any], Owners]:
    """The arguments of a call, with views in the place of tensors, and the tensors of the views."""
    owners = Owners()

    def enter(x: Any) -> Any:
        if type(x) not in PLAIN:
            return x
        if x.is_conj() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
        if x.is_cuda:
            from .cuda import views as on_device

            y = on_device.view(x)
        else:
            y = view(x)
        owners[id(y)] = y, x
        return y

    return tuple(mapped(enter, x) for x in arrays), {n: mapped(enter, x) for n, x in keywords.items()}, owners


def as_tensors(result: Any, owners: Owners) -> Any:
    """A result, with tensors in the place of arrays."""

    def leave(y: Any) -> Any:
        if y is None or id(y) in owners:
            return None if y is None else owners[id(y)][1]
        if isinstance(y, np.ndarray):
            return tensor(y)
        from .cuda import views as on_device

        return on_device.tensor(y)

    return mapped(leave, result)


def on_views(
    rule: Callable[..., Any], device: torch.device, arrays: Arrays, keywords: Keywords,
    record: Callable[[tuple[Arrays, Keywords]], None] | None = None,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
    """(result, pullback) of a rule on views, in tensors; record: gets the call on views, in its context."""
    with context(device):
        own, named, owners = as_views(arrays, keywords)
        result, pullback = rule(own, named)
        if record is not None:
            record((own, named))
        result = as_tensors(result, owners)

    def of_tensors(*cotangents: Any, **more: Any) -> Any:
        with context(device):
            if device.type == "cuda":
                cotangents = tuple(mapped(dense, d) for d in cotangents)
            d, by_name, owners = as_views(cotangents, more)
            return as_tensors(pullback(*d, **by_name), owners)

    return result, of_tensors
