"""The arrays of a call as a table, the kind of a call, and its tasks.

Tasks are a row for each sequence, cut into blocks of time, head after head.

With heads side by side, the tokens of one head are far apart, and a line of memory around them holds the next heads. So
neighbouring heads alternate, each for a block of time short enough to stay in the cache. The states between blocks are
stored in an array, in the dtype of the computation: no bit depends on the order. A forward pass stores one a head,
which becomes the final state; before a backward it stores all of them: the backward takes the last block first.
"""

from __future__ import annotations

import functools
from math import prod
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from ...runtime.held import emptying
from ...runtime.pieces.memory import empty, up
from ...runtime.pieces.registers import NARROW, WIDE
from ...runtime.pieces.run import stored_array
from ...runtime.pieces.vectors import lane
from ...runtime.pieces.workspace import ARRAY, SHARED, Layout
from ...runtime.recorder import constant
from ...runtime.shapes import segments
from .. import policy
from ..policy import DECAY_BLOCK as BLOCK
from ..policy import FEATURE_HEADS
from ..types import Inputs, Plan
from .workspace import ARRAYS, MONOMIALS, TASK, WORK

BATCH, FIRST, STOP, STATE, HEAD, COLUMN, WIDTH, EARLIER, LATER, FROM, TO, AT = range(len(TASK))


def sequences(plan: Plan, batch: int) -> np.ndarray:
    """Rows of tasks, one per sequence, or one per segment of it if there are positions.

    BATCH, FIRST and STOP; STATE, TO: rows of the sequence's initial and its final state; EARLIER and LATER: whether a
    segment of the same sequence is the row before or after; AT: 1 + row of the states at positions of the position that
    it ends at, else 0.
    """
    if not plan.is_ragged:
        each = len(plan.states_at or ())
        owners = [(b, b, b * each, plan.sequences[0]) for b in range(batch)]
    else:
        owners = [(0, s.row or 0, 0, s) for s in plan.sequences]
    rows = []
    for b, state, first, sequence in owners:
        cuts = segments(sequence, plan.states_at or ())
        rows += [(b, s.start, s.stop, state, n > 0, n < len(cuts) - 1, first + at + 1 if at >= 0 else 0)
                 for n, (s, at) in enumerate(cuts)]  # fmt: skip
    table = np.zeros((len(rows), len(TASK)), np.int64)
    if rows:
        table[:, (BATCH, FIRST, STOP, STATE, EARLIER, LATER, AT)] = rows
        table[:, TO] = table[:, STATE]
    return table


def count_sequences(rows: np.ndarray) -> int:
    """The number of sequences of rows."""
    return len(rows) - int(rows[:, LATER].sum())


def lengths(rows: np.ndarray) -> np.ndarray:
    """Of each row the tokens of its sequence."""
    first, last = np.flatnonzero(rows[:, EARLIER] == 0), np.flatnonzero(rows[:, LATER] == 0)
    return np.repeat(rows[last, STOP] - rows[first, FIRST], last - first + 1)


def from_pool(rows: np.ndarray, pool_rows: np.ndarray, in_place: bool) -> None:
    """Let sequences begin with rows of a pool, and end with them if it is overwritten in place."""
    rows[:, STATE] = np.asarray(pool_rows)[rows[:, STATE]]
    if in_place:
        rows[:, TO] = rows[:, STATE]


