"""Raw projections on CuPy arrays: rows of q and k divided by their length, the gate's formula, gradients of both."""

from __future__ import annotations

import struct
from math import gcd, prod
from typing import Any

from ...cuda import launch
from ...ground.namespace import Array, cast, dtype_name
from .cuda_plan import BYTES, ELEMENTS, Constants

UNITS, GATE = "matrix_state/unit_rows.cu", "matrix_state/gate_formula.cu"
THREADS, MOST = 256, 16  # of a block; numbers of a row that a lane holds
MOST_ROWS = 2**32
STRIPS = 528  # of tokens, at most, that a gate's gradients are summed in: four a multiprocessor
Pair = tuple[Array | None, ...]  # of queries and of keys
NONE = struct.pack("<4q2i2q4I", *[0] * 12)


def takes(xp: Any, rows: Pair) -> bool:
    """Whether a kernel takes these rows, one array or two alike."""
    given = [y for y in rows if y is not None]
    if not (xp.__name__.endswith("cupy") and given):
        return False
    alike = all(y.dtype == given[0].dtype and y.shape[-1] == given[0].shape[-1] for y in given)
    small = all(0 < prod(y.shape[:-1]) < MOST_ROWS and 0 < y.shape[-1] <= 32 * MOST for y in given)
    return alike and small and dtype_name(given[0]) in ELEMENTS and launch.unusable() is None


def takes_gate(xp: Any, raw: Array) -> bool:
    """Whether a kernel takes a raw gate."""
    return xp.__name__.endswith("cupy") and dtype_name(raw) in ELEMENTS and launch.unusable() is None


def unit_rows(xp: Any, rows: Pair) -> Pair:
    """x / |x| of both arrays (..., T, heads, K), None for None, in their dtype."""
    return _divide(xp, "unit_rows", rows, (None, None))


def unit_rows_vjp(xp: Any, rows: Pair, grads: Pair) -> Pair:
    """(dy - y <y, dy>) / |x|, y = x / |x|, of both, in the dtype of x."""
    return _divide(xp, "unit_rows_vjp", rows, grads)


def row_constants(element: str, grad: str, K: int, per: int) -> Constants:
    """Of row_pieces.cuh; per: numbers that a lane loads at once; grad: the kind of dy."""
    lanes = 1
    while lanes < 32 and lanes * per < K:
        lanes *= 2
    return tuple(sorted({
        "LA_DTYPE": ELEMENTS[element], "LA_GRAD": ELEMENTS[grad], "LA_K": K, "LA_PER": per, "LA_LANES": lanes,
        "LA_ALIGN": min(16, per * BYTES[element]),
    }.items()))  # fmt: skip


def _divide(xp: Any, entry: str, arrays: Pair, grads: Pair) -> Pair:
    """What the entry makes of each array that is given, contiguous and as `empty` made it."""
    arrays = tuple(
        None if y is None else y if y.shape[-1] == 1 or y.strides[-1] == y.itemsize else xp.ascontiguousarray(y)
        for y in arrays)  # fmt: skip
    grads = tuple(None if y is None or x is None else xp.ascontiguousarray(y)
                  for x, y in zip(arrays, grads, strict=True))  # fmt: skip
    made = [None if y is None else xp.empty(y.shape, dtype=y.dtype) for y in arrays]
    there = [y for y in (*arrays, *grads) if y is not None]
    first, grad = next(y for y in arrays if y is not None), next((y for y in grads if y is not None), None)
    K, element = first.shape[-1], dtype_name(first)
    per = gcd(16 // first.itemsize, K)
    while per > 1 and any(askew(y, per * y.itemsize) for y in there):
        per //= 2
    constants = row_constants(element, element if grad is None else dtype_name(grad), K, per)
    each = THREADS // dict(constants)["LA_LANES"]
    packed, blocks = [], []
    for x, dy, y in zip(arrays, grads, made, strict=True):
        packed.append(NONE if x is None else _pack(x, dy, y))
        blocks.append(0 if x is None else -(-prod(x.shape[:-1]) // each))
    packed.append(struct.pack("<2I", blocks[0], 0))
    launch.launch(UNITS, entry, constants, sum(blocks), THREADS, 0, b"".join(packed),
                  tuple(y for y in (*there, *made) if y is not None))
    return tuple(made)


def askew(y: Array, size: int) -> bool:
    """Whether some row of y does not begin at a multiple of min(16, size) bytes."""
    size = min(size, 16)
    return bool(y.data.ptr % size or any(s % size for s, n in zip(y.strides[:-1], y.shape[:-1], strict=True) if n > 1))


def _pack(x: Array, dy: Array | None, y: Array) -> bytes:
    """struct Array of unit_rows.cu."""
    rows, (T, heads, _) = prod(x.shape[:-1]), x.shape[-3:]
    x = x if x.ndim == 4 else x.reshape(prod(x.shape[:-3]), *x.shape[-3:])
    return struct.pack("<4q2i2q4I", x.data.ptr, *x.strides[:3], 1, 0, 0 if dy is None else dy.data.ptr, y.data.ptr,
                       rows, T, heads, 0)


def log_decay(xp: Any, raw: Array, A_log: Array, bias: Array | None, each: int) -> Array:
    """-e^{A_log} softplus(raw + bias) in float32; raw (..., T, H) or (..., T, H, K), `each` numbers a head."""
    raw, A_log, bias = _dense(xp, raw, A_log, bias)
    g = xp.empty(raw.shape, dtype=xp.float32)
    _formula("gate_formula", -(-raw.size // THREADS), each, 0, (raw, A_log, bias, None, g, None, None), made=(g,))
    return g


def log_decay_vjp(
    xp: Any, raw: Array, A_log: Array, bias: Array | None, dg: Array, each: int
) -> tuple[Array, Array, Array]:
    """Gradients by raw, A_log and bias, in float32 and one after the other in the order of the tokens."""
    raw, A_log, bias = _dense(xp, raw, A_log, bias)
    width = each * A_log.shape[0]
    tokens, dg, da = raw.size // width, xp.ascontiguousarray(dg), xp.empty(raw.shape, dtype=xp.float32)
    strip = -(-tokens // STRIPS)
    parts = xp.empty((-(-tokens // strip), 2, width), dtype=xp.float32)
    arrays = (raw, A_log, bias, dg, None, da, parts)
    _formula("gate_formula_vjp", len(parts) * -(-width // THREADS), each, strip, arrays)
    dbias, product = xp.sum(parts, axis=0)
    return da, xp.sum(xp.reshape(product, (-1, each)), axis=-1), dbias


def _dense(xp: Any, raw: Array, *parameters: Array | None) -> list[Array | None]:
    return [xp.ascontiguousarray(raw),
            *(None if y is None else xp.ascontiguousarray(cast(xp, y, xp.float32)) for y in parameters)]  # fmt: skip


def _formula(
    entry: str, blocks: int, each: int, strip: int, arrays: tuple[Array, ...], made: tuple[Array, ...] = ()
) -> None:
    raw, A_log, *_ = arrays
    width = each * A_log.shape[0]
    packed = struct.pack("<8q4I", *(0 if y is None else y.data.ptr for y in arrays), raw.size // width, width, each,
                         strip, 0)
    launch.launch(GATE, entry, (("LA_DTYPE", ELEMENTS[dtype_name(raw)]),), blocks, THREADS, 0, packed,
                  tuple(y for y in arrays if y is not None), made)
