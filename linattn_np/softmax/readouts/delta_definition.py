"""The linear system of deltaformer by its definition, one token after the other, and its transpose.

    r_i = sum_{j < i} p_ij u_j,   u_i = v_i - beta_i r_i,   p_ij = e^{z_ij - l_i},
    z_ij = scale w_i . k_j + sum_{j < s <= i} g_s,   l_i = log sum_{j < i} e^{z_ij}        0 if `normalize` is false

    y_i = du_i + sum_{t > i} p_ti d_t = dv_i,   d_i = -beta_i y_i,   dbeta_i = -y_i . r_i
    dz_ij = p_ij (d_i . u_j - d_i . r_i)            without the second term if `normalize` is false

and from dz as in `definition.py`, with the queries w. g_i is common to all keys of token i: with `normalize` it cancels
and is left out, so that a large |g_i| hides no logit; after a reset (-inf) there are no keys.
"""

from __future__ import annotations

from typing import Any

from ...runtime.arrays import Array, Namespace, sum_to
from ..definition import begin, decayed, gradients, log_sum, logits, with_past
from ..heads import sum_like
from ..types import Parts, SoftmaxPlan


def forward(plan: SoftmaxPlan, x: Parts, beta: Array) -> tuple[Array, Array, Array]:
    """(u, r (..., G, R, T, V), l (..., G, R, T, 1)).   beta (..., G, R, T, 1)."""
    xp, decay = plan.xp, begin(x)
    us, rs, logs = [] if x.past is None else [x.past.v], [], []
    keys = with_past(xp, x)[0]
    for i in range(x.v.shape[-2]):
        before, decay = decay, decayed(plan, x, decay, i)
        z = logits(plan, x, keys, as_read(plan, x, before, decay, i), i)
        logs.append(log_sum(plan, x, z))
        one = x.v[..., i : i + 1, :]
        r = xp.exp(z - logs[-1]) @ xp.concat(us, axis=-2) if us else xp.zeros_like(one)
        rs.append(r)
        us.append(one - beta[..., i : i + 1, :] * r)
    return xp.concat(us[0 if x.past is None else 1 :], axis=-2), xp.concat(rs, axis=-2), xp.concat(logs, axis=-2)


def as_read(plan: SoftmaxPlan, x: Parts, before: Array | None, decay: Array | None, i: int) -> Array | None:
    """The log decay of each key that token i reads, without g_i; before: as token i - 1 reads them."""
    if before is None or decay is None or not plan.normalize:
        return decay
    return before + common(plan.xp, x.g[..., i : i + 1])


def common(xp: Namespace, g: Array) -> Array:
    """What is left of log decays that are common to all keys: -inf of a reset, else 0."""
    return xp.where(xp.isfinite(g), xp.zeros_like(g), g)


def backward(
    plan: SoftmaxPlan, x: Parts, beta: Array, results: tuple[Array, Array, Array], du: Array
) -> tuple[Parts, Array]:
    """(gradients of the sequence and of the cache, dbeta); x has the values v."""
    xp, (u, r, logs), T = plan.xp, results, plan.xp.matrix_transpose
    keys, values = with_past(xp, x._replace(v=u))
    L, decay, decays = keys.shape[-2] - x.k.shape[-2], begin(x), []
    for i in range(u.shape[-2]):
        before, decay = decay, decayed(plan, x, decay, i)
        decays.append(as_read(plan, x, before, decay, i))
    dw, dk, d_values = sum_like(xp, x.q), sum_like(xp, keys), sum_like(xp, values)
    dbeta, dv, dg, crossing = [], [], list[Any](), None
    for i in reversed(range(u.shape[-2])):
        z, one = logits(plan, x, keys, decays[i], i), slice(i, i + 1)
        n = z.shape[-1]
        y = du[..., one, :] + d_values.total[..., L + i : L + i + 1, :]
        dv.append(y)
        dbeta.append(-xp.sum(y * r[..., one, :], axis=-1, keepdims=True))
        d, p = -beta[..., one, :] * y, xp.exp(z - logs[..., one, :])
        mean = beta[..., one, :] * dbeta[-1] if plan.normalize else 0.0
        dz = sum_to(xp, p * (d @ T(values[..., :n, :]) - mean), p.shape)
        d_values.add(0, T(p) @ d)
        dw.add(i, plan.scale * (dz @ keys[..., :n, :]))
        dk.add(0, T(dz) @ x.q[..., one, :])
        if x.g is not None:
            crossing = dz if crossing is None else crossing[..., :n] + dz
            dg.append(xp.sum(crossing[..., 0, :], axis=-1))
    found = gradients(plan, x, (dw, dk, d_values), L, None, (dg, crossing))
    return found._replace(v=xp.concat(dv[::-1], axis=-2)), xp.concat(dbeta[::-1], axis=-2)
