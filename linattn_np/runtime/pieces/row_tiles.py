"""Passes over rows in whole vectors: inner products, and what fades or is multiplied on the way.

Sums are one vector of partial sums, added in pairs: their bits depend on the number of terms alone. What each does
stands above it in Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from .vectors import BYTES, I64, Array, arrays, broadcast, emitted, fma, known, total


def _dot(x, y, n):  # type: ignore[no-untyped-def]
    return (x[:n] * y[:n]).sum(dtype=x.dtype) if n > 0 else x.dtype.type(0)


@emitted(_dot)
def dot(typing: Any, x: Any, y: Any, n: Any) -> Any:
    """x . y of the first n numbers: one vector of partial sums, added in pairs."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        X, Y, n = Array(context, b, x, values[0]), Array(context, b, y, values[1]), values[2]
        W = X.vector.count
        sums = cgutils.alloca_once_value(b, X.zero())
        whole = b.and_(n, I64(-W))

        def add(j: ir.Value, mask: Any) -> None:
            b.store(fma(b, X.load(X.at(j), 0, mask), Y.load(Y.at(j), 0, mask), b.load(sums)), sums)

        with cgutils.for_range_slice(b, I64(0), whole, I64(W), I64) as (j, _):
            add(j, None)
        with b.if_then(b.icmp_signed("<", whole, n)):
            add(whole, X.masks(n, whole, 1)[0])
        return total(b, b.load(sums))

    return x.dtype(x, y, types.int64), write


def _scaled_dot(f, x, h, y, n):  # type: ignore[no-untyped-def]
    return ((f * x[:n]) * (h * y[:n])).sum(dtype=x.dtype)


@emitted(_scaled_dot)
def scaled_dot(typing: Any, f: Any, x: Any, h: Any, y: Any, n: Any) -> Any:
    """(f x) . (h y) of the first n numbers."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        X, Y, n = Array(context, b, x, values[1]), Array(context, b, y, values[3]), values[4]
        by = [broadcast(b, values[i], X.vector) for i in (0, 2)]
        sums = cgutils.alloca_once_value(b, X.zero())
        with cgutils.for_range_slice(b, I64(0), n, I64(X.vector.count), I64) as (j, _):
            mask = X.masks(n, j, 1)[0]
            left, right = (b.fmul(g, A.load(A.at(j), 0, mask)) for g, A in zip(by, (X, Y), strict=True))
            b.store(fma(b, left, right, b.load(sums)), sums)
        return total(b, b.load(sums))

    return x.dtype(x.dtype, x, x.dtype, y, types.int64), write


def _sum_of(x, n):  # type: ignore[no-untyped-def]
    return x[:n].sum(dtype=x.dtype) if n > 0 else x.dtype.type(0)


@emitted(_sum_of)
def sum_of(typing: Any, x: Any, n: Any) -> Any:
    """The sum of the first n numbers: one vector of partial sums, added in pairs; reads whole vectors."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        X, n = Array(context, b, x, values[0]), values[1]
        sums = cgutils.alloca_once_value(b, X.zero())
        with cgutils.for_range_slice(b, I64(0), n, I64(X.vector.count), I64) as (j, _):
            b.store(b.fadd(b.load(sums), X.load(X.at(j), 0, X.masks(n, j, 1)[0])), sums)
        return total(b, b.load(sums))

    return x.dtype(x, types.int64), write


def _max_of(x, n):  # type: ignore[no-untyped-def]
    return np.fmax.reduce(x[:n], initial=-np.inf)


@emitted(_max_of)
def max_of(typing: Any, x: Any, n: Any) -> Any:
    """The largest of the first n numbers, -inf of none; a NaN may be passed over."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        X, n = Array(context, b, x, values[0]), values[1]
        low = ir.Constant(X.vector, [float("-inf")] * X.vector.count)
        most = cgutils.alloca_once_value(b, low)
        with cgutils.for_range_slice(b, I64(0), n, I64(X.vector.count), I64) as (j, _):
            mask = X.masks(n, j, 1)[0]
            y = b.select(mask, X.load(X.at(j), 0, mask), low)
            b.store(b.select(b.fcmp_ordered(">", y, b.load(most)), y, b.load(most)), most)
        bits = X.size * 8
        largest = known(b, f"llvm.vector.reduce.fmax.v{X.vector.count}f{bits}", X.number, [X.vector])
        return b.call(largest, [b.load(most)])

    return x.dtype(x, types.int64), write


def _dot_wide(x, y, n):  # type: ignore[no-untyped-def]
    return float(x[:n].astype(np.float64) @ y[:n].astype(np.float64))


@emitted(_dot_wide)
def dot_wide(typing: Any, x: Any, y: Any, n: Any) -> Any:
    """x . y of the first n numbers in float64: n a multiple of a vector."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        X, Y, n = Array(context, b, x, values[0]), Array(context, b, y, values[1]), values[2]
        half = BYTES // 8
        kind = ir.VectorType(ir.DoubleType(), half)
        sums = cgutils.alloca_once_value(b, ir.Constant(kind, [0.0] * half))
        vector = ir.VectorType(X.number, half)

        def load(A: Array, j: ir.Value) -> ir.Value:
            narrow = b.load(b.inttoptr(A.at(j), vector.as_pointer()), align=A.size)
            return narrow if X.size == 8 else b.fpext(narrow, kind)

        with cgutils.for_range_slice(b, I64(0), n, I64(half), I64) as (j, _):
            b.store(fma(b, load(X, j), load(Y, j), b.load(sums)), sums)
        return total(b, b.load(sums))

    return types.float64(x, y, types.int64), write


