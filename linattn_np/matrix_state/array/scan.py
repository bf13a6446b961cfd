"""Chunk states by an associative scan over chunk transfers; all chunks are then computed at once.

A chunk maps its incoming state affinely, S -> (M S) (.) h + Delta, with transfer matrix M and offset Delta. Two
such maps compose to one:

    (M2, h2, Delta2) o (M1, h1, Delta1) = (M2 M1, h1 (.) h2, (M2 Delta1) (.) h2 + Delta2)

M is (K, K), or its diagonal (K, 1) if nothing is erased; h (1, V) is the decay on the value axis, None for ones.
The adjoint is the same scan from the last chunk to the first, with M^T.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...runtime.arrays import Array, Namespace, cast, device
from ...runtime.shapes import Chunk
from ..heads import fold, fold_tokens, take
from ..types import Erase, Inputs, Plan
from . import running
from .one_chunk import (
    OneChunk,
    chunk_cotangents,
    chunk_factors,
    chunk_fwd,
    chunk_gradients,
    chunk_state,
    chunk_state_vjp,
)


class Transfer(NamedTuple):
    """S -> (M S) (.) h + Delta for N chunks: (..., N, K, K or 1), (..., N, 1, V) or None, (..., N, K, V)."""

    M: Array
    h: Array | None
    Delta: Array


def forward(
    core: Inputs, plan: Plan, table: list[Chunk], S: Array, put: Callable[[int, Array], None]
) -> tuple[Array, tuple[Array, list[Array]]]:
    """(final state, (S_0, checkpoints of the last, shorter chunk)); outputs go to put(start, out)."""
    N, C = _full_chunks(table)
    S0 = S
    if N:
        f, _, _, S = _all_chunks(core, plan, table[0].start, N, C, S)
        if f.out is not None:
            for n in range(N):
                put(table[n].start, f.out[..., n, :, :])
    S, checkpoints = running.forward(core, plan, table[N:], S, put)
    return S, (S0, checkpoints)


def backward(
    core: Inputs,
    plan: Plan,
    table: list[Chunk],
    checkpoints: tuple[Array, list[Array]],
    dout: Array | None,
    dS: Array,
    put: Callable[[int, dict[str, Array]], None],
) -> Array:
    """dS_0; gradients go to put(start, gradients)."""
    xp, T = plan.xp, plan.xp.matrix_transpose
    N, C = _full_chunks(table)
    S0, rest = checkpoints
    dS = running.backward(core, plan, table[N:], rest, dout, dS, put)
    if not N:
        return dS
    start = table[0].start
    f, transfer, S_in, _ = _all_chunks(core, plan, start, N, C, S0)
    d = None if dout is None else fold_tokens(xp, cast(xp, dout[..., start : start + N * C, :], plan.dtype), N, C)
    # dS_in = (M^T dS_out) (.) h + Delta', Delta' being dS_in for dS_out = 0
    zero = xp.zeros_like(S_in)
    readers, grads = chunk_cotangents(xp, f, plan, d, lambda decayed: decayed @ zero)
    Delta = chunk_state_vjp(xp, f, readers, grads, S_in, zero)
    M = transfer.M if f.x.erase is Erase.NONE else T(transfer.M)
    flipped = Transfer(*(None if y is None else xp.flip(y, axis=-3) for y in (M, transfer.h, Delta)))
    dS_out, dS_0 = states(xp, flipped, dS)
    dS_out = xp.flip(dS_out, axis=-3)
    readers, grads = chunk_cotangents(xp, f, plan, d, lambda decayed: decayed @ dS_out)
    grads = chunk_gradients(
        xp, f, readers, grads, [r.c @ T(S_in) for r in readers], [w.w @ T(dS_out) for w in f.writers]
    )
    chunk_state_vjp(xp, f, readers, grads, S_in, dS_out)
    if "u" in grads:  # one for all chunks
        put(start, {"u": xp.sum(grads.pop("u"), axis=-3)})
    for n in range(N):
        put(start + n * C, {name: y[..., n, :, :] for name, y in grads.items()})
    return dS_0


def _full_chunks(table: list[Chunk]) -> tuple[int, int]:
    """(number of chunks of the full length C, C)."""
    if not table:
        return 0, 1
    C = table[0].stop - table[0].start
    return sum(c.stop - c.start == C for c in table), C


def _all_chunks(
    core: Inputs, plan: Plan, start: int, N: int, C: int, S: Array
) -> tuple[OneChunk, Transfer, Array, Array]:
    """(N chunks in one batch, their transfers, their incoming states (..., N, K, V), the state after them)."""
    xp = plan.xp
    x = take(xp, core, start, start + N * C, plan.dtype)
    x = fold(xp, x, N, C)
    transfer = transfers(x, plan)
    S_in, S_end = states(xp, transfer, S)
    return chunk_fwd(xp, chunk_factors(xp, x, plan), plan, lambda decayed: decayed @ S_in), transfer, S_in, S_end


def transfers(x: Inputs, plan: Plan) -> Transfer:
    """One pass over the chunks gives [Delta, M]: values [v, 0], incoming state [0, I]."""
    xp, K, V = plan.xp, x.k.shape[-1], x.v.shape[-1]
    h = None
    if x.erase is Erase.NONE:
        f = chunk_fwd(xp, chunk_factors(xp, x._replace(q=None), plan), plan, lambda decayed: decayed)
        Delta = chunk_state(xp, f, xp.zeros((*x.v.shape[:-2], K, V), dtype=plan.dtype, device=device(x.v)))
        weight = f.D.weight()
        M = xp.ones((1, 1), dtype=plan.dtype, device=device(x.v)) if weight is None else xp.matrix_transpose(weight)
        h = f.Dv.weight()
        return Transfer(xp.broadcast_to(M, (*Delta.shape[:-1], 1)), h, Delta)
    identity = xp.eye(K, dtype=plan.dtype, device=device(x.v))
    zeros = xp.zeros((*x.v.shape[:-1], K), dtype=plan.dtype, device=device(x.v))
    wide = x._replace(q=None, v=xp.concat([x.v, zeros], axis=-1))

    def read(decayed: Array) -> Array:  # x^ [0, I]
        decayed = xp.broadcast_to(decayed, (*x.v.shape[:-1], K))
        return xp.concat([xp.zeros_like(x.v), decayed], axis=-1)

    f = chunk_fwd(xp, chunk_factors(xp, wide, plan), plan, read)
    lead = x.v.shape[:-2]
    S = xp.concat(
        [xp.zeros((*lead, K, V), dtype=plan.dtype, device=device(x.v)), xp.broadcast_to(identity, (*lead, K, K))],
        axis=-1,
    )
    Delta_M = chunk_state(xp, f, S)
    return Transfer(Delta_M[..., V:], h, Delta_M[..., :V])


def states(xp: Namespace, t: Transfer, S: Array) -> tuple[Array, Array]:
    """(the state before each of N transfers, the state after the last) from the state S before the first."""
    t = inclusive_scan(xp, t)
    S = S[..., None, :, :]
    after = apply(t.M, S) if t.h is None else apply(t.M, S) * t.h
    after = after + t.Delta
    first = xp.broadcast_to(S, after[..., :1, :, :].shape)
    return xp.concat([first, after[..., :-1, :, :]], axis=-3), after[..., -1, :, :]


def apply(M: Array, S: Array) -> Array:
    """M S; M may be a diagonal (..., K, 1)."""
    return M * S if M.shape[-1] == 1 else M @ S


def compose(later: Transfer, earlier: Transfer) -> Transfer:
    """later o earlier."""
    M, h = apply(later.M, earlier.M), None
    Delta = apply(later.M, earlier.Delta)
    if later.h is not None:
        h, Delta = later.h * earlier.h, Delta * later.h
    return Transfer(M, h, Delta + later.Delta)


def inclusive_scan(xp: Namespace, t: Transfer) -> Transfer:
    """Element n becomes t_n o ... o t_0: pairs are composed, scanned, then expanded; O(N) work, O(log N) depth."""
    N = t.Delta.shape[-3]
    if N == 1:
        return t
    even, odd = _every(t, 0, N - 1), _every(t, 1, N)
    pairs = inclusive_scan(xp, compose(odd, even))
    first = _every(t, 0, 1)
    later = _every(t, 2, N)  # even elements from the second on
    if later.Delta.shape[-3]:
        before = Transfer(*(None if y is None else y[..., : later.Delta.shape[-3], :, :] for y in pairs))
        later = compose(later, before)
    return Transfer(
        *(
            None if y is None else _interleave(xp, xp.concat([a, b], axis=-3), y)
            for a, b, y in zip(first, later, pairs, strict=True)
        )
    )


def _every(t: Transfer, start: int, stop: int) -> Transfer:
    """Elements start, start + 2, ... below stop."""
    return Transfer(*(None if y is None else y[..., start:stop:2, :, :] for y in t))


def _interleave(xp: Namespace, even: Array, odd: Array) -> Array:
    """even_0, odd_0, even_1, odd_1, ...: even has as many elements as odd, or one more."""
    n = odd.shape[-3]
    both = xp.stack([even[..., :n, :, :], odd], axis=-3)
    both = xp.reshape(both, (*both.shape[:-4], 2 * n, *both.shape[-2:]))
    return both if even.shape[-3] == n else xp.concat([both, even[..., n:, :, :]], axis=-3)
