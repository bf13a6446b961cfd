"""Softmax attention of queries and keys that all maps up to their own token have multiplied.

    P_t = H_t P_{t-1},  H_t = I - beta_t w_t^T w_t,   q~_t = q_t P_t,  k~_t = k_t P_t

q_t P_t is q_t less its own delta-rule output, with keys and values w. In blocks, with R_J the product of a block
(ops/householder.py), x~ = (x at the start of its block) P_J and P_{J+1} = R_J P_J. Backward, from the last block on:

    dP_J = x_J^T dx~_J + R_J^T dP_{J+1},   dR_J = dP_{J+1} P_J^T
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from ...core import Computed, Explained, StatesAt, register
from ...ops import householder as maps
from ...runtime.arrays import Array, cast, device, sum_to
from ...runtime.shapes import Sequence
from .. import heads, states
from ..core import CORE, choose
from ..policy import array_tile
from ..types import HouseholderCache, HouseholderInputs, Inputs, KeyValueCache, SoftmaxPlan


class HouseholderResiduals(NamedTuple):
    """Residuals of a forward pass."""

    x: HouseholderInputs
    plan: SoftmaxPlan
    state: Any
    attention: Any  # the core's


class Blocks(NamedTuple):
    """One sequence in blocks (..., G, R, n, C, K)."""

    factors: maps.Block
    rows: dict[str, Array]  # q and k
    starts: dict[str, tuple[Array, Array]]  # at the start of their blocks, and E
    R: Array
    P: list[Array]  # before each block, and after the last


class Householder(states.GivesStates):
    """The products, then attention."""

    def forward(self, fn: str, x: HouseholderInputs, plan: SoftmaxPlan, state: Any, wanted: str | None) -> Computed:
        """(out, final state, residuals)."""
        plan = plan._replace(chunk_size=1) if choose(fn, x, plan, wanted) == "reference" else plan
        xp, rows, ends = plan.xp, list[dict[str, Array]](), []
        for s, own, P in each_sequence(plan, x, state):
            found, end = _forward(plan, own, P)
            rows.append(found)
            ends.append(end if s.row is None else xp.reshape(end, end.shape[-3:]))
        q, k = (_joined(plan, [y[n] for y in rows]) if n in rows[0] else None for n in ("q", "k"))
        given = None if state is None else KeyValueCache(state.k, state.v, state.length)
        out, end, attention = CORE.forward(fn, Inputs(q, k, x.v), plan, given, wanted)
        last = ends[0] if not plan.is_ragged else xp.stack(ends)
        if isinstance(end, StatesAt):
            end = StatesAt(_with_product(end.end, last), _with_product(end.at, _at_positions(plan, x, state)))
        else:
            end = _with_product(end, last)
        return out, end, HouseholderResiduals(x, plan, state, attention)

    def backward(self, residuals: HouseholderResiduals, dout: Array | None, dstate: Any) -> tuple[Any, Any]:
        """Gradients of the inputs and of the initial state."""
        x, plan, state, attention = residuals
        given = states.each(lambda d: KeyValueCache(d.k, d.v, d.length), dstate)
        d, dbegin = CORE.backward(attention, dout, given)
        dend, dat = dstate if isinstance(dstate, StatesAt) else (dstate, None)
        each, dPs = list[dict[str, Array]](), []
        for s, own, P in each_sequence(plan, x, state):
            at = slice(s.start, s.stop)
            dP = None
            if dend is not None:
                dP = dend.P if s.row is None else _of_row(plan, x, dend.P, s)
            rows = {n: y[..., at, :, :] for n, y in (("q", d.q), ("k", d.k)) if y is not None}
            found, dP = _backward(plan, own, P, rows, dP)
            for n, p in states.positions_of(plan, s) if dat is not None else ():
                own_at = _tokens(x, p)._replace(q=None)
                more, d_before = _backward(plan, own_at, P, {}, states.row_at(plan, x, dat, n).P)
                dP = dP + d_before
                for name in ("w", "beta"):
                    axis = -2 if name == "beta" else -3
                    found[name] = found[name] + states.with_zeros(plan, more[name], own.v.shape[-3], axis)
            each.append(found)
            dPs.append(dP if s.row is None else plan.xp.reshape(dP, dP.shape[-3:]))
        names = [n for n in ("q", "k", "w", "beta") if getattr(x, n) is not None]
        grads = {n: _joined(plan, [y[n] for y in each], -2 if n == "beta" else -3) for n in names}
        dx = HouseholderInputs(grads.get("q"), grads["k"], d.v, grads["w"], grads["beta"])
        if state is None:
            return dx, None
        return dx, HouseholderCache(dbegin.k, dbegin.v, plan.xp.stack(dPs) if plan.is_ragged else dPs[0], dbegin.length)

    def reads_out(self, residuals: HouseholderResiduals) -> bool:
        """Backward reads the output."""
        return residuals.plan.normalize

    def explain(self, fn: str, x: HouseholderInputs, plan: SoftmaxPlan, wanted: str | None) -> Explained:
        """Those of attention, and of the maps."""
        found = CORE.explain(fn, Inputs(x.q, x.k, x.v), plan, wanted, of=x)
        K, states = x.k.shape[-1], prod(x.v.shape[:-3])
        per_token = 2.0 * K * K * (x.k.shape[-2] + (0 if x.q is None else max(x.q.shape[-2], x.k.shape[-2])))
        C = _tile(plan)
        more = states * x.v.shape[-3] * (per_token + x.k.shape[-2] * (12 * C * K + 2 * K * K))
        total = found.operations + more
        return found._replace(operations=total, operations_per_token=found.operations_per_token * total
                              / max(found.operations, 1.0))  # fmt: skip


def each_sequence(
    plan: SoftmaxPlan, x: HouseholderInputs, state: Any
) -> Iterator[tuple[Sequence, HouseholderInputs, Array]]:
    """(sequence, its tokens, P before them (..., Hk, K, K))."""
    for s in plan.sequences:
        yield s, _tokens(x, s), _product_before(plan, x, state, s)


def _tokens(x: HouseholderInputs, s: Sequence) -> HouseholderInputs:
    """The tokens of a sequence."""
    at = slice(s.start, s.stop)
    q, k, v, w = (None if y is None else y[..., at, :, :] for y in x[:4])
    return HouseholderInputs(q, k, v, w, x.beta[..., at, :])


def _product_before(plan: SoftmaxPlan, x: HouseholderInputs, state: Any, s: Sequence) -> Array | None:
    """P before the tokens of a sequence."""
    if state is None:
        return None
    return cast(plan.xp, state.P, plan.dtype) if s.row is None else _of_row(plan, x, state.P, s)


def _with_product(end: KeyValueCache | None, P: Array) -> HouseholderCache | None:
    return None if end is None else HouseholderCache(end.k, end.v, P, end.length)


def _at_positions(plan: SoftmaxPlan, x: HouseholderInputs, state: Any) -> Array:
    """P at plan.states_at."""
    found = [_forward(plan, _tokens(x, s)._replace(q=None), _product_before(plan, x, state, s))[1]
             for s in states.prefixes_of(plan)]  # fmt: skip
    return states.along_positions(plan, x, found)


def _of_row(plan: SoftmaxPlan, x: HouseholderInputs, P: Array, s: Sequence) -> Array:
    row = cast(plan.xp, P[s.row, ...], plan.dtype)
    return plan.xp.reshape(row, (*x.v.shape[:-3], *row.shape))


def _joined(plan: SoftmaxPlan, parts: list[Array], axis: int = -3) -> Array:
    return parts[0] if len(parts) == 1 else plan.xp.concat(parts, axis=axis)


def _tile(plan: SoftmaxPlan) -> int:
    """Tokens of a block."""
    return 1 if plan.chunk_size == 1 else array_tile(plan.chunk_size)


def _blocks(plan: SoftmaxPlan, x: HouseholderInputs, P: Array | None) -> Blocks:
    """A sequence in blocks."""
    xp, K, G = plan.xp, x.k.shape[-1], _groups(x)
    C = max(min(_tile(plan), x.k.shape[-3]), 1)
    each = {n: y for n, y in (("q", x.q), ("k", x.k), ("w", x.w), ("beta", x.beta[..., None])) if y is not None}
    rows = {n: maps.blocks(xp, heads.split(xp, cast(xp, y, plan.dtype), G), C) for n, y in each.items()}
    f = maps.factorised(xp, rows.pop("w"), rows.pop("beta"))
    R = maps.product(xp, f)
    if P is None:
        eye = xp.eye(K, dtype=plan.dtype, device=device(x.k))
        every = [xp.broadcast_to(eye, (*R.shape[:-3], K, K))]
    else:
        every = [xp.reshape(P, (*P.shape[:-3], G, P.shape[-3] // max(G, 1), K, K))]
    for J in range(R.shape[-3]):
        every.append(R[..., J, :, :] @ every[-1])
    return Blocks(f, rows, {n: maps.to_start(xp, f, y) for n, y in rows.items()}, R, every)


def _groups(x: HouseholderInputs) -> int:
    return x.k.shape[-2] if x.q is None else min(x.q.shape[-2], x.k.shape[-2])


def _forward(plan: SoftmaxPlan, x: HouseholderInputs, P: Array | None) -> tuple[dict[str, Array], Array]:
    """(q~ and k~ by name, P after the tokens)."""
    xp, T, Hk = plan.xp, x.k.shape[-3], x.k.shape[-2]
    m, found = _blocks(plan, x, P), {}
    for name, (y, _) in m.starts.items():
        many = Hk if name == "k" or x.q is None else max(x.q.shape[-2], Hk)
        shape = (*x.v.shape[:-3], T, many, x.k.shape[-1])
        found[name] = xp.zeros(shape, dtype=plan.dtype, device=device(x.k))
        if T:
            found[name] = heads.join(xp, maps.tokens(xp, y @ xp.stack(m.P[:-1], axis=-3), T), shape)
    end = m.P[-1]
    return found, xp.reshape(end, (*end.shape[:-4], Hk, *end.shape[-2:]))


def _backward(
    plan: SoftmaxPlan, x: HouseholderInputs, P: Array | None, d: dict[str, Array], dP: Array | None
) -> tuple[dict[str, Array], Array]:
    """(gradients by name, dP before the tokens) from dq~, dk~ and dP after the tokens."""
    xp, T, G, K = plan.xp, plan.xp.matrix_transpose, _groups(x), x.k.shape[-1]
    m = _blocks(plan, x, P)
    n, C = m.R.shape[-3], m.factors.w.shape[-2]
    before = m.P[0]
    down = xp.zeros_like(before) if dP is None else xp.reshape(cast(xp, dP, plan.dtype), before.shape)
    if not n:
        zeros = {name: xp.zeros_like(y) for name, y in x._asdict().items() if y is not None}
        return zeros, xp.reshape(down, (*down.shape[:-4], x.k.shape[-2], K, K))
    rows = {name: maps.blocks(xp, heads.split(xp, cast(xp, y, plan.dtype), G), C) for name, y in d.items()}
    dR: list[Array] = []
    for J in reversed(range(n)):
        dR.append(down @ T(m.P[J]))
        down = T(m.R[..., J, :, :]) @ down
        for name, y in rows.items():
            down = down + sum_to(xp, T(m.starts[name][0][..., J, :, :]) @ y[..., J, :, :], down.shape)
    sums, every = maps.HouseholderGradients(xp, m.factors), T(xp.stack(m.P[:-1], axis=-3))
    maps.product_vjp(m.factors, sums, xp.stack(dR[::-1], axis=-3))
    grads = {}
    for name, y in rows.items():
        saved = (m.rows[name], m.starts[name][1])
        grads[name] = maps.to_start_vjp(m.factors, sums, saved, y @ every)
    grads["w"], grads["beta"] = maps.factorised_vjp(m.factors, sums)
    like = x._asdict() | {"beta": x.beta[..., None]}
    found = {name: heads.join(xp, maps.tokens(xp, y, x.k.shape[-3]), like[name].shape) for name, y in grads.items()}
    found["beta"] = found["beta"][..., 0]
    for name in ("q", "k"):
        if name not in found and getattr(x, name) is not None:
            found[name] = xp.zeros_like(getattr(x, name))
    return found, xp.reshape(down, (*down.shape[:-4], x.k.shape[-2], K, K))


register(Householder(), HouseholderInputs)
