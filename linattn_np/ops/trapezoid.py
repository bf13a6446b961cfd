"""Tokens that are written twice, each in the frame of its angle: Mamba-3's change of variables and its transpose.

    theta_t = theta_{t-1} + pi tanh(angle_t) dt_t, theta_0 = 0        R(theta) rotates pairs of channels
    gamma_t = lambda_t dt_t, h_t = (1 - lambda_t) dt_t, lambda_t = sigmoid(trap_t), g_t = dt_t A_t

    S_t = e^{g_t} (S_{t-1} + h_t k_{t-1}^T x_{t-1}) + gamma_t k_t^T x_t,   k_t = B_t R(theta_t), q_t = C_t R(theta_t)

A token reads its own write, gamma_t (q_t . k_t) x_t, beside the state. Less that write the state is that of keys and
values that come one token late, with one weight each:

    P_t = S_t - gamma_t k_t^T x_t = e^{g_t} P_{t-1} + k_{t-1}^T (w_t x_{t-1}),   w_t = e^{g_t} (h_t + gamma_{t-1})
    q_t S_t = q_t P_t + gamma_t (C_t . B_t) x_t

Before the first token are a state and its last key and value, whose gamma is in the state already. Arrays are
(..., T, heads, width), numbers of tokens (..., T, H). Of NumPy arrays each direction is one pass (cpu/trapezoid.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..runtime.arrays import Array, Namespace, cast, device, shared_heads, sum_dtype, sum_of_groups
from ..runtime.shapes import Sequence
from .gates import sigmoid
from .host import numpy_kernels
from .rotary import rotate, rotate_vjp, rotation
from .sequences import Sequences
from .sums import over_tokens


class Tokens(NamedTuple):
    """The arrays of tokens; dt are the step sizes, in the compute dtype."""

    x: Array
    dt: Array
    A: Array  # (..., T, H) or (H,)
    B: Array
    C: Array  # None: nothing reads
    trap: Array
    angle: Array  # (..., T, H, P)


class Last(NamedTuple):
    """The last token of each sequence, or before the first one: key and value, (..., H, width)."""

    k: Array
    v: Array


class Late(NamedTuple):
    """The core's inputs, the factors of x that add each token's own write, and what the state needs."""

    q: Array
    k: Array
    v: Array
    g: Array  # (..., T, H)
    shares: Array  # scale gamma_t (C_t . B_t) + D
    last: Last
    own: Array  # (..., H, 1): gamma of the last token
    turn: Array  # (2, ..., H, P): its rotation


class Writes(NamedTuple):
    """How a call writes: the library, the sequences, the factor of queries, the skip connection D (H,), the dtype."""

    xp: Namespace
    sequences: tuple[Sequence, ...]
    scale: float
    D: Array | None
    dtype: Any


def late_writes(how: Writes, x: Tokens, last: Last | None) -> Late:
    """The core's inputs of tokens x, `last` before them; None: zeros."""
    if (cpu := _kernels(how, x, last)) is not None:
        q, k, v, g, shares, *ends = cpu.late_writes(x, last, how.D, how.scale, how.sequences, how.dtype)
        return Late(q, k, v, g, shares, Last(*ends[:2]), *ends[2:])
    weights, theta = _weights(how, x), _angles(how, x)
    turn = _turn(how, theta)
    B = _every(how, x.B, x)
    v = weights.w[..., None] * _late(how, cast(how.xp, x.x, how.dtype), last and last.v)
    k = _late(how, rotate(how.xp, B, turn, how.dtype), last and last.k)
    q = None if x.C is None else rotate(how.xp, _every(how, x.C, x), turn, how.dtype)
    ends = Last(_last(how, B, last and last.k), _last(how, cast(how.xp, x.x, how.dtype), last and last.v))
    shares = None if q is None else weights.own * _overlaps(how, x)
    if shares is not None and how.D is not None:
        shares = shares + cast(how.xp, how.D, how.dtype)
    own = _last(how, weights.own[..., None], None)
    return Late(q, k, v, weights.g, None if shares is None else shares[..., None], ends, own,
                _turn(how, _last(how, theta, None)))  # fmt: skip


