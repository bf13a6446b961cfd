"""The register tiles of the short convolution: R tokens, and all channels of a block, one vector after the other.

The R + W - 1 inputs and the W taps of R tokens are loaded once; e^x is computed of all R vectors together, as one chain
of it waits for its own results. Processors fetch no data ahead beyond a page, which is a few rows: `fetch` does. The
taps of a token are added in one order in every tile, so bits do not depend on R. What each tile does stands above it
in Python.
"""

from __future__ import annotations

from typing import Any

from ...runtime.pieces.vectors import (
    I64,
    Array,
    Builder,
    Value,
    broadcast,
    emitted,
    fma,
    in_every_lane,
    joined,
    parts,
    prefetch,
    store_once,
    whole_type,
)
from ...runtime.pieces.views import numbers_at
from .numbers import _exp, write_one_plus_exp

GROUP = 4  # tokens


def convolution(R: int, W: int, silu: bool, streamed: bool = False, ahead: bool = False) -> Any:
    """Tokens t .. t + R - 1: z = bias + sum_i taps_{W-1-i} x_{t-i}, or silu(z).

    at (R + W - 1): the addresses of x_{t + R - 1 - m}; taps (W, D), bias (D,), of the channels from `first` on. The
    result of token t is `out`, that of the next one `step` bytes behind. added: x_t is added.
    streamed: whole vectors are written past the caches, to aligned rows.   ahead: the next R inputs are fetched.
    """

    def python(at, taps, bias, first, added, out, step):  # type: ignore[no-untyped-def]
        n = len(out)
        x = [numbers_at(out, at[m] + first * out.itemsize, n) for m in range(R + W - 1)]
        for r in range(R):
            z = bias[first : first + n]
            for i in range(W):
                z = z + x[R - 1 - r + i] * taps[W - 1 - i, first : first + n]
            z = z / (1 + _exp(-z)) if silu else z
            to = numbers_at(out, out.__array_interface__["data"][0] + r * step, n)
            to[:] = z + x[R - 1 - r] if added else z

    @emitted(python)
    def tile(b: Builder, at: Array, taps: Array, bias: Array, first: Value, added: Value, out: Array,
             step: Value) -> None:  # fmt: skip
        rows = _Rows(b, (R, W), at, taps, bias, first, out)
        to = [b.add(out.start, b.mul(I64(r), step)) for r in range(R)]
        bits = whole_type(out.vector)
        all_or_none = broadcast(b, b.sext(added, bits.element), bits)  # of the bits of x: no branch in the loop

        def vector(j: Value, mask: Any) -> None:
            x, z = rows.linear(j, mask)
            if ahead and mask is None:
                rows.fetch(R, j)
            if silu:
                every = joined(b, z)
                z = parts(b, b.fdiv(every, write_one_plus_exp(b, b.fneg(every))), R)
            for r in range(R):
                own = b.bitcast(b.and_(b.bitcast(x[R - 1 - r], bits), all_or_none), out.vector)
                y = b.fadd(z[r], own)
                if streamed and mask is None:
                    store_once(b, y, rows.at(to[r], j))
                else:
                    out.store(y, rows.at(to[r], j), 0, mask)

        rows.over(vector)

    return tile


