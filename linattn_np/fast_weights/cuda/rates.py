"""The recurrence of the coefficients (../masks.py) and its transpose on CuPy arrays, for all tiles at once."""

from __future__ import annotations

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
    """Whether the kernels take tiles of n tokens: of decay and momentum, no gain."""
    if not is_cupy(xp) or rates.gain is not None or rates.alpha is None or rates.mu is None or not 0 < n <= MOST:
        return False
    given = [y for y in rates[1:] if y is not None]
    return all(dtype_name(y) in ("float32", "float64") for y in given) and 0 not in given[0].shape \
        and launch.unusable() is None  # fmt: skip


def _given(xp: Namespace, rates: Rates) -> dict[str, Array]:
    """Dense rates by name; 1 for a part of the momentum that is not given."""
    alpha, mu = (xp.ascontiguousarray(y) for y in (rates.alpha, rates.mu))
    return {
        "alpha": alpha,
        "mu": mu,
        "beta": xp.ones_like(mu) if rates.beta is None else xp.ascontiguousarray(rates.beta),
    }


def constants(dtype: str, decayed: bool) -> Constants:
    """Of the compiler."""
    return (("LA_COLUMNS", COLUMNS), ("LA_DECAYED", int(decayed)), ("LA_DOUBLE", int(dtype == "float64")))


def recurrence(xp: Namespace, rates: Rates, n: int) -> tuple[Array, Array]:
    """(w, s), (..., n + 1, 2 + n), from rates (..., n, 1)."""
    given = _given(xp, rates)
    lead = given["mu"].shape[:-2]
    return coefficients(_rows(given), n, (*lead, n + 1, n + 2))


def recurrence_vjp(
    xp: Namespace, rates: Rates, residuals: tuple[Array, Array], d: Array, decayed: bool
) -> dict[str, Array]:
    """Gradients of the rates, by name; d (..., 2 n + 2, 2 + n): of reading, of both ends, of the errors' weights."""
    given = _given(xp, rates)
    shape, n = given["mu"].shape, d.shape[-1] - 2
    found = coefficients_vjp(_rows(given), n, residuals, xp.ascontiguousarray(d), decayed)
    return {name: xp.reshape(y, shape) for name, y in found.items() if getattr(rates, name) is not None}


def _rows(given: dict[str, Array]) -> dict[str, Array]:
    """(..., n, 1) as (rows, 1, n, 1)."""
    return {name: y.reshape(-1, 1, *y.shape[-2:]) for name, y in given.items()}


def coefficients(given: dict[str, Array], n: int, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """(w, s) of this shape, of tiles of n tokens, from rates (N, H, T, 1); tokens that a last tile lacks are none."""
    w, s = (record.empty(shape, given["mu"].dtype) for _ in range(2))
    _launch("forward", n, False, given, {"w": w, "s": s})
    return w, s


def coefficients_vjp(
    given: dict[str, Array], n: int, residuals: tuple[Array, Array], d: Array, decayed: bool
) -> dict[str, Array]:
    """Gradients (N, H, T, 1) of the rates."""
    w, s = residuals
    found = {f"d{name}": record.empty(tuple(y.shape), y.dtype) for name, y in given.items()}
    _launch("backward", n, decayed, given, {"w": w, "s": s, "d": d} | found)
    return {name: found[f"d{name}"] for name in NAMES}


def _launch(entry: str, n: int, decayed: bool, given: dict[str, Array], arrays: dict[str, Array]) -> None:
    N, heads, T, _ = given["alpha"].shape
    per = -(-T // n)
    tiles = N * heads * per
    every = ("w", "s", "d", *(f"d{name}" for name in NAMES))
    packed = RATES.pack(**{name: (y.data.ptr, *y.strides[:3]) for name, y in given.items()},
                        **{name: address(arrays.get(name)) for name in every}, tiles=tiles, n=n, T=T, heads=heads,
                        per=per)  # fmt: skip
    made = constants(dtype_name(given["alpha"]), decayed)
    held = (*given.values(), *arrays.values())
    launch.launch(SOURCE, entry, made, -(-tiles // WARPS), 32 * WARPS, 0, packed, held)
