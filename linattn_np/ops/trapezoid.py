"""Tokens that are written twice, each in the frame of its angle: Mamba-3's change of variables and its transpose.

    theta_t = theta_{t-1} + pi tanh(angle_t) dt_t, theta_0 = 0        R(theta) rotates pairs of channels
    gamma_t = lambda_t dt_t, h_t = (1 - lambda_t) dt_t, lambda_t = sigmoid(trap_t), g_t = dt_t A_t

    S_t = e^{g_t} (S_{t-1} + h_t k_{t-1}^T x_{t-1}) + gamma_t k_t^T x_t,   k_t = B_t R(theta_t), q_t = C_t R(theta_t)

k, x and q are R rows each, the rank of a token: k^T x is a sum over the rows, and every query reads all of them. A
token reads its own write, gamma_t (q_t k_t^T) x_t, beside the state. Less that write the state is that of keys and
values that come one token late, with one weight each:

    P_t = S_t - gamma_t k_t^T x_t = e^{g_t} P_{t-1} + k_{t-1}^T (w_t x_{t-1}),   w_t = e^{g_t} (h_t + gamma_{t-1})
    q_t S_t = q_t P_t + gamma_t (C_t B_t^T) x_t

The core has R steps a token, each writes one row, and reads it with one query: the first decays. Query r has not read
the rows s > r of its own token, of which it reads later_rs = (q_t k_{t-1}^T)_rs times w_t x_{t-1,s} beside the state.

Before the first token are a state and its last keys and values, whose gamma is in the state already. Arrays are
(..., T, R, heads, width), those of the core (..., T R, heads, width), numbers of tokens (..., T, H). Of NumPy arrays
each direction is one pass (cpu/trapezoid.py), of CuPy arrays a few kernels (cuda/trapezoid.py). These make the rows of
values: x then has one row, and m the vectors that make R of it (ops/ranks.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..runtime.arrays import Array, Namespace, cast, device, is_cupy, lower_ones, shared_heads, sum_dtype
from ..runtime.shapes import Sequence
from .gates import sigmoid
from .host import numpy_kernels
from .rotary import rotate, rotate_rows, rotate_vjp, rotation
from .rows import interleaved
from .sequences import Sequences
from .step_size import skip_and_gate
from .sums import over_tokens, sum_of_groups


class Tokens(NamedTuple):
    """The arrays of tokens; dt are the step sizes, in the compute dtype."""

    x: Array  # (..., T, R, H, V)
    dt: Array
    A: Array  # (..., T, H) or (H,)
    B: Array  # (..., T, R, Hk, K)
    C: Array  # (..., T, R, Hq, K), None: nothing reads
    trap: Array
    angle: Array  # (..., T, H, P)
    m: Array | None = None  # (H, R, V): x_r = m_r x of the one row that x has; None: x has its rows


class Last(NamedTuple):
    """The last token of each sequence, or before the first one: keys and values, (..., H, R, width)."""

    k: Array
    v: Array


class Ends(NamedTuple):
    """Gradients of the last tokens: of their keys and values, of gamma (..., H), of the angles (..., H, P) in sums."""

    k: Array
    v: Array
    own: Array
    theta: Array


class Late(NamedTuple):
    """The core's inputs, the factors of rows that each query reads beside the state, and what the state needs."""

    q: Array
    k: Array
    v: Array
    g: Array  # (..., T R, H)
    shares: Array  # (..., T, H, R, R): scale gamma_t C_t B_t^T, + D on the diagonal, factors of x_t
    later: Array  # (..., T, H, R, R): scale q_t k_{t-1}^T above the diagonal, factors of v; None if R = 1
    last: Last
    own: Array  # (..., H, 1): gamma of the last token
    rotation: Array  # (2, ..., H, P): its rotation


class Writes(NamedTuple):
    """How a call writes: the library, the sequences, the factor of queries, the skip connection D (H,), the dtype."""

    xp: Namespace
    sequences: tuple[Sequence, ...]
    scale: float
    D: Array | None
    dtype: Any
    kernels: bool = True  # whether CUDA kernels may compute it


