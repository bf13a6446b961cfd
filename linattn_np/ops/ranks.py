"""Tokens of rank R: values spread over R rows, and R rows gated and summed, each with its transpose.

    x_r = m_r * x
    y = sum_r o_r * u_r * silu(n_r * z)        u_r = out_r + sum_s later_rs late_s + sum_s shares_rs x_s

m, n and o (H, R, V) are vectors of each head. x and z are (..., T, H, V), rows x_r (..., T, R, H, V), out and late
those of the core, (..., T R, H, V). Without z there is no gate, without n it is silu(z) for every row. Of NumPy arrays
each is one pass (cpu/ranks.py), of CuPy arrays one kernel, which makes the rows x_r itself (cuda/ranks.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..runtime.arrays import Array, Namespace, cast
from .gates import silu, silu_vjp
from .host import numpy_kernels
from .product import product
from .sums import over_tokens


class Reads(NamedTuple):
    """What the queries of a token read: the core's outputs, the factors of rows beside the state, and these rows."""

    out: Array
    later: Array  # (..., T, H, R, R), None if R = 1
    late: Array
    shares: Array  # (..., T, H, R, R)
    x: Array
    m: Array | None = None  # x has one row, x_r = m_r x; None: x has its rows


class Heads(NamedTuple):
    """How rows become an output: the gate z, and the vectors of heads."""

    z: Array
    gates: Array  # n
    outs: Array  # o


def spread(xp: Namespace, x: Array, m: Array, dtype: Any) -> Array:
    """x_r = m_r * x in `dtype`: (..., T, R, H, V)."""
    return product(xp, x[..., None, :, :], xp.moveaxis(m, 0, 1), dtype=dtype)


def spread_vjp(xp: Namespace, x: Array, m: Array, d: Array) -> tuple[Array, Array]:
    """(dx, dm) from the gradient of the rows."""
    if d.size and numpy_kernels(xp, x, m, d) is not None:
        from .cpu import ranks

        return ranks.spread_vjp(x, m, d)
    d, x, m = xp.moveaxis(d, -3, -2), cast(xp, x, d.dtype), cast(xp, m, d.dtype)
    return xp.sum(d * m, axis=-2), over_tokens(xp, d * x[..., None, :], axes=3)


def read_out(xp: Namespace, reads: Reads, heads: Heads, dtype: Any) -> Array:
    """y (..., T, H, V) in `dtype`, or of reads with m in the dtype of x."""
    if reads.m is not None:
        from .cuda import ranks

        return ranks.read_out(reads, heads)
    if (cpu := _kernels(xp, reads, heads)) is not None:
        return cpu.read_out(reads, heads, dtype)
    u, gate, outs = _rows(xp, reads, dtype), _gate(xp, heads, dtype), cast(xp, heads.outs, dtype)
    return xp.sum(outs * (u if gate is None else u * silu(xp, gate)), axis=-2)


def read_out_vjp(xp: Namespace, reads: Reads, heads: Heads, dy: Array, dtype: Any) -> tuple[Array, Heads, Array | None]:
    """(du as the core's rows, gradients of z and of the vectors, of `later` if reads have m); None: not given."""
    if reads.m is not None:
        from .cuda import ranks

        du, dz, dgates, douts, dlater = ranks.read_out_vjp(reads, heads, dy)
        return du, Heads(dz, dgates, douts), dlater
    if (cpu := _kernels(xp, reads, heads, dy)) is not None:
        return *cpu.read_out_vjp(reads, heads, dy, dtype), None
    u, gate, outs, dy = (
        _rows(xp, reads, dtype),
        _gate(xp, heads, dtype),
        cast(xp, heads.outs, dtype),
        cast(xp, dy, dtype),
    )
    dy, dz, dgates = dy[..., None, :], None, None
    shut = u if gate is None else u * silu(xp, gate)
    du = outs * dy if gate is None else outs * dy * silu(xp, gate)
    if gate is not None:
        dgate, z = silu_vjp(xp, gate, outs * dy * u), cast(xp, heads.z, dtype)[..., None, :]
        dz = xp.sum(dgate if heads.gates is None else dgate * cast(xp, heads.gates, dtype), axis=-2)
        dgates = None if heads.gates is None else over_tokens(xp, dgate * z, axes=3)
    *lead, T, H, R, V = du.shape
    du = xp.reshape(xp.moveaxis(du, -2, -3), (*lead, T * R, H, V))
    return du, Heads(dz, dgates, over_tokens(xp, dy * shut, axes=3)), None


def _rows(xp: Namespace, reads: Reads, dtype: Any) -> Array:
    """u (..., T, H, R, V)."""
    R = reads.x.shape[-3]

    def by_head(x: Array) -> Array:
        *lead, rows, H, V = x.shape
        return xp.moveaxis(xp.reshape(cast(xp, x, dtype), (*lead, rows // R, R, H, V)), -3, -2)

    u = by_head(reads.out) + reads.shares @ xp.moveaxis(cast(xp, reads.x, dtype), -3, -2)
    return u if reads.later is None else u + reads.later @ by_head(reads.late)


def _gate(xp: Namespace, heads: Heads, dtype: Any) -> Array | None:
    """n_r * z (..., T, H, R, V), R = 1 without n."""
    if heads.z is None:
        return None
    z = cast(xp, heads.z, dtype)[..., None, :]
    return z if heads.gates is None else z * cast(xp, heads.gates, dtype)


def _kernels(xp: Namespace, reads: Reads, heads: Heads, *more: Array) -> Any:
    """The passes for NumPy arrays that are not empty."""
    if not reads.x.size or numpy_kernels(xp, *reads, *heads, *more) is None:
        return None
    from .cpu import ranks

    return ranks
