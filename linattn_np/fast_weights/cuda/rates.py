"""The recurrence of the coefficients (../masks.py) and its transpose on CuPy arrays, for all tiles at once."""

from __future__ import annotations

from math import prod

from ...ops.cuda.arguments import address
from ...runtime.arrays import Array, Namespace, dtype_name, is_cupy
from ...runtime.cuda import launch, record
from ...runtime.cuda.elements import Constants
from ..types import Rates
from .arguments import RATES

SOURCE, WARPS, COLUMNS = "fast_weights/rates.cu", 4, 4
MOST = 32 * COLUMNS - 2  # tokens of a tile
NAMES = ("alpha", "mu", "beta")


def takes(xp: Namespace, rates: Rates, n: int) -> bool:
    """Whether the kernels take tiles of n tokens: decay, momentum and the part of it that is written, no gain."""
    given = [getattr(rates, name) for name in NAMES]
    if not is_cupy(xp) or rates.gain is not None or any(y is None for y in given) or not 0 < n <= MOST:
        return False
    return all(dtype_name(y) in ("float32", "float64") for y in given) and 0 not in given[0].shape \
        and launch.unusable() is None  # fmt: skip


def constants(dtype: str, decayed: bool) -> Constants:
    """Of the compiler."""
    return (("LA_COLUMNS", COLUMNS), ("LA_DECAYED", int(decayed)), ("LA_DOUBLE", int(dtype == "float64")))


def recurrence(xp: Namespace, rates: Rates, n: int) -> tuple[Array, Array]:
    """(w, s), (..., n + 1, 2 + n), from rates (..., n, 1)."""
    given = {name: xp.ascontiguousarray(getattr(rates, name)) for name in NAMES}
    shape, dtype = (*given["mu"].shape[:-2], n + 1, n + 2), given["mu"].dtype
    w, s = record.empty(shape, dtype), record.empty(shape, dtype)
    _launch("forward", n, False, given | {"w": w, "s": s})
    return w, s


def recurrence_vjp(
    xp: Namespace, rates: Rates, residuals: tuple[Array, Array], d: Array, decayed: bool
) -> dict[str, Array]:
    """Gradients of the rates, by name; d (..., 2 n + 2, 2 + n): of reading, of both ends, of the errors' weights."""
    given = {name: xp.ascontiguousarray(getattr(rates, name)) for name in NAMES}
    w, s = residuals
    found = {f"d{name}": record.empty(tuple(y.shape), y.dtype) for name, y in given.items()}
    _launch("backward", d.shape[-1] - 2, decayed, given | {"w": w, "s": s, "d": xp.ascontiguousarray(d)} | found)
    return {name: found[f"d{name}"] for name in NAMES}


def _launch(entry: str, n: int, decayed: bool, arrays: dict[str, Array]) -> None:
    tiles = prod(arrays["alpha"].shape) // n
    every = dict.fromkeys((*NAMES, "w", "s", "d", *(f"d{name}" for name in NAMES)))
    packed = RATES.pack(**{name: address(arrays.get(name)) for name in every}, tiles=tiles, n=n)
    made = constants(dtype_name(arrays["alpha"]), decayed)
    launch.launch(SOURCE, entry, made, -(-tiles // WARPS), 32 * WARPS, 0, packed, tuple(arrays.values()))
