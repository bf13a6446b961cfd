"""The compiled backend: calls on NumPy arrays as tables, tasks and kernels."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...ops.sums import over_tokens, sum_of_groups
from ...runtime.pieces.memory import empty
from ...runtime.shapes import Sequence
from ..cache import count
from ..heads import groups
from ..policy import APPENDED_ROWS, APPENDED_SLOTS, CPU_ROWS, FEW_OPERATIONS, cpu_tile
from ..types import GatedCache, Inputs, KeyValueCache, SoftmaxPlan
from . import path
from .run import ArrayTable
from .run import run as run_kernel

FAR = 1e30  # more tokens than any window


def forward(plan: SoftmaxPlan, x: Inputs, state: Any) -> tuple[np.ndarray, np.ndarray]:
    """(out (..., Tq, heads, V), the logs of the sums (..., Tq, heads, 1))."""
    heads, dtype, C = all_heads(x), np.dtype(plan.dtype), tile_of(plan, x)
    (*lead, Tq), V = x.q.shape[:-2], x.v.shape[-1]
    out, logs = empty((*lead, Tq, heads, V), dtype), empty((*lead, heads, Tq), dtype).swapaxes(-1, -2)[..., None]
    table = table_of(plan, x, state, C[0])
    table.put("out", out)
    table.put("logs", logs)
    blocks = None if x.w is None else path.Blocks(plan, x, C[0])
    if blocks is not None:
        blocks.put(table, "forward")
    tasks = tasks_of(plan, x, 1, -(-CPU_ROWS // C[0]) * C[0], blocks)
    run("forward", plan, x, state, (*C, 1), table, tasks, operations(plan, x, state))
    return out, logs


def backward(
    plan: SoftmaxPlan, x: Inputs, state: Any, results: tuple[np.ndarray, np.ndarray], dout: np.ndarray,
    dlse: np.ndarray | None = None,
) -> tuple[Inputs, Any]:  # fmt: skip
    """(gradients of the inputs, of the cache); results: out and the logs."""
    if x.w is not None:
        return path_backward(plan, x, state, results, dout)
    heads, dtype, C = all_heads(x), np.dtype(plan.dtype), cpu_tile(plan.chunk_size)[1]
    (out, logs), G = results, groups(x)
    dout = cotangent(x, dout, dtype)
    dlse = None if dlse is None else np.ascontiguousarray(dlse, dtype)
    table = table_of(plan, x, state, C)
    dbias = None if x.bias is None else np.zeros(x.bias.shape, dtype)  # there are pairs in no tile
    d = Inputs(*(None if y is None else empty(y.shape, dtype) for y in x[:4]), bias=dbias)
    sinks = None if x.sinks is None or not plan.normalize else empty((rows_of(plan, x), 1, *x.sinks.shape), dtype)
    begin = None if state is None else type(state)(*(np.zeros(y.shape, dtype) for y in state))
    for name, y in (("out", out), ("logs", logs), ("in_dout", dout), ("out_dq", d.q), ("out_dk", d.k),
                    ("out_dv", d.v), ("out_dg", column(d.g)), ("out_dbias", d.bias), ("out_dsinks", column(sinks)),
                    ("in_dlse", dlse)):  # fmt: skip
        table.put(name, y)
    if begin is not None:
        for name, y in (("past_dk", begin.k), ("past_dv", begin.v), ("past_db", column(getattr(begin, "b", None)))):
            table.put(name, y)
    group = heads // max(G, 1)
    tasks = tasks_of(plan, x, group, 0)
    run("backward", plan, x, state, (C, C, group), table, tasks, 2.5 * operations(plan, x, state))
    if x.sinks is not None:
        d = d._replace(sinks=np.zeros(x.sinks.shape, dtype) if sinks is None else over_tokens(np, sinks))
    return d, begin


def cotangent(x: Inputs, dout: np.ndarray, dtype: Any) -> np.ndarray:
    """dout as the values are stored, or in the dtype of the computation."""
    return dout if dout.dtype == x.v.dtype and dout.flags.c_contiguous else np.ascontiguousarray(dout, dtype)


def rows_of(plan: SoftmaxPlan, x: Inputs) -> int:
    """Sequences of a call."""
    return len(plan.sequences) if plan.is_ragged else prod(x.v.shape[:-3])


def path_backward(
    plan: SoftmaxPlan, x: Inputs, state: Any, results: tuple[np.ndarray, np.ndarray], dout: np.ndarray
) -> tuple[Inputs, Any]:
    """The same with position maps: each head has gradients of its own, which are summed over groups of heads."""
    heads, dtype, C = all_heads(x), np.dtype(plan.dtype), cpu_tile(plan.chunk_size)[1]
    table, (out, logs) = table_of(plan, x, state, C), results
    dout = np.ascontiguousarray(dout, dtype)

    def zeros(y: np.ndarray | None) -> np.ndarray | None:
        return None if y is None else np.zeros((*y.shape[:-2], heads, y.shape[-1]), dtype)

    blocks = path.Blocks(plan, x, C)
    blocks.put(table, "backward")
    d = blocks.zeros(heads) | {"out_dv": zeros(x.v), "out_dg": zeros(column(x.g))}
    past = {} if state is None else {"past_dk": zeros(state.k), "past_dv": zeros(state.v),
                                     "past_db": zeros(column(state.b))}  # fmt: skip
    for name, y in ({"out": out, "logs": logs, "in_dout": dout} | d | past).items():
        table.put(name, y)
    tasks = tasks_of(plan, x, 1, 0, blocks)
    run("path_vjp", plan, x, state, (C, C, 1), table, tasks, 3.5 * operations(plan, x, state))
    grads = blocks.gradients(d)
    summed = lambda y, like: sum_of_groups(plan.xp, y, like.shape[-2])  # noqa: E731
    grads["v"] = summed(d["out_dv"], x.v)
    if x.g is not None:
        grads["g"] = summed(d["out_dg"], column(x.g))[..., 0]
    if state is None:
        return Inputs(**grads), None
    k, v, b = (summed(past[n], y) for n, y in (("past_dk", state.k), ("past_dv", state.v),
                                              ("past_db", column(state.b))))  # fmt: skip
    return Inputs(**grads), type(state)(k, v, b[..., 0], np.zeros(state.length.shape, dtype))


def tile_of(plan: SoftmaxPlan, x: Inputs) -> tuple[int, int]:
    """(queries, keys) of a tile of the forward pass."""
    C, N = cpu_tile(plan.chunk_size)
    return (C, N) if x.w is None else (C, C)


def all_heads(x: Inputs) -> int:
    """Heads of the output."""
    return max(y.shape[-2] for y in x[:3] if y is not None)


def column(y: np.ndarray | None) -> np.ndarray | None:
    """One number a token and head as an array of one channel."""
    return None if y is None else y[..., None]


def table_of(plan: SoftmaxPlan, x: Inputs, state: Any, C: int) -> ArrayTable:
    """The arrays of a call."""
    table = ArrayTable(all_heads(x))
    for name, y in (("in_q", x.q), ("in_k", x.k), ("in_v", x.v), ("in_g", column(x.g)), ("in_bias", x.bias)):
        table.put(name, y)
    if x.sinks is not None:
        table.put("in_sinks", np.broadcast_to(x.sinks, (1, C, len(x.sinks)))[..., None])
    if state is not None and state.v.shape[-3]:
        put_cache(table, plan, state)
    return table


def put_cache(table: ArrayTable, plan: SoftmaxPlan, state: Any) -> None:
    """The arrays of a cache."""
    for name, y in (("past_k", state.k), ("past_v", state.v), ("past_b", column(getattr(state, "b", None))),
                    ("past_length", length_of(plan, state))):  # fmt: skip
        table.put(name, y)


def length_of(plan: SoftmaxPlan, state: Any) -> np.ndarray:
    """The lengths of a cache, whose integers look like one or two numbers of the computation."""
    return count(plan.xp, state.length).reshape(-1, 1, 1, 1).view(plan.dtype)


def appends(plan: SoftmaxPlan, state: Any) -> bool:
    """Whether `append` writes into a cache: arrays of the computation's dtype, whose batch is one axis."""
    rows = [state.k, state.v, *([state.b[..., None]] if type(state) is GatedCache else ())]
    dense = all(y.dtype == plan.dtype and y.size and (y.ndim == 4 or y.flags.c_contiguous) for y in rows)
    return dense and state.length.dtype == np.int64 and state.length.flags.c_contiguous