def _faded_dot(p, factors, x):  # type: ignore[no-untyped-def]
    p *= factors
    return (p * x).sum(dtype=x.dtype)


@emitted(_faded_dot)
def faded_dot(typing: Any, p: Any, factors: Any, x: Any) -> Any:
    """p <- p (.) factors; p . x: both in one pass over rows of whole vectors."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        P, G, X = (Array(context, b, kind, value) for kind, value in zip(signature.args, values, strict=True))
        sums = cgutils.alloca_once_value(b, X.zero())
        with cgutils.for_range_slice(b, I64(0), P.shape[0], I64(P.vector.count), I64) as (j, _):
            y = b.fmul(P.load(P.at(j)), G.load(G.at(j)))
            P.store(y, P.at(j))
            b.store(fma(b, y, X.load(X.at(j)), b.load(sums)), sums)
        return total(b, b.load(sums))

    return x.dtype(p, factors, x), write


def _monomial_tile(X, F, weights, segment, count):  # type: ignore[no-untyped-def]
    parent, channel, to = segment
    F[:, to : to + count] = F[:, parent, None] * (weights[to : to + count] * X[:, channel : channel + count])


@emitted(_monomial_tile)
def monomial_tile(typing: Any, X: Any, F: Any, weights: Any, segment: Any, count: Any) -> Any:
    """F_{i, to + j} = F_{i, parent} weights_{to + j} X_{i, channel + j} for all rows, whole vectors."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        x, f, weight = (Array(context, b, kind, v) for kind, v in zip(signature.args[:3], values[:3], strict=True))
        parent, channel, to = (b.extract_value(values[3], n) for n in range(3))
        with cgutils.for_range_slice(b, I64(0), values[4], I64(x.vector.count), I64) as (j, _):
            w = weight.load(weight.at(b.add(to, j)))
            with cgutils.for_range(b, x.shape[0]) as loop:
                i = loop.index
                y = b.fmul(w, x.load(x.at(i, b.add(channel, j))))
                f.store(b.fmul(f.broadcast(f.at(i, parent)), y), f.at(i, b.add(to, j)))
        return context.get_dummy_value()

    return types.void(X, F, weights, types.UniTuple(types.int64, 3), types.int64), write


def _monomial_vjp_tile(x, f, weights, d, dx, segment, count):  # type: ignore[no-untyped-def]
    parent, channel, to = segment
    y = d[to : to + count] * weights[to : to + count]
    dx[channel : channel + count] += f * y
    d[parent] += (y * x[channel : channel + count]).sum(dtype=x.dtype)


