"""Rows times a weight matrix, with bits that do not depend on the number of rows."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable

import numpy as np

from ..runtime import blas, threads
from ..runtime.arrays import Array, Namespace, device, is_cupy, is_numpy, transposed_rows
from .host import kernels

PRODUCT_ROWS = 64  # rows of one product: the summation order of BLAS depends on the shape
PRODUCT_COLUMNS = 64  # of x in one product of a gradient
UNBLOCKED_ROWS = 128  # a multiple of PRODUCT_ROWS; up to this many rows are computed at once, without threads
TEMPORARY_ELEMENTS = 2**17  # of one temporary of a block: 512 KiB of float32 stay in cache
THREADED_PRODUCTS = 2**21  # of numbers, from which threads are worth starting
THREADED_ELEMENTS = 2**18  # of a result, from which threads are worth starting


def times(xp: Namespace, x: Array, W: Array, out: np.ndarray | None = None) -> Array:
    """x W for every row: (..., K) and (K, M) to (..., M); for NumPy rows (R, K) optionally into `out`."""
    if not (is_numpy(xp) or is_cupy(xp)):
        return x @ W
    lead, K = tuple(x.shape[:-1]), x.shape[-1]
    rows = math.prod(lead)
    blocks = -(-rows // PRODUCT_ROWS)
    flat = xp.reshape(x, (rows, K))
    if out is not None:
        whole = rows - rows % PRODUCT_ROWS
        full = (rows // PRODUCT_ROWS, PRODUCT_ROWS)
        _products(flat[:whole].reshape(*full, K), W, out[:whole].reshape(*full, out.shape[-1]))
        if whole < rows:
            out[whole:] = times(xp, flat[whole:], W)
        return out
    if rows % PRODUCT_ROWS:
        flat = xp.concat([flat, xp.zeros((blocks * PRODUCT_ROWS - rows, K), dtype=x.dtype, device=device(x))], axis=0)
    flat = xp.reshape(flat, (blocks, PRODUCT_ROWS, K))
    if is_numpy(xp):
        out = np.empty((blocks, PRODUCT_ROWS, W.shape[-1]), np.result_type(x, W))
        _products(flat, W, out)
    else:
        out = flat @ W
    return xp.reshape(xp.reshape(out, (blocks * PRODUCT_ROWS, W.shape[-1]))[:rows, :], (*lead, W.shape[-1]))


def _products(blocks: np.ndarray, W: np.ndarray, out: np.ndarray) -> None:
    """out = blocks W, (n, R, K) and (K, M); where BLAS has one thread, ours share the blocks."""

    def work(first: int, last: int) -> None:
        np.matmul(blocks[first:last], W, out=out[first:last])

    _shared(work, len(blocks), blocks.size * W.shape[-1])


def _shared(work: Callable[[int, int], None], tasks: int, products: int) -> None:
    """work(first, last) of all tasks, on threads where BLAS has one and there are many products."""
    if blas.is_limited() and products >= THREADED_PRODUCTS and (count := threads.num_threads()) > 1:
        threads.run(work, tasks, count)
    else:
        work(0, tasks)


def in_blocks(f: Callable[..., Array], into: Callable[..., None] | None = None) -> Callable[..., Array]:
    """f, a function of rows, evaluated in blocks whose NumPy temporaries stay in the cache.

    Blocks are distributed over threads. The bits of a row depend on that row alone, if this holds for f.
    into(*arrays, out), if given, computes f into `out`.
    """

    def blocked(*arrays: Array) -> Array:
        first = arrays[0]
        rows = math.prod(first.shape[:-1])
        if type(first) is not np.ndarray:
            return f(*arrays)
        if rows <= UNBLOCKED_ROWS:
            return np.ascontiguousarray(f(*arrays))  # contiguous as in blocks: bits of products depend on strides
        flat = [np.reshape(x, (rows, x.shape[-1])) for x in arrays]
        result = f(*(x[:UNBLOCKED_ROWS] for x in flat))
        out = np.empty((rows, result.shape[-1]), result.dtype)
        out[:UNBLOCKED_ROWS] = result
        most = TEMPORARY_ELEMENTS // max(1, *(x.shape[-1] for x in (*arrays, result)))
        each = max(UNBLOCKED_ROWS, most // PRODUCT_ROWS * PRODUCT_ROWS)
        starts, context = range(UNBLOCKED_ROWS, rows, each), contextvars.copy_context()

        def work(first: int, last: int) -> None:
            for n in starts[first:last]:
                here, part = context.copy(), [x[n : n + each] for x in flat]
                if into is not None:
                    here.run(into, *part, out[n : n + each])
                else:
                    out[n : n + each] = here.run(f, *part)

        count = threads.num_threads() if out.size >= THREADED_ELEMENTS else 1
        with blas.one_thread() if count > 1 else contextlib.nullcontext():
            threads.run(work, len(starts), count)
        return out.reshape(*first.shape[:-1], out.shape[-1])

    return blocked


def times_vjp(xp: Namespace, x: Array, W: Array, dy: Array, out: np.ndarray | None = None) -> tuple[Array, Array]:
    """(dx, dW).   dx = dy W^T, for NumPy rows optionally into `out`, dW = sum over rows of x^T dy."""
    lead = math.prod(x.shape[:-1])
    flat_x, flat_y = xp.reshape(x, (lead, x.shape[-1])), xp.reshape(dy, (lead, dy.shape[-1]))
    dx = times(xp, dy if out is None else flat_y, transposed_rows(xp, W), out)
    return dx, _summed(flat_x, flat_y) if is_numpy(xp) else xp.matrix_transpose(flat_x) @ flat_y


def _summed(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """x^T dy, by a few columns of x: the same products on any number of threads."""
    K, each = x.shape[-1], PRODUCT_COLUMNS
    dW = np.empty((K, dy.shape[-1]), np.result_type(x, dy))

    def work(first: int, last: int) -> None:
        for n in range(first * each, min(last * each, K), each):
            np.matmul(x[:, n : n + each].T, dy, out=dW[n : n + each])

    _shared(work, -(-K // each), x.size * dy.shape[-1])
    return dW


def interleaved(xp: Namespace, x: Array, n: int, at: int) -> Array:
    """(..., T n, heads, D) with x (..., T, heads, D) at place `at` of each token's n, and zeros at the others."""
    *lead, T, heads, D = x.shape
    if (cpu := kernels(xp, x)) is not None:
        return cpu.interleaved(x, n, at).reshape((*lead, T * n, heads, D))
    none = xp.zeros_like(x)
    each = [x if i == at else none for i in range(n)]
    return xp.reshape(xp.stack(each, axis=-3), (*lead, T * n, heads, D))
