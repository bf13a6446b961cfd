"""Rows times weight matrices in compiled loops: y_n = x W_n + b_n of one x, and the transpose.

A few rows at a time are multiplied with weights that stay in the second cache, where they lie. An element of y and of
dx is one chain of fused multiply-adds, whatever the number of rows; dW is a sum of chains of NEAR rows each.
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
from ...runtime.pieces.views import columns, prefetch_line, rows, start_of, transposed
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import PythonWorkspace, Workspace, array_at
from .formulas import dense
from .products import FULL, product, transpose

MOST_BYTES = 2**18  # of a weight matrix: a quarter of a second cache
MOST = 8  # weight matrices of a kernel
NEAR = 64  # rows that are multiplied at a time: they stay in the first cache
AHEAD = 2 * ROWS  # rows of y that are fetched before they are stored
HEIGHT = 32  # rows of a task of dW
WIDE = 128  # columns of dx, from which it is computed in strips
SMALL = 2**21  # multiplications, up to which one thread is enough
ALL = range(MOST)
FIELDS = {"W": ("K", "M"), "T": ("M", "K"), "b": ("R", "M"), "y": ("R", "M")}  # T: W transposed
GIVEN = {"x": Field("R", "K")} | {
    f"{name}{n}": Field(*(f"M{n}" if size == "M" else size for size in sizes))
    for name, sizes in FIELDS.items()
    for n in ALL
}
LINEAR = Workspace("linear", ("R", "K", "count", "adds", *(f"M{n}" for n in ALL)), (), (), {"given": GIVEN})
Work = workspace_kind(LINEAR)
WIDTH, W, T, BIAS, Y = (LINEAR.slots[name] for name in ("M0", "W0", "T0", "b0", "y0"))
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
    """y_n = x W_n + b_n of NEAR rows, for every n."""
    for task in range(first, last):
        at, m = task * NEAR, min(NEAR, w.R - task * NEAR)
        x = rows(w.x, at, m)
        for n in range(w.count):
            M = width(w, n)
            bias, y = numbered(w.x, w, BIAS, n, w.R, M), numbered(w.x, w, Y, n, w.R, M)
            added, own = rows(bias, at, m if len(bias) else 0), numbered(w.x, w, W, n, w.K, M)
            if m == NEAR:
                in_strips(x, own, rows(y, at, m), added)
            else:
                product(FULL, x, own, rows(y, at, m), added=added)


@piece
def in_strips(x: Matrix, W: Matrix, y: Matrix, added: Matrix):
    """y = x W + added of NEAR rows, one strip of columns after the other, while the tiles to come are fetched.

    A tile stores one or two lines of each of its rows, which the processor does not fetch ahead: they are far apart.
    """
    M, wide = y.shape[1], LANES * (BYTES // y.itemsize)
    is_apart = (start_of(y, 0) | start_of(y, 1)) % LINE != 0  # rows that do not begin at a line reach into one more
    for j in range(0, M, wide):
        count = min(wide, M - j)
        for i in range(0, NEAR, ROWS):
            then = i + AHEAD
            for r in range(ROWS):
                line = start_of(y, then % NEAR + r) + (j + then // NEAR * wide) * y.itemsize
                for part in range(0, LANES * BYTES, LINE):
                    prefetch_line(line + part)
                if is_apart:
                    prefetch_line(line + LANES * BYTES)
            product(FULL, rows(x, i, ROWS), columns(W, j, count), columns(rows(y, i, ROWS), j, count),
                    added=columns(rows(added, i, ROWS if len(added) else 0), j, count))  # fmt: skip


@piece
def transposes(w: Work, first: Whole, last: Whole):
    """T_n = W_n^T"""
    for n in range(first, last):
        M = width(w, n)
        transpose(numbered(w.x, w, W, n, w.K, M), numbered(w.x, w, T, n, M, w.K))


@piece
def backward(w: Work, first: Whole, last: Whole):
    """x = sum_n y_n T_n of NEAR rows; adds: and what x was."""
    for task in range(first, last):
        at, m = task * NEAR, min(NEAR, w.R - task * NEAR)
        x = rows(w.x, at, m)
        for n in range(w.count):
            M = width(w, n)
            y = rows(numbered(w.x, w, Y, n, w.R, M), at, m)
            before = rows(x, 0, m if n or w.adds else 0)
            if m == NEAR and w.K > WIDE:
                in_strips(y, numbered(w.x, w, T, n, M, w.K), x, before)
            else:
                product(FULL, y, numbered(w.x, w, T, n, M, w.K), x, added=before)


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
    x, *Ws = arrays
    return all(
        type(y) is np.ndarray and y.dtype == x.dtype and y.dtype.char in "fd" and y.dtype.isnative and y.flags.aligned
        and y.size for y in arrays) and all(fits(W.size, W.itemsize) for W in Ws)  # fmt: skip


def fits(count: int, item: int) -> bool:
    """Whether a weight matrix of so many numbers stays in the second cache; without vector registers BLAS is faster."""
    return count * item <= MOST_BYTES and vectors() != "plain"


def all_times(x: np.ndarray, Ws: Sequence[np.ndarray], biases: Sequence[Any] = ()) -> list[np.ndarray]:
    """x W_n + b_n (..., M_n) for every n; biases: none, or an array (M_n,) or None for every n."""
    ys = [empty((*x.shape[:-1], W.shape[1]), x.dtype) for W in Ws]
    for part in _parts(ys):
        _run(forward, x, {"W": Ws[part], "b": biases[part], "y": ys[part]})
    return ys


def all_times_vjp(
    x: np.ndarray, Ws: Sequence[np.ndarray], dys: Sequence[np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """(dx, every dW_n)"""
    dx, dWs, dys = empty(x.shape, x.dtype), [empty(W.shape, x.dtype) for W in Ws], [dense(d, x.dtype) for d in dys]
    for part in _parts(dys):
        Ts = [working(W.shape[::-1], x.dtype) for W in Ws[part]]
        _run(transposes, x, {"W": Ws[part], "T": Ts})
        _run(backward, dx, {"T": Ts, "y": dys[part]}, part.start > 0)
        _run(gradients, x, {"W": dWs[part], "y": dys[part]})
    return dx, dWs


def _parts(ys: Sequence[Any]) -> list[slice]:
    return [slice(n, n + MOST) for n in range(0, len(ys), MOST)]


def _run(kernel: Any, x: np.ndarray, given: dict[str, Sequence[Any]], adds: bool = False) -> None:
    """A kernel on x (..., K) and matrices by the names of FIELDS, biases (M,); adds: see `backward`."""
    K, R = x.shape[-1], prod(x.shape[:-1])
    Ms = [y.shape[-1] for y in given["y"]] if "y" in given else [T.shape[0] for T in given["T"]]
    values: dict[str, Any] = {f"M{n}": M for n, M in enumerate(Ms)}
    values |= {"R": R, "K": K, "count": len(Ms), "adds": int(adds), "x": dense(x, x.dtype).reshape(R, K)}
    for name, each in given.items():
        for n, y in enumerate(each):
            if y is not None:
                own = dense(y, x.dtype)
                values[f"{name}{n}"] = (
                    np.broadcast_to(own, (R, Ms[n])) if name == "b" else own.reshape(-1, own.shape[-1])
                )
    tasks = {
        forward: -(-R // NEAR),
        backward: -(-R // NEAR),
        transposes: len(Ms),
        gradients: -(-K // HEIGHT) * sum(-(-M // NEAR) for M in Ms),
    }
    is_small = kernel is transposes or R * K * sum(Ms) <= SMALL
    over_matrices(kernel, LINEAR, values, tasks[kernel], x.dtype.name, is_small)
