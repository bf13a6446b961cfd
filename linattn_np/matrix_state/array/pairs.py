"""Every query with every key: out = scale (q K^T) V, without forming the state K^T V.

Queries that all read the final state (causal=False) can be computed in either order. Tq queries and T keys take

    (Q K^T) V    2 Tq T (K + V) operations a head, and 2 Tq K V for a given state
    Q (K^T V)    2 (Tq + T) K V

The first is taken where it has fewer operations, by the lengths of a sequence alone. Then Tq T < (Tq + T) min(K, V):
the products Q K^T take no more memory than queries and keys. A final state that is returned adds its own 2 T K V to
the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

from ...runtime.arrays import Array, Namespace, cast, device, sum_to, swap
from ...runtime.shapes import Sequence
from ..heads import groups, join_state, split, split_state
from ..types import Erase, Inputs, Plan

Run = Callable[..., Any]


def applies(x: Inputs, plan: Plan) -> bool:
    """Whether both orders compute a call: queries that are not causal, no decay, erase, chunk size or positions."""
    plain = x.q is not None and x.g is x.gv is plan.states_at is None and x.erase is Erase.NONE
    return plain and not plan.causal and not isinstance(plan.chunk_size, int) and x.k.shape[-2] <= x.v.shape[-2]


def counts(x: Inputs, plan: Plan, s: Sequence) -> tuple[int, int]:
    """Operations of a sequence of one batch row: (by pairs, by the state)."""
    T, (H, V), (Hk, K), Hq = s.stop - s.start, x.v.shape[-2:], x.k.shape[-2:], x.q.shape[-2]
    Tq = x.q.shape[-3] if s.row is None else T
    write, read = 2 * T * K * V * H, 2 * Tq * K * V * max(Hq, H)
    pairs = 2 * Tq * T * (K * max(Hq, Hk) + V * max(Hq, H))
    return pairs + plan.has_state * read + plan.returns_state * write, write + read


def chosen(x: Inputs, plan: Plan) -> list[bool]:
    """Of each sequence, whether it is computed by pairs."""
    if not applies(x, plan):
        return [False] * len(plan.sequences)
    return [by_pairs < by_state for by_pairs, by_state in (counts(x, plan, s) for s in plan.sequences)]


def operations(x: Inputs, plan: Plan) -> tuple[int, int, int]:
    """Operations of a call: (as computed, all by pairs, all by the state)."""
    each = [counts(x, plan, s) for s in plan.sequences]
    batch = prod(x.v.shape[:-3])
    return (batch * sum(map(min, each)), *(batch * sum(one[n] for one in each) for n in (0, 1)))


# one sequence, in the core's layout (..., G, R, T, D)


def pairs_fwd(plan: Plan, q: Array, k: Array, v: Array, S: Array | None) -> Array:
    """scale ((q k^T) v + q S)."""
    out = (q @ plan.xp.matrix_transpose(k)) @ v
    return plan.scale * (out if S is None else out + q @ S)


def pairs_vjp(plan: Plan, q: Array, k: Array, v: Array, S: Array | None, dout: Array) -> tuple[Any, ...]:
    """(dq, dk, dv, dS)."""
    xp, T = plan.xp, plan.xp.matrix_transpose
    c = plan.scale * dout
    dP = c @ T(v)
    dq = dP @ k
    if S is not None:
        dq = dq + c @ T(S)
    dv = T(q @ T(k)) @ c
    dS = None if S is None else sum_to(xp, T(q) @ c, S.shape)
    return sum_to(xp, dq, q.shape), sum_to(xp, T(dP) @ q, k.shape), sum_to(xp, dv, v.shape), dS


def _core(plan: Plan, x: Inputs, y: Array) -> Array:
    return split(plan.xp, cast(plan.xp, y, plan.dtype), groups(x))


def _public(xp: Namespace, y: Array) -> Array:
    """(..., G, R, T, D) as (..., T, H, D)."""
    return swap(xp, xp.reshape(y, (*y.shape[:-4], y.shape[-4] * y.shape[-3], *y.shape[-2:])), -3)


def _sequences(plan: Plan, x: Inputs, state: Array | None, *rows: Array) -> list[tuple[Any, ...]]:
    """(q, k, v, S, rows of the queries) of every sequence."""
    q, k, v, *more = (_core(plan, x, y) for y in (x.q, x.k, x.v, *rows))
    S = None if state is None else cast(plan.xp, split_state(plan.xp, state, groups(x)), plan.dtype)
    if plan.sequences[0].row is None:
        return [(q, k, v, S, *more)]
    return [(*(y[..., s.start : s.stop, :] for y in (q, k, v)),
             None if S is None else S[n, ...], *(y[..., s.start : s.stop, :] for y in more))
            for n, s in enumerate(plan.sequences)]  # fmt: skip


# a call


class ByPairs(NamedTuple):
    """Residuals of a call whose sequences are computed by pairs; write: computes its state."""

    x: Inputs
    plan: Plan
    state: Array | None
    write: Run
    rest: Any  # residuals of the computation of the final state; None: it was not needed


class Mixed(NamedTuple):
    """Residuals of a ragged call: the sequences that are computed by pairs, and the others."""

    x: Inputs
    plan: Plan
    rows: list[list[int]]
    saved: list[Any]


def forward(run: Run, module: Any, x: Inputs, plan: Plan, state: Array | None) -> tuple[Array, Array, Any]:
    """(out, final state, residuals); the final state is a view of one zero if it is not returned."""
    of_each = chosen(x, plan)
    if all(of_each):
        return _forward(run, x, plan, state)
    rows = [[n for n, by_pairs in enumerate(of_each) if by_pairs is wanted] for wanted in (True, False)]
    calls = [_select(x, plan, state, each) for each in rows]
    results = [_forward(run, *calls[0]), run(*calls[1])]
    outs, ends, saved = zip(*results, strict=True)
    return _merged(plan, rows, outs), _merged_rows(plan, rows, ends), Mixed(x, plan, rows, list(saved))


def backward(run: Run, saved: Any, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input, and of the initial state."""
    if isinstance(saved, ByPairs):
        return _backward(run, saved, dout, dstate)
    xp, plan = saved.plan.xp, saved.plan
    results = []
    for n, rows in enumerate(saved.rows):
        d = None if dout is None else xp.concat(_cut(dout, [plan.sequences[m] for m in rows]), axis=-3)
        dS = None if dstate is None else xp.stack([dstate[m, ...] for m in rows], axis=0)
        results.append((_backward if n == 0 else lambda run, *given: run(*given))(run, saved.saved[n], d, dS))
    grads = {name: _merged(plan, saved.rows, [getattr(d, name) for d, _ in results]) for name in ("q", "k", "v")}
    return Inputs(**grads), _merged_rows(plan, saved.rows, [dS for _, dS in results])