def late_writes_vjp(
    how: Writes, x: Tokens, last: Last | None, d: Any, dout: Array | None
) -> tuple[Tokens, Array | None, Last | None]:
    """Gradients (of the tokens, of the shares, of `last`) from d of the core's inputs and dout of (out + shares x)."""
    xp, x = how.xp, x if dout is not None else x._replace(C=None)
    if (cpu := _kernels(how, x, last)) is not None and numpy_kernels(xp, d.q, d.k, d.v, d.g, dout) is not None:
        made = cpu.late_writes_vjp(x, last, how.D, how.scale, how.sequences, how.dtype, d, dout)
        grads = Tokens(*(made.get(f"d{n}") for n in Tokens._fields))
        dlast = None if last is None else Last(made["dpast_k"], made["dpast_v"])
        return _of_groups(how, x, grads), made.get("written"), dlast
    weights, turn = _weights(how, x), _turn(how, _angles(how, x))
    wide = sum_dtype(xp, x.dt)
    dw = xp.sum(d.v * _late(how, cast(xp, x.x, how.dtype), last and last.v), axis=-1)
    dx, dlast_v = _late_vjp(how, weights.w[..., None] * d.v, last and last.v)
    dk, dlast_k = _late_vjp(how, d.k, last and last.k)
    dB, dtheta = rotate_vjp(xp, rotate(xp, _every(how, x.B, x), turn, how.dtype), turn, dk, dtype=wide)
    dagain = xp.exp(weights.g) * dw
    down = _late_vjp(how, dagain[..., None], None)[0][..., 0]
    dC, written = None, None
    if x.C is not None:
        B, C, dout = _every(how, x.B, x), _every(how, x.C, x), cast(xp, dout, how.dtype)
        dC, dangle = rotate_vjp(xp, rotate(xp, C, turn, how.dtype), turn, d.q, dtype=wide)
        written = xp.sum(dout * cast(xp, x.x, how.dtype), axis=-1)
        overlaps, share = _overlaps(how, x), (how.scale * weights.own * written)[..., None]
        factor = weights.own * overlaps if how.D is None else weights.own * overlaps + cast(xp, how.D, how.dtype)
        dx, dB, dC, dtheta = dx + factor[..., None] * dout, dB + share * C, dC + share * B, dtheta + dangle
        down = down + overlaps * written
    grads = _weights_vjp(how, x, down, dagain, d.g[..., 0] + weights.w * dw, dtheta)
    dlast = None if last is None else Last(dlast_k, dlast_v)
    return _of_groups(how, x, grads._replace(x=dx, B=dB, C=dC)), written, dlast


def last_vjp(
    how: Writes, x: Tokens, last: Last | None, d: Last, down: Array, dtheta: Array
) -> tuple[Tokens, Last | None]:
    """Gradients (of the tokens, of `last`) from those of the last tokens' keys, values, gamma (..., H) and angles."""
    B = _every(how, x.B, x)
    dB, dlast_k = _last_vjp(how, d.k, B, last and last.k)
    dx, dlast_v = _last_vjp(how, d.v, x.x, last and last.v)
    down = _last_vjp(how, down[..., None], x.dt[..., None], None)[0][..., 0]
    dtheta = _last_vjp(how, dtheta, _angles(how, x), None)[0]
    grads = _weights_vjp(how, x, down, how.xp.zeros_like(down), None, dtheta)
    grads = grads._replace(x=dx, B=sum_of_groups(how.xp, dB, x.B.shape[-2]))
    return grads, None if last is None else Last(dlast_k, dlast_v)


def _kernels(how: Writes, x: Tokens, last: Last | None) -> Any:
    """The passes for NumPy arrays that are not empty."""
    if not x.x.size or not x.B.size or numpy_kernels(how.xp, *x, *(last or ()), how.D) is None:
        return None
    from .cpu import trapezoid

    return trapezoid


def _of_groups(how: Writes, x: Tokens, grads: Tokens) -> Tokens:
    """Sums over the heads that share B or C, and over tokens where all have one A."""
    dB = sum_of_groups(how.xp, grads.B, x.B.shape[-2])
    dC = None if grads.C is None else sum_of_groups(how.xp, grads.C, x.C.shape[-2])
    dA = over_tokens(how.xp, grads.A) if x.A.ndim == 1 else grads.A
    return grads._replace(B=dB, C=dC, A=dA)


# weights and angles of tokens


class Weights(NamedTuple):
    own: Array  # gamma_t
    again: Array  # h_t
    g: Array
    w: Array


def _weights(how: Writes, x: Tokens) -> Weights:
    own, g = x.dt * sigmoid(how.xp, cast(how.xp, x.trap, how.dtype)), x.dt * cast(how.xp, x.A, how.dtype)
    before = _late(how, own[..., None], None)[..., 0]
    return Weights(own, x.dt - own, g, how.xp.exp(g) * ((x.dt - own) + before))


