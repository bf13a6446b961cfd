"""The transposes of numba_decay.py for one chunk, with the gradient of g as sums of what crosses it.

A product whose path leads from token j to token i crosses g_t for j < t <= i (early: t < i). Sums are of such products
only: nothing cancels, and a gate that nothing crosses has the gradient 0 exactly.
"""

from __future__ import annotations

from llvmlite import ir

from ...runtime.compiled.emit import DOUBLE, Emit, Mat, Rows, Value, routine
from ...runtime.compiled.rows import add_times, dot, times
from ...runtime.compiled.tiles import FULL, product
from .decay import BLOCK, heads, reaches


def _wide(e: Emit, x: Value) -> Value:
    return x if e.bits == 64 else Value(e, e.b.fpext(x.v, DOUBLE))


def _narrow(e: Emit, x: Value) -> Value:
    return x if e.bits == 64 else Value(e, e.b.fptrunc(x.v, e.F))


@routine
def pull(e: Emit, dP: Mat, P: Mat, E: Mat, m: Value, strict: Value, factors: Rows, crossed: Mat) -> None:
    """From the cotangent dP of P = factors (.) raw (.) E: crossed += dP (.) P, dP <- factors (.) dP (.) E, j <= i."""
    with e.each(m) as i:
        f, stop = e.spread(e.get(factors.at + i * factors.step * e.size)), i + 1 - strict
        with e.lanes(m) as j:
            at, sums, inside = e.address(dP, i, j), e.address(crossed, i, j), e.below(stop - j)
            x = e.select(inside, e.load(at), 0.0)
            e.store(e.fma(x, e.select(inside, e.load(e.address(P, i, j)), 0.0), e.load(sums)), sums)
            e.store(x * e.select(inside, e.load(e.address(E, i, j)), 0.0) * f, at)


@routine
def crossings(e: Emit, at: Value, step: Value, more: Value, m: Value, crossed: Mat, readers: Rows, writers: Rows,
              total: Rows, sums: Rows) -> None:  # fmt: skip
    """dg_t = sum_{i >= t > j} crossed_ij + sum_{i >= t} readers_i + sum_{j < t} writers_j + total, to memory.

    sums: scratch of one row.
    """
    before, after = e.variable(_wide(e, e.get(total.at))), e.variable(Value(e, ir.Constant(DOUBLE, 0.0)))
    with e.each(m) as t:
        to = at + t * step
        y = e.select(more.equals(0), _narrow(e, before.get()), e.get(to) + _narrow(e, before.get()))
        e.put(y, to)
        before.set(before.get() + _wide(e, e.get(writers.at + t * e.size)))
    with e.lanes(m) as j:
        e.store(e.zero(), sums.at + j * e.size)
    with e.each(m, down=True) as t:
        inside = e.variable(e.zero())
        with e.lanes(t) as j:
            below, mask = sums.at + j * e.size, e.below(t - j)
            s = e.load(below) + e.select(mask, e.load(e.address(crossed, t, j)), 0.0)
            e.store(s, below)
            inside.set(inside.get() + e.select(mask, s, 0.0))
        after.set(after.get() + _wide(e, e.get(readers.at + t * e.size)))
        to = at + t * step
        e.put(e.get(to) + _narrow(e, after.get() + _wide(e, e.sum(inside.get()))), to)


@routine
def overlap(e: Emit, S: Mat, dS: Mat, m: Value, n: Value, carry: Rows, out: Rows) -> None:
    """out = carry sum (S (.) dS)"""
    total = e.variable(Value(e, ir.Constant(DOUBLE, 0.0)))
    with e.each(m) as i:
        total.set(total.get() + _wide(e, dot(e, e.address(S, i), e.address(dS, i), n)))
    e.put(_narrow(e, total.get() * _wide(e, e.get(carry.at))), out.at)


@routine
def channel_overlap(e: Emit, S: Mat, dS: Mat, m: Value, n: Value, carry: Rows, out: Rows) -> None:
    """out_d = carry_d sum_v S_dv dS_dv"""
    with e.each(m) as d:
        e.put(e.get(carry.at + d * e.size) * dot(e, e.address(S, d), e.address(dS, d), n), out.at + d * e.size)


@routine
def column_overlap(e: Emit, S: Mat, dS: Mat, m: Value, n: Value, out: Rows) -> None:
    """out_v = sum_d S_dv dS_dv"""
    with e.lanes(n) as v:
        total = e.variable(e.zero())
        with e.each(m) as d:
            total.set(e.fma(e.load(e.address(S, d, v)), e.load(e.address(dS, d, v)), total.get()))
        e.store(total.get(), out.at + v * e.size)


