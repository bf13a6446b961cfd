"""Rows of a pool of states (P, H, K, V), of any stored form, in the dtype of the computation."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtime.arrays import STORAGE, cast, dtype_name, enter
from ..runtime.values import shown
from .small import SmallState, pack_state, unpack_state


def arrays_of(pool: Any) -> tuple[Any, ...]:
    """The arrays that a pool is stored in, that of its states or codes first."""
    return pool.arrays if isinstance(pool, SmallState) else (pool,)


def shape_of(pool: Any) -> tuple[int, ...]:
    """(P, H, K, V)."""
    return tuple(pool.shape)


def compute_dtype(pool: Any) -> np.dtype[Any]:
    """float64 of a float64 pool, else float32."""
    return np.dtype(np.float64 if getattr(pool, "dtype", None) == np.float64 else np.float32)


def take(pool: Any, rows: np.ndarray | slice) -> np.ndarray:
    """The states of rows (R, H, K, V), in the dtype of the computation; views where nothing is converted."""
    if isinstance(pool, SmallState):
        return unpack_state(pool.mapped(lambda x: x[rows]))
    return pool[rows].astype(compute_dtype(pool), copy=False)


def copied(pool: Any, rows: np.ndarray, xp: Any = np) -> Any:
    """The same in memory of their own; xp: the namespace of the pool."""
    if xp is np:
        return np.array(take(pool, rows))
    there = xp.asarray(rows)
    if isinstance(pool, SmallState):
        return take(pool, there)
    return cast(xp, pool[there], compute_dtype(pool))


def put(pool: Any, rows: np.ndarray | slice, S: Any, xp: Any = np) -> None:
    """Store the states of rows, rounded once."""
    if isinstance(pool, SmallState):
        at = rows if xp is np else xp.asarray(rows)
        for own, new in zip(pool.arrays, pack_state(S, pool.kind).arrays, strict=True):
            own[at] = new
    elif xp is np:
        pool[rows] = S.astype(pool.dtype, copy=False)
    else:
        pool[xp.asarray(rows)] = cast(xp, S, pool.dtype)


def check(fn: str, pool: Any) -> Any:
    """The namespace of a pool.   Raises TypeError or ValueError unless it is one of states, and can be written to."""
    arrays = arrays_of(pool)
    known = all(hasattr(x, "__dlpack__") for x in arrays)
    library = enter(fn, {f"state{n or ''}": x for n, x in enumerate(arrays)})[0] if known else None
    on_gpu = library is not None and library.name == "cupy"
    if not on_gpu and not all(isinstance(x, np.ndarray) for x in arrays):
        raise TypeError(f"{fn}: state is a {type(pool).__qualname__}, expected a NumPy or CuPy array, or a SmallState "
                        "of such arrays")  # fmt: skip
    if len(shape_of(pool)) != 4:
        raise ValueError(f"{fn}: state has shape {shape_of(pool)}, expected a pool (P, H, K, V)")
    if not isinstance(pool, SmallState) and dtype_name(pool) not in STORAGE:
        raise TypeError(f"{fn}: state has dtype {pool.dtype}, expected float64, float32, float16 or bfloat16")
    if not all(x.flags.c_contiguous and getattr(x.flags, "writeable", True) for x in arrays):
        raise ValueError(f"{fn}: state is read-only or strided, expected a writeable array in C order")
    if not on_gpu:
        return np
    from ..matrix_state.cuda.token import log

    if (why := log.unsupported_reason(arrays[0])) is not None:
        raise TypeError(f"{fn}: {why}")
    return library.xp if library is not None else np


def rows_of(fn: str, rows: Any, P: int) -> np.ndarray:
    """Row numbers (R,).   Raises ValueError or TypeError unless they are in range and none is there twice."""
    if rows is None:
        return np.arange(P)
    x = np.asarray(rows)
    if x.ndim != 1 or (x.dtype.kind not in "iu" and x.size):
        raise TypeError(f"{fn}: rows is {shown(rows)}, expected a vector of row numbers")
    x = x.astype(np.int64)
    if len(set(x.tolist())) < len(x) or (x < 0).any() or (x >= P).any():
        raise ValueError(f"{fn}: rows is {shown(rows)}, expected rows of a pool of {P}, none twice")
    return x
