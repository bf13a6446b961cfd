"""Levels of log-linear attention as heads (ops/levels.py) on CuPy arrays, by a kernel each."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime.arrays import Array, name_of
from ...runtime.cuda import launch
from ...runtime.cuda.elements import ELEMENTS
from ...runtime.cuda.record import empty
from .arguments import LEVELS, address
from .row_arrays import dense
from .unit_rows import THREADS

SOURCE = "ops/levels.cu"
WEIGHTS = {"writes": 0, "reads": 1, "keeps": 2, "one": 3}
PER = 8  # neighbouring columns of a lane, where rows allow it


def supports(dtype: Any, *arrays: Array | None) -> bool:
    """Whether the kernels take these arrays, and results of this dtype."""
    here, known = launch.current_device(), [y for y in arrays if y is not None]
    names = {name_of(np.dtype(dtype)), *(name_of(y.dtype) for y in known)}
    return names <= ELEMENTS.keys() and all(y.device.id == here for y in known) and launch.unusable() is None


def spread(x: Array, at: Any, weight: str, dtype: Any, lam: Array | None, dots: tuple[Array, Array] | None) -> Array:
    """y (tokens, H n, width); dots: (other, dlam), whose columns of these levels are filled."""
    rows, width = x.shape[:-1], x.shape[-1]
    y = empty((rows[0], rows[1] * at.n, width), np.dtype(dtype))
    other, dlam = (None, None) if dots is None else dots
    given = {"x": dense(x), "y": y, "other": other, "lam": dense(lam), "dlam": dlam}
    _launch("spread", x, y, at, weight, given, dots is not None)
    return y


def gather(y: Array, at: Any, weight: str, dtype: Any, lam: Array | None, base: Array | None) -> Array:
    """x (tokens, H, width)."""
    x = empty((y.shape[0], y.shape[1] // at.n, y.shape[2]), np.dtype(dtype))
    _launch("gather", x, y, at, weight, {"x": x, "y": dense(y), "lam": dense(lam), "base": dense(base)})
    return x


def weigh(A: Array, at: Any, lam: Array) -> Array:
    """A (tokens, H, 64) with the weights of levels."""
    y = empty(tuple(A.shape), A.dtype)
    _launch("weigh", A, y, at, "one", {"x": dense(A), "y": y, "lam": dense(lam)})
    return y


def weigh_vjp(A: Array, at: Any, lam: Array, d: Array) -> tuple[Array, Array]:
    """(gradient of A, dlam in float32)."""
    y, dlam = empty(tuple(d.shape), d.dtype), empty(tuple(lam.shape), np.dtype(np.float32))
    given = {"x": dense(A), "y": y, "other": dense(d), "lam": dense(lam), "dlam": dlam}
    _launch("weigh_vjp", A, y, at, "one", given)
    return y, dlam


def _launch(
    entry: str, x: Array, y: Array, at: Any, weight: str, given: dict[str, Array | None], dots: bool = False
) -> None:
    (tokens, heads, width), lam = x.shape, given.get("lam")
    rows = (given.get(n) for n in ("x", "y", "base", "other"))
    per = PER if width % PER == 0 and all(z is None or z.data.ptr % 16 == 0 for z in rows) else 1
    lanes = min(1 << max(-(-width // per) - 1, 0).bit_length(), 32)
    constants = (("LA_DOTS", int(dots)), ("LA_DTYPE", ELEMENTS[name_of(x.dtype)]), ("LA_LANES", lanes),
                 ("LA_OTHER", ELEMENTS[name_of(y.dtype)]), ("LA_PER", per), ("LA_WEIGHT", WEIGHTS[weight]))  # fmt: skip
    every = dict.fromkeys(("x", "y", "base", "other", "lam", "dlam"))
    packed = LEVELS.pack(
        **{n: address(given.get(n)) for n in every}, positions=address(at.positions), rows=tokens * heads, T=at.T,
        heads=heads, width=width, first=at.first, count=at.n, levels=0 if lam is None else lam.shape[-1],
        kind=0 if lam is None else ELEMENTS[name_of(lam.dtype)])  # fmt: skip
    launched = tuple(z for z in (*given.values(), at.positions) if z is not None)
    launch.launch(SOURCE, entry, constants, -(-tokens * heads // (THREADS // lanes)), THREADS, 0, packed, launched)
