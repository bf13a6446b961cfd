"""A call in compiled loops, forward: its kind, its kernel and its tasks, in the chunk form or the recurrent form.

A form is chosen by the length of its own sequence: the same sequence gives the same bits alone and among others.
"""

from __future__ import annotations

from math import prod, sqrt
from typing import Any

import numpy as np

from ...core import StatesAt
from ...ops.conjugate_gradients import square_of
from ...ops.cpu.formulas import put
from ...runtime import threads
from ...runtime.arrays import cast
from ...runtime.memory import overlaps_itself, place_of
from ...runtime.pieces.memory import address, empty, up
from ...runtime.pieces.run import conversions, launch_of
from ...runtime.pieces.vectors import lane
from ...runtime.pieces.workspace import Layout
from .. import policy
from ..array import chunks as array_chunks
from ..readouts.systems import Solver
from ..types import Decay, Erase, EraseKey, Inputs, Plan, ReadState, Saved, has_raw_gate
from .recurrent import step
from .scan import forward as forward_kernel
from .tasks import (
    FIRST,
    LATER,
    STOP,
    TO,
    Cell,
    Table,
    add_results,
    block_counts,
    checkpoint_block,
    count_sequences,
    from_pool,
    key_width,
    layout,
    lengths,
    query_heads,
    sequences,
    state_shape,
    store_every,
    table_of,
    time_blocks,
    token_layout,
)
from .workspace import EXPONENTIALS, MONOMIALS, WAVES, WORK

HANDLES = frozenset(("wide_keys", "recompute", "features", "averages", "conjugate_gradients", "states_at"))


def handles(x: Inputs, plan: Plan) -> frozenset[str]:
    """The capabilities for a call."""
    found, plain = set(HANDLES), plan.causal and plan.features is None and x.v.size and x.k.size
    if plain and plan.average is plan.states_at is None and (plan.pool_rows is None or plan.pool_rows.is_plain):
        found.add("pools")
    if plain and not goes_back_elsewhere(x):
        found |= {"strengths"}
        found |= {"gates"} if plan.micro_steps == 1 else set()
        found |= {"l2norm"} if plan.erase_key is not EraseKey.PRODUCT else set()
    found |= {"rotations"} if plain else set()
    if plain and query_heads(x) == x.v.shape[-2] and x.decay is Decay.SCALAR:
        found |= {"own_writes"}
    return frozenset(found)


def form(x: Inputs, plan: Plan) -> tuple[str, int | None]:
    """(form, tokens of a chunk or None)."""
    if is_stepwise(x, plan, sequences(plan, 1)).all():
        return "recurrent form", None
    return "chunk form", chunk_length(x, plan)


def describe(x: Inputs, plan: Plan) -> str:
    """Special properties of a call, in words."""
    if x.gv is None:
        return ""
    return "a decay on the value axis takes the recurrent form forward, and chunks backward"


def chunk_length(x: Inputs, plan: Plan) -> int:
    """C of both passes, at most T."""
    C: Any = plan.chunk_size
    channels = x.decay is Decay.VECTOR or x.gv is not None
    is_short = x.erase is not Erase.NONE or (channels and x.k.shape[-1] <= policy.SHORT_CPU_WIDTH)
    C = C if isinstance(C, int) else policy.SHORT_CPU_CHUNK if is_short else policy.CPU_CHUNK
    return max(1, min(C, x.v.shape[-3]))


