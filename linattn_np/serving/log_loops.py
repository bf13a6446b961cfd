"""Tokens of a StateLog in compiled loops: a task is a row of the call and a head. log.py has the equations.

Sums go from a token backwards, then comes the checkpoint: the bits of a token depend on its own path alone, on no other
node, row or token of the call. Checkpoints are read where they lie, and moved forward in place.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..ops.cpu.numbers import exp, number
from ..ops.cpu.products import product
from ..ops.cpu.rows import clear, fill
from ..runtime import threads
from ..runtime.pieces.piece import Matrix, Vector, Whole, piece
from ..runtime.pieces.registers import LINE
from ..runtime.pieces.run import Launch, launch_of, put
from ..runtime.pieces.tiles import dot
from ..runtime.pieces.views import columns, prefetch_line, row, rows, start_of, transposed
from ..runtime.pieces.workspace import Layout
from .log_work import LOG, Work
from .small_loops import add_read, is_finite, is_surely_finite, pack, panel, unpack

GRAIN = 2**17  # numbers of checkpoints that one launch of a thread reads, at least
FEW = 2  # tokens of a call that read the codes themselves; more of them read a copy in numbers


@piece
def copy(x: Vector, to: Vector):
    """to = x"""
    for j in range(len(to)):
        to[j] = x[j]


@piece
def entry(w: Work, slot: Whole) -> Whole:
    """The row of a slot of this head."""
    return (w.at[w.r] * w.H + w.h) * w.slots + slot


@piece
def begin(w: Work, task: Whole):
    """Row and head of a task."""
    w.r, w.h = task // w.H, task % w.H


@piece
def begin_state(w: Work, task: Whole):
    """The same, and where the state is."""
    begin(w, task)
    w.base = (w.state[w.r] * w.H + w.h) * w.K
    if w.unpacked:
        unpack(w, 0, w.held)


@piece
def find_ring(w: Work, depth: Whole, count: Whole):
    """The path from `depth` on: the tokens of the ring, the last of `count` first."""
    for i in range(count):
        w.path[depth + i] = (w.start[w.r] + count - 1 - i) % w.ring
    w.depth = depth + count


@piece
def prefetch_row(A: Matrix, i: Whole):
    """Row i, into a cache."""
    for byte in range(0, A.shape[1] * A.itemsize, LINE):
        prefetch_line(start_of(A, i) + byte)


@piece
def prefetch_entry(w: Work, at: Whole):
    """An entry, of the next head mostly: no processor foresees where its tokens begin."""
    prefetch_row(w.log_k, at)
    prefetch_row(w.log_u, at)
    prefetch_row(w.log_g, at)


@piece
def find_path(w: Work):
    """The slots before token n: its ancestors, then the ring."""
    depth, node = 0, w.parents[w.r, w.n]
    while node >= 0:
        w.path[depth] = w.to[w.r, node]
        depth += 1
        node = w.parents[w.r, node]
    find_ring(w, depth, w.live[w.r])


@piece
def faded_by(x: Vector, total: Vector, fade: Vector, to: Vector):
    """to = x (.) e^total"""
    if len(total) == 1:
        f = exp(total[0])
        for j in range(len(to)):
            to[j] = x[j] * f
    else:
        for j in range(len(total)):
            fade[j] = exp(total[j])
        for j in range(len(to)):
            to[j] = x[j] * fade[j]


@piece
def add_decay(w: Work, slot: Whole):
    """G <- G + g of a slot."""
    g, total = row(w.log_g, entry(w, slot)), w.total
    for j in range(len(total)):
        total[j] += g[j]


@piece
def read(w: Work, first: Whole, count: Whole, decayed: Whole):
    """found_x = readers_x times the state, after the decay of token n if `decayed`; readers are written over."""
    readers, found, total = rows(w.readers, first, count), rows(w.found, first, count), w.total
    faded = row(w.faded, 0)
    if decayed:
        copy(row(w.g, w.place), total)
    else:
        fill(total, 0)
    clear(found)
    for i in range(w.depth):
        at = entry(w, w.path[i])
        prefetch_entry(w, at + w.slots)
        faded_by(row(w.log_k, at), total, w.fade, faded)
        u = row(w.log_u, at)
        for x in range(count):
            f, to = dot(row(readers, x), faded, w.K), row(found, x)
            for d in range(len(to)):
                to[d] += f * u[d]
        add_decay(w, w.path[i])
    for x in range(count):
        faded_by(row(readers, x), total, w.fade, row(readers, x))
    if w.bits:
        add_read(w, first, count)
    else:
        product(0, readers, rows(w.S, w.base, w.K), found, added=found)


@piece
def tell(w: Work, u: Vector):
    """The outputs of token n, which writes u."""
    k, add = row(w.k, w.place), w.updated or w.bonuses
    own, bonus = row(w.faded, 0), row(w.bonus, w.h)
    for j in range(w.K):
        own[j] = k[j] * bonus[j] if w.bonuses else k[j]
    for x in range(w.queries):
        at = w.place * w.queries + x
        f = dot(row(w.q, at), own, w.K) if add else number(u, 0)
        seen, out = row(w.found, w.erases + x), row(w.out, at)
        for d in range(w.V):
            out[d] = w.scale * (seen[d] + f * u[d]) if add else w.scale * seen[d]


@piece
def compute(w: Work):
    """Token n: its outputs, and what it writes, into its slot."""
    w.place = (w.r * w.T + w.t + w.n) * w.H + w.h
    find_path(w)
    if w.erases:
        copy(row(w.erase, w.place), row(w.readers, 0))
    for x in range(w.queries):
        copy(row(w.q, w.place * w.queries + x), row(w.readers, w.erases + x))
    if w.erases and w.early != w.updated:
        read(w, 0, w.erases + w.queries, w.updated)  # one pass over the state
    else:
        if w.erases:
            read(w, 0, 1, 1 - w.early)
        if w.queries:
            read(w, w.erases, w.queries, w.updated)
    at = entry(w, w.to[w.r, w.n])
    u, v = row(w.log_u, at), row(w.v, w.place)
    if w.erases:
        predicted, beta = row(w.found, 0), w.beta[w.place]
        for d in range(w.V):
            u[d] = beta * (v[d] - predicted[d])
    else:
        copy(v, u)
    copy(row(w.k, w.place), row(w.log_k, at))
    copy(row(w.g, w.place), row(w.log_g, at))
    tell(w, u)


@piece
def tokens(w: Work, first: Whole, last: Whole):
    """N tokens of each row, in their order."""
    for task in range(first, last):
        begin_state(w, task)
        for n in range(w.N):
            w.n = n
            compute(w)


@piece(of="small")
def fold_panels(w: Work):
    """A small state <- diag(readers_0) S + faded^T writes, if `writes_state`; else it is looked at alone."""
    A, U, factors = transposed(rows(w.faded, 0, w.depth)), rows(w.writes, 0, w.depth), row(w.readers, 0)
    for d in range(0, w.V, w.held_columns):
        n = min(w.held_columns, w.V - d)
        held = columns(w.held, 0, n)
        unpack(w, d, held)
        product(0, A, columns(U, d, n), held, added=held, weights=factors)
        if w.writes_state:
            pack(w, d, held)
        elif not is_finite(w, held):
            w.wrong[w.r] = 1


@piece
def fold(w: Work, first: Whole, last: Whole):
    """S <- the state after the oldest `live` tokens of each row: e^G S + sum_j (k_j (.) e^G)^T u_j."""
    for task in range(first, last):
        begin_state(w, task)
        find_ring(w, 0, w.live[w.r])
        fill(w.total, 0)
        for i in range(w.depth):
            at = entry(w, w.path[i])
            prefetch_entry(w, at + w.slots)
            faded_by(row(w.log_k, at), w.total, w.fade, row(w.faded, i))
            copy(row(w.log_u, at), row(w.writes, i))
            add_decay(w, w.path[i])
        factors = row(w.readers, 0)
        fill(factors, 1)
        faded_by(factors, w.total, w.fade, factors)
        if not w.bits:
            S, n = rows(w.S, w.base, w.K), w.depth
            product(0, transposed(rows(w.faded, 0, n)), rows(w.writes, 0, n), S, added=S, weights=factors)
        elif w.writes_state or not is_surely_finite(w, w.depth):
            fold_panels(w)


@piece
def move(w: Work, first: Whole, last: Whole):
    """The nodes of a path, (R, N) slots, to the ring after the first `live` tokens; -1: none."""
    for task in range(first, last):
        begin(w, task)
        for n in range(w.N):
            if w.to[w.r, n] >= 0:
                source, at = entry(w, w.to[w.r, n]), entry(w, (w.start[w.r] + w.live[w.r] + n) % w.ring)
                copy(row(w.log_k, source), row(w.log_k, at))
                copy(row(w.log_u, source), row(w.log_u, at))
                copy(row(w.log_g, source), row(w.log_g, at))


@functools.cache
def layout_of(dtype: np.dtype[Any], **sizes: int) -> Layout:
    """The table of a thread's own memory."""
    return LOG.layout(sizes, dtype)


