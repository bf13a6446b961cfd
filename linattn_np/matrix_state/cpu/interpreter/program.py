"""Programs: what a task does, told in Python as a list of operations on small matrices.

A program is built once for a kind of call and carried out for every task by the compiled loop of numba_machine.py, so
a new formula needs nothing compiled. Operands are numbers of registers (whole numbers: sizes, positions), of matrices
(in the task's own memory, or views of arrays), of arrays of the call, or literal flags; numba_machine.py says which.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ....runtime.compiled.emit import BYTES, LANES, ROWS
from ....runtime.compiled.tiles import FULL, PAD

# columns of a table of tasks: they fill the first registers
BATCH, FIRST, STOP, STATE, HEAD, COLUMN, WIDTH, CHUNKS, LEAD, EARLIER, LATER, FROM, TO = range(13)
INPUTS = 13
EXPECTED, EXPECTED_END, AT_ONCE = range(INPUTS, INPUTS + 3)  # lines of memory to ask for: next, end; so many a tile
TURNED = 4  # added to the half of a product: its left factor is read as its transpose

OPERATIONS = [
    "halt", "add", "minus", "least", "times", "whole", "less", "place", "point", "load", "expect", "expect_none",
    "load_column", "state", "store_state", "put", "clear", "copy", "product", "solve", "solve_transposed", "transpose",
    "hadamard", "add_hadamard", "reach", "dots", "dots_below", "pairs", "weigh", "pull", "crossings", "overlap",
    "column_overlap", "channels", "channel_gram", "channel_pull", "channel_crossings", "channel_overlap", "bonus",
    "bonus_pull", "rest", "any_above_one", "accumulate", "descend", "monomials", "monomials_pull", "exponentials",
    "exponentials_pull", "waves", "waves_pull", "inverse_lengths", "unit_pull", "averages",
    "averages_pull",
]
OP = {name: n for n, name in enumerate(OPERATIONS)}
FIELDS = 12  # operation and operands
ONE, SCALE, MINUS = 1, 2, 3  # matrices of a single number, the same for every row: 1, the queries' scale, -1


class Program:
    """Rows of operations, first values of registers, and where the matrices of a task lie."""

    def __init__(self, dtype: Any):
        self.dtype = np.dtype(dtype)
        self.rows: list[list[int]] = []
        self.values: list[int] = [0] * (INPUTS + 3)
        self.matrices: list[tuple[int, int, int, bool]] = [(0, 0, 0, False)]  # address, row, col, own memory?
        self.literals: dict[int, int] = {}
        self.bytes = 0
        self.lines, self.tiles = 0, 0  # expected; of all products, if registers are what they are first
        self.lane = BYTES // self.dtype.itemsize
        for _ in (ONE, SCALE, MINUS):
            self.same(self.vector(1))
        self.matrices[1:] = self.matrices[2::2]  # only the rows that repeat

    # what operands are

    def register(self, value: int = 0) -> int:
        """A register that is `value` before the first task; what a task leaves in it stays."""
        self.values.append(int(value))
        return len(self.values) - 1

    def literal(self, value: int) -> int:
        """The register of a constant."""
        if value not in self.literals:
            self.literals[value] = self.register(value)
        return self.literals[value]

    def matrix(self, m: int, n: int, above: int = 0, size: int = 0) -> int:
        """Own memory for (m, n), in whole squares of vectors and tiles, with `above` rows before row 0."""
        whole = max(self.lane, PAD)
        up = lambda i: -(-i // whole) * whole  # noqa: E731
        size = size or self.dtype.itemsize
        self.matrices.append((self.bytes + above * up(n) * size, up(n), 1, True))
        self.bytes += up(up(m + above) * up(n) * size) if m + above else 0
        self.bytes = -(-self.bytes // BYTES) * BYTES
        return len(self.matrices) - 1

    def vector(self, n: int, above: int = 0, size: int = 0) -> int:
        """Own memory for n numbers as rows of one, with `above` numbers before them."""
        size = size or self.dtype.itemsize
        pad = -(-above // self.lane) * self.lane
        self.matrices.append((self.bytes + pad * size, 1, 1, True))
        self.bytes += -(-(pad + n + self.lane) * size // BYTES) * BYTES
        return len(self.matrices) - 1

    def moved(self, matrix: int, i: int) -> int:
        """The part of a matrix in own memory from row i on (also before row 0)."""
        at, row, col, own = self.matrices[matrix]
        self.matrices.append((at + i * row * self.dtype.itemsize, row, col, own))
        return len(self.matrices) - 1

    def part(self, matrix: int, j: int, row: int | None = None, col: int | None = None) -> int:
        """A matrix in own memory from column j on; or numbers from there on in other steps."""
        at, own_row, own_col, own = self.matrices[matrix]
        at += j * own_col * self.dtype.itemsize
        self.matrices.append((at, own_row if row is None else row, own_col if col is None else col, own))
        return len(self.matrices) - 1

    def same(self, matrix: int) -> int:
        """Row 0 of a matrix in own memory, for every row."""
        at, _, col, own = self.matrices[matrix]
        self.matrices.append((at, 0, col, own))
        return len(self.matrices) - 1

    def view(self) -> int:
        """A matrix that `place` or `point` sets."""
        self.matrices.append((0, 0, 0, False))
        return len(self.matrices) - 1

    # the list

    def __getattr__(self, name: str) -> Any:
        if name not in OP:
            raise AttributeError(name)
        return lambda *operands: self.rows.append([OP[name], *map(int, operands)])

    def here(self) -> int:
        """The number of the next operation: where `less` may go back to."""
        return len(self.rows)

    @contextlib.contextmanager
    def only_if(self, a: int, b: int) -> Iterator[None]:
        """What follows is done only if register a is less than b."""
        self.less(a, b, len(self.rows) + 2)
        self.less(self.literal(0), self.literal(1), 0)
        jump = self.rows[-1]
        yield
        jump[3] = len(self.rows)

    def multiply(self, A: int, B: int, m: int, n: int, k: int, out: int, rows: int, half: int = FULL,
                 added: int = 0, added_rows: int = 0) -> None:  # fmt: skip
        """out (m, n) = diag(rows) A B + diag(added_rows) added, A (m, k)."""
        self.product(half, A, B, m, n, k, rows, added, added_rows or rows, out)
        self.tiles += -(-self.values[m] // ROWS) * -(-self.values[n] // (LANES * self.lane))

    @functools.cached_property
    def finished(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Operations, first values of registers, matrices, and which of these lie in own memory: nothing may follow."""
        self.values[AT_ONCE] = -(-self.lines // max(self.tiles, 1))
        full = [row + [0] * (FIELDS - len(row)) for row in itertools.chain(self.rows, [[OP["halt"]]])]
        matrices = np.array([x[:3] for x in self.matrices], np.int64)
        own = np.array([x[3] for x in self.matrices])
        return np.array(full, np.int64), np.array(self.values, np.int64), matrices, own

    def table(self) -> np.ndarray:
        """The operations, a row each."""
        return self.finished[0]

    def registers(self) -> np.ndarray:
        """First values of the registers, for one thread."""
        return self.finished[1].copy()

    def placed(self, address: int) -> np.ndarray:
        """The matrices for memory that begins at an address."""
        matrices, own = self.finished[2].copy(), self.finished[3]
        matrices[own, 0] += -(-address // 64) * 64
        return matrices