@emitted(_monomial_vjp_tile)
def monomial_vjp_tile(typing: Any, x: Any, f: Any, weights: Any, d: Any, dx: Any, segment: Any, count: Any) -> Any:
    """dx_{channel + j} += f y_j, d_parent += sum_j y_j x_{channel + j}, y_j = d_{to + j} weights_{to + j}."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        kinds = signature.args
        X, W, D, dX = (Array(context, b, kinds[n], values[n]) for n in (0, 2, 3, 4))
        parent, channel, to = (b.extract_value(values[5], n) for n in range(3))
        factor, sums = broadcast(b, values[1], X.vector), cgutils.alloca_once_value(b, X.zero())
        with cgutils.for_range_slice(b, I64(0), values[6], I64(X.vector.count), I64) as (j, _):
            here, at = b.add(channel, j), b.add(to, j)
            y = b.fmul(D.load(D.at(at)), W.load(W.at(at)))
            b.store(fma(b, y, X.load(X.at(here)), b.load(sums)), sums)
            dX.store(fma(b, factor, y, dX.load(dX.at(here))), dX.at(here))
        at = b.inttoptr(D.at(parent), D.number.as_pointer())
        b.store(b.fadd(b.load(at), total(b, b.load(sums))), at)
        return context.get_dummy_value()

    return types.void(x, x.dtype, weights, d, dx, types.UniTuple(types.int64, 3), types.int64), write


def _gram_column_vjp(P, pair, grads, own, at):  # type: ignore[no-untyped-def]
    (X, Y), (dX, dY), (W, crossed, z), (j, end, early) = pair, grads, own, at
    way = np.ones_like(Y[j])
    for i in range(j + early, end):
        if i - early > j:
            way = way * W[i - early]
        p = way * P[i, j]
        dX[i] += p * Y[j]
        dY[j] += p * X[i]
        z[i - j] = p * X[i] * Y[j]
    after = 0 * way
    for t in range(end - 1, j, -1):
        crossed[t] += after + (0 if early else z[t - j])
        after = after + z[t - j]


@emitted(_gram_column_vjp)
def gram_column_vjp(typing: Any, P: Any, pair: Any, grads: Any, own: Any, at: Any) -> Any:
    """Column j of a gram's block on its diagonal, rows to `end`: at = (j, end, early), early 0 or 1.

    pair = (X, Y), grads = (dX, dY), own = (W, crossed, z)

    way_i = W_{j+1} ... W_{i - early}:  dX_i += P_ij way_i Y_j,  dY_j += P_ij way_i X_i, and crossed_t += the sum of
    z_i = P_ij way_i X_i Y_j over i >= t (early: i > t). A vector of channels stays in registers down the rows.
    """

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        p = Array(context, b, P, values[0])
        (x, y), (dx, dy), (w, cross, scratch) = (arrays(context, b, signature.args[n], values[n]) for n in (1, 2, 3))
        j, end, early = (b.extract_value(values[4], n) for n in range(3))
        one = ir.Constant(x.vector, [1.0] * x.vector.count)
        with cgutils.for_range_slice(b, I64(0), x.shape[1], I64(x.vector.count), I64) as (d, _):
            y_j, way = y.load(y.at(j, d)), cgutils.alloca_once_value(b, one)
            sums = cgutils.alloca_once_value(b, x.zero())
            with cgutils.for_range_slice(b, b.add(j, early), end, I64(1), I64) as (i, _):
                fade = b.sub(i, early)
                with b.if_then(b.icmp_signed(">", fade, j)):
                    b.store(b.fmul(b.load(way), w.load(w.at(fade, d))), way)
                a = b.fmul(b.load(way), broadcast(b, p.get(p.at(i, j)), x.vector))
                ax, to = b.fmul(a, x.load(x.at(i, d))), dx.at(i, d)
                dx.store(fma(b, a, y_j, dx.load(to)), to)
                b.store(b.fadd(b.load(sums), ax), sums)
                scratch.store(b.fmul(ax, y_j), scratch.at(b.sub(i, j), d))
            dy.store(b.fadd(dy.load(dy.at(j, d)), b.load(sums)), dy.at(j, d))
            after = cgutils.alloca_once_value(b, x.zero())
            with cgutils.for_range_slice(b, b.sub(end, I64(1)), j, I64(-1), I64, inc=False) as (t, _):
                earlier, to = b.load(after), cross.at(t, d)
                b.store(b.fadd(earlier, scratch.load(scratch.at(b.sub(t, j), d))), after)
                crossing = b.select(b.icmp_signed("==", early, I64(0)), b.load(after), earlier)
                cross.store(b.fadd(cross.load(to), crossing), to)
        return context.get_dummy_value()

    return types.void(P, pair, grads, own, types.UniTuple(types.int64, 3)), write


def _copy_row(x, to, count):  # type: ignore[no-untyped-def]
    to[:count] = x[:count]
    to[count:] = 0


@emitted(_copy_row)
def copy_row(typing: Any, x: Any, to: Any, count: Any) -> Any:
    """The first `count` numbers of x, and zeros to the end of `to`."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        X, To, count = Array(context, b, x, values[0]), Array(context, b, to, values[1]), values[2]
        whole = b.and_(count, I64(-X.vector.count))
        with cgutils.for_range_slice(b, I64(0), whole, I64(X.vector.count), I64) as (j, _):
            To.store(X.load(X.at(j)), To.at(j))
        with cgutils.for_range_slice(b, whole, To.shape[0], I64(X.vector.count), I64) as (j, _):
            y = X.load(X.at(j), 0, X.masks(count, j, 1)[0])
            To.store(y, To.at(j), 0, To.masks(To.shape[0], j, 1)[0])
        return context.get_dummy_value()

    return types.void(x, to, types.int64), write
