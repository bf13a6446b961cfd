"""Tensors on a CUDA device as CuPy arrays, and arrays as tensors.

During a call CuPy works on the current stream of PyTorch and takes its memory from PyTorch. So what a call
allocates belongs to PyTorch's allocator and is freed in the order of that stream, results are tensors like any other,
and a call may be captured by `torch.cuda.graph`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import torch

Tensor = torch.Tensor
streams: dict[tuple[int, int], Any] = {}  # CuPy's streams by device and handle


class TensorMemory(cupy.cuda.UnownedMemory):
    """The memory of a tensor."""

    def __init__(self, tensor: Tensor, size: int):
        super().__init__(tensor.data_ptr(), size, tensor, tensor.get_device())
        self.tensor = tensor


class Handle:
    """A CUDA stream by its handle."""

    def __init__(self, handle: int):
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@functools.cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """A dtype of PyTorch as NumPy's."""
    return np.dtype(ml_dtypes.bfloat16 if dtype is torch.bfloat16 else str(dtype).removeprefix("torch."))


@functools.cache
def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """A dtype of NumPy as PyTorch's."""
    return getattr(torch, dtype.name)


def view(x: Tensor) -> Any:
    """A tensor on a device as a CuPy array."""
    if x.requires_grad:
        x = x.detach()
    dtype, shape = numpy_dtype(x.dtype), tuple(x.shape)
    memory = cupy.cuda.MemoryPointer(TensorMemory(x, x.untyped_storage().nbytes()), 0)
    if x.is_contiguous():
        return cupy.ndarray(shape, dtype, memory)
    return cupy.ndarray(shape, dtype, memory, tuple(n * dtype.itemsize for n in x.stride()))


def tensor(y: Any) -> Tensor:
    """A result as a tensor."""
    owner = getattr(y.data.mem, "tensor", None)
    if owner is None:  # not allocated by a call
        return torch.from_dlpack(y)
    if not y.size:
        return torch.empty(y.shape, dtype=torch_dtype(y.dtype), device=owner.device)
    storage, size = owner.untyped_storage(), y.dtype.itemsize
    first = (y.data.ptr - storage.data_ptr()) // size
    x = torch.empty(0, dtype=torch_dtype(y.dtype), device=owner.device)
    return x.set_(storage, first, y.shape, tuple(n // size for n in y.strides))


def stream(index: int) -> Any:
    """PyTorch's current stream of a device as CuPy's."""
    handle = torch.cuda.current_stream(index).cuda_stream
    found = streams.get((index, handle))
    if found is None:
        found = cupy.cuda.Stream.null if not handle else cupy.cuda.Stream.from_external(Handle(handle))
        streams[index, handle] = found
    return found


def _allocate(device: torch.device, size: int) -> Any:
    """CuPy's allocator during a call."""
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    return cupy.cuda.MemoryPointer(TensorMemory(memory, size), 0)


@contextlib.contextmanager
def context(device: torch.device) -> Iterator[None]:
    """A context in which CuPy computes a call on the tensors of a device."""
    allocate = functools.partial(_allocate, device)
    with cupy.cuda.Device(device.index), stream(device.index), cupy.cuda.using_allocator(allocate):
        yield
