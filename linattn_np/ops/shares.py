"""Shares of a running sum in log space, N_t = N_{t-1} + e^{s_t}: each token's own, and what the sum before it keeps.

    share_t = e^{s_t} / N_t,        g_t = log(N_{t-1} / N_t);        both 0 while N_t = 0

s (..., T, H, M), N_0 (..., H, M), or (N, H, M) for N sequences in one row.
On NumPy and CuPy arrays each is a kernel. The transpose, with z_t = log N_t:

    own_t = share_t (e^{g_t} dshare_t - dg_t),  ds_t = own_t + share_t y_{t+1},  y_t = e^{g_t} y_{t+1} - own_t
    y = 0 after the last token,  and y of the first token is the gradient of log N_0
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import numpy as np

from ..runtime.arrays import Array, Namespace, cast, device, is_cupy
from ..runtime.shapes import Sequence
from .host import numpy_kernels


class Shares(NamedTuple):
    """Shares, log decays and sums, (..., T, H, M), and the first sums."""

    share: Array
    g: Array
    N: Array
    N_0: Array

    def after(self, s: Sequence) -> Array:
        """The sum after the last token of a sequence, or of a prefix: (..., H, M)."""
        if s.stop > s.start:
            return self.N[..., s.stop - 1, :, :]
        return self.N_0 if s.row is None else self.N_0[s.row, ...]


def shares(xp: Namespace, s: Array, N_0: Array, sequences: Items[Sequence], dtype: Any) -> Shares:
    """The shares of every sequence, in `dtype`."""
    if (cpu := numpy_kernels(xp, s, N_0)) is not None:
        from .cpu.stabiliser import accumulated

        wide = cpu.compiled("copy", (s,), (s.shape, np.float64), np.float64)
        _, g, share, N = accumulated(None, _in_line(wide), _in_line(N_0), sequences, dtype)
        return Shares(share.reshape(s.shape), g.reshape(s.shape), N.reshape(s.shape), N_0)
    if (kernel := _kernel(xp, s, N_0)) is not None:
        share, g, N = kernel.shares(xp, s, N_0, sequences, dtype)
        return Shares(share, g, N, N_0)
    s, z, before = cast(xp, s, dtype), [], []
    for sequence in sequences:
        part = s[..., sequence.start : sequence.stop, :, :]
        first = cast(xp, N_0 if sequence.row is None else N_0[sequence.row, ...], dtype)
        first = xp.broadcast_to(first, (*part.shape[:-3], *first.shape[-2:]))[..., None, :, :]
        sums = _log_sums(xp, xp.concat([_log(xp, first), part], axis=-3))
        z.append(sums[..., 1:, :, :])
        before.append(sums[..., :-1, :, :])
    now, before = xp.concat(z, axis=-3), xp.concat(before, axis=-3)
    some, zero = now != -math.inf, xp.zeros_like(now)  # NaN stays
    safe = xp.where(some, now, zero)
    return Shares(xp.where(some, xp.exp(s - safe), zero), xp.where(some, before - safe, zero), xp.exp(now), N_0)


def shares_vjp(
    xp: Namespace, x: Shares, dshare: Array, dg: Array, sequences: Items[Sequence], has_state: bool = True
) -> tuple[Array, Array | None]:
    """(ds, dN_0), from the gradients of the shares and of the log decays; has_state: whether dN_0 is wanted."""
    if numpy_kernels(xp, x.share, x.N_0, dshare, dg) is not None:
        from .cpu import stabiliser_vjp

        share, g, N_0, dshare, dg = (_in_line(y) for y in (x.share, x.g, x.N_0, dshare, dg))
        ds, dN_0 = stabiliser_vjp.shares_vjp(share, g, N_0, dshare, dg, sequences)
        return ds.reshape(x.share.shape), dN_0.reshape(x.N_0.shape)
    if (kernel := _kernel(xp, x.share, dshare, dg)) is not None:
        ds, dz = kernel.shares_vjp(xp, x.share, x.g, dshare, dg, sequences)
        return ds, _of_sum(xp, xp.reshape(dz, x.N_0.shape), x.N_0) if has_state else None
    factors, parts, first = xp.exp(x.g), [], []
    zero = xp.zeros((*x.g.shape[:-3], 1, *x.g.shape[-2:]), dtype=x.g.dtype, device=device(x.g))
    for start, stop in ((q.start, q.stop) for q in sequences):
        dgs, dw, w, e = (y[..., start:stop, :, :] for y in (dg, dshare, x.share, factors))
        own = w * (e * dw - dgs)
        y = xp.concat([_reverse_sums(xp, e, -own), zero], axis=-3)
        first.append(y[..., 0, :, :])
        parts.append(own + w * y[..., 1:, :, :])
    whole = sequences[0].row is None
    dz = first[0] if whole else xp.stack([xp.reshape(p, x.N_0.shape[1:]) for p in first], axis=0)
    return xp.concat(parts, axis=-3), _of_sum(xp, dz, x.N_0)


def last_sum_vjp(xp: Namespace, s: Array, dN: Array, dtype: Any) -> Array:
    """e^s dN: the gradient of the logits from that of the sum after them."""
    if (cpu := numpy_kernels(xp, s, dN)) is not None:
        from .cpu.elementwise import EXP

        return cpu.compiled("feature_vjp", (s, dN), (s.shape, dtype), dtype, how=EXP)
    return xp.exp(cast(xp, s, dtype)) * dN


def _in_line(y: Array) -> Array:
    """(..., H, M) as (..., H M)."""
    return y.reshape((*y.shape[:-2], y.shape[-2] * y.shape[-1]))


def _of_sum(xp: Namespace, dz: Array, N_0: Array) -> Array:
    """The gradient of N_0 from that of its logarithm; 0 where N_0 is no sum."""
    N, some = cast(xp, N_0, dz.dtype), ~(N_0 <= 0)
    return xp.where(some, dz / xp.where(some, N, xp.ones_like(N)), xp.zeros_like(N))


def _reverse_sums(xp: Namespace, a: Array, b: Array) -> Array:
    """y_t = b_t + a_t y_{t+1} along the tokens, y = 0 after the last."""
    n = 1
    while n < b.shape[-3]:
        b = xp.concat([b[..., :-n, :, :] + a[..., :-n, :, :] * b[..., n:, :, :], b[..., -n:, :, :]], axis=-3)
        a = xp.concat([a[..., :-n, :, :] * a[..., n:, :, :], a[..., -n:, :, :]], axis=-3)
        n *= 2
    return b


def _kernel(xp: Namespace, *arrays: Array) -> Any:
    """The module of CUDA kernels for these arrays, or None."""
    if not is_cupy(xp):
        return None
    from .cuda import shares as kernel

    return kernel if kernel.supports(*arrays) else None


def _log(xp: Namespace, N: Array) -> Array:
    """log N; -inf of 0 and below."""
    some = ~(N <= 0)  # NaN stays
    return xp.where(some, xp.log(xp.where(some, N, xp.ones_like(N))), xp.full_like(N, -math.inf))


def _log_sums(xp: Namespace, s: Array) -> Array:
    """Running log of the sum of e^s along the tokens."""
    z, n = s, 1
    while n < s.shape[-3]:  # z_t is of the last n tokens: log2(T) rounds of array calls
        high = xp.maximum(z[..., :-n, :, :], z[..., n:, :, :])
        safe = xp.where(high > -math.inf, high, xp.zeros_like(high))
        both = safe + xp.log(xp.exp(z[..., :-n, :, :] - safe) + xp.exp(z[..., n:, :, :] - safe))
        z, n = xp.concat([z[..., :n, :, :], both], axis=-3), 2 * n
    return z