def forward(x: Inputs, plan: Plan, state: np.ndarray | None) -> tuple[np.ndarray | None, Any, Saved]:
    """(out, final state or StatesAt, saved)."""
    if not (x.v.size and x.k.size):  # no tokens
        return array_chunks.forward(x, plan, state)
    C, rows = chunk_length(x, plan), sequences(plan, prod(x.v.shape[:-3]))
    is_mine = state is not None and in_place(x, plan, state)
    table = table_of(x, plan)
    out, end, at = add_results(table, x, plan, state, is_mine)
    if plan.pool_rows is not None:
        from_pool(rows, plan.pool_rows.at, is_mine)
    stepwise = is_stepwise(x, plan, rows)
    every = block_of_time(x, plan, rows, C) if plan.gradients and not goes_back_elsewhere(x) else 0
    shape = int(block_counts(rows, every).sum()) if every else 0, *state_shape(x, plan)
    starts = empty(shape, np.dtype(plan.dtype)) if every else None
    table.states("starts", starts)
    for form, own in ((steps, rows[stepwise]), (chunks, rows[~stepwise])):
        if len(own):
            form(x, plan, table, own, every)
    if starts is not None:
        last = rows[rows[:, LATER] == 0]
        put(
            end.reshape(prod(end.shape[:-3]), *end.shape[-3:]), _at(starts, last[:, TO] + block_counts(last, every) - 1)
        )
    saved = Saved(x, plan, state, starts)
    return None if out is None else cast(plan.xp, out, x.v.dtype), end if at is None else StatesAt(end, at), saved


def _at(starts: np.ndarray, last: np.ndarray) -> np.ndarray:
    """The stored states at these places: a view if the sequences are equally long."""
    step = last[0] + 1
    even = last[-1] == step * len(last) - 1 and (np.diff(last) == step).all()
    return starts[step - 1 :: step] if even else starts[last]


def block_of_time(x: Inputs, plan: Plan, rows: np.ndarray, C: int) -> int:
    """Tokens of a block of time of the backward, which begins with a stored state; sets TO of the rows.

    A forward in the recurrent form is replayed if it stores none.
    """
    if plan.chunk_size == 1:  # states as the recurrent form makes them, each
        return store_every(rows, 1)
    few = bool(is_stepwise(x, plan, rows).all())
    return checkpoint_block(rows, state_shape(x, plan), np.dtype(plan.dtype).itemsize, C, few)