def late_writes(how: Writes, x: Tokens, last: Last | None) -> Late:
    """The core's inputs of tokens x, `last` before them; None: zeros."""
    if (cpu := _kernels(how, x, last)) is not None:
        q, k, v, g, shares, later, *ends = cpu.late_writes(x, last, how.D, how.scale, how.sequences, how.dtype)
        return Late(q, k, v, g, shares, later, Last(*ends[:2]), *ends[2:])
    if (cuda := _cuda(how, x)) is not None:
        q, k, v, g, shares, later, *ends = cuda.late_writes(how.xp, x, last, how.D, how.scale, how.sequences)
        return Late(q, k, v, g, shares, later, Last(*ends[:2]), *ends[2:])
    xp, R = how.xp, x.x.shape[-3]
    weights, theta = _weights(how, x), _angles(how, x)
    rotation, values = _rotation(how, theta), cast(xp, x.x, how.dtype)
    B = _every(how, x.B, x)
    v = _of_rows(weights.w) * _late(how, values, last and last.v)
    k = _late(how, _rotated(how, B, rotation), last and last.k)
    q = None if x.C is None else _rotated(how, _every(how, x.C, x), rotation)
    ends = Last(_last(how, B, last and last.k), _last(how, values, last and last.v))
    shares, later = None, None
    if q is not None:
        shares = weights.own[..., None, None] * _overlaps(how, x)
        shares = shares if how.D is None else shares + _diagonal(how, x)
        later = None if R == 1 else _above(how, how.scale * _products(how, q, k))
    own = _last(how, _of_rows(weights.own), None)[..., 0, :]
    rotation = _rotation(how, _last(how, theta[..., None, :, :], None)[..., 0, :])
    q, k, v = (None if y is None else in_line(xp, y) for y in (q, k, v))
    g = interleaved(xp, weights.g[..., None], R, 0)[..., 0]
    return Late(q, k, v, g, shares, later, ends, own, rotation)


