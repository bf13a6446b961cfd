"""One pass over a block of columns of a state: it fades, is written to, and is read, while its rows go by once.

A block is a few vectors wide. What is written and what was read so far stay in registers while the loop runs down the
K rows; a row is loaded, changed, stored and read in one go. Each element read is one chain of fused multiply-adds over
the rows, in every kind of pass and at every width: whoever reads the same state with the same weights gets the same
bits. What each pass does stands above it in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir

from .vectors import BYTES, I64, Array, emitted, fma, loop, prefetch, product, total

NARROW, WIDE = 4, 8  # vectors of a block: 8 sums hide an addition's latency, and read a state row by whole row
LINE = 64  # bytes that come with one request


def _blocks(b: ir.IRBuilder, wide: ir.Value) -> Iterator[int]:
    """Vectors of a block: what is written for each number of them is executed where it is the one asked for."""
    with b.if_else(b.icmp_signed("!=", wide, I64(0))) as (if_wide, otherwise):
        with if_wide:
            yield WIDE
        with otherwise:
            yield NARROW


def _load_row(A: Array, at: ir.Value, lanes: int) -> list[ir.Value]:
    return [A.load(at, n) for n in range(lanes)]


def _store_row(A: Array, sums: list[ir.Value]) -> None:
    for n, place in enumerate(sums):
        A.store(A.b.load(place), A.start, n)


def _prefetch(b: ir.IRBuilder, following: ir.Value, row: ir.Value, lanes: int) -> None:
    """Half a row of a wide block into the second cache; what has narrow ones is small."""
    at = b.add(following, b.mul(row, I64(lanes * BYTES // 2)))
    for j in range(0, lanes * BYTES // 2 if lanes >= WIDE else 0, LINE):
        prefetch(b, b.add(at, I64(j)))


def _read(S, x, out, following, wide):  # type: ignore[no-untyped-def]
    out[: S.shape[1]] = x[: len(S)] @ S


@emitted(_read)
def read_pass(b: ir.IRBuilder, S: Array, x: Array, out: Array, following: ir.Value, wide: ir.Value) -> None:
    """out = x S for a block of columns. As many bytes as half of it are prefetched, from `following` on."""
    for lanes in _blocks(b, wide):
        sums = [S.sum() for _ in range(lanes)]
        with loop(b, 0, S.shape[0]) as k:
            _prefetch(b, following, k, lanes)
            weight = x.broadcast(x.at(k))
            for total, s in zip(sums, _load_row(S, S.at(k), lanes), strict=True):
                b.store(fma(b, weight, s, b.load(total)), total)
        _store_row(out, sums)


def _write(readers: int, fades: bool, pushes: bool, turns: bool) -> Any:
    def written(S, to, decay, rows, reads, following, wide):  # type: ignore[no-untyped-def]
        (k, w, fade, b, y), K, V = rows, len(S), S.shape[1]
        new = decay[:K, None] * (S * fade[:V] if fades else S) + k[:K, None] * w[:V]
        if pushes:
            new = new + b[:K, None] * y[:V]
        to[...] = new
        for x, out in (reads[:2], reads[2:])[:readers]:
            out[:V] = x[:K] @ new
        if turns:
            pairs, c, s = 2 * len(b), b[:, None], y[:, None]
            even, odd = new[:pairs:2], new[1:pairs:2]
            to[:pairs:2], to[1:pairs:2] = even * c - odd * s, even * s + odd * c

    return written


def write_pass(readers: int, fades: bool = False, pushes: bool = False, turns: bool = False) -> Any:
    """to = diag(decay) S diag(fade) + k^T w + b^T y for a block of columns, and what one reader, or two, read of it.

    rows = (k, w, fade, b, y), reads = (x1, out1, x2, out2). As many bytes as half of the block are prefetched, behind
    those that a reading of S has asked for.   turns: b and y are cosines and sines (P,), by which the pairs of rows
    (2 p, 2 p + 1) are rotated as ops/cpu/rotary.py does, after they are read.
    """

    @emitted(_write(readers, fades, pushes, turns))
    def write(b: ir.IRBuilder, S: Array, to: Array, decay: Array, rows: Any, reads: Any, following: ir.Value,
              wide: ir.Value) -> None:  # fmt: skip
        k, w, fade, push, y = rows
        turned = push.shape[0] if turns else I64(0)

        def block(lanes: int) -> None:
            written = _load_row(w, w.start, lanes)
            pushed = _load_row(y, y.start, lanes) if pushes else []
            fading = _load_row(fade, fade.start, lanes) if fades else []
            pairs = [(x, out, [S.sum() for _ in range(lanes)]) for x, out in (reads[:2], reads[2:])[:readers]]

            def row(i: ir.Value) -> Iterator[ir.Value]:
                """The vectors of a new row, which is read."""
                _prefetch(b, following, b.add(S.shape[0], i), lanes)
                at, d, key = S.at(i), decay.broadcast(decay.at(i)), k.broadcast(k.at(i))
                by = push.broadcast(push.at(i)) if pushes else None
                weights = [(x.broadcast(x.at(i)), sums) for x, _, sums in pairs]
                for n, new in enumerate(written):
                    old = b.fmul(S.load(at, n), fading[n]) if fades else S.load(at, n)
                    s = fma(b, key, new, b.fmul(d, old))
                    s = fma(b, by, pushed[n], s) if pushes else s
                    for weight, sums in weights:
                        b.store(fma(b, weight, s, b.load(sums[n])), sums[n])
                    yield s

            if turns:
                with loop(b, 0, turned) as p:
                    i, cos, sin = b.mul(p, I64(2)), push.broadcast(push.at(p)), y.broadcast(y.at(p))
                    j = b.add(i, I64(1))
                    for n, (even, odd) in enumerate(zip(row(i), row(j), strict=True)):
                        to.store(b.fsub(product(b, even, cos), product(b, odd, sin)), to.at(i), n)
                        to.store(b.fadd(product(b, even, sin), product(b, odd, cos)), to.at(j), n)
            with loop(b, b.mul(turned, I64(2)), S.shape[0]) as i:
                for n, x in enumerate(row(i)):
                    to.store(x, to.at(i), n)
            for _, out, sums in pairs:
                _store_row(out, sums)

        for lanes in _blocks(b, wide):
            block(lanes)

    return write


def _applied(A, p, own, diagonal, out):  # type: ignore[no-untyped-def]
    n = A.shape[1]
    out[:n] = p[: len(A)] @ A + diagonal[:n] * own[:n]
    return own[:n] @ out[:n]


def apply_pass(lanes: int) -> Any:
    """out = p A + own (.) diagonal for a block of columns of A, own being those of p; own . out.

    Even and odd rows of a narrow block have sums of their own, so that additions do not wait for each other.
    """
    together = WIDE // lanes

    @emitted(_applied, lambda A, *_: A.dtype)
    def apply(b: ir.IRBuilder, A: Array, p: Array, own: Array, diagonal: Array, out: Array) -> ir.Value:
        sums = [[A.sum() for _ in range(lanes)] for _ in range(together)]

        def add(i: ir.Value, to: list[ir.Value]) -> None:
            weight = p.broadcast(p.at(i))
            for n, place in enumerate(to):
                b.store(fma(b, weight, A.load(A.at(i), n), b.load(place)), place)

        whole = b.and_(A.shape[0], I64(-together))
        with loop(b, 0, whole, together) as i:
            for n, to in enumerate(sums):
                add(b.add(i, I64(n)), to)
        with loop(b, whole, A.shape[0]) as i:
            add(i, sums[0])
        curve = A.sum()
        for n in range(lanes):
            y, x = b.load(sums[0][n]), own.load(own.start, n)
            for more in sums[1:]:
                y = b.fadd(y, b.load(more[n]))
            y = fma(b, x, diagonal.load(diagonal.start, n), y)
            out.store(y, out.start, n)
            b.store(fma(b, x, y, b.load(curve)), curve)
        return total(b, b.load(curve))

    return apply


apply_wide, apply_narrow = apply_pass(WIDE), apply_pass(NARROW)