def slopes(R: int, W: int, silu: bool) -> Any:
    """dz_t = dy_t silu'(z_t), or dy_t; dtaps_{W-1-i} += dz_t x_{t-i}, dbias += dz_t, of tokens t .. t + R - 1.

    rows: (address of dy_t, bytes to the next one, bytes between rows of dz, address of dtaps_0, bytes to the next row,
    address of dbias). dz of token t is `out`. Other arguments as those of `convolution`.
    """

    def python(at, taps, bias, first, rows, out):  # type: ignore[no-untyped-def]
        n, start = len(out), out.__array_interface__["data"][0]
        dy_0, dy_step, dz_step, sums, apart, dbias = rows
        x = [numbers_at(out, at[m] + first * out.itemsize, n) for m in range(R + W - 1)]
        for r in range(R):
            z = bias[first : first + n]
            for i in range(W):
                z = z + x[R - 1 - r + i] * taps[W - 1 - i, first : first + n]
            s = 1 / (1 + _exp(-z))
            dz = numbers_at(out, start + r * dz_step, n)
            dz[:] = numbers_at(out, dy_0 + r * dy_step, n) * ((s * (1 + z * (1 - s))) if silu else 1)
            for i in range(W):
                numbers_at(out, sums + (W - 1 - i) * apart, n)[:] += dz * x[R - 1 - r + i]
            numbers_at(out, dbias, n)[:] += dz

    @emitted(python)
    def tile(b: Builder, at: Array, taps: Array, bias: Array, first: Value, rows: Any, out: Array) -> None:
        dy_0, dy_step, dz_step, sums, apart, dbias = rows
        own = _Rows(b, (R, W), at, taps, bias, first, out)
        dy, to = ([b.add(p, b.mul(I64(r), step)) for r in range(R)] for p, step in ((dy_0, dy_step),
                                                                                   (out.start, dz_step)))  # fmt: skip
        dtaps = [b.add(sums, b.mul(I64(i), apart)) for i in range(W)]

        def vector(j: Value, mask: Any) -> None:
            x, z = own.linear(j, mask) if silu else (own.inputs(j, mask), [])
            dz = [out.load(own.at(row, j), 0, mask) for row in dy]
            if silu:
                every = joined(b, z)
                one = in_every_lane(every.type, 1.0)
                s = b.fdiv(one, write_one_plus_exp(b, b.fneg(every)))
                dz = parts(b, b.fmul(joined(b, dz), b.fmul(s, fma(b, every, b.fsub(one, s), one))), R)
            for r in range(R):
                out.store(dz[r], own.at(to[r], j), 0, mask)
            for i in range(W):
                total = out.load(own.at(dtaps[W - 1 - i], j), 0, mask)
                for r in range(R):
                    total = fma(b, dz[r], x[R - 1 - r + i], total)
                out.store(total, own.at(dtaps[W - 1 - i], j), 0, mask)
            total = out.load(own.at(dbias, j), 0, mask)
            for d in dz:
                total = b.fadd(total, d)
            out.store(total, own.at(dbias, j), 0, mask)

        own.over(vector)

    return tile


class _Rows:
    """The rows that a tile reads, and its loop over their channels."""

    def __init__(
        self, b: Builder, sizes: tuple[int, int], at: Array, taps: Array, bias: Array, first: Value, out: Array
    ):
        (self.R, self.W), self.b, self.out = sizes, b, out
        shift = b.mul(first, I64(out.size))
        count = self.R + self.W - 1
        self._x = [b.add(b.load(b.inttoptr(at.at(I64(m)), I64.as_pointer())), shift) for m in range(count)]
        self._taps = [b.add(taps.at(I64(i)), shift) for i in range(self.W)]
        self._bias = b.add(bias.start, shift)

    def at(self, row: Value, j: Value) -> Value:
        """The address of channel j of a row."""
        return self.b.add(row, self.b.mul(j, I64(self.out.size)))

    def inputs(self, j: Value, mask: Any) -> list[Value]:
        """The vectors of all inputs from channel j on."""
        return [self.out.load(self.at(p, j), 0, mask) for p in self._x]

    def fetch(self, R: int, j: Value) -> None:
        """The vectors from channel j on of the R tokens after these come into the first cache."""
        further = self.b.mul(I64(R), self.b.sub(self._x[0], self._x[1]))
        for p in self._x[:R]:
            prefetch(self.b, self.at(self.b.add(p, further), j), 1)

    def linear(self, j: Value, mask: Any) -> tuple[list[Value], list[Value]]:
        """(the inputs, z of the R tokens)."""
        x, R, W = self.inputs(j, mask), self.R, self.W
        taps = [self.out.load(self.at(p, j), 0, mask) for p in self._taps]
        z = [self.out.load(self.at(self._bias, j), 0, mask)] * R
        for i in range(W):
            z = [fma(self.b, x[R - 1 - r + i], taps[W - 1 - i], z[r]) for r in range(R)]
        return x, z

    def over(self, vector: Any) -> None:
        """vector(j, mask) for whole vectors, and for the numbers behind them."""
        b, out = self.b, self.out
        n = out.shape[0]
        whole = b.and_(n, I64(-out.vector.count))
        with out.vectors(I64(0), whole) as j:
            vector(j, None)
        with b.if_then(b.icmp_signed("<", whole, n)):
            vector(whole, out.masks(n, whole, 1)[0])
