"""Shares of a running sum in log space, N_t = N_{t-1} + e^{s_t}: each token's own, and what the sum before it keeps.

    share_t = e^{s_t} / N_t,        g_t = log(N_{t-1} / N_t);        both 0 while N_t = 0

s (..., T, H, M), N_0 (..., H, M), or (N, H, M) for N sequences in one row.
On NumPy arrays it is one kernel, of one token on CuPy arrays two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import numpy as np

from ..runtime.arrays import Array, Namespace, cast, is_cupy
from ..runtime.shapes import Sequence
from .host import kernels, numpy_kernels


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

        (*lead, H, M), wide = s.shape, cpu.compiled("copy", (s,), (s.shape, np.float64), np.float64)
        rows = N_0.reshape((*N_0.shape[:-2], H * M))
        _, g, share, N = accumulated(None, wide.reshape((*lead, H * M)), rows, sequences, dtype)
        return Shares(share.reshape(s.shape), g.reshape(s.shape), N.reshape(s.shape), N_0)
    if is_cupy(xp) and s.shape[-3] == 1 and s.size and sequences[0].row is None and kernels(xp, s, N_0) is not None:
        return _of_one_token(xp, s, N_0, dtype)
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


def _of_one_token(xp: Namespace, s: Array, N_0: Array, dtype: Any) -> Shares:
    """The shares of calls of one token on CuPy arrays, s (..., 1, H, M)."""
    cuda, given, out = kernels(xp, s, N_0), (s, N_0[..., None, :, :]), (s.shape, dtype)
    share, g = cuda.both("share", given, out, dtype)
    return Shares(share, g, cuda.compiled("share_sum", given, out, dtype), N_0)


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
