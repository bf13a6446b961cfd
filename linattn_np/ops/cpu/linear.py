"""Rows times weight matrices in compiled loops: y_n = x W_n + b_n of one x, and the transpose.

NEAR rows at a time are multiplied with DEEP rows of a strip of W, which stay in the caches. The strips of a large W
are copied first, one after the other: where they lie each of their rows is a page. An element of y and of dx is one
chain of fused multiply-adds, whatever the number of rows and the place of its row. In BLAS it is not: of a float32
product on AVX2 every second six rows are summed in another order. dW is a sum of chains of NEAR rows each.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numba import types

from ...runtime.pieces.memory import empty, working
from ...runtime.pieces.piece import Matrix, Whole, piece, workspace_kind
from ...runtime.pieces.registers import LINE
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.vectors import BYTES, I64, LANES, ROWS, Array, Builder, Value, emitted, vectors, word
from ...runtime.pieces.views import columns, prefetch_line, row, rows, start_of, transposed
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import PythonWorkspace, Workspace, array_at
from .elementwise import copy
from .formulas import dense
from .products import FULL, product, transpose

MOST_BYTES = 2**18  # of a small weight matrix
MOST = 8  # weight matrices of a kernel
NEAR = 64  # rows that are multiplied at a time
DEEP = 256  # numbers of each that are multiplied at a time: a strip of W stays in the first cache
SPAN = 1024  # columns of the result of a task
AHEAD = 2 * ROWS  # rows of y that are fetched before they are stored
HEIGHT = 32  # rows of a task of dW
NARROW = 128  # columns, up to which strips are not worth it
SMALL = 2**21  # multiplications, up to which one thread is enough
ALL = range(MOST)
FIELDS = {"W": ("K", "M"), "P": ("S", "strip"), "b": ("R", "M"), "y": ("R", "M")}  # P: strips of W, or of W^T
GIVEN = {"x": Field("R", "K")} | {
    f"{name}{n}": Field(*(f"{size}{n}" if size in "MS" else size for size in sizes))
    for name, sizes in FIELDS.items()
    for n in ALL
}
WHOLES = ("R", "K", "count", "adds", "spans", "strip", "packed", *(f"M{n}" for n in ALL))
LINEAR = Workspace("linear", WHOLES, (), (), {"given": GIVEN})
Work = workspace_kind(LINEAR)
WIDTH, W, P, BIAS, Y = (LINEAR.slots[name] for name in ("M0", "W0", "P0", "b0", "y0"))
NEXT = LINEAR.slots["W1"] - W  # from a matrix to that with the next number


@emitted(lambda w, n: int(w._table[WIDTH + n]), types.int64)
def width(b: Builder, w: Value, n: Value) -> Any:
    """M_n"""
    return b.load(word(b, w, b.add(n, I64(WIDTH))))


def _numbered(like: np.ndarray, w: PythonWorkspace, first: int, n: int, m: int, k: int) -> np.ndarray:
    at, step = (int(x) for x in w._table[first + NEXT * n :][:2])
    return array_at(at, like.dtype, (m, k), (step, like.itemsize)) if at else np.empty((0, 0), like.dtype)


@emitted(_numbered, lambda like, *_: types.Array(like.dtype, 2, "A"))
def numbered(b: Builder, like: Array, w: Value, first: Value, n: Value, m: Value, k: Value) -> Any:
    """Matrix n (m, k) of the fields from `first` on; without rows if it is not given."""
    at, step = (b.load(word(b, w, b.add(b.add(first, b.mul(n, I64(NEXT))), I64(i)))) for i in (0, 1))
    return at, [b.select(b.icmp_signed("==", at, I64(0)), at, m), k], [step, I64(like.size)]


@piece
def forward(w: Work, first: Whole, last: Whole):
    """y_n = x W_n + b_n of NEAR rows and SPAN columns, for every n."""
    for task in range(first, last):
        at, begin = task // w.spans * NEAR, task % w.spans * SPAN
        m = min(NEAR, w.R - at)
        x = rows(w.x, at, m)
        for n in range(w.count):
            M = width(w, n)
            wide, y = max(min(SPAN, M - begin), 0), rows(numbered(w.x, w, Y, n, w.R, M), at, m)
            apart, left = w.K * w.packed, 0 if w.packed else begin
            across = w.strip if w.packed else M
            own = numbered(w.x, w, P if w.packed else W, n, -(-M // w.strip) * w.K if w.packed else w.K, across)
            for k in range(0, w.K, DEEP):
                before, top = numbered(w.x, w, Y if k else BIAS, n, w.R, M), begin // w.strip * apart + k
                added, deep = rows(before, at, m if len(before) else 0), min(DEEP, w.K - k)
                multiply(columns(x, k, deep), columns(rows(own, top, len(own) - top), left, across - left), apart,
                         columns(y, begin, wide), columns(added, begin, wide))  # fmt: skip


@piece
def backward(w: Work, first: Whole, last: Whole):
    """x = sum_n y_n W_n^T of NEAR rows and SPAN columns; adds: and what x was."""
    for task in range(first, last):
        at, begin = task // w.spans * NEAR, task % w.spans * SPAN
        m, wide = min(NEAR, w.R - at), min(SPAN, w.K - begin)
        x = columns(rows(w.x, at, m), begin, wide)
        for n in range(w.count):
            M = width(w, n)
            y, count = rows(numbered(w.x, w, Y, n, w.R, M), at, m), -(-w.K // w.strip) * M
            own = numbered(w.x, w, P, n, count, w.strip)
            for k in range(0, M, DEEP):
                before, top = rows(x, 0, m if n or k or w.adds else 0), begin // w.strip * M + k
                in_strips(columns(y, k, min(DEEP, M - k)), rows(own, top, count - top), M, x, before)


@piece
def multiply(x: Matrix, W: Matrix, apart: Whole, y: Matrix, added: Matrix):
    """y = x W + added of NEAR rows or fewer.   apart: rows of W from strip to strip, 0: its strips lie side by side."""
    if apart or (len(x) == NEAR and y.shape[1] > NARROW):
        in_strips(x, W, apart, y, added)
    else:
        product(FULL, x, W, y, added=added)


@piece
def in_strips(x: Matrix, W: Matrix, apart: Whole, y: Matrix, added: Matrix):
    """The same, one strip of columns after the other, while the tiles to come are fetched.

    A tile stores one or two lines of each of its rows, which the processor does not fetch ahead: they are far apart.
    """
    m, M, wide = len(x), y.shape[1], LANES * (BYTES // y.itemsize)
    is_apart = (
        start_of(y, 0) | start_of(y, min(1, m - 1))
    ) % LINE != 0  # rows that do not begin at a line reach into one more
    for j in range(0, M, wide):
        count = min(wide, M - j)
        own = columns(rows(W, j // wide * apart, x.shape[1]), 0 if apart else j, count)
        for i in range(0, m, ROWS):
            height, then = min(ROWS, m - i), i + AHEAD
            if then < m or j + wide < M:
                for r in range(height):
                    line = start_of(y, (then + r) % m) + (j + (then + r) // m * wide) * y.itemsize
                    for part in range(0, LANES * BYTES, LINE):
                        prefetch_line(line + part)
                    if is_apart:
                        prefetch_line(line + LANES * BYTES)
            product(FULL, rows(x, i, height), own, columns(rows(y, i, height), j, count),
                    added=columns(rows(added, i, height if len(added) else 0), j, count))  # fmt: skip


@piece
def copies(w: Work, first: Whole, last: Whole):
    """P_n, the strips of W_n: a strip of every n is a task."""
    for task in range(first, last):
        for n in range(w.count):
            M, j = width(w, n), task * w.strip
            count = max(min(w.strip, M - j), 0)
            own = numbered(w.x, w, W, n, w.K, M)
            out = numbered(w.x, w, P, n, w.K * -(-M // w.strip), w.strip)
            for k in range(w.K if count else 0):
                copy(row(columns(own, j, count), k), row(columns(out, 0, count), task * w.K + k))


@piece
def transposes(w: Work, first: Whole, last: Whole):
    """P_n, the strips of W_n^T: a strip of every n is a task."""
    for task in range(first, last):
        for n in range(w.count):
            M, j = width(w, n), task * w.strip
            out = numbered(w.x, w, P, n, M * -(-w.K // w.strip), w.strip)
            transpose(rows(numbered(w.x, w, W, n, w.K, M), j, min(w.strip, w.K - j)), rows(out, task * M, M))


@piece
def blocks(w: Work, n: Whole) -> Whole:
    """The tasks of dW_n: HEIGHT of its rows and NEAR of its columns each."""
    return -(-w.K // HEIGHT) * -(-width(w, n) // NEAR)


@piece
def gradients(w: Work, first: Whole, last: Whole):
    """W_n = x^T y_n, sums of NEAR rows at a time."""
    for task in range(first, last):
        n, own = 0, task
        while own >= blocks(w, n):
            own -= blocks(w, n)
            n += 1
        M = width(w, n)
        across = -(-M // NEAR)
        i, j = own // across * HEIGHT, own % across * NEAR
        height, wide = min(HEIGHT, w.K - i), min(NEAR, M - j)
        out = columns(rows(numbered(w.x, w, W, n, w.K, M), i, height), j, wide)
        dy = columns(numbered(w.x, w, Y, n, w.R, M), j, wide)
        for at in range(0, w.R, NEAR):
            m = min(NEAR, w.R - at)
            x = columns(rows(w.x, at, m), i, height)
            product(FULL, transposed(x), rows(dy, at, m), out, added=rows(out, 0, height if at else 0))


# Python


def takes(*arrays: Any) -> bool:
    """Whether these loops multiply NumPy rows (..., K), the first array, with all others (K, M)."""
    x = arrays[0]
    return vectors() != "plain" and all(
        type(y) is np.ndarray and y.dtype == x.dtype and y.dtype.char in "fd" and y.dtype.isnative and y.flags.aligned
        and y.size for y in arrays)  # fmt: skip


def are_small(*Ws: np.ndarray) -> bool:
    """Whether weights stay in the second cache, and have few pages."""
    return all(W.nbytes <= MOST_BYTES for W in Ws)


def all_times(x: np.ndarray, Ws: Sequence[np.ndarray], biases: Sequence[Any] = ()) -> list[np.ndarray]:
    """x W_n + b_n (..., M_n) for every n; biases: none, or an array (M_n,) or None for every n."""
    ys = [empty((*x.shape[:-1], W.shape[1]), x.dtype) for W in Ws]
    for part in _parts(ys):
        given = {"W": Ws[part], "b": biases[part], "y": ys[part]}
        if prod(x.shape[:-1]) >= 2 * NEAR and not are_small(*Ws[part]):
            given["P"] = [_strips(*W.shape, x.dtype) for W in Ws[part]]
            _run(copies, x, {"W": Ws[part], "P": given["P"]})
        _run(forward, x, given)
    return ys


def all_rows_vjp(Ws: Sequence[np.ndarray], dys: Sequence[np.ndarray]) -> np.ndarray:
    """dx = sum_n dy_n W_n^T"""
    dx = empty((*dys[0].shape[:-1], len(Ws[0])), Ws[0].dtype)
    for part in _parts(dys):
        Ps = [_strips(*W.shape[::-1], dx.dtype) for W in Ws[part]]
        _run(transposes, dx, {"W": Ws[part], "P": Ps})
        _run(backward, dx, {"P": Ps, "y": dys[part]}, part.start > 0)
    return dx


def all_weights_vjp(x: np.ndarray, dys: Sequence[np.ndarray]) -> list[np.ndarray]:
    """dW_n = x^T dy_n for every n."""
    dWs = [empty((x.shape[-1], dy.shape[-1]), x.dtype) for dy in dys]
    for part in _parts(dys):
        _run(gradients, x, {"W": dWs[part], "y": dys[part]})
    return dWs


def _strips(K: int, M: int, dtype: np.dtype) -> np.ndarray:
    """Memory of the strips of a matrix (K, M)."""
    strip = LANES * (BYTES // dtype.itemsize)
    return working((-(-M // strip) * K, strip), dtype)


def _parts(ys: Sequence[Any]) -> list[slice]:
    return [slice(n, n + MOST) for n in range(0, len(ys), MOST)]


def _run(kernel: Any, x: np.ndarray, given: dict[str, Sequence[Any]], adds: bool = False) -> None:
    """A kernel on x (..., K) and matrices by the names of FIELDS, biases (M,); adds: see `backward`."""
    K, R = x.shape[-1], prod(x.shape[:-1])
    Ms = [y.shape[-1] for y in given["y" if "y" in given else "W"]]
    strip = LANES * (BYTES // x.itemsize)
    values: dict[str, Any] = {f"M{n}": M for n, M in enumerate(Ms)}
    values |= {"R": R, "K": K, "count": len(Ms), "adds": int(adds), "x": dense(x, x.dtype).reshape(R, K)}
    for name, each in given.items():
        for n, y in enumerate(each):
            if y is not None:
                own = dense(y, x.dtype)
                values[f"{name}{n}"] = (
                    np.broadcast_to(own, (R, Ms[n])) if name == "b" else own.reshape(-1, own.shape[-1])
                )
    spans = -(-(K if kernel is backward else max(Ms)) // SPAN)
    values |= {"spans": spans, "strip": strip, "packed": int("P" in given)}
    values |= {f"S{n}": len(P) for n, P in enumerate(given.get("P", ()))}
    tasks = {
        forward: -(-R // NEAR) * spans,
        backward: -(-R // NEAR) * spans,
        copies: -(-max(Ms) // strip),
        transposes: -(-K // strip),
        gradients: -(-K // HEIGHT) * sum(-(-M // NEAR) for M in Ms),
    }
    is_small = (1 if kernel in (copies, transposes) else R) * K * sum(Ms) <= SMALL
    over_matrices(kernel, LINEAR, values, tasks[kernel], x.dtype.name, is_small)
