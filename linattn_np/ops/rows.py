"""Rows times a weight matrix, with bits that do not depend on the number of rows."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..runtime import blas, threads
from ..runtime.arrays import Array, Namespace, add_to, device, is_cupy, is_numpy, transposed_rows
from ..runtime.recorder import refuse
from .host import has_compiler, kernels

PRODUCT_ROWS = 8  # of BLAS: the order of its sums depends on the shape, and in taller products on a row's place
DEVICE_ROWS = 256  # of cuBLAS
PRODUCT_COLUMNS = 64  # of x in one product of a gradient
FEW_COLUMNS = 4 * PRODUCT_COLUMNS  # up to which its rows are cut into parts
SUMMED_ROWS, SUMMED_PARTS = 512, 8  # least rows of a part, most parts
UNBLOCKED_ROWS = 128  # a multiple of PRODUCT_ROWS; up to this many rows are computed at once, without threads
TEMPORARY_ELEMENTS = 2**17  # of one temporary of a block: 512 KiB of float32 stay in cache
THREADED_PRODUCTS = 2**21  # of numbers, from which threads are worth starting
THREADED_ELEMENTS = 2**18  # of a result, from which threads are worth starting


def times(xp: Namespace, x: Array, W: Array, bias: Array | None = None, compiled: bool = True,
          dtype: Any = None) -> Array:  # fmt: skip
    """x W + bias for every row: (..., K), (K, M) and (M,) to (..., M), in `dtype`, None: theirs.

    NumPy arrays by compiled loops, else by BLAS, PRODUCT_ROWS at a time; CuPy arrays by cuBLAS, DEVICE_ROWS at a time.
    """
    if compiled and (loops := _loops(x, W)) is not None and (bias is None or loops.takes(x, W, bias[None])):
        return loops.all_times(x, [W], [bias])[0]
    y = _by_cublas(xp, x, W, dtype) if is_cupy(xp) else _by_blas(xp, x, W)
    return y if bias is None else y + bias


def _loops(*arrays: Array) -> Any:
    """The compiled loops, if they multiply rows, the first array, with all others; None if they do not."""
    if type(arrays[0]) is not np.ndarray or not has_compiler():
        return None
    from .cpu import linear

    return linear if linear.takes(*arrays) else None


def _by_blas(xp: Namespace, x: Array, W: Array) -> Array:
    refuse("BLAS computes products")
    if not is_numpy(xp):
        return x @ W
    (*lead, K), M, rows = x.shape, W.shape[-1], math.prod(x.shape[:-1])
    more = -rows % PRODUCT_ROWS
    whole = np.concatenate([np.reshape(x, (rows, K)), np.zeros((more, K), x.dtype)])
    with blas.one_thread():
        y = np.matmul(whole.reshape((rows + more) // PRODUCT_ROWS, PRODUCT_ROWS, K), W)
    return y.reshape(rows + more, M)[:rows].reshape(*lead, M)


def _by_cublas(xp: Namespace, x: Array, W: Array, dtype: Any = None, to: Array | None = None) -> Array:
    """x W of CuPy arrays in `dtype`, added to dense `to` if it is given."""
    refuse("BLAS computes products")
    (*lead, K), M = x.shape, W.shape[-1]
    rows = math.prod(lead)
    blocks, more = -(-rows // DEVICE_ROWS), -rows % DEVICE_ROWS
    flat = xp.reshape(x, (rows, K))
    if more:
        flat = xp.concat([flat, xp.zeros((more, K), dtype=x.dtype, device=device(x))], axis=0)
    flat = xp.reshape(flat, (blocks, DEVICE_ROWS, K))
    if to is not None and not more:
        matrix_product(xp, flat, W, dtype, xp.reshape(to, (blocks, DEVICE_ROWS, M)))
        return to
    y = matrix_product(xp, flat, W, dtype)
    y = xp.reshape(xp.reshape(y, (blocks * DEVICE_ROWS, M))[:rows, :], (*lead, M))
    return y if to is None else add_to(to, y)


def matrix_product(xp: Namespace, x: Array, W: Array, dtype: Any = None, to: Array | None = None) -> Array:
    """x W of matrices (..., R, K) and (..., K, M); of CuPy arrays one that a CUDA graph may capture.

    Of these `dtype` is that of the result, and `to` is what it is added to.
    """
    if not is_cupy(xp):
        return x @ W
    if not x.size or not W.size:  # sums of no terms
        shape = (*np.broadcast_shapes(x.shape[:-2], W.shape[:-2]), x.shape[-2], W.shape[-1])
        return xp.zeros(shape, dtype=dtype or x.dtype, device=device(x)) if to is None else to
    from ..runtime.cuda.products import product

    return product(x, W, dtype, to)


def _shared(work: Callable[[int, int], None], tasks: int, products: int) -> None:
    """work(first, last) of all tasks, by our threads if there are many products.

    BLAS has one thread: its own would wait for each other longer than a product of a few rows takes.
    """
    count = threads.num_threads() if products >= THREADED_PRODUCTS else 1
    with blas.one_thread():
        if count > 1:
            threads.run(work, tasks, count)
        else:
            work(0, tasks)


def all_times(xp: Namespace, x: Array, Ws: Sequence[Array], biases: Sequence[Any]) -> list[Array]:
    """x W_n + b_n of every n, of rows (..., K) of NumPy or CuPy, of one dtype: the bits of `times`; None: no bias."""
    if not is_cupy(xp) and (loops := _loops(x, *Ws, *(b[None] for b in biases if b is not None))) is not None:
        return loops.all_times(x, Ws, biases)
    return [times(xp, x, W, b) for W, b in zip(Ws, biases, strict=True)]


def all_times_vjp(xp: Namespace, x: Array, Ws: Sequence[Array], dys: Sequence[Array]) -> tuple[Array, list[Array]]:
    """(dx, every dW)."""
    if is_cupy(xp):
        dx = None
        for W, dy in zip(Ws, dys, strict=True):
            dx = _by_cublas(xp, dy, xp.matrix_transpose(W), to=dx)
        return dx, [_row_sums(xp, x, dy) for dy in dys]
    if (loops := _loops(x, *Ws)) is not None:
        dys = [loops.dense(dy, x.dtype) for dy in dys]
        return loops.all_rows_vjp(Ws, dys), _weights_vjp(loops, x, Ws, dys)
    dxs = [_by_blas(xp, dy, W.T) for W, dy in zip(Ws, dys, strict=True)]
    return functools.reduce(operator.add, dxs), _summed(x, *dys)


def _weights_vjp(loops: Any, x: np.ndarray, Ws: Sequence[np.ndarray], dys: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Every dW, of large ones by BLAS: the order of these sums need not be that of fewer rows."""
    return loops.all_weights_vjp(x, dys) if loops.are_small(*Ws) else _summed(x, *dys)


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


