"""Rows of a table of CuPy arrays, and the gradient of the table in a fixed order (cuda_src/nn/embedding.cu)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime.arrays import Array
from ...runtime.cuda import record
from .arguments import EMBEDDING, address
from .formulas import compiled
from .row_arrays import LARGE, NONE, is_aligned, kind_of, launched, tokens_of, working_dtype

SOURCE = "nn/embedding.cu"
THREADS, TILE, CHUNK = 256, 2048, 32
BITS = 8  # of a pass of the sort


def gather(ids: Array, weight: Array) -> Array:
    """(N, D) in the dtype of weight (V, D), ids int64 (N,) dense; NaN for a number outside of the table."""
    V, D = weight.shape
    y = record.empty((ids.size, D), weight.dtype)
    weight, rows = tokens_of(weight)
    per = _per(D, weight, y)
    sizes = {"N": ids.size, "V": V, "D": D}
    _launch("gather", per, (weight, y), ids.size * D // per, (weight, y, ids), sizes, x=rows, y=y, ids=ids)
    return y


def gather_vjp(ids: Array, weight: Array, dy: Array) -> Array:
    """dW (V, D) in the dtype of weight, of dy (..., D); the order of its sums depends on the ids alone."""
    (V, D), N, wide = weight.shape, ids.size, working_dtype(weight, dy)
    dweight = compiled("filled", (), ((V, D), weight.dtype), wide)
    if not N or not D:
        return dweight
    (dy, rows), blocks, chunks = tokens_of(dy), -(-N // TILE), -(-N // CHUNK)
    word = np.dtype(np.uint32)
    counts, keys, order = record.empty(((1 << BITS) * blocks,), word), ids, ids
    sizes = {"N": N, "V": V, "D": D, "blocks": blocks}
    for shift in range(0, V.bit_length(), BITS):
        to = record.empty((N,), word), record.empty((N,), word)
        own: dict[str, Any] = {"ids": ids, "from_keys": keys, "from_order": order, "counts": counts,
                               "to_keys": to[0], "to_order": to[1]}  # fmt: skip
        how = sizes | {"shift": shift, "first": int(shift == 0)}
        for entry in ("digits", "offsets", "place"):
            threads = LARGE if entry == "offsets" else blocks * THREADS
            _launch(entry, 1, (dy, dweight), threads, (ids, keys, order, counts, *to), how, **own)
        keys, order = to
    per, parts = _per(D, dy, dweight), record.empty((chunks, 2, D), wide)
    for entry in ("runs", "joined"):
        arrays = (dy, dweight, keys, order, parts)
        _launch(entry, per, (dy, dweight), chunks * D // per, arrays, sizes, x=rows, y=dweight, from_keys=keys,
                from_order=order, parts=parts)  # fmt: skip
    return dweight


def _per(D: int, x: Array, y: Array) -> int:
    """Channels of a thread."""
    per = 16 // max(x.itemsize, y.itemsize)
    while per > 1 and (D % per or not is_aligned(per, x, y)):
        per //= 2
    return per


def _launch(
    entry: str,
    per: int,
    kinds: tuple[Array, Array],
    threads: int,
    arrays: tuple[Array, ...],
    sizes: dict[str, int],
    **own: Any,
) -> None:
    """kinds: two arrays of whose dtypes the kernel is. own: fields; arrays: all whose pointers are among them."""
    constants = {"LA_DTYPE": kind_of(kinds[0]), "LA_OUT": kind_of(kinds[1]), "LA_PER": per,
                 "LA_DOUBLE": int(working_dtype(*kinds).itemsize == 8)}  # fmt: skip
    pointers = ("y", "ids", "from_keys", "from_order", "to_keys", "to_order", "counts", "parts")
    fields: dict[str, Any] = {"x": NONE, "shift": 0, "blocks": 0, "first": 0} | sizes | own
    fields |= {n: address(own.get(n)) for n in pointers}
    block = LARGE if entry == "offsets" else THREADS
    unique = {id(z): z for z in arrays}.values()
    launched(SOURCE, entry, constants, -(-threads // block), block, EMBEDDING.pack(**fields), *unique)
