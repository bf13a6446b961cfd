"""Similarities that are polynomials of q . k, by array calls: features exist for one chunk of some heads at a time.

    w_ij = p(q_i . k_j / sqrt(K)) = phi(q_i) . phi(k_j)
    out_i = sum_{j in chunk, j <= i} w_ij v_j + phi(q_i) S        S <- S + phi(k)^T v after the chunk

Inside a chunk p is evaluated at q . k. The terms of phi(q) . phi(k) are as large as (|q| |k|)^n and cancel where q . k
is small, so features, and states between chunks, are float64 in a float32 call. Short sequences take no features: all
their tokens see each other, tile by tile. polynomial_heads.py computes a block of heads; this file chooses blocks that
need at most policy.POLYNOMIAL_BYTES beside inputs and outputs, and assembles the results.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from ...core import Explained
from ...runtime.arrays import Array, cast, device, is_cupy, is_mutable
from ...runtime.pools import take_rows
from ...runtime.recorder import refuse
from ...runtime.shapes import Sequence
from .. import policy
from ..blocks import WHOLE, Block, cut
from ..heads import TokenBuffer, groups, join_state, split, split_state
from ..types import Inputs, Plan
from .polynomial_heads import Heads, HeadsPullback, Polynomial, chunk_of, steps_of


class PolynomialResiduals(NamedTuple):
    """Residuals of a forward pass: its inputs."""

    x: Polynomial
    plan: Plan
    state: Array | None
    lead: tuple[int, ...]  # batch axes


def heads_bytes(x: Polynomial, plan: Plan) -> int:
    """Bytes of the arrays of one head beside its inputs and outputs, at most."""
    T, (K, V), M = x.v.shape[-3], (x.k.shape[-1], x.v.shape[-1]), x.features
    Tq = T if x.q is None else x.q.shape[-3]
    plans = [chunk_of(x, plan, s) for s in plan.sequences]
    wide = 8 if x.exact or plan.dtype == plan.xp.float64 else 4
    C = max((min(c, T) for c, _ in plans), default=1)
    has_features = plan.returns_state or plan.has_state or not all(direct for _, direct in plans)
    features = (8 * C * M + 4 * M * (V + 1)) * wide if has_features else 0
    return features + 6 * C * C * 8 + (T * (K + V + 1) + Tq * 2) * 4


def blocks_of(x: Polynomial, plan: Plan, G: int) -> list[Block]:
    """Blocks of batch rows and groups of heads that stay within policy.POLYNOMIAL_BYTES, one head at least."""
    if not is_mutable(plan.xp):
        return [WHOLE]
    B, R = x.v.shape[0], max(y.shape[-2] for y in (x.q, x.k, x.v) if y is not None) // max(G, 1)
    most = max(1, policy.POLYNOMIAL_BYTES // max(heads_bytes(x, plan) * R, 1))
    groups_each, rows = min(G, most), max(1, min(B, most // G))
    return [Block((slice(b, min(b + rows, B)),), slice(g, min(g + groups_each, G)))
            for b in range(0, B, rows) for g in range(0, G, groups_each)]  # fmt: skip


def _jobs(x: Polynomial, plan: Plan) -> Iterator[tuple[int, Sequence, Block, Heads]]:
    """Every sequence of every block, and the number of its block."""
    G = groups(Inputs(x.q, x.k, x.v))
    core = x._replace(**{n: split(plan.xp, y, G) for n, y in (("q", x.q), ("k", x.k), ("v", x.v)) if y is not None})
    for n, block in enumerate(blocks_of(x, plan, G)):
        part = core._replace(q=cut(core.q, block), k=cut(core.k, block), v=cut(core.v, block))
        for s in plan.sequences:
            yield n, s, block, Heads(part, plan, steps_of(x, plan, s), plan.has_state)


def _state_of(x: Polynomial, plan: Plan, state: Array | None, s: Sequence, block: Block) -> Array | None:
    """The state of the heads of a block, (..., G, R, M, V) in the dtype of states; None for zeros."""
    if state is None:
        return None
    if s.row is not None:
        state = state[s.row, ...][None, ...]
    G = groups(Inputs(x.q, x.k, x.v))
    return cast(plan.xp, cut(split_state(plan.xp, state, G), block), x.wide(plan))


class States:
    """The public array of states, assembled from the states of blocks."""

    def __init__(self, x: Polynomial, plan: Plan):
        H, V = x.v.shape[-2], x.v.shape[-1] + (x.eps is not None)
        count = x.v.shape[0] if plan.sequences[0].row is None else len(plan.sequences)
        self.x, self.plan, self.shape = x, plan, (count, H, x.features, V)
        self.whole: Array | None = None
        self.parts: list[Array] = []

    def put(self, s: Sequence, block: Block, S: Array | None) -> None:
        """Take the state of a sequence's heads; None: zeros."""
        xp, plan = self.plan.xp, self.plan
        if S is None:
            return
        S = cast(xp, join_state(xp, S), plan.dtype)
        if block is WHOLE:
            self.parts.append(S)
            return
        if self.whole is None:
            self.whole = xp.zeros(self.shape, dtype=plan.dtype, device=device(self.x.v))
        each = self.shape[1] // groups(Inputs(self.x.q, self.x.k, self.x.v))
        heads = slice(block.groups.start * each, block.groups.stop * each)
        refuse("an array call writes into an array of states")
        self.whole[block.batch[0] if s.row is None else slice(s.row, s.row + 1), heads, ...] = S

    def done(self) -> Array:
        """All states; zeros, of one number, where none was computed."""
        if self.parts:
            return self.parts[0] if self.plan.sequences[0].row is None else self.plan.xp.concat(self.parts, axis=0)
        if self.whole is not None:
            return self.whole
        xp = self.plan.xp
        return xp.broadcast_to(xp.zeros((1, 1, 1, 1), dtype=self.plan.dtype, device=device(self.x.v)), self.shape)