def late_writes_vjp(
    how: Writes, x: Tokens, last: Last | None, late: Late | None, d: Any, dout: Array | None, ends: Ends | None,
    dlater: Array | None = None,
) -> tuple[Tokens, Array | None, Last | None]:  # fmt: skip
    """Gradients (of the tokens, of D before its sum over tokens, of `last`) from d of the core's inputs and dout.

    dout: the gradient of the core's output, and so of what queries read beside the state. late: the forward's, if R > 1
    ends: of what a final state has of the last tokens, which is `last` where there are none; None: 0.
    dlater: the gradient of late.later, of tokens with m.
    """
    xp, R, x = how.xp, x.x.shape[-3], x if dout is not None else x._replace(C=None)
    if (cpu := _kernels(how, x, last)) is not None and numpy_kernels(xp, d.q, d.k, d.v, d.g, dout) is not None:
        outputs = cpu.late_writes_vjp(x, last, how.D, how.scale, how.sequences, how.dtype, d, dout, late, ends)
        grads = Tokens(*(outputs.get(f"d{n}") for n in Tokens._fields))
        dlast = None if last is None else Last(outputs["dpast_k"], outputs["dpast_v"])
        return _of_groups(how, x, grads), outputs.get("written"), dlast
    if (cuda := _cuda(how, x)) is not None:
        outputs = cuda.late_writes_vjp(xp, x, last, how.D, how.scale, how.sequences, d, dout, ends, late, dlater)
        grads = Tokens(*(outputs.get(f"d{n}") for n in Tokens._fields))
        grads = grads._replace(angle=xp.zeros_like(x.angle)) if grads.angle is None else grads
        dlast = None if last is None else Last(outputs["dpast_k"], outputs["dpast_v"])
        return _of_groups(how, x, grads), outputs.get("written"), dlast
    weights, rotation = _weights(how, x), _rotation(how, _angles(how, x))
    wide, values = sum_dtype(xp, x.dt), cast(xp, x.x, how.dtype)
    before = _late(how, values, last and last.v)
    dq, dk, dv = (None if y is None else in_ranks(xp, y, R) for y in (d.q, d.k, d.v))
    read = None if x.C is None else in_ranks(xp, cast(xp, dout, how.dtype), R)
    if read is not None and late is not None and R > 1:
        dlater = _above(how, how.scale * _products(how, read, in_ranks(xp, late.v, R)))
        dq = dq + _mixed(how, dlater, in_ranks(xp, late.k, R))
        dk = dk + _mixed(how, xp.matrix_transpose(dlater), in_ranks(xp, late.q, R))
        dv = dv + _mixed(how, xp.matrix_transpose(late.later), read)
    dw = xp.sum(dv * before, axis=(-3, -1))
    dx, dlast_v = _late_vjp(how, _of_rows(weights.w) * dv, last and last.v)
    dk, dlast_k = _late_vjp(how, dk, last and last.k)
    dB, dtheta = _rotated_vjp(how, _every(how, x.B, x), rotation, dk, wide)
    dprevious = xp.exp(weights.g) * dw
    down = _late_vjp(how, _of_rows(dprevious), None)[0][..., 0, :, 0]
    dC, written = None, None
    if read is not None:
        B, C, overlaps = _every(how, x.B, x), _every(how, x.C, x), _overlaps(how, x)
        dC, dangle = _rotated_vjp(how, C, rotation, dq, wide)
        dshares = _products(how, read, values)
        shares, share = weights.own[..., None, None] * overlaps, how.scale * weights.own[..., None, None] * dshares
        shares = shares if how.D is None else shares + _diagonal(how, x)
        dx = dx + _mixed(how, xp.matrix_transpose(shares), read)
        dB = dB + _mixed(how, xp.matrix_transpose(share), C)
        dC, dtheta = dC + _mixed(how, share, B), dtheta + dangle
        down = down + xp.sum(overlaps * dshares, axis=(-2, -1))
        written = xp.sum(dshares * _one(how, x), axis=(-2, -1))
    if ends is not None:
        dB, dlast_k = _plus_last(how, ends.k, dB, last and last.k, dlast_k)
        dx, dlast_v = _plus_last(how, ends.v, dx, last and last.v, dlast_v)
        down = _plus_last(how, ends.own[..., None, None], _of_rows(down), None, None)[0][..., 0, :, 0]
        dtheta = _plus_last(how, ends.theta[..., None, :], dtheta[..., None, :, :], None, None)[0][..., 0, :, :]
    grads = _weights_vjp(how, x, down, dprevious, in_ranks(xp, d.g, R)[..., 0, :, 0] + weights.w * dw, dtheta)
    dlast = None if last is None else Last(dlast_k, dlast_v)
    return _of_groups(how, x, grads._replace(x=dx, B=dB, C=dC)), written, dlast


class Weighted(NamedTuple):
    """Numbers of tokens, where the core rotates and weighs rows itself: R = 1, and nothing comes late.

    S_t = e^{g_t} S_{t-1} + weight_t k_t^T x_t is read by later queries, a token's own query reads gamma_t k_t^T x_t:
    weight_t = gamma_t + h_{t+1}, and 0 of the last token. The state before is S_0 + h_1 k_0^T x_0. That behind has
    no write of the last token: its key has no angle in the frame of the state.
    """

    g: Array  # (..., T, H, 1)
    weight: Array
    gamma: Array
    rotations: Array  # (..., T, H, 2 P)  cosines, then sines, of theta_t
    past_v: Array | None  # (..., H, 1, V)  h_1 x_0
    last: Last
    own: Array  # (..., H, 1): gamma of the last token
    rotation: Array  # (2, ..., H, P)


def weighted(how: Writes, x: Tokens, last: Last | None) -> Weighted | None:
    """The numbers of NumPy arrays of one row a token; None of others, whose keys and values come late."""
    if x.x.shape[-3] > 1 or (cpu := _kernels(how, x, last)) is None:
        return None
    g, weight, gamma, rotations, past_v, k, v, own, rotation = cpu.late_weights(x, last, how.sequences, how.dtype)
    return Weighted(g, weight, gamma, rotations, past_v, Last(k, v), own, rotation)


