"""One pass over a block of columns of a state: it fades, is written to, and is read, while its rows go by once.

A block is L vectors wide. What is written and what was read so far stay in registers while the loop runs down the K
rows; a row is loaded, changed, stored and read in one go. Each element read is one chain of fused multiply-adds over
the rows, in every kind of pass: whoever reads the same state with the same weights gets the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .numba_tiles import BYTES, I32, I64, Emit

LANES = 8  # vectors in a block: one load, store and chain of sums each, enough to hide an addition's latency
BLOCK = LANES * BYTES  # bytes of a row


class State(NamedTuple):
    """Where a block of columns of a state lies: address of its first row, and bytes from a row to the next."""

    at: int
    row: int


class Reader(NamedTuple):
    """Addresses: K weights on the rows of the state, and where the row they read goes."""

    weights: int
    out: int


class Token(NamedTuple):
    """Addresses of one token: decays of the rows and bytes between them (0: one for all), and rows of the rest."""

    decay: int
    decay_step: int
    fade: int  # factors on the columns
    k: int
    w: int  # what is written with k
    b: int
    y: int  # what is written with b


def _rows(e: Emit, K: ir.Value, moving: list, sums: int, body) -> list:
    """body(row, addresses, sums) -> sums, down K > 0 rows; addresses move on by (start, step), sums begin at 0."""
    b = e.b
    before, loop, done = b.block, b.append_basic_block("rows"), b.append_basic_block("rows.done")
    b.branch(loop)
    b.position_at_end(loop)
    k, at, values = b.phi(I64), [b.phi(I64) for _ in moving], [b.phi(e.V) for _ in range(sums)]
    new = body(k, at, values)
    after = b.add(k, e.const(1))
    for phi, first, following in [(k, e.const(0), after)] + [
        (p, start, b.add(p, step)) for p, (start, step) in zip(at, moving, strict=True)
    ]:
        phi.add_incoming(first, before)
        phi.add_incoming(following, loop)
    for phi, x in zip(values, new, strict=True):
        phi.add_incoming(e.zero(), before)
        phi.add_incoming(x, loop)
    b.cbranch(b.icmp_signed("<", after, K), loop, done)
    b.position_at_end(done)
    return new


def _fields(b: ir.IRBuilder, x: ir.Value, count: int) -> list:
    return [b.extract_value(x, i) for i in range(count)]


def _load_row(e: Emit, at: ir.Value) -> list:
    return [e.load(e.address(at, e.const(j * e.W)), None) for j in range(LANES)]


def _store_row(e: Emit, x: list, at: ir.Value) -> None:
    for j, vector in enumerate(x):
        e.store(vector, e.address(at, e.const(j * e.W)), None)


def _prefetch(e: Emit, at: ir.Value) -> None:
    """Ask for a row of a block to be brought into the second cache."""
    byte = ir.IntType(8).as_pointer()
    fn = e.function("llvm.prefetch.p0", ir.VoidType(), [byte, I32, I32, I32])
    for j in range(0, BLOCK // 2, 64):
        e.b.call(fn, [e.b.inttoptr(e.b.add(at, e.const(j)), byte), *(ir.Constant(I32, i) for i in (0, 2, 1))])


def _half(b: ir.IRBuilder, at: ir.Value, row: ir.Value, K: ir.Value, halves: int) -> tuple:
    """(start, step) through half of the block that lies behind this one."""
    half = b.ashr(row, ir.Constant(I64, 1))
    return b.add(at, b.mul(b.mul(half, K), ir.Constant(I64, halves))), half


@intrinsic
def read_block(context, one, S, reader, K):
    """out = x S for a block of columns."""

    def emit(context, b, signature, given):
        e, (S_at, S_row), (x, out) = Emit(b, signature.args[0]), _fields(b, given[1], 2), _fields(b, given[2], 2)

        def body(k, at, sums):
            weight = e.spread(e.number(e.address(x, k)))
            _prefetch(e, at[1])
            return [e.fma(weight, s, y) for s, y in zip(_load_row(e, at[0]), sums, strict=True)]

        _store_row(e, _rows(e, given[3], [(S_at, S_row), _half(b, S_at, S_row, given[3], 2)], LANES, body), out)
        return context.get_dummy_value()

    return types.void(one, S, reader, types.int64), emit


def _write_block(fade: bool, push: bool, readers: int):
    """to = diag(decay) S diag(fade) + k^T w + b^T y for a block of columns, and what one reader, or two, read of it."""

    @intrinsic
    def tile(context, one, S, to, token, first, second, K):
        def emit(context, builder, signature, given):
            e = Emit(builder, signature.args[0])
            (S_at, S_row), (to_at, to_row) = (_fields(builder, x, 2) for x in given[1:3])
            decay, decay_step, fading, k, w, b, y = _fields(builder, given[3], 7)
            (x1, out1), (x2, out2) = (_fields(builder, x, 2) for x in given[4:6])
            w = _load_row(e, w)
            y = _load_row(e, y) if push else []
            fading = _load_row(e, fading) if fade else []

            def body(row, at, sums):
                s = _load_row(e, at[0])
                d, key = e.spread(e.number(at[2])), e.spread(e.number(e.address(k, row)))
                if fade:
                    s = [builder.fmul(x, f) for x, f in zip(s, fading, strict=True)]
                s = [e.fma(key, x, builder.fmul(d, old)) for old, x in zip(s, w, strict=True)]
                if push:
                    by = e.spread(e.number(e.address(b, row)))
                    s = [e.fma(by, x, old) for old, x in zip(s, y, strict=True)]
                _store_row(e, s, at[1])
                _prefetch(e, at[3])
                weights = [e.spread(e.number(e.address(x, row))) for x in (x1, x2)[:readers]]
                return [e.fma(weight, new, sums[i * LANES + j]) for i, weight in enumerate(weights)
                        for j, new in enumerate(s)]  # fmt: skip

            moving = [(S_at, S_row), (to_at, to_row), (decay, decay_step), _half(builder, S_at, S_row, given[6], 3)]
            sums = _rows(e, given[6], moving, LANES * readers, body)
            for i, out in enumerate((out1, out2)[:readers]):
                _store_row(e, sums[i * LANES : (i + 1) * LANES], out)
            return context.get_dummy_value()

        return types.void(one, S, to, token, first, second, types.int64), emit

    return tile


write_block = _write_block(fade=False, push=False, readers=1)
fade_block = _write_block(fade=True, push=False, readers=1)
erase_block = _write_block(fade=False, push=False, readers=2)
push_block = _write_block(fade=False, push=True, readers=2)