def forward(x: Polynomial, plan: Plan, state: Array | None) -> tuple[Array | None, Array, PolynomialResiduals]:
    """(out, final state with z, residuals) of arrays with any batch axes."""
    saved, xp, is_ragged = residuals_of(x, plan, state), plan.xp, plan.is_ragged
    x, plan, flat, lead = saved
    out, ends = None, States(x, plan)
    if x.q is not None:
        H = max(x.q.shape[-2], x.v.shape[-2])
        T = x.v.shape[-3] if plan.causal or is_ragged else x.q.shape[-3]
        out = TokenBuffer(xp, (x.v.shape[0], T, H, x.v.shape[-1]), plan.dtype, device(x.v))
    parts: dict[int, Any] = {}
    for n, s, block, heads in _jobs(x, plan):
        if out is not None and n not in parts:
            parts[n] = out.part(block, groups(Inputs(x.q, x.k, x.v))).put
        end = heads.forward(_state_of(x, plan, flat, s, block), parts.get(n))
        ends.put(s, block, end if plan.returns_state else None)
    return None if out is None else _unflat(xp, out.done(), lead), _unflat_state(saved, ends.done()), saved


def residuals_of(x: Polynomial, plan: Plan, state: Array | None) -> PolynomialResiduals:
    """Residuals of a call, in the layout of blocks."""
    xp, lead = plan.xp, x.v.shape[:-3]
    if plan.pool_rows is not None:
        rows: Any = plan.pool_rows
        state = take_rows(xp, state, rows, rows.at.shape if plan.is_ragged else lead)
    x = x._replace(**{n: _flat(xp, y) for n, y in (("q", x.q), ("k", x.k), ("v", x.v)) if y is not None})
    flat = state if state is None or plan.is_ragged else _flat(xp, state)
    returns_state = plan.returns_state or x.q is None
    plan = plan._replace(pool_rows=None, has_state=state is not None, returns_state=returns_state)
    return PolynomialResiduals(x, plan, flat, lead)


