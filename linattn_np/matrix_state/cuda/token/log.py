"""Tokens after a checkpoint and a log, sums of a flush, and moves of entries, as CUDA kernels (token/log.cu)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ....runtime.arrays import Array, cast, dtype_name
from ....runtime.cuda import launch
from ....runtime.cuda.elements import ELEMENTS, Constants
from ... import policy
from ...types import Inputs, Plan, ReadState
from .. import arguments

FILE = "token/log.cu"
LONGEST = 96  # path of a token that is computed beside others
FOLD_THREADS, FOLD_BLOCKS, FOLD_ROWS = 256, 3, 8  # of a block of a fold; of a multiprocessor; of a thread
READ, KEPT = 72 << 10, 16 << 10  # bytes of what tokens at a time read of S, and of values u that a block has at hand
TOKEN_BLOCKS = {8: 5, 12: 4, 16: 4}  # of a multiprocessor, by the bits of codes
KINDS = {**ELEMENTS, "float64": 3}
ROWS = ("q", "k", "v", "g", "erase", "beta")
NO_TOKENS: dict[str, Any] = {
    **dict.fromkeys(ROWS, (0, 0, 0, 0, 1)), **{f"kind_{n}": 0 for n in (*ROWS, "out")}, "bonus": 0, "out": 0,
    "queries": 0, "erases": 0, "early": 0, "updated": 0, "tokens": 0, "scale": 0.0,
}  # fmt: skip


class Tokens(NamedTuple):
    """The tokens of a call: fields of the argument struct, the arrays that they point to, and out."""

    fields: dict[str, Any]
    held: tuple[Any, ...]
    out: Array | None


class Cursors(NamedTuple):
    """Rows of the pool, their first slots and tokens in the ring, as numbers and (3, R) on the device."""

    rows: np.ndarray
    start: np.ndarray
    live: np.ndarray
    there: Any


def unsupported_reason(pool: Array) -> str | None:
    """Why the kernels do not support a pool (P, H, K, V); None if they do."""
    if max(pool.shape[2:]) > policy.WIDEST_CUDA:
        return f"states are {pool.shape[2]} x {pool.shape[3]}, the kernels support up to {policy.WIDEST_CUDA}"
    if pool.device.id != launch.current_device():
        return f"state is on device {pool.device.id}, the current one is {launch.current_device()}"
    return launch.unusable()


@functools.cache
def constants_of(K: int, V: int, W: int, state: str, wide: bool) -> Constants:
    """The constants of log.cu; state: the dtype of states, or int16, int12 or int8 for codes of so many bits."""
    bits = int(state[3:]) if state.startswith("int") else 0
    lanes = min(32, 1 << (-(-V // 4) - 1).bit_length())
    threads, blocks = (256, 1 if state == "float64" else 2) if K <= 128 else (512, 1)
    if bits:  # a thread has twice as many rows in its registers
        threads, blocks = threads // 2, TOKEN_BLOCKS[bits] // (1 if K <= 128 else 2)
    rows = 1 << (max(8, FOLD_ROWS * FOLD_THREADS // max(K, 1)).bit_length() - 1)
    found = {"LA_K": K, "LA_V": V, "LA_W": W, "LA_STATE": KINDS["float32" if bits else state], "LA_BITS": bits,
             "LA_WIDE": int(wide), "LA_LANES": lanes, "LA_LONGEST": LONGEST, "LA_THREADS": threads,
             "LA_BLOCKS": blocks, "LA_FOLD_LANES": min(lanes, rows),
             "LA_FOLD_BLOCKS": 1 if state == "float64" else FOLD_BLOCKS}  # fmt: skip
    size, tile, groups = 8 if state == "float64" else 4, 4 * lanes, threads // lanes
    at_once = min(threads // 32, 1 << (READ // (size * (8 * threads + 2 * K))).bit_length() - 1)
    kept = max(at_once, min(64, KEPT // (tile * size)))
    numbers = at_once * (2 * groups * tile + 2 * K + 2 * LONGEST + 3) + kept * tile
    found |= {"LA_AT_ONCE": at_once, "LA_KEPT": kept,
              "LA_NODES": -(-(size * numbers + 4 * at_once * (LONGEST + 1)) // 16) * 16}  # fmt: skip
    return tuple(sorted(found.items()))


def tokens_of(x: Inputs, plan: Plan, heads: int, dtype: Any) -> Tokens:
    """The tokens of a call, whose gates and norms are computed; arrays are read where they lie."""
    xp, (R, T, _, V) = plan.xp, x.v.shape
    asked = 0 if x.q is None else max(x.q.shape[-2], heads)
    fields, held = dict(NO_TOKENS), []
    given: dict[str, Array | None] = {"q": x.q, "k": x.k, "v": x.v, "g": x.g}
    if x.r is not None and x.beta is not None:
        given |= {"erase": x.r, "beta": x.beta}
    for name, y in given.items():
        if y is not None:
            y = _readable(xp, y)
            fields |= {name: _rows_of(y, asked if name == "q" else heads), f"kind_{name}": KINDS[dtype_name(y)]}
            held.append(y)
    if x.u is not None:
        bonus = xp.ascontiguousarray(xp.broadcast_to(cast(xp, x.u, dtype), (heads, x.k.shape[-1])))
        fields["bonus"] = bonus.data.ptr
        held.append(bonus)
    out = None if x.q is None else xp.empty((R, T, asked, V), dtype=x.v.dtype)
    if out is not None:
        fields |= {"out": out.data.ptr, "kind_out": KINDS[dtype_name(out)], "queries": asked // heads}
    fields |= {"erases": int("erase" in given), "early": int(plan.erase_reads is ReadState.PREVIOUS),
               "updated": int(plan.query_reads is ReadState.UPDATED), "tokens": T, "scale": plan.scale}  # fmt: skip
    return Tokens(fields, (*held, out), out)


def run(entry: str, xp: Any, states: Sequence[Array], kind: str, logs: dict[str, Array],
        cursors: tuple[np.ndarray, ...], on_device: dict[str, Any], ring: int, tokens: Tokens | None = None,
        **own: Any) -> None:  # fmt: skip
    """Launch an entry of log.cu for rows of the pool.

    states: an array of the dtype `kind`, or codes of that kind, their scales and, of int12, low. logs: k, u, g.
    cursors: the rows, their first slots, their tokens in the ring. on_device: what the last launch left there.
    own: fields of the argument struct, parents as an array of slots or nodes.
    """
    state, scales, low = (*states, None, None)[:3]
    R, (H, K, V) = len(cursors[0]), state.shape[1:]
    if 0 in (R, H, K, V):
        return
    longest = int(cursors[2].max()) + own.get("count", 0)
    if entry == "tokens" and own["parents"] is not None and own["count"] > 1 and longest <= LONGEST:
        entry = "nodes"  # tokens of a chain wait for each other: one by one is faster
    there, shift, more = _cursors(xp, cursors, on_device, ring)
    given = own.pop("parents", None)
    parents = None if given is None else _indices(xp, given, on_device)
    fields = NO_TOKENS | (tokens.fields if tokens else {}) | {"first": 0, "count": 0, "tree": 0, "dense": 0} | own
    pointers = {"state": state, "scales": scales, "low": low, "cursors": there, "parents": parents}
    pointers |= {f"log_{n}": y for n, y in logs.items()}
    fields |= {n: 0 if y is None else y.data.ptr for n, y in pointers.items()}
    fields |= {"shift": shift, "more": more, "rows": R, "heads": H, "ring": ring, "slots": logs["k"].shape[2]}
    wide = V % 4 == 0 and state.data.ptr % (4 * state.itemsize) == 0
    constants = constants_of(K, V, logs["g"].shape[-1], kind, wide)
    values = dict(constants)
    lanes, threads = values["LA_LANES"], values["LA_THREADS"]
    if entry == "fold":
        lanes, threads = values["LA_FOLD_LANES"], FOLD_THREADS
    launch.launch(FILE, entry, constants, R * H * -(-V // (4 * lanes)), threads,
                  values["LA_NODES"] * (entry == "nodes"), arguments.LOG.packed(fields))  # fmt: skip


def _cursors(xp: Any, wanted: tuple[np.ndarray, ...], on_device: dict[str, Any], ring: int) -> tuple[Any, int, int]:
    """(cursors on the device, what is added to their slots and to their tokens): sent again where rows went apart."""
    rows, start, live = wanted
    last: Cursors | None = on_device.get("cursors")
    if last is not None and np.array_equal(last.rows, rows):
        shifts, more = (start - last.start) % ring, live - last.live
        if (shifts == shifts[0]).all() and (more == more[0]).all():
            return last.there, int(shifts[0]), int(more[0])
    there = xp.asarray(np.stack(wanted).astype(np.int32))
    on_device["cursors"] = Cursors(rows.copy(), start.copy(), live.copy(), there)
    return there, 0, 0


def _indices(xp: Any, x: np.ndarray, on_device: dict[str, Any]) -> Any:
    """Whole numbers on the device; those of the last call are not sent again."""
    last = on_device.get("indices")
    if last is None or not np.array_equal(last[0], x):
        last = on_device["indices"] = np.array(x), xp.asarray(np.ascontiguousarray(x, np.int32))
    return last[1]


def _readable(xp: Any, y: Array) -> Array:
    """An array whose rows the kernels read: of a kind they know, each row in one piece."""
    if dtype_name(y) not in KINDS:
        y = cast(xp, y, xp.float32)
    return y if y.shape[-1] < 2 or y.strides[-1] == y.itemsize else xp.ascontiguousarray(y)


def _rows_of(y: Array, heads: int) -> tuple[int, ...]:
    """The ROWS struct of an array (rows, tokens, heads, width), or of one without the first axes."""
    strides = [s if n > 1 else 0 for s, n in zip(y.strides[:-1], y.shape[:-1], strict=True)]
    return (y.data.ptr, *[0, 0, *strides][-3:], heads // y.shape[-2])