def launch(kernel: Any, values: Mapping[str, Any], longest: int, launches: dict[str, tuple[Any, Launch]]) -> None:
    """A kernel for every row and head; longest: tokens of a path, at most.

    launches: the last launch of each kernel: one with the same numbers is launched again, on other arrays.
    """
    arrays = {n: x for n, x in values.items() if isinstance(x, np.ndarray)}
    numbers = {n: x for n, x in values.items() if n not in arrays}
    if not numbers["R"] * numbers["H"] or not numbers.get("N", 1):
        return
    key = arrays["log_k"].dtype, longest, threads.num_threads(), *arrays, *numbers.items()
    if (known := launches.get(kernel.__name__)) is None or known[0] != key:
        known = launches[kernel.__name__] = key, _launch(kernel, arrays["log_k"].dtype, numbers, longest)
    put(LOG, known[1].table, arrays)
    known[1].run()


def _launch(kernel: Any, dtype: np.dtype[Any], numbers: Mapping[str, Any], longest: int) -> Launch:
    """A launch without its arrays."""
    unpacked = bool(numbers.get("bits")) and numbers.get("N", 0) > FEW
    tasks, sizes = numbers["R"] * numbers["H"], {name: numbers[name] for name in ("K", "V", "W")}
    sizes["held_rows"] = numbers["K"] if numbers.get("bits") else 0
    sizes["held_columns"] = numbers["V"] if unpacked else min(numbers["V"], panel(dtype))
    sizes |= {"longest": longest + 1, "most": numbers.get("erases", 0) + numbers.get("queries", 0) + 2}
    each = max(1, GRAIN // max(1, numbers["K"] * numbers["V"] * max(1, numbers.get("N", 1))))
    bounds = [*range(0, tasks, each), tasks]
    values, own = {**numbers, "unpacked": unpacked}, layout_of(dtype, **sizes)
    words = frozenset({"small"} if numbers.get("bits") else ())
    return launch_of(kernel, LOG, dtype.name, own, values, words, bounds, each)
