"""The state handed on from chunk to chunk.

What a chunk does without a state is computed for several chunks at once. Backward keeps the state at the start of
every segment of 16 chunks and walks each segment once more, so that nothing of the size of a state is stored a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from ...ground.chunk_table import Chunk
from ...ground.namespace import Array, cast
from .heads import fold, take
from .inputs import Inputs, Plan
from .one_chunk import (
    Ready,
    apart,
    chunk_cotangents,
    chunk_fwd,
    chunk_gradients,
    chunk_ready,
    chunk_state,
    chunk_state_vjp,
    slim,
)

SEGMENT = 16  # chunks between two kept states
CACHED = 2**18  # elements of one array of the chunks that are computed together


def forward(
    core: Inputs, plan: Plan, table: list[Chunk], S: Array, put: Callable[[int, Array], None]
) -> tuple[Array, list[Array]]:
    """(final state, the state at the start of each segment); outputs go to put(start, out)."""
    kept = []
    for n, (chunk, ready) in enumerate(_ready(core, plan, table, slim)):
        if n % SEGMENT == 0:
            kept.append(S)
        f = chunk_fwd(plan.xp, ready, plan, partial(_read, S))
        if f.out is not None:
            put(chunk.start, f.out)
        S = chunk_state(plan.xp, f, S)
        del f, ready  # the chunks that were computed together are freed before the next ones are computed
    return S, kept


def backward(
    core: Inputs,
    plan: Plan,
    table: list[Chunk],
    kept: list[Array],
    dout: Array | None,
    dS: Array,
    put: Callable[[int, dict[str, Array]], None],
) -> Array:
    """dS_0; gradients go to put(start, gradients). Segments last to first, each walked forward again and then back."""
    xp, T = plan.xp, plan.xp.matrix_transpose
    for n in reversed(range(len(kept))):
        walked, S = [], kept[n]
        for chunk, ready in _ready(core, plan, table[n * SEGMENT : (n + 1) * SEGMENT]):
            f = chunk_fwd(xp, ready, plan, partial(_read, S))
            walked.append((chunk, f, S))
            S = chunk_state(xp, f, S)
        for (start, stop), f, S in reversed(walked):
            d = None if dout is None else cast(xp, dout[..., start:stop, :], plan.dtype)
            readers, grads = chunk_cotangents(xp, f, plan, d, partial(_read, dS))
            dread = [r.c @ T(S) for r in readers]
            dwrite = [w.w @ T(dS) for w in f.writers]
            grads = chunk_gradients(xp, f, readers, grads, dread, dwrite)
            dS = chunk_state_vjp(xp, f, readers, grads, S, dS)
            put(start, grads)
    return dS


def _read(S: Array, hat: Array) -> Array:
    return hat @ S


def _ready(
    core: Inputs, plan: Plan, table: list[Chunk], part: Callable[[Ready], Ready] = lambda ready: ready
) -> Iterator[tuple[Chunk, Ready]]:
    """Every chunk with what it knows before it sees the state; neighbours of one length are computed together."""
    xp, n = plan.xp, 0
    while n < len(table):
        C = table[n].stop - table[n].start
        group = table[n : n + together(core, C)]
        if group[-1].stop - group[-1].start != C:  # the last chunk of a sequence may be shorter
            group = group[:-1]
        x, n = take(xp, core, group[0].start, group[-1].stop, plan.dtype), n + len(group)
        if len(group) == 1:
            yield group[0], part(chunk_ready(xp, x, plan))
            continue
        ready = apart(xp, part(chunk_ready(xp, fold(xp, x, len(group), C), plan)), len(group))
        while ready:
            yield group[-len(ready)], ready.pop(0)


def together(core: Inputs, C: int) -> int:
    """How many chunks are computed together: as many as keep an array of theirs in the cache."""
    *lead, _, V = core.v.shape
    return max(1, min(SEGMENT, CACHED // max(1, math.prod(lead) * C * max(V, core.k.shape[-1]))))