def weighted_vjp(how: Writes, x: Tokens, last: Last | None, d: Any, ends: Ends | None) -> tuple[Tokens, Last | None]:
    """Gradients of tokens but C, and of `last`, from d of the core's inputs and those of the last tokens."""
    from .cpu import trapezoid as cpu

    outputs = cpu.late_weights_vjp(x, last, how.sequences, how.dtype, d, ends)
    outputs["dA"] = over_tokens(how.xp, outputs["dA"]) if x.A.ndim == 1 else outputs["dA"]
    grads = Tokens(*(outputs.get(f"d{n}") for n in Tokens._fields))
    return grads, None if last is None else Last(outputs["dpast_k"], outputs["dpast_v"])


def _plus_last(how: Writes, d: Array, dx: Array, last: Array | None, dlast: Array | None) -> tuple[Array, Array | None]:
    """(dx, dlast) with d of the last tokens (..., H, R, D) added."""
    more, dpast = _last_vjp(how, d, dx, last)
    return dx + more, dlast if dlast is None or dpast is None else dlast + dpast


def settled(xp: Namespace, P: Array, late: Late | Weighted, dtype: Any, in_place: bool = False) -> Array:
    """S = P + gamma k^T v of the last token, in its frame: the rows of P (..., H, K, V) are rotated back.

    in_place: P may be overwritten.
    """
    P = cast(xp, P, dtype)
    if P.size and numpy_kernels(xp, P, late.own, late.rotation, *late.last) is not None:
        from .cpu import trapezoid

        return trapezoid.settled(P, *late.last, late.own, late.rotation)
    if is_cupy(xp) and P.size:
        from .cuda import trapezoid as cuda

        if cuda.settles(P, late.last):
            return cuda.settled(P, late.last, late.own, late.rotation, in_place)
    S, k, written = (
        rotate_rows(xp, P, late.rotation[..., None, :], back=True),
        late.last.k,
        late.own[..., None] * late.last.v,
    )
    for r in range(k.shape[-2]):
        S = skip_and_gate(xp, S, k[..., r, :, None], written[..., r, None, :], None, dtype)
    return S


def _kernels(how: Writes, x: Tokens, last: Last | None) -> Any:
    """The passes for NumPy arrays that are not empty."""
    if not x.x.size or not x.B.size or numpy_kernels(how.xp, *x, *(last or ()), how.D) is None:
        return None
    from .cpu import trapezoid

    return trapezoid


def by_kernels(how: Writes, x: Tokens) -> bool:
    """Whether CUDA kernels take the tokens."""
    return _cuda(how, x) is not None


def _cuda(how: Writes, x: Tokens) -> Any:
    """The kernels for CuPy arrays; None of others."""
    if not (how.kernels and is_cupy(how.xp)):
        return None
    from .cuda import trapezoid

    return trapezoid if trapezoid.takes(how.xp, x, how.dtype) else None


def _of_groups(how: Writes, x: Tokens, grads: Tokens) -> Tokens:
    """Sums over the heads that share B or C, and over tokens where all have one A."""
    dB = sum_of_groups(how.xp, grads.B, x.B.shape[-2])
    dC = None if grads.C is None else sum_of_groups(how.xp, grads.C, x.C.shape[-2])
    dA = over_tokens(how.xp, grads.A) if x.A.ndim == 1 else grads.A
    return grads._replace(B=dB, C=dC, A=dA)


# weights and angles of tokens


class Weights(NamedTuple):
    own: Array  # gamma_t
    previous: Array  # h_t
    g: Array
    w: Array


def _weights(how: Writes, x: Tokens) -> Weights:
    own, g = x.dt * sigmoid(how.xp, cast(how.xp, x.trap, how.dtype)), x.dt * cast(how.xp, x.A, how.dtype)
    before = _late(how, _of_rows(own), None)[..., 0, :, 0]
    return Weights(own, x.dt - own, g, how.xp.exp(g) * ((x.dt - own) + before))


