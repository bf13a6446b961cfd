"""Kinds of calls, and the table of a workspace for each: sizes, flags, and where the matrices of a thread lie."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ...runtime.pieces.passes import NARROW, WIDE
from ...runtime.pieces.vectors import LANES, ROWS, lane
from ...runtime.pieces.workspace import Layout, up
from ..policy import CHECKPOINT_BYTES, FEATURE_HEADS
from ..policy import DECAY_BLOCK as BLOCK
from .workspace import MONOMIALS, TASK, WORK

RECOMPUTED = {"k", "r"}  # without slots of their own
DECAYS = {"E", "start", "end", "carry"}  # one for all chunks unless tokens decay


class Cell(NamedTuple):
    """A kind of call: all that a table depends on."""

    dtype: str  # of the computation
    K: int
    V: int  # value columns of a task
    C: int  # tokens of a chunk
    queries: int  # heads of queries a head of the state
    words: frozenset[str]  # what is true of it: see forms.cell_of
    features: tuple[tuple[str, int], ...] = ()  # sizes of a feature map, which q and k go through: K counts features
    iterations: int = 0  # conjugate-gradient steps of the systems x (Z + diag(ridge)) = q; 0: outputs are read

    def sizes(self, W: int) -> dict[str, int]:
        """What a kernel is told of it; W: numbers of a vector."""
        found = dict.fromkeys(self.words, 1) | {"K_lanes": up(self.K, W), "one": 1, "lane": W, "task_fields": len(TASK)}
        found |= {name: x for name, x in self._asdict().items() if isinstance(x, int)}
        return found | dict(self.features)

    def which(self, *words: str) -> Cell:
        """The kind of those calls of which these words are true, too."""
        return self._replace(words=self.words.union(words))


def checkpoints(size: int, chunks: int) -> int:
    """Chunks that an adjoint keeps at once: as many as fit, of `size` bytes each."""
    return max(1, min(chunks, CHECKPOINT_BYTES // max(size, 1)))


@functools.lru_cache(256)
def layout(cell: Cell, group: int = 1, chunks: int = 0) -> tuple[Layout, int]:
    """(table, chunks that it keeps); group: heads that share inputs, chunks: of the longest task, of an adjoint."""
    words = cell.words
    W = lane(cell.dtype) * (NARROW if "formed" in words else 1)  # rows of a formed Z are whole blocks
    sizes = {"c": cell.C, "c1": cell.C + 1, "V_lanes": up(cell.V, W), "block": BLOCK, "given": cell.K,
             "scratch_rows": 2 * BLOCK + 1 + 3 * cell.C, "line_count": 0, "slots": 1, "segments": 1,
             "slot_after": 1} | cell.sizes(W)  # fmt: skip
    if "adjoint" not in words:
        if not cell.iterations:
            sizes["line_count"], sizes["lines_at_once"] = _lines(cell, np.dtype(cell.dtype).itemsize)
        return WORK.layout(sizes, cell.dtype, words), 0
    kept = [name for name, m in WORK.declared if m.of <= words and m.slot == "slot" and not m.alias
            and name not in RECOMPUTED and ("scalar" in words or name not in DECAYS)]  # fmt: skip
    sizes["group"] = group
    one, two = (WORK.layout(sizes, cell.dtype, words, dict.fromkeys(kept, n)).bytes for n in (1, 2))
    count = checkpoints(two - one, chunks)
    sizes |= {"slots": count, "segments": -(-chunks // count)}
    copies = dict.fromkeys(kept, count) | dict.fromkeys(("S_begun", "z_begun"), sizes["segments"])
    return WORK.layout(sizes, cell.dtype, words, copies), count


@functools.lru_cache(64)
def token_layout(cell: Cell, tokens: int) -> Layout:
    """The table of a kernel of the recurrent form whose slabs have so many tokens."""
    W = lane(cell.dtype)
    sizes = {"c": tokens, "c_queries": tokens * cell.queries, "c_rows": tokens * (1 + cell.queries),
             "width_lanes": WIDE * W, "two": 2, "pairs": up(cell.K, W)} | cell.sizes(W)  # fmt: skip
    if cell.features:
        sizes["group"] = FEATURE_HEADS if tokens == 1 and sizes["map"] != MONOMIALS else 1
        sizes["c_rows"] *= sizes["group"]
    return WORK.layout(sizes, cell.dtype, cell.words)


def _lines(cell: Cell, itemsize: int) -> tuple[int, int]:
    """(length of the list of cache lines to prefetch in a chunk, lines before each tile)."""
    of = lambda n: -(-n * itemsize // 64) + 1  # noqa: E731
    tiles = lambda m, n: -(-m // ROWS) * -(-n // (LANES * lane(cell.dtype)))  # noqa: E731
    lines = cell.C * 2 * (of(cell.K) + of(cell.V))
    products = 2 * ("has_queries" in cell.words) + ("erase" in cell.words)  # of a chunk, but for that of K rows
    count = tiles(cell.K, cell.V) + products * tiles(cell.C, cell.V)
    return lines + 3, -(-lines // count)