@routine
def channel_crossings(e: Emit, at: Value, step: Value, more: Value, m: Value, K: Value, crossed: Mat, readers: Mat,
                      writers: Mat, total: Rows) -> None:  # fmt: skip
    """dg_t = crossed_t + sum_{i >= t} readers_i + sum_{j < t} writers_j + total, all rows of K, to memory."""
    with e.lanes(K) as d:
        everywhere, mask = e.load(total.at + d * e.size), e.below(K - d)
        before, after = e.variable(e.zero()), e.variable(e.zero())
        with e.each(m) as t:
            own = e.address(crossed, t, d)
            e.store(e.load(own) + before.get() + everywhere, own)
            before.set(before.get() + e.load(e.address(writers, t, d)))
        with e.each(m, down=True) as t:
            to = at + t * step + d * e.size
            after.set(after.get() + e.load(e.address(readers, t, d)))
            y = e.variable(e.load(e.address(crossed, t, d)) + after.get())
            with e.when(more.compare("!=", 0)):
                y.set(y.get() + e.load(to, mask))
            e.store(y.get(), to, mask)


@routine
def channel_pull(e: Emit, P: Mat, X: Mat, Y: Mat, W: Mat, early: Value, m: Value, K: Value, dX: Mat, dY: Mat,
                 crossed: Mat, scratch: Mat, ones: Rows) -> None:  # fmt: skip
    """From the cotangent P of the gram of X and Y: dX += rows(P, Y), dY += cols(P, X), crossed += what crosses g."""
    with e.each(m, step=BLOCK) as b:
        rows = e.least(m - b, BLOCK)
        with e.each(b + rows, start=b) as j:
            _pull_column(e, P, X, Y, W, early, j, b + rows, K, dX, dY, crossed, scratch)
        with e.when(b > 0):
            _pull_block(e, P, X, Y, W, early, b, rows, K, dX, dY, crossed, scratch, ones)


@routine
def _pull_column(e: Emit, P: Mat, X: Mat, Y: Mat, W: Mat, early: Value, j: Value, end: Value, K: Value, dX: Mat,
                 dY: Mat, crossed: Mat, scratch: Mat) -> None:  # fmt: skip
    """Column j of a block on the diagonal; scratch: the products z_i = P_ij way_i x_i y_j."""
    with e.lanes(K) as d:
        way, y, dy = e.variable(e.spread(e.number(1))), e.load(e.address(Y, j, d)), e.variable(e.zero())
        with e.each(end, start=j + early) as i:
            fade = i - early
            with e.when(fade > j):
                way.set(way.get() * e.load(e.address(W, fade, d)))
            p = way.get() * e.spread(e.get(e.address(P, i, j)))
            px, to = p * e.load(e.address(X, i, d)), e.address(dX, i, d)
            e.store(e.fma(p, y, e.load(to)), to)
            dy.set(dy.get() + px)
            e.store(px * y, e.address(scratch, i - j, d))
        to = e.address(dY, j, d)
        e.store(e.load(to) + dy.get(), to)
        _add_suffix(e, early, j + 1, end, e.address(scratch, 1, d), scratch.row, crossed, d)


def _add_suffix(e: Emit, early: Value, begin: Value, end: Value, z: Value, z_row: Value, crossed: Mat,
                d: Value) -> None:  # fmt: skip
    """crossed_t += sum_{i >= t} z_i (early: i > t) for t in begin..end, z_begin at the address z; columns from d on."""
    after = e.variable(e.zero())
    with e.each(end, start=begin, down=True) as t:
        to, x = e.address(crossed, t, d), e.load(z + (t - begin) * z_row * e.size)
        earlier = after.get()
        after.set(earlier + x)
        e.store(e.load(to) + e.select(early.equals(0), after.get(), earlier), to)


@routine
def _pull_block(e: Emit, P: Mat, X: Mat, Y: Mat, W: Mat, early: Value, b: Value, rows: Value, K: Value, dX: Mat,
                dY: Mat, crossed: Mat, scratch: Mat, ones: Rows) -> None:  # fmt: skip
    """Rows b.. against all columns before b, which meet at row b; scratch: heads, near, reaches, far, products."""
    none = Mat(0, 0, 0)
    part = lambda i: Mat(e.address(scratch, i), scratch.row, 1)  # noqa: E731
    head, near, reach, far, D = part(0), part(BLOCK), part(2 * BLOCK), part(b + 2 * BLOCK), part(b * 2 + 2 * BLOCK)
    heads(e, W, early, b, rows, K, head)
    reaches(e, W, b, K, reach)
    times(e, Mat(e.address(X, b), X.row, 1), head, rows, K, near)
    times(e, Y, reach, b, K, far)
    corner = Mat(e.address(P, b), P.row, 1)
    product(e, FULL, corner, far, rows, K, b, ones, none, ones, D, 0)
    add_times(e, D, head, rows, K, Mat(e.address(dX, b), dX.row, 1))
    times(e, D, near, rows, K, D)
    with e.lanes(K) as d:
        _add_suffix(e, early, b, b + rows, e.address(D, 0, d), D.row, crossed, d)
    product(e, FULL, corner.turned(), near, b, K, rows, ones, none, ones, D, 0)
    add_times(e, D, reach, b, K, dY)
    times(e, D, far, b, K, D)
    with e.lanes(K) as d:
        before = e.variable(e.zero())
        with e.each(b) as t:
            to = e.address(crossed, t, d)
            e.store(e.load(to) + before.get(), to)
            before.set(before.get() + e.load(e.address(D, t, d)))
