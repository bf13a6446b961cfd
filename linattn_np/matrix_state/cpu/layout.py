"""Kinds of calls, and the table of a workspace for each: sizes, flags, and where the matrices of a thread lie."""

from __future__ import annotations

import functools
from numbers import Integral
from typing import NamedTuple

import numpy as np

from ...ops.cpu.maps import EXPONENTIALS, MONOMIALS, WAVES
from ...runtime.pieces.passes import NARROW, WIDE
from ...runtime.pieces.vectors import LANES, ROWS, lane
from ...runtime.pieces.workspace import Layout, up
from ..policy import CHECKPOINT_BYTES, FEATURE_HEADS
from ..policy import DECAY_BLOCK as BLOCK
from ..types import Decay, Erase
from .workspace import DELTA, FREE, SCALAR, TASK, VECTOR, WORK

RECOMPUTED = {"k", "r"}  # slots of other matrices that they may be, not of their own
DECAYS = {"E", "start", "end", "carry"}  # one for all chunks unless tokens decay


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
    separate_erase_key: bool  # it is not k
    has_queries: bool  # there are queries
    queries: int  # heads of queries a head of the state
    bonus: bool
    started: bool  # there is an initial state
    features: Features | None = None  # what q and k go through: K counts features
    value_decay: bool = False  # the adjoint alone has one
    averaged: bool = False  # outputs are divided by the sum of their weights
    direct: frozenset[str] = frozenset()  # of q and v: those that are read where they lie
    iterations: int = 0  # conjugate-gradient steps of the systems x (Z + diag(ridge)) = q; 0: outputs are read
    formed: bool = False  # of one token, whose Z is formed

    @property
    def compensates(self) -> bool:
        """Whether a float32 system is solved with what its rounding leaves out of rows with beta > 1."""
        return self.dtype == "float32" and self.erase is Erase.DELTA and self.decay is not Decay.VECTOR


@functools.lru_cache(256)
def words_of(cell: Cell, *form: str) -> frozenset[str]:
    """What a kind of call is: which matrices have memory, and which pieces are compiled.

    form: "chunk", also "adjoint", or "tokens", the recurrent form.
    """
    is_so = {
        "plain": cell.features is None, "map": cell.features is not None, "separate_erase_key": cell.separate_erase_key,
        "waves": cell.features is not None and cell.features.kind == "waves", "bonus": cell.bonus,
        "averaged": cell.averaged, "solved": cell.iterations > 0, "formed": cell.formed,
        "compensates": cell.compensates, "value_decay": cell.value_decay,
        "channels": cell.value_decay or cell.decay is Decay.VECTOR, "erase": cell.erase is not Erase.NONE,
        cell.decay.name.lower(): True, cell.erase.name.lower(): True,
    }  # fmt: skip
    return frozenset(word for word, is_true in is_so.items() if is_true).union(form)


def flags(cell: Cell) -> dict[str, int]:
    """What a kernel is told of the kind of a call."""
    decays = {Decay.NONE: 0, Decay.SCALAR: SCALAR, Decay.VECTOR: VECTOR}
    erases = {Erase.NONE: 0, Erase.DELTA: DELTA, Erase.FREE: FREE}
    plain = {name: int(x) for name, x in cell._asdict().items() if isinstance(x, Integral)}
    return plain | {f"direct_{name}": name in cell.direct for name in ("q", "v")} | {
        "decay": decays[cell.decay], "erase": erases[cell.erase], "compensates": cell.compensates}  # fmt: skip


class Backward(NamedTuple):
    """What the table of an adjoint depends on besides."""

    group: int  # heads that share inputs: one task
    chunks: int  # of the longest task
    has_dstate: bool
    apart: bool  # gradients of the states between tasks are known