def new_cache(plan: SoftmaxPlan, x: Inputs, L: int) -> Any:
    """A cache of L slots for tokens x, to be filled."""
    lead, dtype = x.v.shape[:-3], np.dtype(plan.dtype)
    k, v = (empty((*lead, L, *y.shape[-2:]), dtype) for y in (x.k, x.v))
    b = () if x.g is None else (empty((*lead, L, x.g.shape[-1]), dtype),)
    return (GatedCache if b else KeyValueCache)(k, v, *b, empty(lead, np.dtype(np.int64)))


def append(plan: SoftmaxPlan, x: Inputs, state: Any, end: Any) -> Any:
    """`end`, filled with the last tokens of a cache, None without one, and of x; in its own memory if it is `state`."""
    L, T, rows, in_place = end.v.shape[-3], x.v.shape[-3], prod(x.v.shape[:-3]), end is state
    given = {"in_k": x.k, "in_v": x.v, "end_k": end.k, "end_v": end.v}
    given |= {"past_k": state.k, "past_v": state.v} if state is not None and state.v.shape[-3] else {}
    given = with_wide_rows(given)
    gates = {} if x.g is None else {"in_g": x.g, "end_b": end.b} | ({"past_b": state.b} if "past_k" in given else {})
    lengths = {"end_length": end} | ({} if state is None else {"past_length": state})
    given |= {n: column(y) for n, y in gates.items()} | {n: length_of(plan, y) for n, y in lengths.items()}
    heads, N = max(y.shape[-2] for y in given.values()), APPENDED_ROWS
    table = ArrayTable(heads)
    for name, y in given.items():
        table.put(name, y)
    work = x.k.size + x.v.size if in_place else end.k.size + end.v.size
    step = L if in_place or work < FEW_OPERATIONS else APPENDED_SLOTS
    tasks = [(b, b, 0, T, 0, i, min(i + step, L), 0) for b in range(rows) for i in range(0, L, step)]
    alone = plan._replace(sequences=(Sequence(None, 0, T),))
    rows_of_call = Inputs(given["in_k"], given["in_k"], given["in_v"], x.g)
    run("append", alone, rows_of_call, state, (N, N, heads), table, np.array(tasks, np.int64), work)
    return end