def backward(saved: PolynomialResiduals, dout: Array | None, dstate: Array | None) -> tuple[Polynomial, Array]:
    """Gradients of every input, and of the initial state with z."""
    x, plan, state, lead = saved
    xp, G = plan.xp, groups(Inputs(x.q, x.k, x.v))
    begins = States(x, plan)
    given = {n: y for n, y in (("q", x.q), ("k", x.k), ("v", x.v)) if y is not None}
    buffers = {n: TokenBuffer(xp, tuple(y.shape), plan.dtype, device(y)) for n, y in given.items()}
    d = None if dout is None else split(xp, _flat(xp, dout), G)
    if dstate is not None and not plan.is_ragged:
        dstate = _flat(xp, dstate)
    parts: dict[int, dict[str, Any]] = {}
    for n, s, block, heads in _jobs(x, plan):
        if n not in parts:
            parts[n] = {name: buffer.part(block, G).put for name, buffer in buffers.items()}
        dS = HeadsPullback(heads, cut(d, block), parts[n]).run(
            _state_of(x, plan, state, s, block), _state_of(x, plan, dstate, s, block))  # fmt: skip
        begins.put(s, block, dS)
    grads = {n: _unflat(xp, buffer.done(), lead) for n, buffer in buffers.items()}
    return Polynomial(grads.get("q"), grads["k"], grads["v"]), _unflat_state(saved, begins.done())


def _flat(xp: Any, y: Array) -> Array:
    """(..., T, H, D) as (B, T, H, D), or a state (..., H, K, V) as (B, H, K, V)."""
    return xp.reshape(y, (prod(y.shape[:-3]), *y.shape[-3:]))


def _unflat(xp: Any, y: Array, lead: tuple[int, ...]) -> Array:
    return xp.reshape(y, (*lead, *y.shape[-3:]))


def _unflat_state(saved: PolynomialResiduals, S: Array) -> Array:
    return S if saved.plan.is_ragged else _unflat(saved.plan.xp, S, saved.lead)


def explain(reason: str, others: dict[str, str], x: Polynomial, plan: Plan) -> Explained:
    """Backend, form, memory and operations of a call."""
    B, (T, H, V), K, M = prod(x.v.shape[:-3]), x.v.shape[-3:], x.k.shape[-1], x.features
    heads, length = H if x.q is None else max(H, x.q.shape[-2]), lambda tokens: tokens.stop - tokens.start
    pairs = reads = writes = 0
    for s in plan.sequences:
        steps = steps_of(x, plan, s)
        for n, step in enumerate(steps):
            pairs += sum(length(step.queries) * length(keys) for keys in step.sees)
            before = plan.has_state or any(one.writes for one in steps[:n])
            reads += length(step.queries) if step.queries is not None and before else 0
            after = plan.returns_state or x.q is None or any(one.queries for one in steps[n + 1 :])
            writes += length(step.writes) if step.writes is not None and after else 0
    total = float(2 * B * (heads * (pairs * (K + V) + reads * M * V) + H * writes * M * V))
    C, is_direct = chunk_of(x, plan, Sequence(0 if plan.is_ragged else None, 0, T))
    words = "all tokens see each other, tile by tile" if is_direct else "features of one chunk at a time"
    if x.exact and (reads or writes):
        words += ", they and states in float64, since their terms cancel"
    most = f"at most {policy.POLYNOMIAL_BYTES >> 20} MiB beside inputs and outputs"
    reason = f"{reason}; a polynomial of q . k: {words}; {most}"
    form = "chunk form" if not is_direct else "parallel form in tiles" if plan.causal else "parallel form"
    if x.exact and "cuda" in others and is_cupy(plan.xp):
        others["cuda"] = "terms of its float32 features cancel where q . k is small; backend='cuda' takes them"
    return Explained("chunks", reason, others, form, min(C, T), total, total / max(B * T * H, 1))
