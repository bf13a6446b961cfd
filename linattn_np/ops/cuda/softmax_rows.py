"""The softmax of rows of CuPy arrays, losses of rows of logits, and their gradients (cuda_src/nn/softmax.cu)."""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.arrays import Array
from ...runtime.cuda import record
from .arguments import SOFTMAX, address
from .row_arrays import (
    BLOCK,
    LARGE,
    dense,
    grid_of,
    is_narrow,
    kind_of,
    launched,
    rows_of,
    strided,
    strides_of,
    working_dtype,
)

SOURCE = "nn/softmax.cu"
SUMS = "loss_sums"  # an entry of one block


def softmax(x: Array) -> Array:
    """y of rows (..., D)."""
    y = record.empty(tuple(x.shape), x.dtype)
    _launch("softmax", x, None, y)
    return y


def softmax_vjp(x: Array, dy: Array) -> Array:
    """dx of rows (..., D), in the dtype of x."""
    dx = record.empty(tuple(x.shape), x.dtype)
    _launch("softmax_vjp", x, dy, dx)
    return dx


class Losses(NamedTuple):
    """Of rows (R, D), in the dtype of the computation: (R,), and log sum e^x (R,) of each."""

    loss: Array
    lse: Array


def cross_entropy(x: Array, labels: Array, smoothing: float, z: float, ignored: int) -> Losses:
    """Of rows (R, D), labels int64 (R,): the loss is 0 of a label `ignored`, NaN of one that is no column."""
    labels, wide = dense(labels), working_dtype(x)
    found = Losses(record.empty((x.shape[0],), wide), record.empty((x.shape[0],), wide))
    _launch("cross_entropy", x, None, None, labels, *found, smoothing, z, ignored)
    return found


class Sums(NamedTuple):
    """Of losses: (), in the dtype of the computation. number: how many rows have one, at least 1."""

    total: Array
    mean: Array
    number: Array


def loss_sums(x: Array, labels: Array, loss: Array, ignored: int) -> Sums:
    """Sums of losses (R,)."""
    sums = record.empty((3,), working_dtype(x))
    _launch("loss_sums", x, None, sums, dense(labels), loss, ignored=ignored)
    return Sums(*(sums[n : n + 1].reshape(()) for n in range(3)))


def cross_entropy_vjp(
    x: Array,
    labels: Array,
    smoothing: float,
    z: float,
    ignored: int,
    d: Array,
    lse: Array | None = None,
    number: Array | None = None,
) -> Array:
    """dx (R, D) in the dtype of x; d (R,), or () for all, in the dtype of the computation, is divided by `number`.

    lse: that of the forward.
    """
    dx = record.empty(tuple(x.shape), x.dtype)
    _launch("cross_entropy_vjp", x, None, dx, dense(labels), dense(d), lse, smoothing, z, ignored, number)
    return dx


def _launch(
    entry: str,
    x: Array,
    dy: Array | None,
    y: Array | None,
    labels: Array | None = None,
    loss: Array | None = None,
    lse: Array | None = None,
    smoothing: float = 0.0,
    z: float = 0.0,
    ignored: int = 0,
    number: Array | None = None,
) -> None:
    D = x.shape[-1]
    inner, (x, dy) = strided(D, x, dy)
    grid, rows = grid_of(D, x, dy), rows_of(x, D)
    if (lse is not None or loss is not None) and grid.lanes > BLOCK:  # one pass: rows need not be held
        grid = grid._replace(lanes=BLOCK)
    constants: dict[str, int] = {
        "LA_D": D, "LA_PER": grid.per, "LA_LANES": grid.lanes, "LA_DOUBLE": int(working_dtype(x, dy).itemsize == 8),
        "LA_DTYPE": kind_of(x), "LA_GRAD": kind_of(x if dy is None else dy),
        "LA_NARROW": int(is_narrow(x, None if entry == SUMS else y)), "LA_SMOOTH": int(smoothing != 0),
        "LA_SAVED": int(entry == "cross_entropy_vjp" and lse is not None),
    }  # fmt: skip
    packed = SOFTMAX.pack(x=strides_of(x, D, inner), dy=strides_of(dy, D, inner), y=address(y), labels=address(labels),
                          loss=address(loss), lse=address(lse), number=address(number), ignored=ignored,
                          smoothing=smoothing, z=z, rows=rows, inner=inner,
                          each=int(loss is not None and loss.ndim))  # fmt: skip
    blocks, threads = (1, LARGE) if entry == SUMS else (-(-rows // grid.beside), grid.threads)
    launched(SOURCE, entry, constants, blocks, threads, packed, x, dy, y, labels, loss, lse, number)
