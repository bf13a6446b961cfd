"""Tasks of a call: a row for each sequence, cut into blocks of time, head after head.

Tokens of one head lie far apart where heads lie side by side, and what a processor fetches around them belongs to the
next heads. So neighbouring heads alternate, a block of time each, short enough that it still lies in the cache. The
states between blocks are stored in an array, in the dtype of the computation: no bit depends on the order. Forward
stores one a head, the final state in the end; before a backward all of them, so that it can take the blocks from the
last to the first.
"""

from __future__ import annotations

import numpy as np

from ...runtime.held import Cached
from ...runtime.pieces.workspace import up
from ...runtime.shapes import segments
from .. import policy
from ..types import Plan
from .workspace import TASK

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
        rows += [(b, s.start, s.stop, state, n > 0, n < len(cuts) - 1, first + s.at + 1 if s.at >= 0 else 0)
                 for n, s in enumerate(cuts)]  # fmt: skip
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
    make = _tasks if len(rows) <= policy.REMEMBERED_ROWS else _tasks.__wrapped__
    tasks, bounds = make(rows.tobytes(), (H, V, columns, C, group, every, last_first, policy.TIME_BLOCK))
    return tasks.copy(), bounds


@Cached
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
    if block >= longest and not rows[:, LATER].any():
        return 0
    rows[:, TO] = np.cumsum(block_counts(rows, block)) - block_counts(rows, block)
    return block


def block_counts(rows: np.ndarray, block: int) -> np.ndarray:
    """Time blocks of each row, at least one."""
    return np.maximum(-(-(rows[:, STOP] - rows[:, FIRST]) // block), 1)
