"""The order in which heads and tokens are walked: by strips of tokens, head after head.

Tokens of one head lie far apart where heads lie side by side, and what a processor fetches around them belongs to the
next heads. So neighbouring heads take turns, a strip of tokens each, short enough that it still lies in the cache. A
head's state waits in the array of final states, which has the dtype of the computation: no bit depends on the order.
"""

from __future__ import annotations

import numpy as np

from ..numba_program import COLUMN, FIRST, HEAD, RESUMED, STOP, WIDTH

STRIP = 256  # tokens
GROUP = 8  # heads that take turns, at most


def strips(rows: np.ndarray, H: int, V: int, columns: int, C: int, group: int) -> tuple[np.ndarray, list[int]]:
    """(tasks, bounds): a task for each sequence of `rows`, head, block of value columns and strip of whole chunks.

    Tasks bounds[n]..bounds[n + 1] are one sequence, a block of columns and at most `group` heads that take turns.
    """
    group = next(n for n in range(min(group, GROUP, H), 0, -1) if H % n == 0)
    length = rows[:, STOP] - rows[:, FIRST]
    strip = -(-STRIP // C) * C if group > 1 else max(int(length.max(initial=1)), 1)
    blocks, groups = -(-V // columns), H // group
    each = np.repeat(np.maximum(-(-length // strip), 1) * group, groups * blocks)
    bounds = np.concatenate([[0], np.cumsum(each)])
    bundle = np.repeat(np.arange(len(each)), each)
    turn, head = np.divmod(np.arange(len(bundle)) - bounds[bundle], group)
    sequence, place = np.divmod(bundle, groups * blocks)
    tasks = rows[sequence]
    tasks[:, HEAD] = place // blocks * group + head
    tasks[:, COLUMN] = place % blocks * columns
    tasks[:, WIDTH] = np.minimum(columns, V - tasks[:, COLUMN])
    tasks[:, FIRST] += turn * strip
    tasks[:, STOP] = np.minimum(tasks[:, STOP], tasks[:, FIRST] + strip)
    tasks[:, RESUMED] = turn > 0
    return tasks, bounds.tolist()