def checkpoints(size: int, chunks: int) -> int:
    """Chunks that an adjoint keeps at once: as many as fit, of `size` bytes each."""
    return max(1, min(chunks, CHECKPOINT_BYTES // max(size, 1)))


@functools.lru_cache(256)
def layout(cell: Cell, back: Backward | None = None) -> tuple[Layout, int]:
    """(table, chunks that it keeps)."""
    words = words_of(cell, "chunk", *(("adjoint",) if back else ()))
    W = lane(cell.dtype) * (NARROW if cell.formed else 1)  # rows of a formed Z are whole blocks
    sizes = {"c": cell.C, "c1": cell.C + 1, "K_lanes": up(cell.K, W), "V_lanes": up(cell.V, W), "one": 1,
             "block": BLOCK, "scratch_rows": 2 * BLOCK + 1 + 3 * cell.C, "given": cell.K, "line_count": 0,
             "task_fields": len(TASK), "slots": 1, "segments": 1, "slot_after": 1, "lane": W}  # fmt: skip
    sizes |= flags(cell)
    if cell.features is not None:
        sizes |= map_sizes(cell.K, cell.features, W)
    if back is None:
        if not cell.iterations:
            sizes["line_count"], sizes["lines_at_once"] = _lines(cell, np.dtype(cell.dtype).itemsize)
        return _aliased(WORK.layout(sizes, cell.dtype, words), cell), 0
    kept = [name for name, m in WORK.matrices.items() if m.slot == "slot" and not m.alias and name not in RECOMPUTED
            and (cell.decay is Decay.SCALAR or name not in DECAYS)]  # fmt: skip
    sizes |= {"group": back.group, "has_dstate": back.has_dstate, "apart": back.apart}
    one, two = (WORK.layout(sizes, cell.dtype, words, dict.fromkeys(kept, n)).bytes for n in (1, 2))
    count = checkpoints(two - one, back.chunks)
    sizes |= {"slots": count, "segments": -(-back.chunks // count)}
    copies = dict.fromkeys(kept, count) | dict.fromkeys(("S_begun", "z_begun"), sizes["segments"])
    return _aliased(WORK.layout(sizes, cell.dtype, words, copies), cell), count


@functools.lru_cache(64)
def token_layout(cell: Cell, tokens: int) -> Layout:
    """The table of a kernel of the recurrent form whose slabs have so many tokens."""
    W, K = lane(cell.dtype), cell.K
    sizes = flags(cell) | {
        "c": tokens, "c_queries": tokens * cell.queries, "c_rows": tokens * (1 + cell.queries), "K_lanes": up(K, W),
        "width_lanes": WIDE * W, "one": 1, "two": 2, "pairs": up(K, W), "lane": W,
        "task_fields": len(TASK)}  # fmt: skip
    if cell.features is not None:
        sizes |= map_sizes(K, cell.features, W)
        sizes["group"] = FEATURE_HEADS if tokens == 1 and sizes["map"] != MONOMIALS else 1
        sizes["c_rows"] *= sizes["group"]
    return WORK.layout(sizes, cell.dtype, words_of(cell, "tokens"))


def map_sizes(K: int, f: Features, W: int) -> dict[str, int]:
    """The sizes that a map to K features adds."""
    kinds = {"monomials": MONOMIALS, "exponentials": EXPONENTIALS, "waves": WAVES}
    return {"map": kinds[f.kind], "given": f.K, "given_wide": up(f.K, W) + W, "skipped": f.skipped,
            "phi_lanes": up(f.skipped + up(K, W), W) + W, "numbers": f.numbers, "half": K // 2,
            "half_lanes": up(K // 2, W), "segment_count": f.segments}  # fmt: skip


def _lines(cell: Cell, itemsize: int) -> tuple[int, int]:
    """(length of the list of cache lines to prefetch in a chunk, lines before each tile)."""
    of = lambda n: -(-n * itemsize // 64) + 1  # noqa: E731
    tiles = lambda m, n: -(-m // ROWS) * -(-n // (LANES * lane(cell.dtype)))  # noqa: E731
    lines = cell.C * 2 * (of(cell.K) + of(cell.V))
    count = tiles(cell.K, cell.V) + (2 * cell.has_queries + (cell.erase is not Erase.NONE)) * tiles(cell.C, cell.V)
    return lines + 3, -(-lines // count)


def _aliased(made: Layout, cell: Cell) -> Layout:
    """Where features are q and k, the erase vector is the key, and values are written as they are."""
    table, slots, item = made.table, WORK.slots, np.dtype(cell.dtype).itemsize
    same = [("r", "k", not cell.separate_erase_key, 0), ("U", "v", cell.erase is not Erase.DELTA, 0)]
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
