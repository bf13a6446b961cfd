"""Array libraries: which one a call uses, on which device, in which dtype it computes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import array_api_compat as compat
import numpy as np

from .held import cached

Array = Any
Namespace = Any

STORAGE = ("float16", "bfloat16", "float32", "float64")
NARROW = STORAGE[:2]  # storage formats: cast to float32 before use
COMPLEX = ("complex64", "complex128")
device = compat.device  # the device an array lies on
CPU, CUDA = 1, 2  # DLPack device types


class Library(NamedTuple):
    """The array library of one call: its namespace, its device, and the conversion back to the caller's array type."""

    xp: Namespace
    device: Any
    give_back: Callable[[Array], Array]
    name: str
    anchor: str  # the array from which the library was determined


def dtype_name(x: Array) -> str:
    """Name of the dtype in every library: 'float32', 'bfloat16', ..."""
    return name_of(x.dtype)


def name_of(dtype: Any) -> str:
    """The same for a dtype; a separate function, because compilers do not trace caches."""
    return _name(dtype)


@functools.lru_cache(maxsize=128, typed=True)  # typed: dtypes of two libraries are never compared
def _name(dtype: Any) -> str:
    return str(dtype).rsplit(".", 1)[-1]


def enter(fn: str, arrays: Mapping[str, Array], beside: Library | None = None) -> tuple[Library, dict[str, Array]]:
    """The library that all `arrays` share, and the arrays ready for it (None stays None).

    beside: the library of the call that the arrays belong to, if they come later.
    Raises TypeError for objects that are no arrays, for masked arrays and matrices, and for two libraries or devices.
    """
    given = {name: x for name, x in arrays.items() if x is not None}
    first = beside
    if all(type(x) is np.ndarray for x in given.values()) and (first is None or first.name == "numpy"):
        first = first or Library(np, "cpu", _same, "numpy", next(iter(given), ""))
        return first, {n: None if x is None else _native(x) for n, x in arrays.items()}
    entered: dict[str, Array] = dict(arrays)
    kind, own = None, first
    for name, x in given.items():
        if type(x) is kind and own is not None:  # a known type: only the device may differ
            own = own._replace(device=x.device)
        else:
            entered[name], own = _library_of(fn, name, x)
            kind = type(x) if own.name == "cupy" and entered[name] is x else None
        first = first or own
        if own.name != first.name:
            raise TypeError(
                f"{fn}: {name} is an array of {own.name} and {first.anchor} of {first.name}, "
                "expected all arrays in one library"
            )
        if own.device != first.device and own.device is not None and first.device is not None:
            raise TypeError(
                f"{fn}: {name} is on device {own.device} and {first.anchor} on {first.device}, "
                "expected all arrays on one device"
            )
    if first is None:
        raise TypeError(f"{fn}: no array was given")
    return first, entered


def _library_of(fn: str, name: str, x: Any) -> tuple[Array, Library]:
    if isinstance(x, np.ma.MaskedArray | np.matrix):
        raise TypeError(f"{fn}: {name} is a {type(x).__module__}.{type(x).__qualname__}, expected a plain array")
    if isinstance(x, np.ndarray | np.generic):
        return _native(np.asarray(x)), Library(np, "cpu", _same, "numpy", name)
    try:
        xp = compat.array_namespace(x)
    except TypeError:
        return _through_dlpack(fn, name, x)
    return x, Library(xp, compat.device(x), _same, _short(xp), name)


