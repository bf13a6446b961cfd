"""One pass over a block of columns of a state: it fades, is written to, and is read, while its rows go by once.

A block is a few vectors wide. What is written and what was read so far stay in registers while the loop runs down the
K rows; a row is loaded, changed, stored and read in one go. Each element read is one chain of fused multiply-adds over
the rows, in every kind of pass and at every width: whoever reads the same state with the same weights gets the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from .emit import BYTES, I32, Emit, Value, routine

NARROW, WIDE = 4, 8  # vectors in a block: 8 sums hide an addition's latency, and read a state row by whole row
LINE = 64  # bytes that come with one request


class State(NamedTuple):
    """Where a block of columns of a state lies: address of its first row, and bytes from a row to the next."""

    at: Any
    row: Any


class Token(NamedTuple):
    """Addresses of one token: decays of the rows and bytes between them (0: one for all), and rows of the rest."""

    decay: Any
    decay_step: Any
    fade: Any  # factors on the columns
    k: Any
    w: Any  # what is written with k
    b: Any
    y: Any  # what is written with b


class Reader(NamedTuple):
    """Addresses: K weights on the rows of the state, and where the row they read goes."""

    weights: Any
    out: Any


def _reader(lanes: int) -> Callable[..., None]:
    """out = x S for a block of columns. As many bytes as half of it are asked for, from `following` on."""

    def read(e: Emit, at: Value, row: Value, x: Value, out: Value, following: Value, K: Value) -> None:
        sums = [e.variable(e.zero()) for _ in range(lanes)]
        with e.each(K) as k:
            _ask_for(e, following + k * (lanes * BYTES // 2), lanes)
            weight = e.spread(e.get(x + k * e.size))
            for total, s in zip(sums, _load_row(e, at + k * row, lanes), strict=True):
                total.set(e.fma(weight, s, total.get()))
        _store_row(e, [total.get() for total in sums], out)

    read.__name__ = f"read_{lanes}"
    return routine(read)


def _writer(lanes: int, readers: int, fades: bool, pushes: bool) -> Callable[..., None]:
    """to = diag(decay) S diag(fade) + k^T w + b^T y for a block of columns, and what one reader, or two, read of it.

    As many bytes as half of it are asked for, behind those that a reading of S has asked for.
    """

    def write(
        e: Emit, at: Value, row: Value, to: Value, to_row: Value, decay: Value, decay_step: Value, fade: Value,
        k: Value, w: Value, b: Value, y: Value, x1: Value, out1: Value, x2: Value, out2: Value, following: Value,
        K: Value,
    ) -> None:  # fmt: skip
        written = _load_row(e, w, lanes)
        pushed = _load_row(e, y, lanes) if pushes else []
        fading = _load_row(e, fade, lanes) if fades else []
        pairs = [(x1, out1), (x2, out2)][:readers]
        sums = [[e.variable(e.zero()) for _ in range(lanes)] for _ in pairs]
        with e.each(K) as i:
            _ask_for(e, following + (K + i) * (lanes * BYTES // 2), lanes)
            s = _load_row(e, at + i * row, lanes)
            d, key = e.spread(e.get(decay + i * decay_step)), e.spread(e.get(k + i * e.size))
            if fades:
                s = [x * f for x, f in zip(s, fading, strict=True)]
            s = [e.fma(key, new, d * old) for old, new in zip(s, written, strict=True)]
            if pushes:
                by = e.spread(e.get(b + i * e.size))
                s = [e.fma(by, new, old) for old, new in zip(s, pushed, strict=True)]
            _store_row(e, s, to + i * to_row)
            for (x, _), totals in zip(pairs, sums, strict=True):
                weight = e.spread(e.get(x + i * e.size))
                for total, new in zip(totals, s, strict=True):
                    total.set(e.fma(weight, new, total.get()))
        for (_, out), totals in zip(pairs, sums, strict=True):
            _store_row(e, [total.get() for total in totals], out)

    write.__name__ = f"write_{lanes}_{readers}{'_fade' * fades}{'_push' * pushes}"
    return routine(write)


def _load_row(e: Emit, at: Value, lanes: int) -> list[Value]:
    return [e.load(at + j * BYTES) for j in range(lanes)]


def _store_row(e: Emit, x: list[Value], at: Value) -> None:
    for j, vector in enumerate(x):
        e.store(vector, at + j * BYTES)


def _ask_for(e: Emit, at: Value, lanes: int) -> None:
    """Ask for half a row of a wide block to be brought into the second cache; what has narrow ones is small."""
    if lanes < WIDE:
        return
    byte = ir.IntType(8)
    fn = e.function("llvm.prefetch.p0", ir.VoidType(), [byte.as_pointer(), I32, I32, I32])
    for j in range(0, lanes * BYTES // 2, LINE):
        e.b.call(fn, [e.pointer(at + j, byte), *(ir.Constant(I32, i) for i in (0, 2, 1))])


# by width of the block; passes by (readers, fades, pushes) too
READ = {lanes: _reader(lanes) for lanes in (NARROW, WIDE)}
KINDS = ((1, False, False), (1, True, False), (2, False, False), (1, False, True), (2, False, True))
WRITE = {(lanes, *kind): _writer(lanes, *kind) for lanes in (NARROW, WIDE) for kind in KINDS}