def time_blocks(rows: np.ndarray, H: int, V: int, columns: int, C: int, group: int, every: int = 0,
                last_first: bool = False) -> tuple[np.ndarray, list[int]]:  # fmt: skip
    """(tasks, bounds): a task for each sequence of `rows`, head, block of value columns and block of whole chunks.

    Each row of a sequence is cut into blocks of time. Tasks bounds[n]..bounds[n + 1] are one sequence, a block of
    columns and at most `group` heads that alternate. Where all states are stored, each for `every` tokens, TO of a row
    is the place of the first.
    """
    blocks = len(rows) + int((rows[:, STOP] - rows[:, FIRST]).sum()) // (every or policy.TIME_BLOCK)
    make = _tasks if H * -(-V // columns) * blocks <= policy.CACHED_TASKS else _tasks.__wrapped__
    tasks, bounds = make(rows.tobytes(), (H, V, columns, C, group, every, last_first, policy.TIME_BLOCK))
    return tasks.copy(), bounds


@functools.lru_cache(maxsize=64)
def _tasks(given: bytes, how: tuple[int, ...]) -> tuple[np.ndarray, list[int]]:
    """`time_blocks` of the bytes of `rows`."""
    H, V, columns, C, group, every, last_first, time_block = how
    rows = np.frombuffer(given, np.int64).reshape(-1, len(TASK))
    group = next(n for n in range(min(group, policy.ALTERNATING_HEADS, H), 0, -1) if H % n == 0)
    length = rows[:, STOP] - rows[:, FIRST]
    whole = group == 1 or last_first
    block = every or (max(int(length.max(initial=1)), 1) if whole else up(time_block, C))
    column_blocks, groups = -(-V // columns), H // group
    counts = block_counts(rows, block)
    before = np.cumsum(counts) - counts  # time blocks of earlier rows
    first = np.flatnonzero(rows[:, EARLIER] == 0)  # row of each sequence
    count = np.add.reduceat(counts, first) if len(first) else counts
    each = np.repeat(count * group, groups * column_blocks)
    bounds = np.concatenate([[0], np.cumsum(each)])
    bundle = np.repeat(np.arange(len(each)), each)
    n, head = np.divmod(np.arange(len(bundle)) - bounds[bundle], group)
    sequence, place = np.divmod(bundle, groups * column_blocks)
    n = count[sequence] - 1 - n if last_first else n
    n += before[first][sequence]
    row = np.repeat(np.arange(len(rows)), counts)[n]
    n -= before[row]
    tasks = rows[row]
    tasks[:, HEAD] = place // column_blocks * group + head
    tasks[:, COLUMN] = place % column_blocks * columns
    tasks[:, WIDTH] = np.minimum(columns, V - tasks[:, COLUMN])
    tasks[:, FIRST] += n * block
    tasks[:, STOP] = np.minimum(tasks[:, STOP], tasks[:, FIRST] + block)
    inside = n < counts[row] - 1
    tasks[:, EARLIER] |= n > 0
    tasks[:, LATER] |= inside
    tasks[inside, AT] = 0
    tasks[:, TO] += n * bool(every)
    tasks[:, FROM] = tasks[:, TO] - bool(every)
    return tasks, bounds.tolist()


def checkpoint_block(rows: np.ndarray, shape: tuple[int, int, int], itemsize: int, C: int, few: bool = False) -> int:
    """Tokens between the states that are stored for a backward, and TO of each row; 0 where none are stored.

    shape: (H, K, V) of the states of a sequence. Those that segments begin with are always stored. Blocks are longer
    where much would be stored, or `few` are wanted, unless an adjoint would keep too much of their chunks.
    """
    (H, K, V), longest = shape, int((rows[:, STOP] - rows[:, FIRST]).max(initial=0))
    most = max(min(policy.LONGEST_BLOCK, policy.CHECKPOINT_BYTES // (K * V * itemsize) * C), policy.TIME_BLOCK)
    block = up(most if few else policy.TIME_BLOCK, C)
    stored = lambda: int(block_counts(rows, block).sum() - rows[:, EARLIER].sum()) * H * K * V * itemsize  # noqa: E731
    while block < min(longest, most) and stored() > policy.STORED_BYTES:
        block *= 2
    return store_every(rows, block)


def store_every(rows: np.ndarray, block: int) -> int:
    """Set TO of each row and return the block; 0 if only the states before sequences are stored."""
    if block >= int((rows[:, STOP] - rows[:, FIRST]).max(initial=0)) and not rows[:, LATER].any():
        return 0
    rows[:, TO] = np.cumsum(block_counts(rows, block)) - block_counts(rows, block)
    return block


def block_counts(rows: np.ndarray, block: int) -> np.ndarray:
    """Time blocks of each row, at least one."""
    return np.maximum(-(-(rows[:, STOP] - rows[:, FIRST]) // block), 1)


# kinds of calls, and the table of each: sizes, flags, and where the matrices of a thread lie

RECOMPUTED = {"k", "r"}  # without slots of their own
DECAYS = {"E", "start", "end", "carry"}  # one for all chunks unless tokens decay


class Cell(NamedTuple):
    """A kind of call: all that a table depends on."""

    dtype: str  # of the computation
    K: int
    V: int  # value columns of a task
    C: int  # tokens of a chunk
    queries: int  # heads of queries a head of the state
    words: frozenset[str]  # its properties: see forward.cell_of
    features: tuple[tuple[str, int], ...] = ()  # sizes of a feature map, which q and k go through: K counts features
    iterations: int = 0  # conjugate-gradient steps of the systems x (Z + diag(ridge)) = q; 0: outputs are read

    def sizes(self, W: int) -> dict[str, int]:
        """The sizes that it adds to a kernel's fields; W: numbers of a vector."""
        found = dict.fromkeys(self.words, 1) | {"K_lanes": up(self.K, W), "one": 1, "lane": W, "task_fields": len(TASK)}
        found |= {name: x for name, x in self._asdict().items() if isinstance(x, Integral)}
        return found | dict(self.features)


@functools.lru_cache(maxsize=128)
def layout(cell: Cell, group: int = 1, chunks: int = 1) -> Layout:
    """Its table; of an adjoint for `group` heads that share inputs and `chunks` chunks of the longest task."""
    words = cell.words
    W = lane(cell.dtype) * (NARROW if "formed" in words else 1)  # rows of a formed Z are whole blocks
    sizes = {"c": cell.C, "c1": cell.C + 1, "V_lanes": up(cell.V, W), "block": BLOCK, "given": cell.K, "group": group,
             "scratch_rows": 2 * BLOCK + 1 + 3 * cell.C, "slot_after": 1} | cell.sizes(W)  # fmt: skip
    per_chunk = [name for name, m in WORK.declared if m.of <= words and m.slot == "slot" and not m.alias
            and name not in RECOMPUTED and ("scalar" in words or name not in DECAYS)]  # fmt: skip
    return WORK.layout(sizes, cell.dtype, words, dict.fromkeys(per_chunk, chunks))


@functools.lru_cache(maxsize=128)
def token_layout(cell: Cell, tokens: int) -> Layout:
    """The table of a kernel of the recurrent form whose slabs have so many tokens."""
    W = lane(cell.dtype)
    sizes = {"c": tokens, "c_queries": tokens * cell.queries, "c_rows": tokens * (1 + cell.queries),
             "width_lanes": WIDE * W} | cell.sizes(W)  # fmt: skip
    if "map" in cell.words:
        sizes["group"] = FEATURE_HEADS if tokens == 1 and sizes["map"] != MONOMIALS else 1
        sizes["c_rows"] *= sizes["group"]
    return WORK.layout(sizes, cell.dtype, cell.words)


# the arrays of a call


class Table:
    """Arrays by name as rows of `numbers`: address, steps, heads that share one, storage, shape; owns them."""

    def __init__(self, names: tuple[str, ...]):
        self.numbers = np.zeros((len(names), ARRAY), np.int64)
        self.numbers[:, SHARED] = 1
        self.arrays: dict[str, Any] = {}
        self._row = {name: n for n, name in enumerate(names)}

    def tokens(self, name: str, y: np.ndarray | None, heads: int) -> None:
        """An array (..., T, H', D) for `heads` heads; one batch row, or none, is shared by the batch."""
        if y is None:
            return
        y = y.reshape((prod(y.shape[:-3]), *y.shape[-3:]))
        steps = (0, *y.strides[1:]) if y.shape[0] == 1 else y.strides
        self.put(name, y, steps, heads // y.shape[-2])

    def states(self, name: str, y: np.ndarray | None) -> None:
        """An array (..., H, K, V): rows of the state take the place of tokens."""
        if y is None:
            return
        y = y.reshape((prod(y.shape[:-3]), *y.shape[-3:])).swapaxes(1, 2)
        self.put(name, y, y.strides, 1)

    def constant(self, name: str, y: np.ndarray | None) -> None:
        """A matrix, the same for every batch row and head: its rows take the place of tokens."""
        if y is not None:
            self.put(name, constant(y)[None, :, None], (0, y.strides[0], 0, y.strides[1]), 1)

    def put(self, name: str, y: np.ndarray, steps: tuple[int, ...], shared: int) -> None:
        """An array (B, T, heads, D) with these steps."""
        self.arrays[name] = y
        self.numbers[self._row[name]] = stored_array(y, steps, max(shared, 1))


def table_of(x: Inputs, plan: Plan) -> Table:
    """The inputs of a call of the core."""
    table, H = Table(ARRAYS), x.v.shape[-2]
    table.tokens("in_q", x.q, query_heads(x))
    for name, y in (("in_k", x.k), ("in_v", x.v), ("in_g", x.g), ("in_r", x.r if x.a is None else x.a),
                    ("in_beta", x.beta), ("in_b", x.b), ("in_gv", x.gv), ("in_weight", x.weight),
                    ("in_own", x.own)):  # fmt: skip
        table.tokens(name, y, H)
    if x.rotation is not None:
        y = x.rotation.reshape((-1, *x.rotation.shape[-3:]))
        steps = [0 if n == 1 else step for n, step in zip(y.shape, y.strides, strict=True)]
        table.put("in_rotation", y, tuple(steps), 1)  # one of all heads: they stay tasks of their own
    table.states("in_past_k", x.past_k)
    table.states("in_past_v", x.past_v)
    if x.A_log is not None:
        table.put("in_A_log", x.A_log[None, None, :, None], (0, 0, *x.A_log.strides, 0), H // len(x.A_log))
    if x.bias is not None:
        table.put("in_bias", x.bias[None, None], (0, 0, *x.bias.strides), H // len(x.bias))
    if x.u is not None:
        table.put("in_u", x.u.reshape((1, 1, *x.u.shape)), (0, 0, *x.u.strides), H // x.u.shape[0])
    if plan.features is not None:
        tables = plan.features.tables(x.k.shape[-1], np.dtype(plan.dtype))
        for name, y in (("in_map", tables.W), ("in_map_T", tables.WT), ("in_numbers", tables.numbers[None]),
                        ("in_segments", tables.segments)):  # fmt: skip
            table.constant(name, y)
    if plan.average is not None:
        table.tokens("out_sums", plan.average.sums, query_heads(x))
    return table


def add_results(table: Table, x: Inputs, plan: Plan, state: np.ndarray | None, in_place: bool) -> tuple[Any, Any, Any]:
    """(output, final state, states at positions) of a forward, which are added to its table, with the initial state.

    in_place: the final state is written over the initial.
    """
    (*lead, T, _, V), dtype, shape = x.v.shape, np.dtype(plan.dtype), state_shape(x, plan)
    out = None if x.q is None else empty((*lead, T, query_heads(x), V), dtype)
    lead, ended = ([], [len(plan.sequences)]) if plan.is_ragged else (lead, lead)
    end = state if in_place else empty((*ended, *shape), dtype)
    at = None if plan.states_at is None else empty((*lead, len(plan.states_at), *shape), dtype)
    table.tokens("out", out, query_heads(x))
    for name, S in (("in_state", state), ("starts", end), ("out_states", at)):
        table.states(name, S)
    return out, end, at


def query_heads(x: Inputs) -> int:
    """The heads of the output: those of the queries or of the values, whichever are more."""
    return x.v.shape[-2] if x.q is None else max(x.v.shape[-2], x.q.shape[-2])


def key_width(x: Inputs, plan: Plan) -> int:
    """Channels of the keys as the state has them."""
    K = x.k.shape[-1]
    return K if plan.features is None else plan.features.width(K)


def state_shape(x: Inputs, plan: Plan) -> tuple[int, int, int]:
    """(H, K, V) of a state."""
    return x.v.shape[-2], key_width(x, plan), x.v.shape[-1] + (plan.average is not None)


emptying.extend((_tasks.cache_clear, layout.cache_clear, token_layout.cache_clear))
