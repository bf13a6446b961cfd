"""One pass over a block of columns of a state: it fades, is written to, and is read, while its rows go by once.

A block is L vectors wide. What is written and what was read so far stay in registers while the loop runs down the K
rows; a row is loaded, changed, stored and read in one go. Each element read is one chain of fused multiply-adds over
the rows, in every kind of pass and under every mask: whoever reads the same state with the same weights gets the same
bits.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .numba_jit import apart, jit
from .numba_tiles import BYTES, I64, Emit, size_of

LANES = 4  # vectors in a block: one load, store and chain of sums each, enough to hide an addition's latency


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


@jit
def block_columns(one):
    """Columns of a block."""
    return BYTES // size_of(one) * LANES


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


def _load_row(e: Emit, at: ir.Value, masks: list) -> list:
    return [e.load(e.address(at, e.const(j * e.W)), mask) for j, mask in enumerate(masks)]


def _store_row(e: Emit, x: list, at: ir.Value, masks: list) -> None:
    for j, mask in enumerate(masks):
        e.store(x[j], e.address(at, e.const(j * e.W)), mask)


def _read_tile(masked: bool):
    """out = x S"""

    @intrinsic
    def tile(context, one, S, reader, n, K):
        def emit(context, b, signature, given):
            e, (S_at, S_row), (x, out) = Emit(b, signature.args[0]), _fields(b, given[1], 2), _fields(b, given[2], 2)
            masks = [e.lanes_below(given[3], j * e.W) if masked else None for j in range(LANES)]

            def body(k, at, sums):
                weight = e.spread(e.number(e.address(x, k)))
                return [e.fma(weight, s, y) for s, y in zip(_load_row(e, at[0], masks), sums, strict=True)]

            _store_row(e, _rows(e, given[4], [(S_at, S_row)], LANES, body), out, masks)
            return context.get_dummy_value()

        return types.void(one, S, reader, types.int64, types.int64), emit

    return tile


def _write_tile(masked: bool, fade: bool, push: bool, readers: int):
    """to = diag(decay) S diag(fade) + k^T w + b^T y, and what one reader, or two, read of it."""

    @intrinsic
    def tile(context, one, S, to, token, first, second, n, K):
        def emit(context, builder, signature, given):
            e = Emit(builder, signature.args[0])
            (S_at, S_row), (to_at, to_row) = (_fields(builder, x, 2) for x in given[1:3])
            decay, decay_step, fading, k, w, b, y = _fields(builder, given[3], 7)
            (x1, out1), (x2, out2) = (_fields(builder, x, 2) for x in given[4:6])
            masks = [e.lanes_below(given[6], j * e.W) if masked else None for j in range(LANES)]
            w = _load_row(e, w, masks)
            y = _load_row(e, y, masks) if push else []
            fading = _load_row(e, fading, masks) if fade else []

            def body(row, at, sums):
                s = _load_row(e, at[0], masks)
                d, key = e.spread(e.number(at[2])), e.spread(e.number(e.address(k, row)))
                if fade:
                    s = [builder.fmul(x, f) for x, f in zip(s, fading, strict=True)]
                s = [e.fma(key, x, builder.fmul(d, old)) for old, x in zip(s, w, strict=True)]
                if push:
                    by = e.spread(e.number(e.address(b, row)))
                    s = [e.fma(by, x, old) for old, x in zip(s, y, strict=True)]
                _store_row(e, s, at[1], masks)
                weights = [e.spread(e.number(e.address(x, row))) for x in (x1, x2)[:readers]]
                return [e.fma(weight, new, sums[i * LANES + j]) for i, weight in enumerate(weights)
                        for j, new in enumerate(s)]  # fmt: skip

            moving = [(S_at, S_row), (to_at, to_row), (decay, decay_step)]
            sums = _rows(e, given[7], moving, LANES * readers, body)
            for i, out in enumerate((out1, out2)[:readers]):
                _store_row(e, sums[i * LANES : (i + 1) * LANES], out, masks)
            return context.get_dummy_value()

        return types.void(one, S, to, token, first, second, types.int64, types.int64), emit

    return tile


_read_whole, _read_masked = _read_tile(False), _read_tile(True)
_write_whole, _write_masked = _write_tile(False, False, False, 1), _write_tile(True, False, False, 1)
_fade_whole, _fade_masked = _write_tile(False, True, False, 1), _write_tile(True, True, False, 1)
_erase_whole, _erase_masked = _write_tile(False, False, False, 2), _write_tile(True, False, False, 2)
_push_whole, _push_masked = _write_tile(False, False, True, 2), _write_tile(True, False, True, 2)


@jit
def read_block(one, S, reader, n, K):
    """out = x S for n columns of a block."""
    apart()
    if n == block_columns(one):
        _read_whole(one, S, reader, n, K)
    else:
        _read_masked(one, S, reader, n, K)


@jit
def write_block(one, S, to, token, fades, first, n, K):
    """to = diag(decay) S diag(fade) + k^T w for n columns of a block, and what one reads of it."""
    apart()
    whole = n == block_columns(one)
    if fades:
        if whole:
            _fade_whole(one, S, to, token, first, first, n, K)
        else:
            _fade_masked(one, S, to, token, first, first, n, K)
    elif whole:
        _write_whole(one, S, to, token, first, first, n, K)
    else:
        _write_masked(one, S, to, token, first, first, n, K)


@jit
def erase_block(one, S, to, token, pushes, first, second, n, K):
    """to = diag(decay) S + k^T w (+ b^T y) for n columns of a block, and what two read of it."""
    apart()
    whole = n == block_columns(one)
    if pushes:
        if whole:
            _push_whole(one, S, to, token, first, second, n, K)
        else:
            _push_masked(one, S, to, token, first, second, n, K)
    elif whole:
        _erase_whole(one, S, to, token, first, second, n, K)
    else:
        _erase_masked(one, S, to, token, first, second, n, K)
