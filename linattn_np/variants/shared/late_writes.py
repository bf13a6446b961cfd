"""Mamba-3's variants: a scalar decay whose channel pairs rotate, and tokens that write the one before again.

ops/trapezoid.py has the equations: the core computes simple_gla on rotated queries, and on rotated keys and weighted
values that come one token late; each token's own write is added to its output, and to the final state. A token has
R rows, one without an axis R.
"""

from __future__ import annotations

from typing import Any

from ...matrix_state.types import Inputs, Mamba3State
from ...ops.gates import sigmoid
from ...ops.ranks import spread
from ...ops.rotary import rotate_rows, rows_angle_vjp
from ...ops.step_size import skip_and_gate, step_size_vjp
from ...ops.sums import inner_of_matrices, over_tokens, row_inner
from ...ops.trapezoid import (
    Ends,
    Last,
    Late,
    Tokens,
    Weighted,
    Writes,
    by_kernels,
    late_writes,
    late_writes_vjp,
    settled,
    weighted,
    weighted_vjp,
)
from ...runtime.arrays import Array, cast, device, sum_dtype
from ...runtime.shapes import Sequence, check_state
from ...spec import ArgSpec, Call, StateFormat
from .arguments import LOG_DECAY, POSITIVE
from .step_sizes import limits, steps

ARRAYS = {
    "x": ArgSpec("T H V", "inputs (the values)"),
    "dt": ArgSpec("T H", "step sizes", limits=POSITIVE, raw_with=("dt_softplus", "dt_bias")),
    "A": ArgSpec("T H|H", "decay rate, < 0", limits=LOG_DECAY),
    "B": ArgSpec("T Hk K", "input vectors (the keys), shared by groups of heads"),
    "C": ArgSpec("T Hq K", "output vectors (the queries), shared by groups of heads"),
    "trap": ArgSpec("T H", "lambda = sigmoid(trap) is the token's share of the step, the rest is the one before"),
    "angle": ArgSpec("T H P", "channels (2 p, 2 p + 1) rotate by pi tanh(angle) dt, 2 P <= K"),
}


def rank(c: Call) -> int:
    return int(c.sizes.get("R", 1))


def of_rows(c: Call, x: Array) -> Array:
    """An array (..., T, H, D) of a token with one row as (..., T, R, H, D)."""
    return x if x is None or "R" in c.sizes else x[..., None, :, :]


def of_ends(c: Call, x: Array) -> Array:
    """A part (..., H, D) of a state with one row as (..., H, R, D)."""
    return x if "R" in c.sizes else x[..., None, :]


def values(c: Call) -> Array:
    """The values (..., T, R, H, V): x, of several rows mimo_x_r * x, computed once a call; x if kernels make them."""
    if "R" not in c.sizes or spreads(c):
        return c.x[..., None, :, :]
    if "values" not in vars(c):
        c.values = spread(c.xp, c.x, c.mimo_x, c.dtype)
    return c.values


def spreads(c: Call) -> bool:
    """Whether CUDA kernels make the rows of the values, found once a call."""
    if "spreads" not in vars(c):
        one = Tokens(c.x[..., None, :, :], c.dt, c.A, c.B, c.C, c.trap, c.angle, c.mimo_x)
        c.spreads = by_kernels(_writes(c), one)
    return bool(c.spreads)


