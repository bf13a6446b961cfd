"""Short sequences in compiled loops: which take the recurrent form, and how it is shared out.

A form is chosen by the length of its own sequence: the same sequence gives the same bits alone and among others.
"""

from __future__ import annotations

import numpy as np

from ....runtime import threads
from ....runtime.memory import overlaps_itself, place_of
from ....runtime.pieces.memory import address
from ....runtime.pieces.run import Kernel
from ... import policy
from ...types import Decay, Erase, Inputs, Plan
from ..chunks import cell_of, kernel_of, key_width, numbers_of
from ..layout import token_layout
from ..table import FIRST, STOP, Table, count_sequences, is_direct, lengths
from ..time_blocks import time_blocks
from .step import step


def is_stepwise(x: Inputs, plan: Plan, rows: np.ndarray) -> np.ndarray:
    """Whether each sequence takes the recurrent form: by the chunk size, its length, or for want of another form."""
    if plan.chunk_size == 1 or is_only_stepwise(x):
        return np.ones(len(rows), bool)
    plain = x.erase is Erase.NONE and x.decay is not Decay.VECTOR
    short = policy.SHORT_CPU_PLAIN if plain else policy.SHORT_CPU
    return (lengths(rows) <= short) & (plan.chunk_size is None)


def is_only_stepwise(x: Inputs) -> bool:
    """Whether no compiled chunk form covers the cell forward."""
    return x.gv is not None or goes_back_elsewhere(x)


def goes_back_elsewhere(x: Inputs) -> bool:
    """Whether no compiled chunk form covers the cell backward."""
    return x.u is not None and (x.erase is not Erase.NONE or x.gv is not None)


def in_place(x: Inputs, plan: Plan, state: np.ndarray) -> bool:
    """Whether the final state is written where the initial one lies: nothing else that is read may lie there."""
    if not plan.overwrite or state.dtype != plan.dtype:
        return False
    if state.strides[-1] != state.itemsize or overlaps_itself(place_of(state)) or not is_one_batch(state):
        return False
    return not any(y is not None and np.may_share_memory(state, y) for y in x)


def is_one_batch(y: np.ndarray) -> bool:
    """Whether (..., H, K, V) is an array (B, H, K, V) where it lies."""
    return not y.size or address(y.reshape((-1, *y.shape[-3:]))) == address(y)


def steps(x: Inputs, plan: Plan, table: Table, rows: np.ndarray, kept: int = 0) -> Kernel:
    """The recurrent form of these sequences: all but where the arrays lie.   kept: see time_blocks."""
    dtype, (H, V), state = np.dtype(plan.dtype), x.v.shape[-2:], table.kept.get("in_state")
    longest, states = int((rows[:, STOP] - rows[:, FIRST]).max()), count_sequences(rows) * H
    few = states * key_width(x, plan) * V * dtype.itemsize * longest < policy.FEW_BYTES
    count = 1 if few else threads.num_threads()
    share = -(-count // states)
    columns = min(V, max(1, -(-V // (share * policy.STEP_COLUMNS))) * policy.STEP_COLUMNS)
    columns = V if plan.average is not None else columns
    cell, rotation = cell_of(x, plan, columns, state is not None), table.kept.get("in_rotation")
    direct = state is not None and state.dtype == dtype and state.strides[-1] == dtype.itemsize
    numbers = numbers_of(plan) | {"H": H, "direct": direct, "direct_v": is_direct(x.v, dtype)}
    words = ("tokens",)
    if rotation is not None:  # the last pass rotates the final state
        numbers, words = numbers | {"rotates": 1, "pairs": rotation.shape[-1]}, ("tokens", "rotates")
    made = token_layout(cell, max(1, min(longest, policy.STEP_TOKENS)))
    tasks, bounds = time_blocks(rows, H, V, columns, cell.C, 1, kept)
    return kernel_of(step, cell, made, table, numbers, *words).over(tasks, bounds, len(tasks), count)
