"""The definition of PaTH, one query after the other, and its transpose.

    z_ij = scale q_i H_i H_{i-1} ... H_{j+1} k_j^T + sum_{j < s <= i} g_s,   H_t = I - beta_t w_t^T w_t

Before token i is read, every key k of the cache and of the tokens before it becomes k H_i. The transpose goes back
through the tokens with the gradient dk of all these keys: with y = k w_i^T and e = dk w_i^T before the map,

    dbeta_i = -sum e y,   dw_i = -beta_i sum (y dk + e k),   dk <- dk H_i

The rest is ../definition.py. Backward stores the keys of every token: its memory grows with T^2, that of the tiles
with T.
"""

from __future__ import annotations

from ...ops.householder import one_map
from ...runtime.arrays import Array, Namespace, sum_to
from .. import definition as plain
from ..heads import sum_like
from ..types import Parts, SoftmaxPlan


def _token(x: Parts, i: int) -> tuple[Array, Array]:
    """w (..., 1, K) and beta (..., 1, 1) of token i."""
    return x.w[..., i : i + 1, :], x.beta[..., i : i + 1, None]


def _each_keys(xp: Namespace, x: Parts) -> list[Array]:
    """The keys that each query reads."""
    keys, found = None if x.past is None else x.past.k, []
    for i in range(x.k.shape[-2]):
        own = x.k[..., i : i + 1, :]
        keys = own if keys is None else xp.concat([one_map(xp, keys, *_token(x, i)), own], axis=-2)
        found.append(keys)
    return found


def forward(plan: SoftmaxPlan, x: Parts) -> tuple[Array, Array]:
    """(out (..., G, R, T, V), l (..., G, R, T, 1))."""
    xp, values = plan.xp, plain.with_past(plan.xp, x)[1]
    outs, logs, decay = [], [], plain.begin(x)
    for i, keys in enumerate(_each_keys(xp, x)):
        decay = plain.decayed(plan, x, decay, i)
        z = plain.logits(plan, x, keys, decay, i)
        log = plain.log_sum(plan, x, z)
        outs.append(xp.exp(z - log) @ values[..., : z.shape[-1], :])
        logs.append(log)
    return xp.concat(outs, axis=-2), xp.concat(logs, axis=-2)


def backward(plan: SoftmaxPlan, x: Parts, out: Array, logs: Array, dout: Array) -> Parts:
    """Gradients of the sequence and of the cache, with the heads of each array."""
    xp, (_, values) = plan.xp, plain.with_past(plan.xp, x)
    T, keys = xp.matrix_transpose, _each_keys(xp, x)
    L, decay, decays = values.shape[-2] - x.v.shape[-2], plain.begin(x), []
    for i in range(len(keys)):
        decay = plain.decayed(plan, x, decay, i)
        decays.append(decay)
    dq, dv, dk = sum_like(xp, x.q), sum_like(xp, values), xp.zeros_like(keys[-1])
    each: list[tuple[Array, ...]] = []
    dg, crossing = [], None
    for i in reversed(range(len(keys))):
        z = plain.logits(plan, x, keys[i], decays[i], i)
        one = slice(i, i + 1)
        p, d = xp.exp(z - logs[..., one, :]), dout[..., one, :]
        dp = d @ T(values[..., : z.shape[-1], :])
        mean = xp.sum(d * out[..., one, :], axis=-1, keepdims=True) if plan.normalize else 0.0
        dz = sum_to(xp, p * (dp - mean), z.shape)
        dv.add(0, T(p) @ d)
        dq.add(i, plan.scale * (dz @ keys[i]))
        dk = dk + sum_to(xp, T(dz) @ x.q[..., one, :], dk.shape)
        if x.g is not None:
            crossing = dz if crossing is None else crossing[..., : z.shape[-1]] + dz
            dg.append(xp.sum(crossing[..., 0, : z.shape[-1] - 1], axis=-1))
        own, dk = dk[..., -1:, :], dk[..., :-1, :]
        before = keys[i - 1] if i else keys[0][..., :0, :] if x.past is None else x.past.k
        dk, *maps = _mapped_vjp(xp, before, *_token(x, i), dk)
        each.append((own, *maps))
    own, dw, dbeta = (xp.concat(y[::-1], axis=-2) for y in zip(*each, strict=True))
    keys_d = sum_like(xp, xp.concat([dk, own], axis=-2))
    keys_d.add(0, xp.concat([dk, own], axis=-2))
    d_all = plain.gradients(plan, x, (dq, keys_d, dv), L, None, (dg, crossing))
    return d_all._replace(w=dw, beta=dbeta[..., 0])


def _mapped_vjp(xp: Namespace, keys: Array, w: Array, beta: Array, d: Array) -> tuple[Array, Array, Array]:
    """(gradient of the keys before the map, dw, dbeta)."""
    T = xp.matrix_transpose
    y, e = keys @ T(w), d @ T(w)
    dw = -beta * (T(y) @ d + T(e) @ keys)
    return d - (beta * e) @ w, dw, -xp.sum(y * e, axis=-2, keepdims=True)
