"""Kinds of calls, and the table of a workspace for each: sizes, flags, and where the matrices of a thread lie."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ...runtime.pieces.tiles import lane
from ...runtime.pieces.vectors import LANES, ROWS
from ...runtime.pieces.workspace import Layout
from ..policy import CHECKPOINT_BYTES
from ..policy import DECAY_BLOCK as BLOCK
from ..types import Decay, Erase
from .workspace import (
    CHUNK,
    DELTA,
    EXPONENTIALS,
    FREE,
    MATRICES,
    MONOMIALS,
    SCALAR,
    TASK,
    VECTOR,
    WAVES,
)

FORWARD = frozenset(("tasks", "lines", "k", "v", "kT", "g64", "sums", "factor", "scales", "ones", "minus", "E", "start",
                     "end", "S", "inside", "hat", "carries"))  # fmt: skip
READS = frozenset(("q", "P"))
CHANNELS = frozenset(("W", "first", "last", "carry", "near", "far", "farT"))
ADJOINT = frozenset(("dout", "dS", "dST", "ST", "UT", "dU", "dP", "dq", "dk", "totals", "S_begun", "P", "q",
                     "crossed"))  # fmt: skip
SCALAR_ADJOINT = frozenset(("readers", "writers", "column_sums"))
CHANNEL_ADJOINT = frozenset(("crossed_k", "readers_k", "writers_k", "scratch"))


VALUE_ADJOINT = frozenset(name for name in MATRICES if name.endswith("_v") or name in ("ended", "asking"))


class Features(NamedTuple):
    """A kind of feature map: all of it that a table depends on."""

    kind: str
    K: int  # channels of its rows
    skipped: int  # monomials before the first of the K features of the cell
    numbers: int
    segments: int


class Cell(NamedTuple):
    """A kind of call: all that a table depends on."""

    dtype: str  # of the computation
    K: int
    V: int  # value columns of a task
    C: int  # tokens of a chunk
    decay: Decay
    erase: Erase
    query_reads: bool  # queries read S_{t-1}
    erase_reads: bool  # the erase vector reads S_{t-1}
    own_read: bool  # it is not k
    asked: bool  # there are queries
    queries: int  # heads of queries a head of the state
    bonus: bool
    started: bool  # there is an initial state
    features: Features | None = None  # what q and k go through: K counts features
    value_decay: bool = False  # the adjoint alone has one
    averaged: bool = False  # outputs are divided by the sum of their weights
    direct: frozenset[str] = frozenset()  # of q, v and r: those that are read where they lie
    solved: int = 0  # conjugate-gradient steps of the systems x (Z + diag(ridge)) = q; 0: outputs are read
    each_ridge: bool = False  # each token has its own ridge

    @property
    def compensates(self) -> bool:
        """Whether a float32 system is solved with what its rounding leaves out of rows with beta > 1."""
        return self.dtype == "float32" and self.erase is Erase.DELTA and self.decay is not Decay.VECTOR


class Backward(NamedTuple):
    """What the table of an adjoint depends on besides."""

    group: int  # heads that share inputs: one task
    chunks: int  # of the longest task
    has_dstate: bool
    apart: bool  # gradients of the states between tasks are known


def _fields(cell: Cell, back: Backward | None) -> frozenset[str]:
    """The matrices of a kind of call."""
    names = set(FORWARD)
    if cell.asked:
        names |= READS
    if cell.decay is Decay.VECTOR:
        names |= CHANNELS
    if cell.bonus:
        names |= {"u", "du"}
    if cell.averaged:
        names |= {"z", "over", "averages"}
    if cell.solved:
        names |= {"found", "residual", "direction", "times_A", "squares", "bounds", "ridge"}
    if cell.features is not None:
        names |= {"x_q", "x_k", "phi_q", "phi_k", "map_numbers", "over_q", "over_k"}
        names |= {"angle"} if cell.features.kind == "waves" else set()
        names -= {"q", "k"}
    if cell.erase is not Erase.NONE:
        names |= {"A", "P"} | ({"r"} if cell.own_read else set())
    if cell.erase is Erase.DELTA:
        names |= {"beta", "M", "U"} | ({"rest", "correction"} if cell.compensates else set())
    if cell.erase is Erase.FREE:
        names |= {"b", "bT", "Y"}
    if back is None:
        return frozenset(names)
    names |= ADJOINT
    if cell.decay is not Decay.NONE:
        names |= CHANNEL_ADJOINT if cell.decay is Decay.VECTOR else SCALAR_ADJOINT
    if cell.erase is Erase.DELTA:
        names |= {"dbeta", "dr", "back"}
    if cell.erase is Erase.FREE:
        names |= {"dY", "db", "dr"}
    if cell.averaged:
        names |= {"dz", "weights", "z_begun"}
    if cell.value_decay:
        names |= VALUE_ADJOINT - {name for name in MATRICES if MATRICES[name].alias}
    if cell.features is not None:
        names |= {"phi_dq", "phi_dk", "dx", "row_sums"}
        names -= {"q", "k", "dq", "dk"}
    return frozenset(names)


def _checkpoints(cell: Cell) -> frozenset[str]:
    """The matrices that an adjoint keeps of each chunk."""
    names = {"S", "A", "rest", "Y"} | ({"U"} if cell.erase is Erase.DELTA else set())
    names |= {"z", "x_k", "phi_k", "over_k"}
    return frozenset(names | ({"E", "start", "end"} if cell.decay is Decay.SCALAR else set()))


def checkpoints(size: int, chunks: int) -> int:
    """Chunks that an adjoint keeps at once: as many as fit, of `size` bytes each."""
    return max(1, min(chunks, CHECKPOINT_BYTES // max(size, 1)))


@functools.lru_cache(256)
def layout(cell: Cell, back: Backward | None = None) -> tuple[Layout, int]:
    """(table, chunks that it keeps)."""
    W = lane(cell.dtype)
    up = lambda n: -(-n // W) * W  # noqa: E731
    sizes = {"c": cell.C, "c1": cell.C + 1, "C": cell.C, "K": cell.K, "K_lanes": up(cell.K), "V": cell.V,
             "V_lanes": up(cell.V), "one": 1, "block": BLOCK, "scratch_rows": 2 * BLOCK + 1 + 3 * cell.C,
             "given": cell.K, "line_count": 0, "tasks_count": 0, "task_fields": len(TASK), "slots": 1, "segments": 1,
             "slot": 0, "slot_after": 1, "segment": 0, "lane": W}  # fmt: skip
    sizes |= {
        "decay": {Decay.NONE: 0, Decay.SCALAR: SCALAR, Decay.VECTOR: VECTOR}[cell.decay],
        "erase": {Erase.NONE: 0, Erase.DELTA: DELTA, Erase.FREE: FREE}[cell.erase],
        "query_reads": cell.query_reads, "erase_reads": cell.erase_reads, "own_read": cell.own_read,
        "asked": cell.asked, "queries": cell.queries, "bonus": cell.bonus, "started": cell.started,
        "compensates": cell.compensates, "value_decay": cell.value_decay, "averaged": cell.averaged,
        "direct_q": "q" in cell.direct, "direct_v": "v" in cell.direct, "direct_r": "r" in cell.direct,
        "iterations": cell.solved, "each_ridge": cell.each_ridge,
    }  # fmt: skip
    if cell.features is not None:
        sizes |= map_sizes(cell.K, cell.features, W)
    fields, itemsize = _fields(cell, back), np.dtype(cell.dtype).itemsize
    if back is None:
        if not cell.solved:
            sizes["line_count"], sizes["lines_at_once"] = _lines(cell, itemsize)
        return _aliased(CHUNK.layout(sizes, itemsize, W, lambda f: int(f in fields)), cell), 0
    kept = _checkpoints(cell) & fields
    sizes |= {"group": back.group, "has_dstate": back.has_dstate, "apart": back.apart}
    one = CHUNK.layout(sizes, itemsize, W, lambda f: int(f in kept)).bytes
    count = checkpoints(one, back.chunks)
    sizes |= {"slots": count, "segments": -(-back.chunks // count)}
    each = lambda f: 0 if f not in fields else count if f in kept else sizes["segments"] if "begun" in f else 1  # noqa: E731
    return _aliased(CHUNK.layout(sizes, itemsize, W, each), cell), count


def map_sizes(K: int, f: Features, W: int) -> dict[str, int]:
    """The sizes that a map to K features adds."""
    up = lambda n: -(-n // W) * W  # noqa: E731
    kinds = {"monomials": MONOMIALS, "exponentials": EXPONENTIALS, "waves": WAVES}
    return {"map": kinds[f.kind], "given": f.K, "given_wide": up(f.K) + W, "skipped": f.skipped,
            "phi_lanes": up(f.skipped + up(K)) + W, "numbers": f.numbers, "half": K // 2,
            "half_lanes": up(K // 2), "segment_count": f.segments, "three": 3}  # fmt: skip


def _lines(cell: Cell, itemsize: int) -> tuple[int, int]:
    """(length of the list of cache lines to prefetch in a chunk, lines before each tile)."""
    of = lambda n: -(-n * itemsize // 64) + 1  # noqa: E731
    tiles = lambda m, n: -(-m // ROWS) * -(-n // (LANES * lane(cell.dtype)))  # noqa: E731
    lines = cell.C * 2 * (of(cell.K) + of(cell.V))
    count = tiles(cell.K, cell.V) + (2 * cell.asked + (cell.erase is not Erase.NONE)) * tiles(cell.C, cell.V)
    return lines + 3, -(-lines // count)


def _aliased(made: Layout, cell: Cell) -> Layout:
    """Where features are q and k, the erase vector is the key, and values are written as they are."""
    table, slots, item = made.table, CHUNK.slots, np.dtype(cell.dtype).itemsize
    same = [("r", "k", not cell.own_read, 0), ("U", "v", cell.erase is not Erase.DELTA, 0)]
    if cell.features is not None:
        same = [(x, "phi_" + x, True, cell.features.skipped * item) for x in ("q", "k", "dq", "dk")] + same
    own = set(made.own.tolist())
    for name, other, applies, offset in same:
        if applies and slots[other] in own:
            to, at = slots[name], slots[other]
            table[to : to + 3] = table[at : at + 3]
            table[to] += offset
            own.add(to)
    return made._replace(own=np.array(sorted(own), np.int64))