def _weights_vjp(how: Writes, x: Tokens, down: Array, dprevious: Array, dg: Array, dtheta: Array) -> Tokens:
    """Gradients of dt, A, trap and angle: dt reaches the weights, the decay and the angle."""
    xp, lam, A = how.xp, sigmoid(how.xp, cast(how.xp, x.trap, how.dtype)), cast(how.xp, x.A, how.dtype)
    slope = xp.tanh(cast(xp, x.angle, dtheta.dtype))
    dphi = math.pi * _later_sums(how, dtheta)
    dangle = dphi * (1 - slope * slope) * cast(xp, x.dt, dphi.dtype)[..., None]
    ddt = cast(xp, xp.sum(dphi * slope, axis=-1), how.dtype) + lam * down + (1 - lam) * dprevious
    dtrap = lam * (1 - lam) * x.dt * (down - dprevious)
    return Tokens(None, ddt + A * dg, x.dt * dg, None, None, dtrap, dangle)


def _angles(how: Writes, x: Tokens) -> Array:
    """theta (..., T, H, P) in the dtype of sums."""
    wide = sum_dtype(how.xp, x.dt)
    increments = math.pi * how.xp.tanh(cast(how.xp, x.angle, wide)) * cast(how.xp, x.dt, wide)[..., None]
    return _by_sequence(how, increments, lambda part: how.xp.cumulative_sum(part, axis=-3))


def _later_sums(how: Writes, d: Array) -> Array:
    """Of each token the sum over it and all later ones: the transpose of a cumulative sum."""
    flip = lambda part: how.xp.flip(part, axis=-3)  # noqa: E731
    return _by_sequence(how, d, lambda part: flip(how.xp.cumulative_sum(flip(part), axis=-3)))


def _by_sequence(how: Writes, x: Array, f: Callable[[Array], Array]) -> Array:
    """f of the tokens (..., T, H, P) of each sequence alone."""
    parts = [f(x[..., s.start : s.stop, :, :]) for s in how.sequences if s.stop > s.start]
    return how.xp.concat(parts, axis=-3) if len(parts) > 1 else parts[0] if parts else x


def _rotation(how: Writes, theta: Array) -> Array:
    one = how.xp.ones((1,), dtype=theta.dtype, device=device(theta))
    return rotation(how.xp, theta, one, how.dtype)


def _overlaps(how: Writes, x: Tokens) -> Array:
    """scale C_t B_t^T of every head: (..., T, H, R, R)."""
    return how.scale * _products(how, _every(how, x.C, x), _every(how, x.B, x))


def _diagonal(how: Writes, x: Tokens) -> Array:
    """D on the diagonals of (H, R, R)."""
    return cast(how.xp, how.D, how.dtype)[:, None, None] * _one(how, x)


def _one(how: Writes, x: Tokens) -> Array:
    """The identity (R, R)."""
    return how.xp.eye(x.x.shape[-3], dtype=how.dtype, device=device(x.dt))


def _above(how: Writes, x: Array) -> Array:
    """x above the diagonal, 0 on and below it."""
    lower = lower_ones(how.xp, x.shape[-1], how.xp.bool, device(x))
    return how.xp.where(lower, how.xp.zeros_like(x), x)


def _every(how: Writes, x: Array, tokens: Tokens) -> Array:
    """Rows that groups of heads share, of every head."""
    return shared_heads(how.xp, cast(how.xp, x, how.dtype), tokens.x.shape[-2])


# ranks


def in_line(xp: Namespace, x: Array) -> Array:
    """(..., T, R, H, D) as the core's (..., T R, H, D)."""
    return xp.reshape(x, (*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:]))


