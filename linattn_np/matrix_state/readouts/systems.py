"""The systems of a SOLVED read-out: x_t (Z_t + diag(ridge_t)) = b_t for every token, Z_t a memory of keys.

The memory is given as the core's inputs: queries b, keys k, values beta k, log decay g. The exact solver forms every
Z_t, token by token. Conjugate gradients form none; a chunk's rows are multiplied by their matrices in one product,

    p_i Z_i = p^_i Z_in + sum over j <= i of gram(p, k)_ij beta_j k_j
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ...ops.conjugate_gradients import conjugate_gradients, first_singular, solve_rows
from ...runtime.arrays import Array, cast, device
from ...runtime.shapes import Chunk, Sequence, chunks
from .. import policy
from ..array.cumulative import list_chunks
from ..array.decay import decay_of
from ..heads import TokenBuffer, fold, gather_states, groups, initial_state, split, split_all, take
from ..types import Inputs, Plan, ReadState


class Solver(NamedTuple):
    """How to solve; conjugate gradients stop at |b - x A| <= max(tolerance, eps) |b|, or after `iterations`."""

    exact: bool
    iterations: int
    tolerance: float
    free: bool = False  # the caller does not say how: kernels may iterate in place of exact solutions
    dtype: Any = None  # of the caller's q, k and v, if it is one


def solve(x: Inputs, ridge: Array, solver: Solver, plan: Plan, Z: Array | None) -> tuple[Array, Array]:
    """(x_t, Z after the last token).

    ridge (1, H, K) or (..., T, H, K), Z_0 (..., H, K, K), x_t (..., T, max(Hq, H), K).
    """
    xp, G = plan.xp, groups(x)
    core, diagonal = split_all(xp, x, G), split(xp, ridge, G)
    heads, K = max(x.q.shape[-2], x.v.shape[-2]), x.v.shape[-1]
    x_t = TokenBuffer(xp, (*x.v.shape[:-2], heads, K), plan.dtype, device(x.v))
    solve_sequence, ends = solve_exactly if solver.exact else solve_iteratively, []
    for s in plan.sequences:
        begin = end = initial_state(core, plan, Z, s.row, G)
        for start, rows, after in solve_sequence(core, diagonal, solver, plan, s, begin):
            x_t.put(start, rows)
            end = after
        ends.append(end)
    return x_t.done(), gather_states(plan, ends)


def _of(plan: Plan, ridge: Array, tokens: Chunk) -> Array:
    """The ridge of some tokens."""
    return cast(plan.xp, ridge if ridge.shape[-2] == 1 else ridge[..., tokens.start : tokens.stop, :], plan.dtype)


# exact solver


def solve_exactly(
    core: Inputs, ridge: Array, solver: Solver, plan: Plan, sequence: Sequence, Z: Array
) -> Iterator[tuple[int, Array, Array]]:
    """(start, x, Z after them) of successive ranges of tokens."""
    xp = plan.xp
    for tokens, b, formed in matrices(core, plan, sequence, Z):
        A = formed + _diagonal(plan, _of(plan, ridge, tokens))
        yield tokens.start, solve_rows(xp, A, b), formed[..., -1, :, :]


def matrices(core: Inputs, plan: Plan, sequence: Sequence, Z: Array) -> Iterator[tuple[Chunk, Array, Array]]:
    """(tokens, b, Z_t (..., C, K, K)) of successive ranges of tokens."""
    xp = plan.xp
    for tokens in chunks(sequence, max(1, policy.MATRIX_ELEMENTS // max(1, math.prod(Z.shape)))):
        x, formed = take(xp, core, tokens.start, tokens.stop, plan.dtype), []
        decay = None if x.g is None else xp.exp(x.g)[..., None]
        for t in range(tokens.stop - tokens.start):
            Z = (Z if decay is None else decay[..., t, :, :] * Z) + x.k[..., t, :, None] * x.v[..., t, None, :]
            formed.append(Z)
        yield tokens, x.q, xp.stack(formed, axis=-3)


def _diagonal(plan: Plan, ridge: Array) -> Array:
    """diag(ridge): (..., K) to (..., K, K)."""
    return ridge[..., None] * plan.xp.eye(ridge.shape[-1], dtype=plan.dtype, device=device(ridge))


def singular(x: Inputs, ridge: Array, plan: Plan, Z: Array | None) -> tuple[int, int] | None:
    """(token, head of the state) of the first singular system; None if all are regular."""
    xp, G = plan.xp, groups(x)
    core, diagonal = split_all(xp, x, G), split(xp, ridge, G)
    for s in plan.sequences:
        begin = initial_state(core, plan, Z, s.row, G)
        for tokens, _, formed in matrices(core, plan, s, begin):
            at = first_singular(xp, formed + _diagonal(plan, _of(plan, diagonal, tokens)))
            if at is not None:
                g, r, t = at[-3:]
                return tokens.start + t, g * formed.shape[-4] + r
    return None


# conjugate gradients


def solve_iteratively(
    core: Inputs, ridge: Array, solver: Solver, plan: Plan, sequence: Sequence, Z: Array
) -> Iterator[tuple[int, Array, Array]]:
    """(start, x, Z after them) of successive batches of chunks."""
    xp = plan.xp
    for tokens, N, C in _chunk_batches(core, plan, sequence):
        x = fold(xp, take(xp, core, tokens.start, tokens.stop, plan.dtype), N, C)
        times_Z, Z = products(x, plan, Z)
        diagonal = _of(plan, ridge, tokens)
        diagonal = diagonal[..., None, :, :] if diagonal.shape[-2] == 1 else fold_rows(plan, diagonal, N, C)
        rows = _wide(plan, x, Z)
        rows = conjugate_gradients(xp, lambda p: times_Z(p) + diagonal * p, rows, solver.iterations, solver.tolerance)  # noqa: B023
        yield tokens.start, xp.reshape(rows, (*rows.shape[:-3], N * C, rows.shape[-1])), Z


def fold_rows(plan: Plan, y: Array, N: int, C: int) -> Array:
    """(..., N C, K) as (..., N, C, K)."""
    return plan.xp.reshape(y, (*y.shape[:-2], N, C, y.shape[-1]))


def _wide(plan: Plan, x: Inputs, Z: Array) -> Array:
    """b broadcast to every state that it is solved with."""
    *lead, R, N, C, K = x.q.shape
    return plan.xp.broadcast_to(x.q, (*lead, max(R, Z.shape[-3]), N, C, K))


def _chunk_batches(core: Inputs, plan: Plan, sequence: Sequence) -> Iterator[tuple[Chunk, int, int]]:
    """(tokens, N chunks, C) of batches of neighbouring chunks of one length."""
    C = min(policy.array_chunk(plan, sequence.stop - sequence.start), policy.ARRAY_CHUNK)
    table = chunks(sequence, C)
    full = sum(c.stop - c.start == C for c in table)
    each = max(1, policy.VECTOR_ELEMENTS // max(1, math.prod(core.v.shape[:-2]) * C * core.k.shape[-1]))
    for n in range(0, full, each):
        last = min(n + each, full)
        yield Chunk(table[n].start, table[last - 1].stop), last - n, C
    if full < len(table):
        yield table[-1], 1, table[-1].stop - table[-1].start


def products(x: Inputs, plan: Plan, Z: Array) -> tuple[Callable[[Array], Array], Array]:
    """(p -> p_i Z_i for all rows of N chunks (..., N, C, K), Z after them)."""
    xp, T = plan.xp, plan.xp.matrix_transpose
    D, states = decay_of(xp, x.g, plan.dtype), []
    weight = D.weight()
    written = list_chunks(xp, T(D.to_end(x.k)) @ x.v)
    weights = [None] * len(written) if weight is None else list_chunks(xp, weight)
    for w, Z_n in zip(weights, written, strict=True):
        states.append(Z)
        Z = (Z if w is None else w * Z) + Z_n
    Z_in = xp.stack(states, axis=-3)
    return lambda p: D.from_start(p, ReadState.UPDATED) @ Z_in + D.gram(p, x.k, ReadState.UPDATED) @ x.v, Z
