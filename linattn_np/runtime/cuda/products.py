"""Products of CuPy matrices by cuBLAS, which may be captured in a CUDA graph: CuPy's own refuse to be.

y (n, R, M) = x (n, R, K) W (n, K, M)     rows in memory are columns of cuBLAS: it computes y^T = W^T x^T

Sums are float32, or float64 of float64; float32 numbers are not rounded to tf32. A handle belongs to a thread and a
device; the workspace is memory of the current stream, of which every call has its own, so that bits do not depend on
other streams.
"""

from __future__ import annotations

import ctypes
import threading
from math import prod
from typing import Any, NamedTuple

from numpy import broadcast_shapes

from ..arrays import Array, dtype_name
from . import launch

TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}  # cudaDataType_t
FLOAT, DOUBLE = 68, 70  # cublasComputeType_t
EXACT_SUMS = 16  # cublasMath_t: partial sums keep the type of the computation
WORKSPACE, LEAST, SPLITS = 32 << 20, 4 << 20, 32  # bytes, of which the choice of an algorithm depends; partial sums
P, I, L = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
SIGNATURES = {
    "cublasCreate_v2": (ctypes.POINTER(P),),
    "cublasSetMathMode": (P, I),
    "cublasSetStream_v2": (P, P),
    "cublasSetWorkspace_v2": (P, P, ctypes.c_size_t),
    "cublasGemmStridedBatchedEx": (P, I, I, I, I, I, P, P, I, I, L, P, I, I, L, P, P, I, I, L, I, I, I),
}
_FLOATS, _DOUBLES = (ctypes.c_float(1), ctypes.c_float(0)), (ctypes.c_double(1), ctypes.c_double(0))


class _Handles(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[int, Any] = {}


_handles, _libraries = _Handles(), dict[int, Any]()


def library() -> Any:
    """cuBLAS, as CuPy has loaded it; None if it is not found."""
    cuda = launch.cupy().cuda
    major = getattr(cuda.runtime, "runtimeGetVersion", int)() // 1000  # 0: there is none
    if major not in _libraries:
        try:
            cuda.device.get_cublas_handle()  # which loads it
            found = ctypes.CDLL(f"libcublas.so.{major}")
            for name, kinds in SIGNATURES.items():
                getattr(found, name).argtypes = kinds
        except (OSError, AttributeError):
            found = None
        _libraries[major] = found
    return _libraries[major]


class Matrices(NamedTuple):
    """Matrices (n, R, C) in memory as cuBLAS reads them: by columns of C numbers, or of R where `turned`."""

    array: Array
    turned: int
    leading: int  # numbers from a column to the next
    apart: int  # from a matrix to the next


def takes(x: Array, W: Array) -> bool:
    """Whether cuBLAS multiplies these arrays here: of one dtype, of two axes or three, not empty."""
    alike = x.dtype == W.dtype and dtype_name(x) in TYPES and {x.ndim, W.ndim} <= {2, 3}
    return alike and x.size > 0 and W.size > 0 and library() is not None


def product(x: Array, W: Array, dtype: Any = None, to: Array | None = None) -> Array:
    """x W: (R, K) or (n, R, K), times (K, M) or (n, K, M); in their dtype, or float32 of 16 bits.

    to: a dense array of that shape and dtype, to which the product is added.
    """
    dtype = x.dtype if dtype is None else dtype
    if not takes(x, W):
        y = (x @ W).astype(dtype, copy=False)
        return y if to is None else _added(to, y)
    n, batched = max(x.shape[0] if x.ndim == 3 else 1, W.shape[0] if W.ndim == 3 else 1), 3 in (x.ndim, W.ndim)
    (R, K), M = x.shape[-2:], W.shape[-1]
    y = launch.array_type()((n, R, M) if batched else (R, M), dtype) if to is None else to
    first, second = _matrices(W), _matrices(x)
    kind, result, is_wide = TYPES[dtype_name(x)], TYPES[dtype_name(y)], dtype_name(x) == "float64"
    one, zero = _DOUBLES if is_wide else _FLOATS
    handle, sums = _handle(), DOUBLE if is_wide else FLOAT
    size = min(WORKSPACE, max(SPLITS * R * M * (8 if is_wide else 4), LEAST)) if batched else WORKSPACE
    stream, memory = launch.cupy().cuda.get_current_stream().ptr, launch.allocator()(size)
    _call("cublasSetStream_v2", handle, stream)
    _call("cublasSetWorkspace_v2", handle, memory.ptr, size)  # after the stream, which gives it a default one
    _call("cublasGemmStridedBatchedEx", handle, first.turned, second.turned, M, R, K, ctypes.addressof(one),
          first.array.data.ptr, kind, first.leading, first.apart, second.array.data.ptr, kind, second.leading,
          second.apart, ctypes.addressof(zero if to is None else one), y.data.ptr, result, M, R * M, n, sums,
          -1)  # fmt: skip
    return y


def batched(x: Array, W: Array, to: Array | None = None) -> Array:
    """x W of matrices with axes in front, which are broadcast; of arrays of one dtype, in which the product is.

    to: a dense array of its shape and dtype, to which it is added.
    """
    if x.dtype != W.dtype or not x.size or not W.size:
        return x @ W if to is None else _added(to, x @ W)
    lead = broadcast_shapes(x.shape[:-2], W.shape[:-2])
    n, R, M = prod(lead), x.shape[-2], W.shape[-1]
    y = product(_in_step(x, lead), _in_step(W, lead), to=None if to is None else to.reshape((n, R, M)))
    return y.reshape((*lead, R, M)) if to is None else to


def _added(to: Array, y: Array) -> Array:
    to += y
    return to


def _in_step(x: Array, lead: tuple[int, ...]) -> Array:
    """Matrices with these axes in front as (n, R, C), one for all as (1, R, C)."""
    n = prod(x.shape[:-2])
    if n != 1 and x.shape[:-2] != lead:
        x, n = launch.cupy().broadcast_to(x, (*lead, *x.shape[-2:])), prod(lead)
    return x if x.ndim == 3 and x.shape[0] == n else x.reshape((n, *x.shape[-2:]))


def _matrices(x: Array) -> Matrices:
    """Arrays (R, C) or (n, R, C); copied where neither rows nor columns are dense."""
    item, apart = x.itemsize, x.strides[0] // x.itemsize if x.ndim == 3 and x.shape[0] > 1 else 0
    (R, C), (row, column) = x.shape[-2:], x.strides[-2:]
    if (C == 1 or column == item) and (R == 1 or row >= C * item) and not row % item:
        return Matrices(x, 0, max(row // item if R > 1 else C, 1), apart)
    if (R == 1 or row == item) and (C == 1 or column >= R * item) and not column % item:
        return Matrices(x, 1, max(column // item if C > 1 else R, 1), apart)
    return _matrices(launch.cupy().ascontiguousarray(x))


def _handle() -> Any:
    """The handle of this thread on the current device."""
    device = launch.current_device()
    if device not in _handles.by_device:
        made = P()
        _call("cublasCreate_v2", ctypes.byref(made))
        _call("cublasSetMathMode", made, EXACT_SUMS)
        _handles.by_device[device] = made
    return _handles.by_device[device]


def _call(name: str, *given: Any) -> None:
    """Call a function of cuBLAS.   Raises RuntimeError for a status that is an error."""
    if status := getattr(library(), name)(*given):
        raise RuntimeError(f"{name}: cuBLAS returned the status {status}")