def _forward(run: Run, x: Inputs, plan: Plan, state: Array | None) -> tuple[Array, Array, ByPairs]:
    xp, write = plan.xp, functools.partial(run, x._replace(q=None), plan, state)
    outs = [pairs_fwd(plan, *each) for each in _sequences(plan, x, state)]
    out = cast(xp, _public(xp, outs[0] if len(outs) == 1 else xp.concat(outs, axis=-2)), x.v.dtype)
    if plan.returns_state:
        _, end, rest = write()
        return out, end, ByPairs(x, plan, state, write, rest)
    return out, _no_state(x, plan), ByPairs(x, plan, state, write, None)


def _no_state(x: Inputs, plan: Plan) -> Array:
    """A state of zeros."""
    lead = x.v.shape[:-3] if plan.sequences[0].row is None else (len(plan.sequences),)
    zero = plan.xp.zeros((1, 1, 1), dtype=plan.dtype, device=device(x.v))
    return plan.xp.broadcast_to(zero, (*lead, x.v.shape[-2], x.k.shape[-1], x.v.shape[-1]))


def _backward(run: Run, saved: ByPairs, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    x, plan, state, write, rest = saved
    xp, of_write, dS = plan.xp, None, None
    if dstate is not None:
        of_write, dS = run(write()[2] if rest is None else rest, None, dstate)
    if dout is None:
        zeros = (plan.xp.zeros_like(cast(xp, y, plan.dtype)) for y in (x.q, x.k, x.v))
        dq, dk, dv = zeros
    else:
        each = [pairs_vjp(plan, *given) for given in _sequences(plan, x, state, dout)]
        dq, dk, dv = (_public(xp, y[0] if len(y) == 1 else xp.concat(list(y), axis=-2))
                      for y in list(zip(*each, strict=True))[:3])  # fmt: skip
        if state is not None:
            read = [join_state(xp, one[3]) for one in each]
            more = (
                read[0]
                if plan.sequences[0].row is None
                else xp.stack([xp.reshape(one, one.shape[-3:]) for one in read], axis=0)
            )
            dS = more if dS is None else dS + more
    if of_write is not None:
        dk, dv = dk + of_write.k, dv + of_write.v
    return Inputs(dq, dk, dv), _no_state(x, plan) if dS is None else dS


# groups of sequences of a ragged call


def _cut(y: Array, sequences: list[Sequence]) -> list[Array]:
    return [y[..., s.start : s.stop, :, :] for s in sequences]


def _select(x: Inputs, plan: Plan, state: Array | None, rows: list[int]) -> tuple[Inputs, Plan, Array | None]:
    """The call of some of the sequences."""
    xp, own = plan.xp, [plan.sequences[n] for n in rows]
    offsets = accumulate((s.stop - s.start for s in own), initial=0)
    packed = tuple(Sequence(n, *each) for n, each in enumerate(pairwise(offsets)))
    q, k, v = (xp.concat(_cut(y, own), axis=-3) for y in (x.q, x.k, x.v))
    state = None if state is None else xp.stack([state[n, ...] for n in rows], axis=0)
    return Inputs(q, k, v), plan._replace(sequences=packed), state


def _merged(plan: Plan, rows: list[list[int]], parts: Any) -> Array:
    """Tokens of groups of sequences, in the order of the sequences."""
    pieces: dict[int, Array] = {}
    for group, y in zip(rows, parts, strict=True):
        offsets = accumulate((plan.sequences[n].stop - plan.sequences[n].start for n in group), initial=0)
        pieces |= {n: y[..., a:b, :, :] for n, (a, b) in zip(group, pairwise(offsets), strict=True)}
    return plan.xp.concat([pieces[n] for n in sorted(pieces)], axis=-3)


def _merged_rows(plan: Plan, rows: list[list[int]], states: Any) -> Array:
    """States of groups of sequences, in the order of the sequences."""
    each = {n: S[m, ...] for group, S in zip(rows, states, strict=True) for m, n in enumerate(group)}
    return plan.xp.stack([each[n] for n in sorted(each)], axis=0)
