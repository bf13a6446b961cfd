"""A zero-order hold: the exact step of a continuous diagonal system dh/dt = A h + x, with x held over a step dt.

    z = dt A,   b = (e^z - 1) / A,   h <- e^z h + b x,   dt = e^dt_log,   A = -e^A_log + i A_imag

dt_log is (D,), A_log and A_imag are (D, N). Gradients of complex arrays are dRe + i dIm.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtime.arrays import Array, Namespace, cast, complex_of
from ..runtime.constants import constant_ones
from .host import numpy_kernels
from .parts import pairs_of
from .sums import row_inner

NEAR, TERMS = 0.5, 14  # |z| up to which a difference that cancels is a series; its terms


def hold(xp: Namespace, dt_log: Array, A_log: Array, A_imag: Array, dtype: Any) -> tuple[Array, Array]:
    """(z, b) in the complex dtype of `dtype`; on NumPy arrays by a kernel."""
    if (cpu := numpy_kernels(xp, dt_log, A_log, A_imag)) is not None:
        D, N = A_log.shape
        pairs = cpu.compiled("hold", (dt_log[:, None], A_log, A_imag), ((D, 4 * N), dtype), dtype)
        kind = complex_of(np, pairs.dtype)
        return pairs[:, : 2 * N].view(kind), pairs[:, 2 * N :].view(kind)
    dt, A, u, v = _system(xp, dt_log, A_log, A_imag, dtype)
    return xp.astype(dt, A.dtype) * A, _gain(xp, u, v, A.dtype) / A


def hold_vjp(
    xp: Namespace, dt_log: Array, A_log: Array, A_imag: Array, dz: Array, db: Array, dtype: Any
) -> tuple[Array, Array, Array]:
    """(ddt_log, dA_log, dA_imag) from the gradients of z and b: through A and dt."""
    if (cpu := numpy_kernels(xp, dt_log, A_log, A_imag)) is not None and dz.dtype == complex_of(np, np.dtype(dtype)):
        from ..runtime.pieces.memory import working

        D, N = A_log.shape
        both = working((D, 2, 2 * N), np.dtype(dtype))
        for n, d in enumerate((dz, db)):
            cpu.put(both[:, n].reshape(D, N, 2), pairs_of(d))
        given = dt_log[:, None], A_log, A_imag, both.reshape(D, 4 * N)
        grads = cpu.compiled("hold_vjp", given, ((D, 3 * N), dtype), dtype)
        ddt = row_inner(xp, grads[:, 2 * N :], constant_ones((N,), grads.dtype), dtype)
        return ddt, grads[:, :N], grads[:, N : 2 * N]
    dt, A, u, v = _system(xp, dt_log, A_log, A_imag, dtype)
    gain, step = _gain(xp, u, v, A.dtype), xp.astype(dt, A.dtype)
    dA = step * dz + db * xp.conj(_slope(xp, step, A, gain))
    ddt = xp.sum(xp.real(dz * xp.conj(A) + db * xp.conj(gain + 1)), axis=-1)
    return dt[:, 0] * ddt, xp.real(A) * xp.real(dA), xp.imag(dA)


def _slope(xp: Namespace, dt: Array, A: Array, gain: Array) -> Array:
    """db / dA = dt^2 (e^z (z - 1) + 1) / z^2, near 0 by the series dt^2 sum_n n z^{n - 1} / (n + 1)!"""
    z = dt * A
    near = xp.astype(xp.where(xp.abs(z) < NEAR, xp.ones_like(xp.real(z)), xp.zeros_like(xp.real(z))), A.dtype)
    small, s = near * z, xp.ones_like(z)
    for n in range(TERMS, 0, -1):
        s = 1 + small * s * ((n + 1) / (n * (n + 2)))
    return near * dt * dt * s / 2 + (1 - near) * (dt * (gain + 1) - gain / A) / A


def _system(xp: Namespace, dt_log: Array, A_log: Array, A_imag: Array, dtype: Any) -> tuple[Array, ...]:
    """dt (D, 1), A (D, N), and the parts of z."""
    kind, (dt, decay, angle) = complex_of(xp, dtype), (cast(xp, y, dtype) for y in (dt_log, A_log, A_imag))
    dt, decay = xp.exp(dt)[:, None], -xp.exp(decay)
    return dt, xp.astype(decay, kind) + 1j * xp.astype(angle, kind), dt * decay, dt * angle


def _gain(xp: Namespace, u: Array, v: Array, kind: Any) -> Array:
    """e^{u + iv} - 1, exact near 0"""
    half = xp.sin(v / 2)
    re, im = xp.expm1(u) * xp.cos(v) - 2 * half * half, xp.exp(u) * xp.sin(v)
    return xp.astype(re, kind) + 1j * xp.astype(im, kind)
