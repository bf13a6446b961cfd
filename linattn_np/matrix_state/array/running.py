"""The chunk form with a sequential loop over chunks: S is carried from chunk to chunk.

State-independent factors are computed for several chunks at once. The forward stores a checkpoint, the state at the
start of every segment of 16 chunks; the backward recomputes the states inside a segment from its checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from itertools import takewhile

from ...runtime.arrays import Array, cast
from ...runtime.shapes import Chunk
from .. import policy
from ..heads import fold, take
from ..types import Inputs, Plan
from .one_chunk import (
    Factors,
    chunk_cotangents,
    chunk_factors,
    chunk_fwd,
    chunk_gradients,
    chunk_state,
    chunk_state_vjp,
    forward_part,
    unstack,
)

CUTS = True  # a table may have chunks of any lengths, and states between them go out and in


def forward(
    core: Inputs, plan: Plan, table: list[Chunk], S: Array, put: Callable[[int, Array], None],
    found: Callable[[int, Array], None] | None = None, stops: Container[int] = (),
) -> tuple[Array, list[Array]]:  # fmt: skip
    """(final state, checkpoints: the state at the start of each segment); outputs go to put(start, out).

    The state after each chunk that ends in `stops` goes to found(stop, S).
    """
    checkpoints = []
    for n, (chunk, factors) in enumerate(_factors(core, plan, table, forward_part)):
        if n % policy.CHECKPOINT_CHUNKS == 0:
            checkpoints.append(S)
        f = chunk_fwd(plan.xp, factors, plan, partial(_read, S))
        if f.out is not None:
            put(chunk.start, f.out)
        S = chunk_state(plan.xp, f, S)
        if chunk.stop in stops and found is not None:
            found(chunk.stop, S)
        del f, factors  # frees a batch of chunks before the next one is computed
    return S, checkpoints


def backward(
    core: Inputs,
    plan: Plan,
    table: list[Chunk],
    checkpoints: list[Array],
    dout: Array | None,
    dS: Array,
    put: Callable[[int, dict[str, Array]], None],
    added: Mapping[int, Array] | None = None,
) -> Array:
    """dS_0; gradients go to put(start, gradients). Segments go from last to first, each recomputed first.

    added: by its last token, the gradient of the state after a chunk besides the gradients of its later readers.
    """
    xp, T = plan.xp, plan.xp.matrix_transpose
    for n in reversed(range(len(checkpoints))):
        recomputed, S = [], checkpoints[n]
        first = n * policy.CHECKPOINT_CHUNKS
        for chunk, factors in _factors(core, plan, table[first : first + policy.CHECKPOINT_CHUNKS]):
            f = chunk_fwd(xp, factors, plan, partial(_read, S))
            recomputed.append((chunk, f, S))
            S = chunk_state(xp, f, S)
        for (start, stop), f, S in reversed(recomputed):
            d = None if dout is None else cast(xp, dout[..., start:stop, :], plan.dtype)
            dS = dS + added[stop] if added is not None and stop in added else dS
            readers, grads = chunk_cotangents(xp, f, plan, d, partial(_read, dS))
            dread = [r.c @ T(S) for r in readers]
            dwrite = [w.w @ T(dS) for w in f.writers]
            grads = chunk_gradients(xp, f, readers, grads, dread, dwrite)
            dS = chunk_state_vjp(xp, f, readers, grads, S, dS)
            put(start, grads)
    return dS


def _read(S: Array, decayed: Array) -> Array:
    return decayed @ S


def _factors(
    core: Inputs, plan: Plan, table: list[Chunk], part: Callable[[Factors], Factors] = lambda factors: factors
) -> Iterator[tuple[Chunk, Factors]]:
    """Every chunk with its state-independent factors; neighbours of one length are computed in one batch."""
    xp, n = plan.xp, 0
    while n < len(table):
        C = table[n].stop - table[n].start
        group = table[n : n + batched_chunks(core, C)]
        group = list(takewhile(partial(_has_length, C), group))  # one at a position may be shorter
        x, n = take(xp, core, group[0].start, group[-1].stop, plan.dtype), n + len(group)
        if len(group) == 1:
            yield group[0], part(chunk_factors(xp, x, plan))
            continue
        factors = unstack(xp, part(chunk_factors(xp, fold(xp, x, len(group), C), plan)), len(group))
        while factors:
            yield group[-len(factors)], factors.pop(0)


def _has_length(C: int, chunk: Chunk) -> bool:
    return chunk.stop - chunk.start == C


def batched_chunks(core: Inputs, C: int) -> int:
    """How many chunks are computed at once: as many as keep each of their arrays in the cache."""
    *lead, _, V = core.v.shape
    elements = max(1, math.prod(lead) * C * max(V, core.k.shape[-1]))
    return max(1, min(policy.CHECKPOINT_CHUNKS, policy.BATCH_ELEMENTS // elements))
