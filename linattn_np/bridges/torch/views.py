"""PyTorch tensors as NumPy and CuPy arrays, and arrays as tensors, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor
PLAIN = (Tensor, torch.nn.Parameter)  # tensors with memory of their own, and no code of somebody else's around calls


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