def _through_dlpack(fn: str, name: str, x: Any) -> tuple[Array, Library]:
    """An array of an unknown library as a NumPy (CPU) or CuPy (CUDA) view; a copy if the strides require one."""
    if isinstance(x, type) or not (hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")):
        from .hints import conversion

        raise TypeError(
            f"{fn}: {name} is a {type(x).__qualname__}, expected an array "
            f"(NumPy, CuPy, PyTorch, JAX, or anything with __dlpack__){conversion(name, x)}"
        )
    kind = int(x.__dlpack_device__()[0])
    if kind == CPU:
        view = np.from_dlpack(x)
    elif kind == CUDA:
        import cupy

        view = cupy.from_dlpack(x)
    else:
        raise TypeError(f"{fn}: {name} lies on DLPack device type {kind}, expected CPU ({CPU}) or CUDA ({CUDA})")
    xp, owner = np if kind == CPU else compat.array_namespace(view), type(x).__module__.split(".")[0]
    return view, Library(xp, compat.device(view), _importer(type(x)), owner, name)


def _importer(kind: type) -> Callable[[Array], Array]:
    """`from_dlpack` of the library that defines `kind`; the identity if it has none."""
    parts = kind.__module__.split(".")
    owners = [kind] + [sys.modules.get(".".join(parts[:n])) for n in range(len(parts), 0, -1)]
    for owner in owners:
        found = getattr(owner, "from_dlpack", None)
        if callable(found):
            return lambda x: found(np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x)
    return _same


def _same(x: Array) -> Array:
    return x


def _native(x: np.ndarray) -> np.ndarray:
    """`x` in this machine's byte order."""
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def _short(xp: Namespace) -> str:
    return xp.__name__.removeprefix("array_api_compat.").split(".")[0]


def swap(xp: Namespace, x: Array, axis: int) -> Array:
    """x with `axis` and the next one exchanged; a view."""
    order = list(range(x.ndim))
    order[axis], order[axis + 1] = order[axis + 1], order[axis]
    return xp.permute_dims(x, tuple(order))


def is_cupy(xp: Namespace) -> bool:
    """Whether a namespace is CuPy's, or wraps CuPy's to record allocations."""
    return xp.__name__.endswith("cupy")


def is_numpy(xp: Namespace) -> bool:
    """Whether a namespace is NumPy's."""
    return compat.is_numpy_namespace(xp)


def is_mutable(xp: Namespace) -> bool:
    """Whether arrays of this library support item assignment."""
    return not (compat.is_jax_namespace(xp) or compat.is_dask_namespace(xp))


def compute_dtype(xp: Namespace, *arrays: Array | None) -> Any:
    """float64 if any array, or its real part, is; else float32: 16-bit types are storage only."""
    wide = any(x is not None and dtype_name(x) in ("float64", "complex128") for x in arrays)
    return xp.float64 if wide else xp.float32


def is_complex(x: Array) -> bool:
    """Whether an array has complex numbers."""
    return dtype_name(x) in COMPLEX


def complex_of(xp: Namespace, dtype: Any) -> Any:
    """The complex dtype whose parts have a dtype."""
    return xp.complex128 if dtype == xp.float64 else xp.complex64


def as_computed(xp: Namespace, x: Array, dtype: Any) -> Array:
    """`x` in the dtype of a computation; complex numbers in its complex one."""
    return cast(xp, x, complex_of(xp, dtype) if is_complex(x) else dtype)


def stored_like(xp: Namespace, y: Array, x: Array) -> Array:
    """A result `y` in the dtype of `x`; complex numbers stay complex."""
    if is_complex(y) and not is_complex(x):
        return as_computed(xp, y, compute_dtype(xp, x))
    return cast(xp, y, x.dtype)


def gradient_like(xp: Namespace, d: Array, x: Array) -> Array:
    """A gradient in the dtype of `x`: of real numbers its real part."""
    return cast(xp, xp.real(d) if is_complex(d) and not is_complex(x) else d, x.dtype)


def conjugate(xp: Namespace, x: Array) -> Array:
    """The complex conjugate; real numbers themselves."""
    return xp.conj(x) if is_complex(x) else x


def count_dtype(xp: Namespace) -> Any:
    """The dtype of numbers of tokens: int64, or the default integer of JAX."""
    return xp.arange(0).dtype if compat.is_jax_namespace(xp) else xp.int64


def sum_dtype(xp: Namespace, x: Array) -> Any:
    """The dtype in which sums of log decays are formed: float64 where the library and device have it."""
    if compat.is_jax_namespace(xp) or getattr(compat.device(x), "type", "") == "mps":
        return x.dtype
    return xp.float64


COMPILED = f"{__package__.rpartition('.')[0]}.ops.cpu.formulas"  # NumPy's bits, several times as fast


def cast(xp: Namespace, x: Array, dtype: Any) -> Array:
    """`x` in `dtype`; `x` itself if it has that dtype."""
    if x.dtype == dtype:
        return x
    if type(x) is np.ndarray:
        compiled = sys.modules.get(COMPILED)  # a process that has compiled nothing yet does not begin here
        if compiled is not None:
            return compiled.cast(x, np.dtype(dtype))
    return xp.astype(x, dtype)


def accumulate(xp: Namespace, x: Array) -> Array:
    """`x` in the dtype it is computed in."""
    return cast(xp, x, compute_dtype(xp, x))


def constant(xp: Namespace, y: np.ndarray, dtype: Any, where: Any) -> Array:
    """A NumPy table as an array of the caller's library."""
    values = y if is_numpy(xp) or is_cupy(xp) else y.tolist()
    return xp.reshape(xp.asarray(values, dtype=dtype, device=where), y.shape)


def lower_ones(xp: Namespace, n: int, dtype: Any, where: Any, strict: bool = False) -> Array:
    """n x n ones on and below the diagonal, zeros above; `strict` leaves the diagonal out."""
    make = _lower_ones if is_numpy(xp) else _lower_ones.__wrapped__
    return make(xp, n, dtype, where, strict)


def keep_lower(xp: Namespace, P: Array, strict: bool = False) -> Array:
    """P (..., n, n) with exact zeros above the diagonal, also for NaN and inf; `strict` clears the diagonal too."""
    if is_numpy(xp) and P.dtype in _BITS:  # a bit mask takes a quarter of the time of where
        bits = _BITS[P.dtype]
        return (P.view(bits) & -lower_ones(xp, P.shape[-1], bits, "cpu", strict)).view(P.dtype)
    mask = lower_ones(xp, P.shape[-1], xp.bool, device(P), strict)
    return xp.where(mask, P, xp.zeros((), dtype=P.dtype, device=device(P)))


_BITS = {np.dtype(np.float32): np.dtype(np.int32), np.dtype(np.float64): np.dtype(np.int64)}


def add_to(x: Array, y: Array) -> Array:
    """x + y, in the memory of x if the sum has its shape; no other reference to x may exist."""
    if x.shape != y.shape:
        return x + y
    x += y
    return x


def transposed_rows(xp: Namespace, x: Array) -> Array:
    """x^T in the memory order that its library multiplies fastest: C order for small NumPy products."""
    T = xp.matrix_transpose(x)
    return np.ascontiguousarray(T) if is_numpy(xp) else T


@cached
def _lower_ones(xp: Namespace, n: int, dtype: Any, where: Any, strict: bool) -> Array:
    rows, columns = xp.arange(n, device=where)[:, None], xp.arange(n, device=where)[None, :]
    return xp.astype(rows > columns if strict else rows >= columns, dtype, copy=False)


def shared_heads(xp: Namespace, x: Array, heads: int) -> Array:
    """x (..., few, D) as (..., heads, D): each of its heads is shared by a group."""
    few = x.shape[-2]
    return x if few == heads or not few else xp.repeat(x, heads // few, axis=-2)


def over_tokens(xp: Namespace, y: Array, axes: int = 1) -> Array:
    """The sum over batch and tokens, all axes but the last ones; NumPy's in C order of y, whatever its strides."""
    y = np.ascontiguousarray(y) if isinstance(y, np.ndarray) else y
    return xp.sum(y, axis=tuple(range(y.ndim - axes)))


def sum_to(xp: Namespace, x: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of broadcasting: sum `x` over the axes along which `shape` was stretched to x.shape."""
    if x.shape == shape:
        return x
    extra = x.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(i + extra for i, n in enumerate(shape) if n == 1 and x.shape[i + extra] != 1)
    return xp.reshape(xp.sum(x, axis=axes, keepdims=True), shape)
