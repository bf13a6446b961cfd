"""One pass over a block of columns of a state: it fades, is written to, and is read, while its rows go by once.

A block is a few vectors wide. What is written and what was read so far stay in registers while the loop runs down the
K rows; a row is loaded, changed, stored and read in one go. Each element read is one chain of fused multiply-adds over
the rows, in every kind of pass and at every width: whoever reads the same state with the same weights gets the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from .numba_stage import Int, Stage
from .numba_tiles import BYTES, I32, I64

NARROW, WIDE = 4, 8  # vectors in a block: 8 sums hide an addition's latency, and read a state row by whole row
PREFETCHED = 64  # bytes that come with one request


class State(NamedTuple):
    """Where a block of columns of a state lies: address of its first row, and bytes from a row to the next."""

    at: Int
    row: Int


class Token(NamedTuple):
    """Addresses of one token: decays of the rows and bytes between them (0: one for all), and rows of the rest."""

    decay: Int
    decay_step: Int
    fade: Int  # factors on the columns
    k: Int
    w: Int  # what is written with k
    b: Int
    y: Int  # what is written with b


class Reader(NamedTuple):
    """Addresses: K weights on the rows of the state, and where the row they read goes."""

    weights: Int
    out: Int


def read_block(s: Stage, lanes: int, S: State, reader: Reader, following: Int, K) -> None:
    """out = x S for a block of columns; as many bytes as half of it are asked for."""

    def body(s, at, row, x, out, following, K):
        def one(k, at, sums):
            _ask_for(s, at[1], lanes)
            weight = s.spread(s.get(x + k * s.size))
            return [s.fma(weight, y, total) for y, total in zip(_load_row(s, at[0], lanes), sums, strict=True)]

        _store_row(s, _rows(s, K, [(at, row), (following, s.int(lanes * BYTES // 2))], lanes, one), out)

    s.routine(f"read.{lanes}", body, *S, *reader, following, K)


def write_block(
    s: Stage, lanes: int, S: State, to: State, token: Token, readers: list[Reader], following: Int, K: Int,
    fade: bool, push: bool,
) -> None:  # fmt: skip
    """to = diag(decay) S diag(fade) + k^T w + b^T y for a block of columns, and what each reader reads of it.

    The same number of bytes behind those that were asked for before is asked for.
    """

    def body(s, at, row, to, to_row, decay, decay_step, fading, k, w, b, y, *rest):
        *pairs, following, K = rest
        half = lanes * BYTES // 2
        written, pushed, faded = (_load_row(s, x, lanes) for x in (w, y, fading))

        def one(i, at, sums):
            _ask_for(s, at[3], lanes)
            x, d, key = _load_row(s, at[0], lanes), s.spread(s.get(at[2])), s.spread(s.get(k + i * s.size))
            if fade:
                x = [s.b.fmul(old, f) for old, f in zip(x, faded, strict=True)]
            x = [s.fma(key, new, s.b.fmul(d, old)) for old, new in zip(x, written, strict=True)]
            if push:
                by = s.spread(s.get(b + i * s.size))
                x = [s.fma(by, new, old) for old, new in zip(x, pushed, strict=True)]
            _store_row(s, x, at[1])
            weights = [s.spread(s.get(weight + i * s.size)) for weight in pairs[::2]]
            return [s.fma(weight, new, sums[n * lanes + j]) for n, weight in enumerate(weights)
                    for j, new in enumerate(x)]  # fmt: skip

        moving = [(at, row), (to, to_row), (decay, decay_step), (following + K * half, s.int(half))]
        sums = _rows(s, K, moving, lanes * (len(pairs) // 2), one)
        for n, out in enumerate(pairs[1::2]):
            _store_row(s, sums[n * lanes : (n + 1) * lanes], out)

    name = f"write.{lanes}.{len(readers)}{'.fade' if fade else ''}{'.push' if push else ''}"
    s.routine(name, body, *S, *to, *token, *(x for reader in readers for x in reader), following, K)


def _rows(s: Stage, K: Int, moving: list, sums: int, body: Callable[..., list]) -> list:
    """body(row, addresses, sums) -> sums, down K > 0 rows; addresses move on by (start, step), sums begin at 0."""
    b = s.b
    before, loop, done = b.block, b.append_basic_block("rows"), b.append_basic_block("rows.done")
    b.branch(loop)
    b.position_at_end(loop)
    k, at, values = b.phi(I64), [b.phi(I64) for _ in moving], [b.phi(s.V) for _ in range(sums)]
    new = body(s.int(k), [s.int(x) for x in at], values)
    after = b.add(k, s.const(1))
    k.add_incoming(s.const(0), before)
    k.add_incoming(after, loop)
    for phi, (start, step) in zip(at, moving, strict=True):
        phi.add_incoming(start.value, before)
        phi.add_incoming(b.add(phi, step.value), loop)
    for phi, x in zip(values, new, strict=True):
        phi.add_incoming(s.zero(), before)
        phi.add_incoming(x, loop)
    b.cbranch(b.icmp_signed("<", after, K.value), loop, done)
    b.position_at_end(done)
    return new


def _load_row(s: Stage, at: Int, lanes: int) -> list:
    return [s.vector(at + j * BYTES) for j in range(lanes)]


def _store_row(s: Stage, x: list, at: Int) -> None:
    for j, vector in enumerate(x):
        s.put_vector(vector, at + j * BYTES)


def _ask_for(s: Stage, at: Int, lanes: int) -> None:
    """Ask for half a row of a wide block to be brought into the second cache; what has narrow ones is small."""
    if lanes < WIDE:
        return
    byte = ir.IntType(8).as_pointer()
    fn = s.function("llvm.prefetch.p0", ir.VoidType(), [byte, I32, I32, I32])
    for j in range(0, lanes * BYTES // 2, PREFETCHED):
        s.b.call(fn, [s.b.inttoptr((at + j).value, byte), *(ir.Constant(I32, i) for i in (0, 2, 1))])