def in_ranks(xp: Namespace, x: Array, R: int) -> Array:
    """The inverse of in_line."""
    return xp.reshape(x, (*x.shape[:-3], x.shape[-3] // R, R, *x.shape[-2:]))


def _by_head(how: Writes, x: Array) -> Array:
    """(..., T, R, H, D) as matrices (..., T, H, R, D), and back."""
    return how.xp.moveaxis(x, -3, -2)


def _products(how: Writes, x: Array, y: Array) -> Array:
    """x_r . y_s of rows (..., T, R, H, D): (..., T, H, R, R)."""
    if x.shape[-3] == 1:
        return how.xp.sum(x * y, axis=-1)[..., 0, :, None, None]
    return _by_head(how, x) @ how.xp.moveaxis(y, -3, -1)


def _mixed(how: Writes, factors: Array, x: Array) -> Array:
    """sum_s f_rs x_s of factors (..., T, H, R, R) and rows (..., T, R, H, D)."""
    if x.shape[-3] == 1:
        return _of_rows(factors[..., 0, 0]) * x
    return _by_head(how, factors @ _by_head(how, x))


def _of_rows(x: Array) -> Array:
    """Numbers of tokens (..., T, H) as they multiply rows (..., T, R, H, D)."""
    return x[..., None, :, None]


def _rotated(how: Writes, x: Array, rotation: Array) -> Array:
    return rotate(how.xp, x, rotation[..., None, :, :], how.dtype)


def _rotated_vjp(how: Writes, x: Array, rotation: Array, dy: Array, wide: Any) -> tuple[Array, Array]:
    """(dx, gradient of the angle (..., T, H, P), in the dtype of sums)."""
    dx, dangle = rotate_vjp(how.xp, _rotated(how, x, rotation), rotation[..., None, :, :], dy, dtype=wide)
    return dx, how.xp.sum(dangle, axis=-3)


# the token before, and the last one


def _sequences(how: Writes) -> Sequences:
    ragged = not how.sequences or how.sequences[0].row is not None
    return Sequences(how.xp, (0, *(s.stop for s in how.sequences)) if ragged else None)


def _in_line(how: Writes, x: Array) -> Array:
    """(..., R, H, D) as (..., R H D)."""
    return how.xp.reshape(x, (*x.shape[:-3], math.prod(x.shape[-3:])))


def _past(how: Writes, last: Array | None) -> Array | None:
    """Rows (..., H, R, D) as one row of tokens (..., 1, R H D)."""
    return None if last is None else _in_line(how, _by_head(how, cast(how.xp, last, how.dtype)))[..., None, :]


def _late(how: Writes, x: Array, last: Array | None) -> Array:
    """x (..., T, R, H, D) of the token before."""
    return how.xp.reshape(_sequences(how).before(_in_line(how, x), _past(how, last), 1), x.shape)


def _late_vjp(how: Writes, d: Array, last: Array | None) -> tuple[Array, Array | None]:
    dx, dpast = _sequences(how).before_vjp(_in_line(how, d), _past(how, last), 1)
    return how.xp.reshape(dx, d.shape), _as_last(how, dpast, last)


def _as_last(how: Writes, dpast: Array | None, last: Array | None) -> Array | None:
    """The inverse of _past."""
    if last is None or dpast is None:
        return None
    H, R, D = last.shape[-3:]
    return _by_head(how, how.xp.reshape(dpast, (*last.shape[:-3], R, H, D)))


def _last(how: Writes, x: Array, last: Array | None) -> Array:
    """x (..., T, R, H, D) of the last token of each sequence: (..., H, R, D); without tokens that before, or 0."""
    found = _sequences(how).last(_in_line(how, x), _past(how, last), 1)[..., 0, :]
    return _by_head(how, how.xp.reshape(found, (*found.shape[:-1], *x.shape[-3:])))


def _last_vjp(how: Writes, d: Array, x: Array, last: Array | None) -> tuple[Array, Array | None]:
    """(dx, dlast) from d (..., H, R, D)."""
    rows = _in_line(how, _by_head(how, d))[..., None, :]
    dx, dpast = _sequences(how).last_vjp(rows, _in_line(how, x), _past(how, last))
    return how.xp.reshape(dx, x.shape), _as_last(how, dpast, last)
