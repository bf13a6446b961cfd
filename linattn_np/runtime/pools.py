"""Rows of a state pool (P, H, K, V): checks, gather and scatter."""

from __future__ import annotations

from math import prod
from numbers import Integral
from typing import Any

import array_api_compat as compat
import numpy as np

from .arrays import Array, Namespace, device, dtype_name
from .shapes import Sizes, check_plain
from .values import shown


def check_rows(fn: str, xp: Namespace, rows: Any, sizes: Sizes, pool: Array) -> Array:
    """Row numbers as integers (N,) of the pool's library, on its device.

    Values on a CUDA device are not checked: reading them would synchronise with the device.
    Raises TypeError or ValueError unless there is one integer per sequence, in range and unique.
    """
    batch = sizes.batch if sizes.ragged is None else (sizes.ragged,)
    check_plain(fn, "state_rows", rows)
    kind = str(getattr(rows, "dtype", "int")).rsplit(".", 1)[-1]
    if "int" not in kind:
        raise TypeError(f"{fn}: state_rows has dtype {kind}, expected integers")
    if compat.is_cupy_array(rows) and compat.is_cupy_namespace(xp):
        _check_shape(fn, tuple(rows.shape), batch)
        return xp.ascontiguousarray(xp.astype(rows, xp.int64) if rows.dtype.itemsize < 4 else rows).reshape(-1)
    rows = _on_host(rows)
    shape = tuple(rows.shape) if hasattr(rows, "shape") else (len(rows),) if isinstance(rows, list | tuple) else ()
    _check_shape(fn, shape, batch)
    flat: list[Any] = rows.reshape(-1).tolist() if hasattr(rows, "shape") else list(rows)
    if any(not isinstance(n, Integral) or isinstance(n, bool) for n in flat):
        raise TypeError(f"{fn}: state_rows is {shown(rows)}, expected integers")
    P = int(pool.shape[0])
    if any(not 0 <= n < P for n in flat):
        raise ValueError(f"{fn}: state_rows is {flat}, expected rows of a pool of {P}: from 0 to {P - 1}")
    if len(set(flat)) < len(flat):
        raise ValueError(f"{fn}: state_rows is {flat}, expected no row twice")
    return xp.asarray([int(n) for n in flat], dtype=xp.int32 if P < 1 << 31 else xp.int64, device=device(pool))


def _on_host(rows: Any) -> Any:
    """Row numbers as a NumPy array; sequences are returned unchanged."""
    if not hasattr(rows, "shape"):
        return rows
    if hasattr(rows, "tolist"):
        return np.asarray(rows.tolist(), dtype=np.int64).reshape(rows.shape)
    return np.asarray(rows) if hasattr(rows, "__array__") else np.from_dlpack(rows)


def _check_shape(fn: str, shape: tuple[int, ...], batch: tuple[int, ...]) -> None:
    if shape != batch:
        raise ValueError(f"{fn}: state_rows has shape {shape}, expected one row per sequence: {batch}")


def take_rows(xp: Namespace, pool: Array, rows: Array, batch: tuple[int, ...]) -> Array:
    """(P, ...) -> (*batch, ...)."""
    taken = xp.reshape(xp.take(_bits(xp, pool), rows, axis=0), (*batch, *pool.shape[1:]))
    return taken if taken.dtype == pool.dtype else taken.view(pool.dtype)


def put_rows(xp: Namespace, pool: Array, rows: Array, values: Array) -> None:
    """Scatter: write `values`, of the pool's dtype, into its rows."""
    values = xp.reshape(values, (prod(rows.shape), *pool.shape[1:]))
    if compat.is_cupy_namespace(xp) or compat.is_numpy_namespace(xp):
        _bits(xp, pool)[rows] = _bits(xp, values)
        return
    for n, row in enumerate(_on_host(rows).tolist()):
        pool[row, ...] = values[n, ...]


def _bits(xp: Namespace, x: Array) -> Array:
    """CuPy's bfloat16 as uint16, for which it supports all indexing; other arrays unchanged."""
    return x.view(xp.uint16) if compat.is_cupy_namespace(xp) and dtype_name(x) == "bfloat16" else x