def chunks(x: Inputs, plan: Plan, table: Table, rows: np.ndarray, every: int = 0, solver: Solver | None = None
           ) -> None:  # fmt: skip
    """The chunk form of these sequences.

    every: see time_blocks.   solver: of systems, whose solutions are the output.
    """
    (H, V), enough, operations = x.v.shape[-2:], 0.0, 6.0
    states, count = count_sequences(rows) * H, threads.num_threads()
    columns = V if plan.average is not None or solver is not None else columns_of(V, states, count)
    cell = cell_of(x, plan, columns, "chunk", started="in_state" in table.arrays)
    if solver is not None:
        cell = cell._replace(words=cell.words | {"solved"}, iterations=0 if solver.exact else solver.iterations)
        if solver.exact or (lengths(rows) == 1).all():
            cell = cell._replace(C=1, words=cell.words - {"direct_q", "direct_v"} | {"formed"})
        enough = square_of(solver.tolerance, float(np.finfo(plan.dtype).eps))
        operations = 2.0 * solver.iterations * cell.queries * (1 + cell.C / V)
        if solver.exact:
            cell, operations = cell._replace(words=cell.words | {"exact"}), V + 2.0 * cell.queries
    tasks, bounds = time_blocks(rows, H, V, columns, cell.C, max(1, states // count), every)
    shares = shares_of(tasks, bounds, operations * tokens(rows) * H * cell.K * V)
    run(forward_kernel, cell, layout(cell), plan, table, tasks, shares, enough=enough)


# the recurrent form


def is_stepwise(x: Inputs, plan: Plan, rows: np.ndarray) -> np.ndarray:
    """Whether each sequence takes the recurrent form: by the chunk size, its length, or for want of another form."""
    if plan.chunk_size == 1 or x.gv is not None or goes_back_elsewhere(x):
        return np.ones(len(rows), bool)
    plain = x.erase is Erase.NONE and x.decay is not Decay.VECTOR
    short = policy.SHORT_CPU_PLAIN if plain else policy.SHORT_CPU
    return (lengths(rows) <= short) & (plan.chunk_size is None)


def goes_back_elsewhere(x: Inputs) -> bool:
    """Whether no compiled chunk form covers the cell backward."""
    return x.u is not None and (x.erase is not Erase.NONE or x.gv is not None)


def in_place(x: Inputs, plan: Plan, state: np.ndarray) -> bool:
    """Whether the final state is written over the initial one: no other input may share its memory."""
    if not plan.overwrite or state.dtype != plan.dtype:
        return False
    if state.strides[-1] != state.itemsize or overlaps_itself(place_of(state)) or not is_one_batch(state):
        return False
    return not any(y is not None and np.may_share_memory(state, y) for y in x)


def is_one_batch(y: np.ndarray) -> bool:
    """Whether (..., H, K, V) is an array (B, H, K, V) without a copy."""
    return not y.size or address(y.reshape((-1, *y.shape[-3:]))) == address(y)


def steps(x: Inputs, plan: Plan, table: Table, rows: np.ndarray, every: int = 0) -> None:
    """The recurrent form of these sequences.   every: see time_blocks."""
    dtype, (H, V), state = np.dtype(plan.dtype), x.v.shape[-2:], table.arrays.get("in_state")
    longest, states = int((rows[:, STOP] - rows[:, FIRST]).max()), count_sequences(rows) * H
    few = states * key_width(x, plan) * V * dtype.itemsize * longest < policy.FEW_BYTES
    count = 1 if few else threads.num_threads()
    columns = V if plan.average is not None else columns_of(V, states, count, policy.STEP_COLUMNS)
    direct = state is not None and state.dtype == dtype and state.strides[-1] == dtype.itemsize
    cell = cell_of(x, plan, columns, "tokens", started=state is not None, direct=direct)
    of_tokens = token_layout(cell, max(1, min(longest, policy.STEP_TOKENS)))
    tasks, bounds = time_blocks(rows, H, V, columns, cell.C, 1, every)
    bounds = bounds if count > 1 else [0, len(tasks)]
    run(step, cell, of_tokens, plan, table, tasks, (bounds, len(tasks)), H=H)


# both


def run(body: Any, cell: Cell, layout: Layout, plan: Plan, table: Table, tasks: np.ndarray,
        shares: tuple[list[int], int], **more: float) -> None:  # fmt: skip
    """A kernel for a kind of call, on its arrays; shares: bounds and each of its launch; more: further numbers."""
    values = {"scale": plan.scale, "eps": 0.0 if plan.average is None else plan.average.eps,
              "root": sqrt(plan.l2norm_eps), "strongest": plan.beta_sigmoid, "lower_bound": plan.lower_bound or 0.0,
              "tasks": tasks, "tasks_count": len(tasks)} | more  # fmt: skip
    words = cell.words | conversions(table.numbers, cell.dtype)
    launch_of(body, WORK, cell.dtype, layout, values, words, *shares).with_arrays(WORK, table.numbers, table).run()


def shares_of(tasks: np.ndarray, bounds: list[int], operations: float) -> tuple[list[int], int]:
    """Bounds and each of a launch: how threads share tasks; few operations are executed by the calling thread alone."""
    if operations < policy.FEW_OPERATIONS:
        return [0, len(tasks)], len(tasks)
    return bounds, max(1, int(len(tasks) * policy.MANY_OPERATIONS / operations))


def cell_of(x: Inputs, plan: Plan, columns: int, form: str, **more: bool) -> Cell:
    """The kind of a call whose tasks have so many value columns; more: further words, each true or false.

    form: "chunk", "chunk adjoint", or "tokens", the recurrent form.
    """
    dtype, features, W = np.dtype(plan.dtype).name, plan.features, lane(plan.dtype)
    vector, delta, free = x.decay is Decay.VECTOR, x.erase is Erase.DELTA, x.erase is Erase.FREE
    apart = free or (delta and not plan.erases_key)
    direct = {n: is_direct(y, plan.dtype) and y.shape[-1] % W == 0 for n, y in (("q", x.q), ("v", x.v))}
    is_so = {
        "decay": x.decay is not Decay.NONE, "scalar": x.decay is Decay.SCALAR, "vector": vector,
        "erase": delta or free, "delta": delta, "free": free, "U_is_v": not delta,
        "query_reads": plan.query_reads is ReadState.PREVIOUS,  # queries read S_{t-1}; erase_reads: r does
        "erase_reads": free or plan.erase_reads is ReadState.PREVIOUS,
        "separate_erase_key": apart, "r_is_k": not apart, "has_queries": x.q is not None, "bonus": x.u is not None,
        "plain": features is None, "map": features is not None,
        "waves": features is not None and features.kind == "waves",
        "value_decay": x.gv is not None, "channels": vector or x.gv is not None, "averaged": plan.average is not None,
        # rows that are read in place
        "direct_q": direct["q"] and features is None and not plan.l2norm and x.rotation is None,
        "direct_v": direct["v"],
        # a float32 system is corrected for its rounding errors in rows with beta > 1
        "compensates": dtype == "float32" and delta and not vector,
        "raw_gate": has_raw_gate(x, plan), "bounded": plan.lower_bound is not None,
        "has_bias": x.bias is not None, "has_rate": x.A_log is not None,
        "rotated": x.rotation is not None, "weighted": x.own is not None,
        "unweighted": x.own is None, "preceded": x.past_k is not None,
        "normalised": plan.l2norm, "before_sigmoid": plan.beta_sigmoid > 0,
    } | more | dict.fromkeys(form.split(), True)  # fmt: skip
    queries = 1 if x.q is None else max(1, x.q.shape[-2] // x.v.shape[-2])
    return Cell(dtype, key_width(x, plan), columns, chunk_length(x, plan), queries,
                frozenset([word for word, is_true in is_so.items() if is_true]), map_sizes(x, plan))  # fmt: skip


def map_sizes(x: Inputs, plan: Plan) -> tuple[tuple[str, int], ...]:
    """The sizes that a call's feature map or its rotations add, by name."""
    if plan.features is None:
        return () if x.rotation is None else (("pairs", x.rotation.shape[-1] // 2),)
    given, K, W = x.k.shape[-1], key_width(x, plan), lane(plan.dtype)
    tables, skipped = plan.features.tables(given, np.dtype(plan.dtype)), plan.features.skipped(given)
    kinds = {"monomials": MONOMIALS, "exponentials": EXPONENTIALS, "waves": WAVES}
    return tuple({
        "map": kinds[plan.features.kind], "given": given, "given_wide": up(given, W) + W, "skipped": skipped,
        "phi_lanes": up(skipped + up(K, W), W) + W, "numbers": len(tables.numbers), "half": K // 2,
        "half_lanes": up(K // 2, W), "segment_count": 0 if tables.segments is None else len(tables.segments),
    }.items())  # fmt: skip


def columns_of(V: int, states: int, count: int, block: int = policy.CPU_COLUMNS) -> int:
    """Value columns of a task: all, or whole blocks of fewer where there are fewer states than threads."""
    share = -(-count // max(states, 1))
    return min(V, max(1, -(-V // (share * block))) * block) if share > 1 else V


def tokens(rows: np.ndarray) -> int:
    """Tokens of all sequences."""
    return int((rows[:, 2] - rows[:, 1]).sum())


def is_direct(y: np.ndarray | None, dtype: Any) -> bool:
    """Whether compiled code can read rows in place: they have the dtype of the computation and stride 1."""
    size = np.dtype(dtype).itemsize
    return y is not None and y.dtype == dtype and y.strides[-1] == size and not any(s % size for s in y.strides)
