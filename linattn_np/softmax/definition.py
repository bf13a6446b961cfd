"""The definition, one query after the other, and its transpose.

z_ij = scale q_i . k_j + sum_{j < s <= i} g_s        for the keys j that query i reads, in the cache too
l_i = log(e^{sink} + sum_j e^{z_ij})                 0 if `normalize` is false, inf if no key is read: p is 0
p_ij = e^{z_ij - l_i},   out_i = sum_j p_ij v_j

dv_j = sum_i p_ij dout_i
dz_ij = p_ij (dout_i . v_j - delta_i),  delta_i = dout_i . out_i - dlse_i        0 if `normalize` is false
dq_i = scale sum_j dz_ij k_j,   dk_j = scale sum_i dz_ij q_i,   dsink = -sum_i e^{sink - l_i} delta_i
dg_s = sum_{j < s <= i} dz_ij
"""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Array, Namespace, device, sum_to
from .heads import sum_like
from .types import Parts, Past, SoftmaxPlan

INF = float("inf")


def forward(plan: SoftmaxPlan, x: Parts) -> tuple[Array, Array]:
    """(out (..., G, R, T, V), l (..., G, R, T, 1))."""
    xp, keys, values = plan.xp, *with_past(plan.xp, x)
    outs, logs, decay = [], [], begin(x)
    for i in range(x.q.shape[-2]):
        decay = decayed(plan, x, decay, i)
        z = logits(plan, x, keys, decay, i)
        log = log_sum(plan, x, z)
        p = xp.exp(z - log)
        outs.append(p @ values[..., : z.shape[-1], :])
        logs.append(log)
    return xp.concat(outs, axis=-2), xp.concat(logs, axis=-2)


def backward(plan: SoftmaxPlan, x: Parts, out: Array, logs: Array, dout: Array, dlse: Array | None = None) -> Parts:
    """Gradients of the sequence and of the cache, with the heads of each array."""
    xp, (keys, values) = plan.xp, with_past(plan.xp, x)
    L, decay, decays = keys.shape[-2] - x.k.shape[-2], begin(x), []
    for i in range(x.q.shape[-2]):
        decay = decayed(plan, x, decay, i)
        decays.append(decay)
    dq, dk, dv = sum_like(xp, x.q), sum_like(xp, keys), sum_like(xp, values)
    dsinks, dg, crossing = None if x.sinks is None else xp.zeros_like(x.sinks), [], None
    dbias = None if x.bias is None else sum_like(xp, x.bias)
    for i in reversed(range(x.q.shape[-2])):
        z = logits(plan, x, keys, decays[i], i)
        n, one = z.shape[-1], slice(i, i + 1)
        p, d = xp.exp(z - logs[..., one, :]), dout[..., one, :]
        dp = d @ xp.matrix_transpose(values[..., :n, :])
        mean = xp.sum(d * out[..., one, :], axis=-1, keepdims=True) if plan.normalize else 0.0
        mean = mean if dlse is None else mean - dlse[..., one, :]
        dz = sum_to(xp, p * (dp - mean), z.shape)
        dv.add(0, xp.matrix_transpose(p) @ d)
        dq.add(i, plan.scale * (dz @ keys[..., :n, :]))
        dk.add(0, xp.matrix_transpose(dz) @ x.q[..., one, :])
        if dbias is not None:
            dbias.add_columns(i, 0, dz)
        if x.sinks is not None and plan.normalize:
            dsinks = dsinks - sum_to(xp, xp.exp(x.sinks - logs[..., one, :]) * mean, x.sinks.shape)
        if x.g is not None:
            crossing = dz if crossing is None else crossing[..., :n] + dz
            dg.append(xp.sum(crossing[..., 0, : n - 1], axis=-1))
    found = gradients(plan, x, (dq, dk, dv), L, dsinks, (dg, crossing))
    return found if dbias is None else found._replace(bias=dbias.total)


