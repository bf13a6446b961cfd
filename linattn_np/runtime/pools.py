"""Rows of a state pool (P, H, K, V), and states that begin at zero: checks, gather and scatter."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from numbers import Integral
from typing import Any, NamedTuple

import array_api_compat as compat
import numpy as np

from .arrays import Array, Namespace, device, dtype_name
from .shapes import Sizes, check_plain, lead, state_shape
from .values import shown

NO_ROW = -1  # of a sequence that has no row of the pool


class StateRows(NamedTuple):
    """Where the states of N sequences begin and end.

    at: (N,) rows of the pool; one outside of it is neither read nor written. None: `state` has one for each sequence.
    fresh: (N,) which sequences begin as without a state, whatever it holds; None: only those without a row.
    is_plain: every sequence begins with the state in its row. On a device this is not known.
    """

    at: Array | None
    fresh: Array | None = None
    is_plain: bool = False


def check_rows(
    fn: str, xp: Namespace, given: tuple[Any, Any], sizes: Sizes, states: Mapping[str, tuple[Array, str]]
) -> StateRows:
    """The rows of a call, in the state's library, on its device.

    given: the options state_rows and fresh. states: the parts of the state by name, with their axes.
    Values on a CUDA device are not checked: reading them would synchronise with the device. Raises TypeError or
    ValueError unless there is one integer per sequence, in range and unique, or NO_ROW, and one boolean.
    """
    (rows, fresh), batch = given, lead(sizes)
    for name, (S, axes) in states.items():
        letters = axes.split()
        if rows is not None and S.ndim != len(letters) + 1:
            raise ValueError(f"{fn}: {name} has shape {tuple(S.shape)}, expected a pool {state_shape(axes, 'P')}")
        if rows is None and (S.ndim != len(batch) + len(letters) or tuple(S.shape[: len(batch)]) != batch):
            raise ValueError(
                f"{fn}: {name} has shape {tuple(S.shape)}, expected a state for each sequence: "
                f"{state_shape(axes, ', '.join(map(str, batch)) or '...')}"
            )
    one = next(iter(states.values()))[0]
    at, has_all = (None, True) if rows is None else _rows(fn, xp, rows, batch, one)
    new, has_some = (None, False) if fresh is None else _fresh(fn, xp, fresh, batch, one)
    return StateRows(at, new if has_some else None, has_all and not has_some)


def _rows(fn: str, xp: Namespace, rows: Any, batch: tuple[int, ...], pool: Array) -> tuple[Array, bool]:
    """(row numbers (N,), whether every sequence has a row; not so if that is not known)."""
    check_plain(fn, "state_rows", rows)
    kind = _kind(rows, "int")
    if "int" not in kind:
        raise TypeError(f"{fn}: state_rows has dtype {kind}, expected integers")
    if compat.is_cupy_array(rows) and compat.is_cupy_namespace(xp):
        _check_shape(fn, "state_rows", "row", tuple(rows.shape), batch)
        rows = xp.astype(rows, xp.int64) if rows.dtype.itemsize < 4 else rows
        return xp.ascontiguousarray(rows).reshape(-1), False
    flat, P = _flat(fn, "state_rows", "row", rows, batch), int(pool.shape[0])
    if any(not isinstance(n, Integral) or isinstance(n, bool) for n in flat):
        raise TypeError(f"{fn}: state_rows is {shown(rows)}, expected integers")
    if any(not NO_ROW <= n < P for n in flat):
        raise ValueError(
            f"{fn}: state_rows is {flat}, expected rows of a pool of {P}: from 0 to {P - 1}, or {NO_ROW} "
            "for a sequence without a row"
        )
    owned = [int(n) for n in flat if n != NO_ROW]
    if len(set(owned)) < len(owned):
        raise ValueError(f"{fn}: state_rows is {flat}, expected no row twice")
    dtype = xp.int32 if P < 1 << 31 else xp.int64
    return xp.asarray([int(n) for n in flat], dtype=dtype, device=device(pool)), len(owned) == len(flat)


def _fresh(fn: str, xp: Namespace, fresh: Any, batch: tuple[int, ...], state: Array) -> tuple[Array, bool]:
    """(booleans (N,), whether one is true, or may be)."""
    check_plain(fn, "fresh", fresh)
    kind = _kind(fresh, "bool")
    if not kind.startswith("bool"):
        raise TypeError(f"{fn}: fresh has dtype {kind}, expected booleans")
    if compat.is_cupy_array(fresh) and compat.is_cupy_namespace(xp):
        _check_shape(fn, "fresh", "boolean", tuple(fresh.shape), batch)
        return xp.ascontiguousarray(fresh).reshape(-1), True
    flat = _flat(fn, "fresh", "boolean", fresh, batch)
    if any(not isinstance(x, bool | np.bool_) for x in flat):
        raise TypeError(f"{fn}: fresh is {shown(fresh)}, expected booleans")
    return xp.asarray([bool(x) for x in flat], dtype=xp.bool, device=device(state)), any(flat)


def _kind(given: Any, default: str) -> str:
    return str(getattr(given, "dtype", default)).rsplit(".", 1)[-1]


def _flat(fn: str, name: str, one: str, given: Any, batch: tuple[int, ...]) -> list[Any]:
    """Numbers in host memory, one per sequence, as a list."""
    if hasattr(given, "shape"):
        given = _on_host(given)
        shape, flat = tuple(given.shape), given.reshape(-1).tolist()
    else:
        shape, flat = ((len(given),), list(given)) if isinstance(given, list | tuple) else ((), [given])
    _check_shape(fn, name, one, shape, batch)
    return flat


def _on_host(x: Any) -> np.ndarray:
    """An array of any library as a NumPy array."""
    if hasattr(x, "tolist"):
        return np.asarray(x.tolist()).reshape(x.shape)
    return np.asarray(x) if hasattr(x, "__array__") else np.from_dlpack(x)


def _check_shape(fn: str, name: str, one: str, shape: tuple[int, ...], batch: tuple[int, ...]) -> None:
    if shape != batch:
        raise ValueError(f"{fn}: {name} has shape {shape}, expected one {one} per sequence: {batch}")


# gather and scatter


def take_rows(xp: Namespace, state: Array, rows: StateRows, batch: tuple[int, ...], unit: bool = False) -> Array:
    """The states (*batch, ...) that the sequences begin with; unit: matrices that begin as the identity, not zero."""
    S = _bits(xp, state)
    if rows.is_plain:
        return _typed(xp.reshape(xp.take(S, rows.at, axis=0), (*batch, *S.shape[1:])), state)
    begins = rows.fresh
    if rows.at is not None:
        has_row = _has_row(rows.at, S)
        begins = ~has_row if begins is None else ~has_row | begins
        S = xp.zeros((1, *S.shape[1:]), dtype=S.dtype, device=device(S)) if not S.shape[0] else S
        S = xp.reshape(xp.take(S, xp.where(has_row, rows.at, xp.zeros_like(rows.at)), axis=0), (*batch, *S.shape[1:]))
    begins = xp.reshape(begins, (*batch, *(1,) * (S.ndim - len(batch))))
    how = {"dtype": S.dtype, "device": device(S)}
    first = xp.eye(S.shape[-1], **how) if unit else xp.zeros((), **how)
    return _typed(xp.where(begins, first, S), state)


def put_rows(xp: Namespace, state: Array, rows: StateRows, values: Array) -> None:
    """Write `values`, of the state's dtype, where the sequences end."""
    if rows.at is None:
        state[...] = values
        return
    values = xp.reshape(values, (prod(rows.at.shape), *state.shape[1:]))
    if compat.is_cupy_namespace(xp):
        put_on_device(xp, _bits(xp, state), rows.at, _bits(xp, values))
    elif compat.is_numpy_namespace(xp):
        owned = rows.at != NO_ROW
        whole = owned.all()
        state[rows.at if whole else rows.at[owned]] = values if whole else values[owned]
    else:
        for n, row in enumerate(_on_host(rows.at).tolist()):
            if row != NO_ROW:
                state[row, ...] = values[n, ...]


def put_on_device(xp: Namespace, pool: Array, at: Array, values: Array) -> None:
    """Write the values that have a row. The host does not read `at`: one without a row repeats another write.

    If none has a row, row 0 is written unchanged.
    """
    if not (at.shape[0] and pool.shape[0]):
        return
    has_row = _has_row(at, pool)
    any_row, index = xp.any(has_row), xp.arange(at.shape[0], dtype=at.dtype, device=device(at))
    whose = xp.where(has_row, index, xp.argmax(xp.astype(has_row, xp.int8)))
    pool[xp.where(any_row, at[whose], xp.zeros_like(at))] = xp.where(any_row, values[whose], pool[:1])


def _has_row(at: Array, pool: Array) -> Array:
    return (at >= 0) & (at < pool.shape[0])


def _typed(S: Array, like: Array) -> Array:
    return S if S.dtype == like.dtype else S.view(like.dtype)


def _bits(xp: Namespace, x: Array) -> Array:
    """CuPy's bfloat16 as uint16, for which it supports all indexing; other arrays unchanged."""
    return x.view(xp.uint16) if compat.is_cupy_namespace(xp) and dtype_name(x) == "bfloat16" else x
