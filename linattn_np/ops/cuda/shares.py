"""Shares of a running sum in log space (ops/shares.py) on CuPy arrays, and their transpose, by a kernel each."""

from __future__ import annotations

from collections.abc import Sequence as Items
from math import prod
from typing import Any

import numpy as np

from ...runtime.arrays import Array, cast
from ...runtime.cuda import launch
from ...runtime.cuda.record import empty
from ...runtime.shapes import Sequence
from .arguments import SHARES, address
from .formulas import KINDS, takes
from .row_arrays import dense, kind_of
from .stabiliser import THREADS, blocks_of, offsets_of

SOURCE = "ops/shares.cu"


def supports(*arrays: Array | None) -> bool:
    """Whether the kernels take arrays (..., T, H, M)."""
    return all(x is None or x.size > 0 for x in arrays) and takes(*arrays)


def shares(xp: Any, s: Array, N_0: Array, sequences: Items[Sequence], dtype: Any) -> tuple[Array, Array, Array]:
    """(share, g, N) in `dtype`, float32 or float64, of s (..., T, H, M) and N_0 (..., H, M) or (sequences, H, M)."""
    share, g, N = (empty(tuple(s.shape), np.dtype(dtype)) for _ in range(3))
    given = {"s": dense(s), "begin": dense(cast(xp, N_0, dtype))}
    _launch("shares", xp, given | {"share": share, "g": g, "N": N}, sequences, N_0.size, dtype)
    return share, g, N


def shares_vjp(
    xp: Any, share: Array, g: Array, dshare: Array, dg: Array, sequences: Items[Sequence]
) -> tuple[Array, Array]:
    """(ds, the gradient of log N_0 (sequences, H, M)) in the dtype of the shares."""
    dtype, columns = share.dtype, share.shape[-2:]
    count = prod(share.shape[:-3]) if sequences[0].row is None else len(sequences)
    ds, dbegin = empty(tuple(share.shape), dtype), empty((count, *columns), dtype)
    given = {"dshare": dense(cast(xp, dshare, dtype)), "dg": dense(cast(xp, dg, dtype))}
    given |= {"share": share, "g": g, "ds": ds, "dbegin": dbegin}
    _launch("shares_vjp", xp, given, sequences, dbegin.size, dtype)
    return ds, dbegin


def _launch(entry: str, xp: Any, arrays: dict[str, Array], sequences: Items[Sequence], size: int, dtype: Any) -> None:
    T, H, M = arrays["share"].shape[-3:]
    given: dict[str, Array | None] = {**arrays, "offsets": offsets_of(xp, sequences)}
    every = dict.fromkeys(("s", "begin", "share", "g", "N", "dshare", "dg", "ds", "dbegin", "offsets"))
    packed = SHARES.pack(**{n: address(given.get(n)) for n in every}, T=T, columns=H * M)
    wide = KINDS[np.dtype(dtype).name]
    constants = (("LA_DTYPE", kind_of(arrays["s"]) if "s" in arrays else wide), ("LA_WIDE", wide))
    launched = tuple(y for y in given.values() if y is not None)
    launch.launch(SOURCE, entry, constants, blocks_of(size, H * M), THREADS, 0, packed, launched)
