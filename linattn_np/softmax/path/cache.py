"""Keys of a cache of PaTH: each is mapped by all tokens since its own, k_j H_{j+1} ... H_t after token t.

Over blocks with the products R_1 .. R_n, and N_J = R_{J+1}^T ... R_n^T:

    k_j of block J <- k~_j N_J,   keys that were in the cache <- k N_0,   N_{J-1} = R_J^T N_J

Few tokens are multiplied one after the other: 4 K operations for a key and a token.
"""

from __future__ import annotations

from typing import Any

from ...ops import householder as maps
from ...runtime.arrays import Array, Namespace, cast, device, swap
from ..policy import ARRAY_TILE, FEW_TOKENS
from ..types import Inputs, SoftmaxPlan


def _heads_first(plan: SoftmaxPlan, x: Inputs) -> tuple[Array, Array, Array]:
    """(k (..., H, T, K), w (..., H, T, K), beta (..., H, T, 1))."""
    k, w, beta = (swap(plan.xp, cast(plan.xp, y, plan.dtype), -3) for y in (x.k, x.w, x.beta[..., None]))
    return k, w, beta


def to_end(plan: SoftmaxPlan, x: Inputs, past: Array) -> tuple[Array, Array]:
    """(keys of the cache, keys of the tokens) after all tokens; both (..., L or T, H, K)."""
    xp, (k, w, beta), past = plan.xp, _heads_first(plan, x), swap(plan.xp, past, -3)
    T = k.shape[-2]
    if T <= FEW_TOKENS:
        L = past.shape[-2]
        for t in range(T):
            own = slice(t, t + 1)
            past = xp.concat([maps.one_map(xp, past, w[..., own, :], beta[..., own, :]), k[..., own, :]], axis=-2)
        new = past[..., L:, :]
        return swap(xp, past[..., :L, :], -3), swap(xp, new, -3)
    _, (ends, _), _, N = _blocks(xp, k, w, beta)
    new = maps.tokens(xp, ends @ xp.stack(N[1:], axis=-3), T)
    return swap(xp, past @ N[0], -3), swap(xp, new, -3)


def to_end_vjp(plan: SoftmaxPlan, x: Inputs, past: Array, d: tuple[Array, Array]) -> tuple[dict[str, Any], Array]:
    """(gradients of k, w and beta, gradient of the keys of the cache); d: gradients of the results of to_end."""
    xp, (k, w, beta), T = plan.xp, _heads_first(plan, x), plan.xp.matrix_transpose
    past, dpast, dnew = (swap(xp, y, -3) for y in (past, *d))
    if not k.shape[-2]:
        return {"k": d[1], "w": xp.zeros_like(x.w), "beta": xp.zeros_like(x.beta)}, d[0]
    f, saved, R, N = _blocks(xp, k, w, beta)
    dnew = maps.blocks(xp, dnew, f.w.shape[-2])
    dN, dR = T(past) @ dpast, []
    for J in range(R.shape[-3]):  # N_{J-1} = R_J^T N_J
        own, after = R[..., J, :, :], N[J + 1]
        dR.append(after @ T(dN))
        dN = own @ dN + T(saved[0][..., J, :, :]) @ dnew[..., J, :, :]
    sums = maps.HouseholderGradients(xp, f)
    maps.product_vjp(f, sums, xp.stack(dR, axis=-3))
    keys = maps.blocks(xp, k, f.w.shape[-2])
    dk = maps.to_end_vjp(f, sums, (keys, saved[1]), dnew @ T(xp.stack(N[1:], axis=-3)))
    dk, dw, dbeta = (swap(xp, maps.tokens(xp, y, k.shape[-2]), -3) for y in (dk, *maps.factorised_vjp(f, sums)))
    return {"k": dk, "w": dw, "beta": dbeta[..., 0]}, swap(xp, dpast @ T(N[0]), -3)


def _blocks(xp: Namespace, k: Array, w: Array, beta: Array) -> tuple[maps.Block, tuple[Array, Array], Array, list[Any]]:
    """(factors, (keys at the end of their block, X), R, N_0 ... N_n)."""
    C = max(min(ARRAY_TILE, k.shape[-2]), 1)
    f = maps.factorised(xp, maps.blocks(xp, w, C), maps.blocks(xp, beta, C))
    R = maps.product(xp, f)
    eye = xp.eye(k.shape[-1], dtype=k.dtype, device=device(k))
    N = [xp.broadcast_to(eye, (*R.shape[:-3], *eye.shape))]
    for J in reversed(range(R.shape[-3])):
        N.append(xp.matrix_transpose(R[..., J, :, :]) @ N[-1])
    return f, maps.to_end(xp, f, maps.blocks(xp, k, C)), R, N[::-1]
