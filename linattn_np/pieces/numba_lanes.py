"""Operations along rows in whole vectors: e^x, and the tables and masks of decays.

Rows have room for whole vectors: what lies between their end and that of the vector is computed and not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .numba_tiles import I64, Emit


def _split_ln2(bits: int) -> tuple[float, float]:
    """ln 2 as a number of few bits, so that n times it is exact, and the rest."""
    with localcontext() as c:
        c.prec = 50
        high = Decimal(math.floor(math.log(2) * 2**bits)) / 2**bits
        return float(high), float(Decimal(2).ln() - high)


def emit_exp(e: Emit, x: ir.Value) -> ir.Value:
    """e^x = 2^n e^r with |r| <= ln(2) / 2, e^r by its series; at most 2 ulp off; 0 below e^-87 (float64: e^-708).

    -inf gives 0, NaN gives NaN, and what overflows inf.
    """
    b, single = e.b, e.bits == 32
    vector = lambda y: ir.Constant(e.V, [y] * e.W)  # noqa: E731
    high, low = map(vector, _split_ln2(10 if single else 32))
    floor, ceiling = vector(-87.0 if single else -708.0), vector(88.7 if single else 709.7)
    below, above = b.fcmp_ordered("<", x, floor), b.fcmp_ordered(">", x, ceiling)
    inside = b.select(b.fcmp_ordered(">", x, floor), x, floor)  # NaN, too, is kept from becoming a whole number
    inside = b.select(above, ceiling, inside)
    nearest = e.function(f"llvm.rint.v{e.W}f{e.bits}", e.V, [e.V])
    n = b.call(nearest, [b.fmul(inside, vector(1 / math.log(2)))])
    minus_n = e.negative(n)
    r = e.fma(minus_n, low, e.fma(minus_n, high, x))
    terms = 8 if single else 14
    y = vector(1 / math.factorial(terms - 1))
    for i in reversed(range(terms - 1)):
        y = e.fma(y, r, vector(1 / math.factorial(i)))
    whole = ir.VectorType(ir.IntType(e.bits), e.W)
    count = lambda i: ir.Constant(whole, [i] * e.W)  # noqa: E731
    bias, shift = (127, 23) if single else (1023, 52)
    power = b.bitcast(b.shl(b.add(b.fptosi(n, whole), count(bias)), count(shift)), e.V)
    y = b.select(above, vector(math.inf), b.fmul(y, power))
    return b.select(below, vector(0.0), y)


def _along(e: Emit, n: ir.Value, body: Callable[[ir.Value], None]) -> None:
    """body(j) for j = 0, W, 2 W, ... below n."""
    b = e.b
    before, loop, done = b.block, b.append_basic_block("row"), b.append_basic_block("row.done")
    b.cbranch(b.icmp_signed(">", n, e.const(0)), loop, done)
    b.position_at_end(loop)
    j = b.phi(I64)
    j.add_incoming(e.const(0), before)
    body(j)
    after = b.add(j, e.const(e.W))
    j.add_incoming(after, b.block)
    b.cbranch(b.icmp_signed("<", after, n), loop, done)
    b.position_at_end(done)


@intrinsic
def exp_row(context, one, x, n):
    """x_j <- e^{x_j} for n numbers from an address on."""

    def emit(context, b, signature, given):
        e = Emit(b, signature.args[0])

        def body(j):
            at = e.address(given[1], j)
            e.store(emit_exp(e, e.load(at, None)), at, None)

        _along(e, given[2], body)
        return context.get_dummy_value()

    return types.void(one, types.int64, types.int64), emit


@intrinsic
def advance_row(context, one, sums, g, out, n):
    """sums_j += g in float64, out_j = e^{sums_j}: n numbers from two addresses on."""

    def emit(context, b, signature, given):
        e = Emit(b, signature.args[0])
        wide = Emit(b, types.float64)
        wide.W, wide.V = e.W, ir.VectorType(wide.F, e.W)

        def body(j):
            at = wide.address(given[1], j)
            s = b.fadd(wide.load(at, None), wide.spread(given[2]))
            wide.store(s, at, None)
            e.store(emit_exp(e, s if e.bits == 64 else b.fptrunc(s, e.V)), e.address(given[3], j), None)

        _along(e, given[4], body)
        return context.get_dummy_value()

    return types.void(one, types.int64, types.float64, types.int64, types.int64), emit


@intrinsic
def weigh_row(context, one, x, weights, factor, stop, n):
    """x_j <- factor weights_j x_j where j < stop, else 0: n numbers from two addresses on."""

    def emit(context, b, signature, given):
        e = Emit(b, signature.args[0])
        _, x, weights, factor, stop, n = given

        def body(j):
            at = e.address(x, j)
            y = b.fmul(b.fmul(e.load(at, None), e.load(e.address(weights, j), None)), e.spread(factor))
            e.store(b.select(e.lanes_below(b.sub(stop, j), 0), y, e.zero()), at, None)

        _along(e, n, body)
        return context.get_dummy_value()

    return types.void(one, types.int64, types.int64, one, types.int64, types.int64), emit


@intrinsic
def add_row(context, one, x, y, n):
    """x_j += y_j: n numbers from two addresses on."""

    def emit(context, b, signature, given):
        e = Emit(b, signature.args[0])

        def body(j):
            at = e.address(given[1], j)
            e.store(b.fadd(e.load(at, None), e.load(e.address(given[2], j), None)), at, None)

        _along(e, given[3], body)
        return context.get_dummy_value()

    return types.void(one, types.int64, types.int64, types.int64), emit


@intrinsic
def add_both_row(context, one, x, y, z, n):
    """x_j += y_j, then z_j += x_j: n numbers from three addresses on."""

    def emit(context, b, signature, given):
        e = Emit(b, signature.args[0])

        def body(j):
            x, y, z = (e.address(at, j) for at in given[1:4])
            total = b.fadd(e.load(x, None), e.load(y, None))
            e.store(total, x, None)
            e.store(b.fadd(e.load(z, None), total), z, None)

        _along(e, given[4], body)
        return context.get_dummy_value()

    return types.void(one, *[types.int64] * 4), emit


@intrinsic
def pull_row(context, one, dP, P, E, crossed, factor, stop, n):
    """crossed_j += dP_j P_j and dP_j <- factor dP_j E_j where j < stop, else dP_j <- 0: n numbers from addresses on."""

    def emit(context, b, signature, given):
        e = Emit(b, signature.args[0])
        factor, stop = given[5], given[6]

        def body(j):
            dP, P, E, crossed = (e.address(at, j) for at in given[1:5])
            x, inside = e.load(dP, None), e.lanes_below(b.sub(stop, j), 0)
            w = b.select(inside, b.fmul(x, e.load(P, None)), e.zero())
            e.store(b.fadd(e.load(crossed, None), w), crossed, None)
            y = b.fmul(b.fmul(x, e.load(E, None)), e.spread(factor))
            e.store(b.select(inside, y, e.zero()), dP, None)

        _along(e, given[7], body)
        return context.get_dummy_value()

    return types.void(one, *[types.int64] * 4, one, types.int64, types.int64), emit


@intrinsic
def pull_pair_row(context, one, way, w, x, y, dx, dy, z, p, n):
    """way_d *= w_d (w: 0 where none); dx += p way y, dy += p way x, z = p way x y: n numbers from addresses on."""

    def emit(context, b, signature, given):
        e = Emit(b, signature.args[0])
        p, faded = given[8], b.icmp_signed("!=", given[2], ir.Constant(I64, 0))
        w_at = b.select(faded, given[2], given[1])

        def body(d):
            way, w, x, y, dx, dy, z = (e.address(at, d) for at in (given[1], w_at, *given[3:8]))
            f = e.load(way, None)
            f = b.select(faded, b.fmul(f, e.load(w, None)), f)
            e.store(f, way, None)
            f, X, Y = b.fmul(f, e.spread(p)), e.load(x, None), e.load(y, None)
            fx = b.fmul(f, X)
            e.store(e.fma(f, Y, e.load(dx, None)), dx, None)
            e.store(b.fadd(e.load(dy, None), fx), dy, None)
            e.store(b.fmul(fx, Y), z, None)

        _along(e, given[9], body)
        return context.get_dummy_value()

    return types.void(one, *[types.int64] * 7, one, types.int64), emit