def with_wide_rows(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tokens, and slots, of keys, or values, whose heads lie side by side, as those of one head."""
    found = dict(given)
    for letter in "kv":
        each = {n: y for n, y in given.items() if n.endswith(letter)}
        if all(y.strides[-2:] == (y.shape[-1] * y.itemsize, y.itemsize) for y in each.values()):
            found |= {n: y.reshape(*y.shape[:-2], 1, -1) for n, y in each.items()}
    return found


def tasks_of(plan: SoftmaxPlan, x: Inputs, group: int, rows: int, blocks: path.Blocks | None = None) -> np.ndarray:
    """A task for each sequence, `group` heads and `rows` queries (0: all); those with most keys first."""
    if plan.is_ragged:
        maps = [0] * len(plan.sequences) if blocks is None else blocks.first_rows
        owners = [(0, s.row or 0, s.start, s.stop - s.start, s.stop - s.start, first)
                  for s, first in zip(plan.sequences, maps, strict=True)]  # fmt: skip
    else:
        T, Tq = x.v.shape[-3], x.q.shape[-3]
        owners = [(b, b, 0, T, Tq, 0) for b in range(prod(x.v.shape[:-3]))]
    found = [(b, row, first, T, h, i, min(i + (rows or Tq), Tq), maps)
             for b, row, first, T, Tq, maps in owners
             for h in range(0, all_heads(x), max(group, 1))
             for i in reversed(range(0, Tq if rows else 1, rows or 1))]  # fmt: skip
    return np.array(found, np.int64).reshape(-1, 8)


def run(name: str, plan: SoftmaxPlan, x: Inputs, state: Any, sizes: tuple[int, int, int], table: ArrayTable,
        tasks: np.ndarray, operations: float) -> None:  # fmt: skip
    """A kernel for all tasks of a call; sizes: queries and keys of a tile, heads of a task."""
    longest = max((s.stop - s.start for s in plan.sequences), default=0)
    longest = max(longest, 0 if plan.is_ragged else x.q.shape[-3])
    C, N, heads = sizes
    L, blocks = 0 if state is None else state.v.shape[-3], -(-longest // N) + 1
    each = {"C": C, "N": N, "K": x.k.shape[-1], "V": x.v.shape[-1],
            "tokens": longest, "blocks": blocks, "tiles": blocks + -(-L // N), "causal": int(plan.causal),
            "window": plan.window or 0, "gated": int(x.g is not None), "sinks": int(x.sinks is not None),
            "normalize": int(plan.normalize), "biased": int(x.bias is not None), "strict": int(plan.strict),
            "heads": heads, "mapped": path.how(name, C, x),
            "lse": int(plan.lse)}  # fmt: skip
    dtype = np.dtype(plan.dtype).name
    numbers = {"scale": plan.scale, "reach": float(plan.window or FAR), "L": L}  # one layout for caches that grow
    run_kernel(name, dtype, each, numbers, table, tasks, operations)


def operations(plan: SoftmaxPlan, x: Inputs, state: Any) -> float:
    """Of the products of the forward pass, about."""
    L, T = 0 if state is None else state.v.shape[-3], x.v.shape[-3]
    keys = min(plan.window or FAR, L + (T / 2 if plan.causal else T))
    return 2.0 * (x.k.shape[-1] + x.v.shape[-1]) * prod(x.q.shape[:-2]) * all_heads(x) * keys