def gradients(plan: SoftmaxPlan, x: Parts, sums: Any, L: int, dsinks: Any, gates: Any) -> Any:
    """Gradients of the sequence and of the cache."""
    xp, (dq, dk, dv), (dg, crossing) = plan.xp, sums, gates
    dg = None if x.g is None else sum_to(xp, xp.stack(dg[::-1], axis=-1), x.g.shape)
    past = None
    if x.past is not None:
        db = None if x.past.b is None else sum_to(xp, crossing[..., 0, :L], x.past.b.shape)
        past = Past(dk.total[..., :L, :], dv.total[..., :L, :], db, None)
    return Parts(dq.total, dk.total[..., L:, :], dv.total[..., L:, :], dg, dsinks, past)


def with_past(xp: Namespace, x: Parts) -> tuple[Array, Array]:
    """Keys and values of the cache and of the sequence."""
    if x.past is None:
        return x.k, x.v
    return xp.concat([x.past.k, x.k], axis=-2), xp.concat([x.past.v, x.v], axis=-2)


def begin(x: Parts) -> Array | None:
    """The log decay of each key of the cache."""
    return None if x.past is None else x.past.b


def decayed(plan: SoftmaxPlan, x: Parts, decay: Array | None, i: int) -> Array | None:
    """The log decay of each key when token i is read: all before it decay by g_i."""
    if x.g is None:
        return None
    g = x.g[..., i : i + 1]
    own = plan.xp.zeros_like(g)
    return own if decay is None else plan.xp.concat([decay + g, own], axis=-1)


def logits(plan: SoftmaxPlan, x: Parts, keys: Array, decay: Array | None, i: int) -> Array:
    """z_i of the keys up to i: (..., G, R, 1, n)."""
    xp, L = plan.xp, 0 if x.past is None else x.past.k.shape[-2]
    n = L + i + 1 - plan.strict if plan.causal else keys.shape[-2]
    z = x.q[..., i : i + 1, :] @ xp.matrix_transpose(keys[..., :n, :])
    if decay is not None:
        z = z + decay[..., None, :n]
    if x.bias is not None:
        z = z + x.bias[..., i : i + 1, :n]
    hidden = _hidden(plan, x, i, n - L)
    return z if hidden is None else xp.where(hidden, xp.asarray(-float("inf"), dtype=z.dtype, device=device(z)), z)


def _hidden(plan: SoftmaxPlan, x: Parts, i: int, n: int) -> Array | None:
    """Which keys query i does not read: empty slots, and tokens before its window; None: it reads all."""
    xp, window, found = plan.xp, plan.window, []
    if x.past is not None:
        found.append(x.past.age < 0 if window is None else (x.past.age < 0) | (x.past.age + i + 1 >= window))
    elif window is None:
        return None
    own = i - xp.arange(n, device=device(x.v)) >= (i + 1 if window is None or not plan.causal else window)
    shape = (*(found[0].shape[:-1] if found else (1,)), n)
    return xp.concat([*found, xp.broadcast_to(own, shape)], axis=-1)


def log_sum(plan: SoftmaxPlan, x: Parts, z: Array) -> Array:
    """log(e^{sink} + sum_j e^{z_j}); of no key at all inf, so that p = e^{-inf} = 0."""
    xp = plan.xp
    if not plan.normalize or (x.sinks is None and not z.shape[-1]):
        return xp.full((*z.shape[:-1], 1), INF if plan.normalize else 0.0, dtype=z.dtype, device=device(z))
    if x.sinks is not None:
        z = xp.concat([z, xp.broadcast_to(x.sinks, (*z.shape[:-1], 1))], axis=-1)
    m = xp.max(z, axis=-1, keepdims=True)
    none = m == -INF
    m = xp.where(none, xp.zeros_like(m), m)
    total = xp.sum(xp.exp(z - m), axis=-1, keepdims=True)
    return m + xp.log(xp.where(none, xp.full_like(total, INF), total))
