"""Stick-breaking attention by its definition, one query after the other, and its transpose.

log s_ij = min(z_ij, 0) - log(1 + e^{-|z_ij|}),   c_ij = sum_{j < l} log(1 + e^{z_il}),   a_ij = e^{log s_ij - c_ij}
out_i = sum_j a_ij v_j                            z_ij = scale q_i . k_j of the keys j, l that query i reads

G_ij = a_ij (dout_i . v_j),   dz_il = (1 - s_il) G_il - s_il sum_{j < l} G_ij
dv_j = sum_i a_ij dout_i,   dq_i = scale sum_j dz_ij k_j,   dk_j = scale sum_i dz_ij q_i
"""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.arrays import Array, Namespace, device, sum_to
from ..definition import logits, with_past
from ..heads import sum_like
from ..types import Parts, Past, SoftmaxPlan


class Shares(NamedTuple):
    """Of a query's keys."""

    a: Array  # (..., n)
    s: Array  # (..., n)
    complement: Array  # (..., n), 1 - s without a difference
    left: Array  # (..., 1), minus the log of the stick that these keys and all later ones leave


def shares(xp: Namespace, z: Array, left: Array) -> Shares:
    """Of logits z (..., n); left (..., 1) is minus the log of the stick that later keys left."""
    rest = xp.log1p(xp.exp(-xp.abs(z)))
    log, taken = xp.minimum(z, xp.zeros_like(z)) - rest, xp.maximum(z, xp.zeros_like(z)) + rest
    later = xp.flip(xp.cumulative_sum(xp.flip(taken, axis=-1), axis=-1), axis=-1)
    after = xp.concat([later[..., 1:], xp.zeros_like(later[..., :1])], axis=-1)
    return Shares(xp.exp(log - after - left), xp.exp(log), xp.exp(-taken), left + later[..., :1])


def logits_vjp(xp: Namespace, of: Shares, G: Array, before: Array) -> tuple[Array, Array]:
    """(dz, the sum of G up to these keys); before: of earlier keys."""
    sums = before + xp.cumulative_sum(G, axis=-1)
    return of.complement * G - of.s * xp.concat([before, sums[..., :-1]], axis=-1), sums[..., -1:]


def forward(plan: SoftmaxPlan, x: Parts) -> tuple[Array, Array]:
    """(out (..., G, R, T, V), minus the logs of the rest (..., G, R, T, 1))."""
    xp, (keys, values) = plan.xp, with_past(plan.xp, x)
    outs, lefts = [], []
    for i in range(x.q.shape[-2]):
        z = logits(plan, x, keys, None, i)
        a, left = z, xp.zeros((*z.shape[:-1], 1), dtype=z.dtype, device=device(z))
        if z.shape[-1]:
            a, _, _, left = shares(xp, z, left)
        outs.append(a @ values[..., : z.shape[-1], :])
        lefts.append(left)
    return xp.concat(outs, axis=-2), xp.concat(lefts, axis=-2)


def backward(plan: SoftmaxPlan, x: Parts, out: Array, left: Array, dout: Array) -> Parts:
    """Gradients of the sequence and of the cache."""
    xp, (keys, values), T = plan.xp, with_past(plan.xp, x), plan.xp.matrix_transpose
    dq, dk, dv, L = sum_like(xp, x.q), sum_like(xp, keys), sum_like(xp, values), keys.shape[-2] - x.k.shape[-2]
    for i in range(x.q.shape[-2]):
        z, one = logits(plan, x, keys, None, i), slice(i, i + 1)
        n = z.shape[-1]
        if not n:
            continue
        nothing = xp.zeros_like(z[..., :1])
        of = shares(xp, z, nothing)
        G = sum_to(xp, of.a * (dout[..., one, :] @ T(values[..., :n, :])), of.a.shape)
        dz, _ = logits_vjp(xp, of, G, nothing)
        dv.add(0, T(of.a) @ dout[..., one, :])
        dq.add(i, plan.scale * (dz @ keys[..., :n, :]))
        dk.add(0, T(dz) @ x.q[..., one, :])
    past = None if x.past is None else Past(dk.total[..., :L, :], dv.total[..., :L, :], None, None)
    return Parts(dq.total, dk.total[..., L:, :], dv.total[..., L:, :], None, None, past)
