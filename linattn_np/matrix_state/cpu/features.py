"""Queries and keys of a chunk through a feature map, as operations.

Features are made in the task's own memory, a chunk at a time, and again where a backward needs them, which keeps those
of the keys of a few chunks: they never lie in main memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...ops.map_steps import Steps
from .interpreter.program import HEAD, ONE, Program
from .slots import Slots
from .table import IN_K, IN_MAP, IN_MAP_TURNED, IN_NUMBERS, IN_Q, IN_SEGMENTS


class Features(NamedTuple):
    """A kind of map: all of it that a program depends on."""

    kind: str
    K: int  # channels of its rows
    M: int  # features
    skipped: int  # monomials before the first of them
    numbers: int
    segments: int


def features_of(steps: Steps, K: int, dtype: Any) -> Features:
    """Of rows of K channels."""
    tables = steps.tables(K, dtype)
    count = 0 if tables.segments is None else len(tables.segments)
    return Features(steps.kind, K, steps.width(K), steps.skipped(K), len(tables.numbers), count)


class Mapped:
    """Memory for the features of a chunk, and the operations that make them and pull their gradients back."""

    def __init__(self, p: Program, f: Features, C: int):
        self.p, self.f, self.C = p, f, C
        self.zero, self.M, self.given = p.literal(0), p.literal(f.M), p.literal(f.K)
        self.half = p.literal(f.M // 2)
        self.numbers, self.total = p.vector(f.numbers), p.vector(C)
        self.W, self.WT, self.segments = p.view(), p.view(), p.view()
        self.made: dict[int, int] = {}
        self.wholes: dict[int, int] = {}  # views of features, with the monomials before the first
        self.dx = p.matrix(C, f.K + p.lane)
        if f.kind == "waves":
            self.angle, self.over = p.matrix(C, f.M // 2), {array: p.vector(C) for array in (IN_Q, IN_K)}
        if f.kind == "monomials":
            self.weights, self.factor = p.part(self.numbers, 1), p.same(self.numbers)
            self.scaled = {array: p.matrix(C, f.K + p.lane) for array in (IN_Q, IN_K)}

    def matrix(self) -> int:
        """Memory for the features of a chunk, or for their gradients."""
        p, f = self.p, self.f
        return p.part(p.matrix(self.C, f.skipped + f.M + p.lane), f.skipped)

    def all_of(self, matrix: int) -> int:
        """The same with the monomials before the first feature."""
        return self.wholes[matrix] if matrix in self.wholes else self.p.part(matrix, -self.f.skipped)

    def keep(self, slots: Slots) -> None:
        """Features of keys, and what their transpose asks for, lie in slots."""
        p, f = self.p, self.f
        base = p.matrix(self.C, f.skipped + f.M + p.lane)
        self.made[IN_K] = slots.view(p.part(base, f.skipped))
        self.wholes[self.made[IN_K]] = slots.view(base)
        if f.kind == "waves":
            self.over[IN_K] = slots.view(p.vector(self.C))
        if f.kind == "monomials":
            self.scaled[IN_K] = slots.view(p.matrix(self.C, f.K + p.lane))

    def point(self) -> None:
        """Where the tables lie."""
        p = self.p
        if self.f.kind == "monomials":
            p.point(self.segments, IN_SEGMENTS, self.zero, HEAD, self.zero)
        else:
            p.point(self.W, IN_MAP, self.zero, HEAD, self.zero)
            p.point(self.WT, IN_MAP_TURNED, self.zero, HEAD, self.zero)
        p.load(self.numbers, IN_NUMBERS, self.zero, HEAD, p.literal(1), self.zero, p.literal(self.f.numbers))

    def features(self, array: int, x: int, c: int) -> int:
        """phi of the rows x."""
        p, f = self.p, self.f
        if array not in self.made:
            self.made[array] = self.matrix()
        out = self.made[array]
        if f.kind == "monomials":
            y = self.scaled[array]
            p.copy(x, c, self.given, y, self.factor)
            p.monomials(y, self.segments, p.literal(f.segments), self.weights, c, self.given, self.all_of(out))
        elif f.kind == "waves":
            p.inverse_lengths(x, c, self.given, self.over[array])
            p.multiply(x, self.W, c, self.half, self.given, self.angle, self.over[array])
            p.waves(self.angle, c, self.half, self.numbers, out)
        else:
            p.multiply(x, self.W, c, self.M, self.given, out, ONE)
            p.exponentials(out, x, c, self.M, self.given, self.numbers)
        return out

    def pull(self, array: int, x: int, phi: int, dphi: int, c: int, put: Callable[[int, int], None]) -> None:
        """put(dx, factors of its rows) from the gradient of phi(x), which is written over."""
        p, f = self.p, self.f
        if f.kind == "monomials":
            whole = self.all_of(dphi)
            p.clear(whole, self.zero, c, p.literal(f.skipped))
            p.clear(self.dx, self.zero, c, self.given)
            p.monomials_pull(self.scaled[array], self.segments, p.literal(f.segments), self.weights, c, self.given,
                             self.all_of(phi), whole, self.dx)  # fmt: skip
            put(self.dx, self.factor)
        elif f.kind == "waves":
            p.waves_pull(dphi, phi, c, self.half, self.angle)
            p.multiply(self.angle, self.WT, c, self.given, self.half, self.dx, ONE)
            p.unit_pull(x, c, self.given, self.over[array], self.dx)
            put(self.dx, ONE)
        else:
            p.exponentials_pull(dphi, phi, c, self.M, self.numbers, self.total)
            p.multiply(dphi, self.WT, c, self.given, self.M, self.dx, ONE, added=x, added_rows=self.total)
            put(self.dx, ONE)
