"""The state handed on from chunk to chunk.

Backward keeps the state at the start of every segment of 16 chunks and walks each segment once more, so that nothing
of the size of a state is stored a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...ground.chunk_table import Chunk
from ...ground.namespace import Array, cast
from .heads import take
from .inputs import Inputs, Plan
from .one_chunk import (
    Forward,
    chunk_cotangents,
    chunk_fwd,
    chunk_gradients,
    chunk_state,
    chunk_state_vjp,
)

SEGMENT = 16  # chunks between two kept states


def forward(
    core: Inputs, plan: Plan, table: list[Chunk], S: Array, put: Callable[[int, Array], None]
) -> tuple[Array, list[Array]]:
    """(final state, the state at the start of each segment); outputs go to put(start, out)."""
    kept = []
    for n, chunk in enumerate(table):
        if n % SEGMENT == 0:
            kept.append(S)
        f = _step(core, plan, chunk, S)
        if f.out is not None:
            put(chunk.start, f.out)
        S = chunk_state(plan.xp, f, S)
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
        for chunk in table[n * SEGMENT : (n + 1) * SEGMENT]:
            f = _step(core, plan, chunk, S)
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


def _step(core: Inputs, plan: Plan, chunk: Chunk, S: Array) -> Forward:
    x = take(plan.xp, core, chunk.start, chunk.stop, plan.dtype)
    return chunk_fwd(plan.xp, x, plan, partial(_read, S))