def _weights_vjp(how: Writes, x: Tokens, down: Array, dagain: Array, dg: Array | None, dtheta: Array) -> Tokens:
    """Gradients of dt, A, trap and angle: dt reaches the weights, the decay and the angle."""
    xp, lam, A = how.xp, sigmoid(how.xp, cast(how.xp, x.trap, how.dtype)), cast(how.xp, x.A, how.dtype)
    slope = xp.tanh(cast(xp, x.angle, dtheta.dtype))
    dphi = math.pi * _later_sums(how, dtheta)
    dangle = dphi * (1 - slope * slope) * cast(xp, x.dt, dphi.dtype)[..., None]
    ddt = cast(xp, xp.sum(dphi * slope, axis=-1), how.dtype) + lam * down + (1 - lam) * dagain
    dtrap = lam * (1 - lam) * x.dt * (down - dagain)
    if dg is None:
        return Tokens(None, ddt, None, None, None, dtrap, dangle)
    return Tokens(None, ddt + A * dg, x.dt * dg, None, None, dtrap, dangle)


def _angles(how: Writes, x: Tokens) -> Array:
    """theta (..., T, H, P) in the dtype of sums."""
    wide = sum_dtype(how.xp, x.dt)
    turns = math.pi * how.xp.tanh(cast(how.xp, x.angle, wide)) * cast(how.xp, x.dt, wide)[..., None]
    return _by_sequence(how, turns, lambda part: how.xp.cumulative_sum(part, axis=-3))


def _later_sums(how: Writes, d: Array) -> Array:
    """Of each token the sum over it and all later ones: the transpose of a cumulative sum."""
    flip = lambda part: how.xp.flip(part, axis=-3)  # noqa: E731
    return _by_sequence(how, d, lambda part: flip(how.xp.cumulative_sum(flip(part), axis=-3)))


def _by_sequence(how: Writes, x: Array, f: Callable[[Array], Array]) -> Array:
    """f of the tokens (..., T, H, P) of each sequence alone."""
    parts = [f(x[..., s.start : s.stop, :, :]) for s in how.sequences if s.stop > s.start]
    return how.xp.concat(parts, axis=-3) if len(parts) > 1 else parts[0] if parts else x


def _turn(how: Writes, theta: Array) -> Array:
    one = how.xp.ones((1,), dtype=theta.dtype, device=device(theta))
    return rotation(how.xp, theta, one, how.dtype)


def _overlaps(how: Writes, x: Tokens) -> Array:
    """scale C_t . B_t of every head."""
    return how.scale * how.xp.sum(_every(how, x.C, x) * _every(how, x.B, x), axis=-1)


def _every(how: Writes, x: Array, tokens: Tokens) -> Array:
    """Rows that groups of heads share, of every head."""
    return shared_heads(how.xp, cast(how.xp, x, how.dtype), tokens.x.shape[-2])


# the token before, and the last one


def _sequences(how: Writes) -> Sequences:
    ragged = not how.sequences or how.sequences[0].row is not None
    return Sequences(how.xp, (0, *(s.stop for s in how.sequences)) if ragged else None)


def _in_line(how: Writes, x: Array) -> Array:
    """(..., H, D) as (..., H D)."""
    return how.xp.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))


def _past(how: Writes, last: Array | None) -> Array | None:
    """As one row of tokens (..., 1, H D)."""
    return None if last is None else _in_line(how, cast(how.xp, last, how.dtype))[..., None, :]


def _late(how: Writes, x: Array, last: Array | None) -> Array:
    """x (..., T, H, D) of the token before."""
    return how.xp.reshape(_sequences(how).before(_in_line(how, x), _past(how, last), 1), x.shape)


def _late_vjp(how: Writes, d: Array, last: Array | None) -> tuple[Array, Array | None]:
    dx, dpast = _sequences(how).before_vjp(_in_line(how, d), _past(how, last), 1)
    return how.xp.reshape(dx, d.shape), None if last is None else how.xp.reshape(dpast, last.shape)


def _last(how: Writes, x: Array, last: Array | None) -> Array:
    """x (..., T, H, D) of the last token of each sequence: (..., H, D); without tokens that before, or 0."""
    found = _sequences(how).last(_in_line(how, x), _past(how, last), 1)[..., 0, :]
    return how.xp.reshape(found, (*found.shape[:-1], *x.shape[-2:]))


def _last_vjp(how: Writes, d: Array, x: Array, last: Array | None) -> tuple[Array, Array | None]:
    dx, dpast = _sequences(how).last_vjp(_in_line(how, d)[..., None, :], _in_line(how, x), _past(how, last))
    return how.xp.reshape(dx, x.shape), None if last is None else how.xp.reshape(dpast, last.shape)