def sequences(c: Call) -> tuple[Sequence, ...]:
    """The sequences in tokens; those of the plan are in rows."""
    R = rank(c)
    return c.sequences if R == 1 else tuple(Sequence(s.row, s.start // R, s.stop // R) for s in c.sequences)


def _tokens(c: Call) -> Tokens:
    """The arrays of the tokens, dt after its formula, which is computed once a call."""
    if "step_sizes" not in vars(c):
        c.step_sizes = steps(c)
    m = c.mimo_x if "R" in c.sizes and spreads(c) else None
    return Tokens(values(c), c.step_sizes, c.A, of_rows(c, c.B), of_rows(c, c.C), c.trap, c.angle, m)


def _writes(c: Call) -> Writes:
    scale, D = c.options["scale"], None if c.D is None or c.D.ndim > 1 else c.D
    return Writes(c.xp, sequences(c), 1.0 if scale is None else scale, D, c.dtype, c.kernels)


def _before(c: Call) -> Last | None:
    """The last keys and values before the call."""
    return None if c.state is None else Last(of_ends(c, c.state.k), of_ends(c, c.state.v))


def _check(c: Call) -> None:
    if 2 * c.angle.shape[-1] > c.sizes["K"]:
        shape = tuple(c.angle.shape)
        raise ValueError(f"{c.name}: angle has shape {shape}, expected (..., P) with 2 P <= K = {c.sizes['K']}")


def late(c: Call) -> Late:
    """Computed once a call."""
    if "late" not in vars(c):
        _check(c)
        c.late = late_writes(_writes(c), _tokens(c), _before(c))
    return c.late


def weights(c: Call) -> Weighted | None:
    """Computed once a call; None where keys and values come late."""
    if "weights" not in vars(c):
        _check(c)
        c.weights = None if "R" in c.sizes else weighted(_writes(c), _tokens(c), _before(c))
    return c.weights


def to_core(c: Call) -> Inputs:
    if (own := weights(c)) is not None:
        rotation, last = own.rotations if own.rotations.shape[-1] else None, _before(c)
        # the output is rounded once, behind skip connection and gate
        v = c.x if c.D is None and c.z is None else cast(c.xp, c.x, c.dtype)
        return Inputs(c.C, c.B, v, own.g, rotation=rotation, weight=own.weight, own=own.gamma,
                      past_k=None if last is None else last.k, past_v=own.past_v)  # fmt: skip
    found = late(c)
    return Inputs(found.q, found.k, found.v, found.g[..., None])


def to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    """Gradients by name, that of x of the values.

    dread: of the core's output, and of what queries read beside it; dlater: of their factors of rows. dends: of the
    last tokens in the final state.
    """
    if weights(c) is not None:
        return _weighted_vjp(c, d)
    dread, dends = getattr(c, "dread", None), getattr(c, "dends", None)
    read = late(c) if rank(c) > 1 else None
    dlater = getattr(c, "dlater", None)
    grads, written, dlast = late_writes_vjp(_writes(c), _tokens(c), _before(c), read, d, dread, dends, dlater)
    found = _by_name(c, grads)
    if c.D is not None and c.D.ndim == 1 and written is not None:
        found["D"] = over_tokens(c.xp, written)
    return found if dlast is None else found | {"state": dlast}


def _weighted_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    grads, dlast = weighted_vjp(_writes(c), _tokens(c), _before(c), d, getattr(c, "dends", None))
    found = _by_name(c, grads) | {"C": d.q}
    return found if dlast is None else found | {"state": dlast}


def _written_vjp(c: Call, last: Last, dS: Array) -> tuple[Array, Array]:
    """(v dS^T, k dS) of rows k, v (..., H, R, width)."""
    of_k = row_inner(c.xp, last.v[..., :, None, :], dS[..., None, :, :], c.dtype)
    return of_k, row_inner(c.xp, last.k[..., :, None, :], c.xp.matrix_transpose(dS)[..., None, :, :], c.dtype)


def _by_name(c: Call, grads: Tokens) -> dict[str, Array]:
    """Gradients of the arrays, from those of tokens."""
    found = {n: d for n, d in grads._asdict().items() if d is not None}
    if "R" not in c.sizes:
        found |= {n: d[..., 0, :, :] for n, d in found.items() if n in ("x", "B", "C")}
    found["dt"] = step_size_vjp(c.xp, c.dt, c.dt_bias, c.options["dt_softplus"], limits(c), grads.dt)
    return found if c.dt_bias is None else found | {"dt_bias": over_tokens(c.xp, found["dt"])}


# the state


def pack_state(c: Call, state: Any) -> Array | None:
    """The core's state before the first token is S: no token has written the last one yet."""
    if state is None:
        return None
    for name, axes in (c.spec.state.axes or STATE_AXES).items():
        check_state(c.name, getattr(state, name), c.sizes, axes, f"state.{name}")
    return state.S


def unpack_state(c: Call, P: Array) -> Mamba3State:
    """S = P + gamma k^T v in the frame of the last token."""
    found = _found(c)
    k, v = found.last if "R" in c.sizes else (y[..., 0, :] for y in found.last)
    is_own = c.options["overwrite_state"] and P is c.state.S  # the core has overwritten the caller's array
    return Mamba3State(settled(c.xp, P, found, c.dtype, is_own), k, v)


def unpack_state_vjp(c: Call, P: Array, dstate: Mamba3State) -> tuple[Array, dict[str, Array]]:
    """(gradient of P, gradients of the last tokens: to_core_vjp takes them on)."""
    xp, found, dS, wide = c.xp, _found(c), dstate.S, sum_dtype(c.xp, c.dt)
    rotation, own = found.rotation[..., None, :], found.own[..., None]
    of_k, of_v = _written_vjp(c, found.last, dS)
    dk = skip_and_gate(xp, of_ends(c, dstate.k), own, of_k, None, c.dtype)
    dv = skip_and_gate(xp, of_ends(c, dstate.v), own, of_v, None, c.dtype)
    dtheta = rows_angle_vjp(xp, rotate_rows(xp, P, rotation, back=True), dS, c.angle.shape[-1], wide, -1.0)
    down = inner_of_matrices(xp, of_v, found.last.v, c.dtype)
    return rotate_rows(xp, dS, rotation), {"dends": Ends(dk, dv, down, dtheta)}


def _found(c: Call) -> Late | Weighted:
    return late(c) if (own := weights(c)) is None else own


def pack_state_vjp(c: Call, dS: Array, dlast: Last) -> Mamba3State:
    return Mamba3State(dS, *(dlast if "R" in c.sizes else (y[..., 0, :] for y in dlast)))


# what a span does to the token before it (la.summary)


def first_weight(c: Call) -> Array:
    """h = (1 - lambda) dt of the first token of each sequence."""
    xp, (rest, dt) = c.xp, _rest(c)
    h, lead = rest * dt, c.batch if not c.is_ragged else ()
    none = xp.zeros((*lead, c.sizes["H"]), dtype=c.dtype, device=device(c.dt))
    each = [h[..., s.start, :] if s.stop > s.start else none for s in sequences(c)]
    return xp.stack([xp.reshape(x, none.shape) for x in each]) if c.is_ragged else xp.broadcast_to(each[0], none.shape)


def first_weight_vjp(c: Call, d: Array) -> dict[str, Array]:
    xp, (rest, dt) = c.xp, _rest(c)
    rows = []
    for s in sequences(c):
        if s.stop > s.start:
            one = d if s.row is None else xp.reshape(d[s.row, ...], (*rest.shape[:-2], rest.shape[-1]))
            more = xp.zeros((*one.shape[:-1], s.stop - s.start - 1, one.shape[-1]), dtype=one.dtype, device=device(one))
            rows.append(xp.concat([one[..., None, :], more], axis=-2))
    dh = xp.zeros_like(rest) if not rows else rows[0] if len(rows) == 1 else xp.concat(rows, axis=-2)
    return _by_name(c, Tokens(None, rest * dh, None, None, None, -rest * (1 - rest) * dt * dh, None))


def _rest(c: Call) -> tuple[Array, Array]:
    """(1 - lambda, dt) of the tokens (..., T, H)."""
    return 1 - sigmoid(c.xp, cast(c.xp, c.trap, c.dtype)), steps(c)


STATE_AXES = {"S": "H K V", "k": "H K", "v": "H V"}
STATE = StateFormat(
    Mamba3State,
    None,
    pack_state,
    unpack_state,
    unpack_state_vjp,
    pack_state_vjp,
    rotates=True,
    first_weight=(first_weight, first_weight_vjp),
)