def times_vjp(xp: Namespace, x: Array, W: Array, dy: Array, compiled: bool = True,
              dtype: Any = None) -> tuple[Array, Array]:  # fmt: skip
    """(dx, dW), dW in `dtype`, None: theirs.   dx = dy W^T, dW = sum over rows of x^T dy."""
    if compiled and dy.dtype == x.dtype and (loops := _loops(x, W)) is not None:
        return loops.all_rows_vjp([W], [dy]), _weights_vjp(loops, x, [W], [dy])[0]
    back = _by_cublas if is_cupy(xp) else _by_blas
    return back(xp, dy, transposed_rows(xp, W)), _row_sums(xp, x, dy, dtype)


def _row_sums(xp: Namespace, x: Array, dy: Array, dtype: Any = None) -> Array:
    """x^T dy, the sum over all rows."""
    lead = math.prod(x.shape[:-1])
    if is_numpy(xp):
        return _summed(x, dy)[0]
    flat_x, flat_y = xp.reshape(x, (lead, x.shape[-1])), xp.reshape(dy, (lead, dy.shape[-1]))
    return matrix_product(xp, xp.matrix_transpose(flat_x), flat_y, dtype)


def _summed(x: np.ndarray, *dys: np.ndarray) -> list[np.ndarray]:
    """x^T dy, by a few columns of x, of few by parts of the rows: the same bits on any number of threads."""
    refuse("BLAS computes products")
    R, K = math.prod(x.shape[:-1]), x.shape[-1]
    x, dys = x.reshape(R, K), tuple(dy.reshape(R, dy.shape[-1]) for dy in dys)
    parts = min(max(R // SUMMED_ROWS, 1), SUMMED_PARTS) if K <= FEW_COLUMNS else 1
    each, width = -(-R // parts), min(PRODUCT_COLUMNS, max(K, 1))
    sums = [np.empty((parts, K, dy.shape[-1]), np.result_type(x, dy)) for dy in dys]
    tasks = [(part, block, n) for part in range(parts) for block in range(-(-K // width)) for n in range(len(dys))]

    def work(first: int, last: int) -> None:
        for part, block, n in tasks[first:last]:
            rows, columns = slice(part * each, (part + 1) * each), slice(block * width, (block + 1) * width)
            np.matmul(x[rows, columns].T, dys[n][rows], out=sums[n][part, columns])

    _shared(work, len(tasks), x.size * sum(dy.shape[-1] for dy in dys))
    return [y[0] if parts == 1 else y.sum(axis=0) for y in sums]


def interleaved(xp: Namespace, x: Array, n: int, at: int) -> Array:
    """(..., T n, heads, D) with x (..., T, heads, D) at place `at` of each token's n, and zeros at the others."""
    *lead, T, heads, D = x.shape
    if (cpu := kernels(xp, x)) is not None:
        return cpu.interleaved(x, n, at).reshape((*lead, T * n, heads, D))
    none = xp.zeros_like(x)
    each = [x if i == at else none for i in range(n)]
    return xp.reshape(xp.stack(each, axis=-3), (*lead, T * n, heads, D))
