"""Formulas on the numbers, or on the rows, of arrays of any storage dtype and stride: one pass over the memory.

A formula has up to four arrays and one result. Their axes are broadcast, and neighbours that are one axis in all of
them are merged, so that up to four are left: (batch, head, token, column), whatever they stand for in the caller's
arrays. A tile is some tokens and columns of one head: of an array that has the dtype of the computation it is the
caller's memory, of another one a converted copy. A formula of rows has them whole, and its arrays may differ in width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...runtime import threads
from ...runtime.arrays import STORAGE as DTYPES
from ...runtime.arrays import name_of
from ...runtime.held import emptying
from ...runtime.pieces.memory import first_byte, working
from ...runtime.pieces.piece import Matrix, Stored, Whole, piece, workspace_kind
from ...runtime.pieces.run import STORAGES, Launch, launch_of
from ...runtime.pieces.views import FLOAT32, FLOAT64, address_of, columns, field_of, point, row, start_of
from ...runtime.pieces.workspace import ARRAY, AT, CHANNEL, CHANNELS, STORAGE, TOKEN, Workspace
from ...runtime.pieces.workspace import Matrix as M
from .storage import load, store

TILE = 2**12  # numbers of a tile: the copies of all arrays stay in the second cache
TASK = 2**15  # numbers of a task
SMALL = 2 * TASK  # numbers, up to which one thread is enough
ALONE = 2**25  # numbers, up to which a thread that is alone calls the kernel once: a call cannot be interrupted
CALLS = 4  # of the kernel by each thread
NAMES = ("x", "y", "z", "u")
SIZES = (
    "kind",
    "how",
    "has_rows",
    "heads",
    "tokens",
    "columns",
    "task_tokens",
    "task_columns",
    "tile_tokens",
    "tile_columns",
)

HERE = ("batch", "head", "t0", "t1", "c0", "c1", "t", "c", "m")  # a task; a tile of it: m tokens from t, columns from c

OWN = {f"{n}_own": M("m", f"{n}_width") for n in (*NAMES, "out")}
TILES = {f"{n}_tile": M("m", f"{n}_width", alias=f"{n}_own") for n in (*NAMES, "out")}  # own memory, or the caller's
GRID = Workspace(
    "grid",
    (*SIZES, *HERE, *(f"{n}_width" for n in (*NAMES, "out"))),
    ("a", "b"),
    (*NAMES, "out"),
    {"": OWN | TILES, "given": {"tasks": M("tasks_count", "task_fields", dtype="int64")}},
)
Work = workspace_kind(GRID)
X, Y, Z, U, OUT = (GRID.slots[f"{n}_tile"] for n in (*NAMES, "out"))


@piece
def is_direct(x: Stored, own: Matrix) -> Whole:
    """Whether rows of an array are read, or written, where they lie, not in own memory."""
    unit = own.itemsize
    return 1 if field_of(x, STORAGE) == (FLOAT32 if unit == 4 else FLOAT64) and field_of(x, CHANNEL) == unit else 0


@piece
def fetch(w: Work, x: Stored, tile: Whole, own: Matrix):
    """The tile of an array; a column that is alone stands for all of them."""
    place, count = (w.batch, w.head, w.t), own.shape[1]
    if field_of(x, CHANNELS) == 1 and count > 1:
        load(x, place, (0, 1), columns(own, 0, 1))
        for i in range(len(own)):
            to, one = row(own, i), own[i, 0]
            for j in range(count):
                to[j] = one
    elif is_direct(x, own):
        point(w, tile, address_of(x, place, w.c), field_of(x, TOKEN))
        return
    else:
        load(x, place, (w.c, count), own)
    point(w, tile, start_of(own, 0), start_of(own, 1) - start_of(own, 0))


@piece
def begin_task(w: Work, n: Whole):
    """Task n: tokens t0..t1 and columns c0..c1 of a batch row and head."""
    across, along = -(-w.columns // w.task_columns), -(-w.tokens // w.task_tokens)
    c, t, head = n % across, n // across % along, n // across // along
    w.c0, w.c1 = c * w.task_columns, min((c + 1) * w.task_columns, w.columns)
    w.t0, w.t1 = t * w.task_tokens, min((t + 1) * w.task_tokens, w.tokens)
    w.batch, w.head = head // w.heads, head % w.heads


@piece
def begin_tile(w: Work, t: Whole, c: Whole):
    """The tiles of all arrays from token t and column c on; that of the result where it lies, or in own memory."""
    w.t, w.c, w.m = t, c, min(w.tile_tokens, w.t1 - t)
    if not w.has_rows:
        n = min(w.tile_columns, w.c1 - c)
        w.x_width, w.y_width = n if w.x_width else 0, n if w.y_width else 0
        w.z_width, w.u_width, w.out_width = n if w.z_width else 0, n if w.u_width else 0, n
    if w.x_width:
        fetch(w, w.x, X, w.x_own)
    if w.y_width:
        fetch(w, w.y, Y, w.y_own)
    if w.z_width:
        fetch(w, w.z, Z, w.z_own)
    if w.u_width:
        fetch(w, w.u, U, w.u_own)
    own = w.out_own
    if is_direct(w.out, own):
        point(w, OUT, address_of(w.out, (w.batch, w.head, t), c), field_of(w.out, TOKEN))
    else:
        point(w, OUT, start_of(own, 0), start_of(own, 1) - start_of(own, 0))


@piece
def end_tile(w: Work):
    """Store the result, unless it is where it belongs."""
    own = w.out_own
    if not is_direct(w.out, own):
        store(own, w.out, (w.batch, w.head, w.t), (w.c, own.shape[1]))


# Python


class Laid(NamedTuple):
    """How arrays lie in memory after their axes have been merged."""

    sizes: tuple[int, int, int]  # batch, head, token
    widths: tuple[int, ...]  # columns of each array
    steps: tuple[tuple[int, int, int, int], ...]  # bytes of each array: batch, head, token, column


def laid(shapes: Sequence[tuple[int, ...]], strides: Sequence[tuple[int, ...]], items: Sequence[int],
         has_rows: bool) -> Laid | None:  # fmt: skip
    """The merged axes of arrays, the result last; None if more than four are left.

    has_rows: the last axis stays as it is. Else it is merged, too, and an array that has one column for all has a
    width of 1.
    """
    count = max(map(len, shapes))
    full = [(*(1,) * (count - len(s)), *s) for s in shapes]
    steps = [tuple(0 if n == 1 else t for n, t in zip(s, (*(0,) * (count - len(own)), *own), strict=True))
             for s, own in zip(full, strides, strict=True)]  # fmt: skip
    outer = [max(s[axis] for s in full) if all(s[axis] for s in full) else 0 for axis in range(count - has_rows)]
    sizes: list[int] = []
    each: list[list[int]] = [[] for _ in shapes]
    for axis in reversed(range(len(outer))):
        n, own = outer[axis], [s[axis] for s in steps]
        if n == 1:
            continue
        if sizes and all(s == one[-1] * sizes[-1] for s, one in zip(own, each, strict=True)):
            sizes[-1] *= n
            continue
        sizes.append(n)
        for s, one in zip(own, each, strict=True):
            one.append(s)
    if has_rows:
        widths = tuple(s[-1] for s in full)
        inner = [t[-1] if n > 1 else item for t, n, item in zip(steps, widths, items, strict=True)]
    else:
        n = sizes.pop(0) if sizes else 1
        inner = [one.pop(0) if one else 0 for one in each]
        widths = tuple(n if t or n == 1 else 1 for t in inner)
        inner = [t or item for t, item in zip(inner, items, strict=True)]
    if len(sizes) > 3:
        return None
    rest = 3 - len(sizes)
    token, head, batch = (*sizes, *(1,) * rest)
    found = [(*one, *(0,) * rest) for one in each]
    return Laid((batch, head, token), widths, tuple((b, h, t, c) for (t, h, b), c in zip(found, inner, strict=True)))


class Prepared(NamedTuple):
    """The launch of a formula for arrays that lie in one way: all but their addresses."""

    launch: Launch
    rows: np.ndarray  # of the table
    at: list[int]  # which of them the arrays are, the result last


@functools.lru_cache(512)
def _prepared(body: Any, kind: tuple[str, int, int], dtype: str, numbers: tuple[float, float], has_rows: bool,
              names: tuple[str, ...], arrays: tuple[Any, ...], count: int) -> Prepared | None:  # fmt: skip
    """arrays: (shape, strides, dtype) of each, the result last. None: more than four axes. count: threads."""
    shapes, strides, dtypes = zip(*arrays, strict=True)
    lead = [s[: len(s) - has_rows] for s in shapes]
    if np.broadcast_shapes(*lead) != lead[-1]:
        raise ValueError(f"{kind[0]}: arrays have shapes {shapes[:-1]}, expected to be broadcast to {shapes[-1]}")
    found = laid(shapes, strides, [t.itemsize for t in dtypes], has_rows)
    if found is None:
        return None
    (batch, heads, tokens), widths, steps = found
    storages, unit, widest = [STORAGES[name_of(t)] for t in dtypes], np.dtype(dtype).itemsize, max(widths)
    *read, written = (s == STORAGES[dtype] and t[3] == unit for s, t in zip(storages, steps, strict=True))
    words = {kind[0]} | {word for word, is_so in (("converted", all(read)), ("rounded", written)) if not is_so}
    tile_columns, task_columns = (widest if has_rows else min(widest, most) for most in (TILE, TASK))
    task_tokens = min(max(TASK // task_columns, 1), tokens)
    tile_tokens = min(max(TILE // tile_columns, 1), task_tokens)
    tasks = batch * heads * -(-tokens // task_tokens) * -(-widest // task_columns)
    fields = {"kind": kind[1], "how": kind[2], "has_rows": has_rows, "heads": heads, "tokens": tokens,
              "columns": widest, "task_tokens": task_tokens, "task_columns": task_columns, "tile_tokens": tile_tokens,
              "tile_columns": tile_columns, "m": tile_tokens, "task_fields": 0}  # fmt: skip
    wide = dict(zip((*names, "out"), widths, strict=True))
    fields |= {f"{n}_width": wide.get(n, 0) if has_rows else tile_columns * (n in wide) for n in (*NAMES, "out")}
    is_one = batch * heads * tokens * widest <= (SMALL if count > 1 else ALONE)
    each = tasks if is_one else -(-tasks // (CALLS * count))  # tasks of one call of the kernel
    values = {"a": numbers[0], "b": numbers[1], "tasks": np.empty((tasks, 0), np.int64), "tasks_count": tasks}
    launch = launch_of(body, GRID, dtype, GRID.layout(fields, dtype), values, frozenset(words),
                       [*range(0, tasks, each), tasks], each)  # fmt: skip
    rows, at = np.zeros((len(NAMES) + 1, ARRAY), np.int64), [*map(NAMES.index, names), len(NAMES)]
    rows[at] = [(0, b, t, h, c, 1, storage, batch, tokens, heads, width)
                for (b, h, t, c), storage, width in zip(steps, storages, widths, strict=True)]  # fmt: skip
    return Prepared(launch, rows, at)


emptying.append(_prepared.cache_clear)


def takes(*arrays: Any) -> bool:
    """Whether these are NumPy arrays that kernels read and write where they lie; None is left out."""
    return all(y is None or (isinstance(y, np.ndarray) and y.dtype.isnative and y.flags.aligned
                             and name_of(y.dtype) in DTYPES) for y in arrays)  # fmt: skip


def over_grid(body: Any, kind: tuple[str, int, int], arrays: Sequence[Any], out: Any, dtype: Any,
              numbers: tuple[float, float] = (0.0, 0.0), has_rows: bool = False) -> Any:  # fmt: skip
    """`out`, filled by a formula of arrays; None in place of an array that the formula does not have.

    kind: (word of its piece, number, how). out: an array, or (shape, dtype) of a new one. dtype: of the computation.
    """
    if isinstance(out, tuple):
        out = working(out[0], np.dtype(out[1]))
    if out.size:
        given = {name: y for name, y in zip(NAMES, arrays, strict=False) if y is not None} | {"out": out}
        _launch(body, kind, np.dtype(dtype).name, numbers, has_rows, given)
    return out


def _launch(body: Any, kind: tuple[str, int, int], dtype: str, numbers: tuple[float, float], has_rows: bool,
            given: dict[str, Any]) -> None:  # fmt: skip
    each, names = [*given.values()], (*given,)[:-1]
    found = _prepared(body, kind, dtype, numbers, has_rows, names, tuple([(y.shape, y.strides, y.dtype) for y in each]),
                      threads.num_threads())  # fmt: skip
    if found is None:  # a launch for each place along the first axis
        n = max(y.ndim for y in each)
        for i in range(max(y.shape[0] for y in each if y.ndim == n)):
            part = {m: y if y.ndim < n else y[i if y.shape[0] > 1 else 0, ...] for m, y in given.items()}
            _launch(body, kind, dtype, numbers, has_rows, part)
        return
    rows = found.rows.copy()
    rows[found.at, AT] = [first_byte(y) for y in each]
    found.launch.with_arrays(GRID, rows, each).run()
