"""Mamba-3: a scalar decay whose channel pairs rotate by an angle of each token, and that writes its last token again.

ops/trapezoid.py has the equations: the core computes simple_gla on rotated queries, and on rotated keys and weighted
values that come one token late; each token's own write is added to its output, and to the final state.
"""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Decay, Inputs, Mamba3State
from ...ops.product import product
from ...ops.rotary import rotate_rows, rows_angle_vjp
from ...ops.step_size import gate_vjp, skip_and_gate, step_size_vjp
from ...ops.sums import over_tokens
from ...ops.trapezoid import Last, Late, Tokens, Writes, last_vjp, late_writes, late_writes_vjp
from ...runtime.arrays import Array, cast, sum_dtype
from ...runtime.shapes import check_state
from ...spec import ArgSpec, ChangeOfVariables, Samples, StateFormat, Variables, VariantSpec
from ..shared.arguments import LOG_DECAY, POSITIVE
from ..shared.step_sizes import STEP_OPTIONS, StepOptions, limits, steps


def _tokens(c: Variables) -> Tokens:
    return Tokens(c.x, steps(c), c.A, c.B, c.C, c.trap, c.angle)


def _writes(c: Variables) -> Writes:
    scale, D = c.options["scale"], None if c.D is None or c.D.ndim > 1 else c.D
    return Writes(c.xp, c.sequences, 1.0 if scale is None else scale, D, c.dtype)


def _before(c: Variables) -> Last | None:
    """The last key and value before the call."""
    return None if c.state is None else Last(c.state.k, c.state.v)


def _late(c: Variables) -> Late:
    """Computed once a call."""
    if "late" not in vars(c):
        if 2 * c.angle.shape[-1] > c.sizes.K:
            shape = tuple(c.angle.shape)
            raise ValueError(f"{c.name}: angle has shape {shape}, expected (..., P) with 2 P <= K = {c.sizes.K}")
        c.late = late_writes(_writes(c), _tokens(c), _before(c))
    return c.late


def to_core(c: Variables) -> Inputs:
    late = _late(c)
    return Inputs(late.q, late.k, late.v, late.g[..., None])


def to_core_vjp(c: Variables, d: Inputs) -> dict[str, Array]:
    grads, written, dlast = late_writes_vjp(_writes(c), _tokens(c), _before(c), d, getattr(c, "dread", None))
    found = _by_name(c, grads)
    if c.D is not None and c.D.ndim == 1 and written is not None:
        found["D"] = over_tokens(c.xp, written)
    return found if dlast is None else found | {"state": c.xp.concat(dlast, axis=-1)}


def _by_name(c: Variables, grads: Tokens) -> dict[str, Array]:
    """Gradients of the arrays, from those of tokens."""
    found = {n: d for n, d in grads._asdict().items() if d is not None}
    found["dt"] = step_size_vjp(c.xp, c.dt, c.dt_bias, c.options["dt_softplus"], limits(c), grads.dt)
    return found if c.dt_bias is None else found | {"dt_bias": over_tokens(c.xp, found["dt"])}


# the token's own write, skip connection and gate


def _shares(c: Variables) -> Array:
    """scale gamma_t (q_t . k_t) + D, the factor of x: (..., T, H, 1 or V)."""
    shares = _late(c).shares
    return shares if c.D is None or c.D.ndim == 1 else shares + cast(c.xp, c.D, c.dtype)


def from_core(c: Variables, out: Array) -> Array:
    """(out + shares x) silu(z)."""
    return skip_and_gate(c.xp, out, _shares(c), c.x, c.z, c.dtype)


def from_core_vjp(c: Variables, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    """(gradient of out, gradients of z and of D (H, V)); to_core_vjp adds the rest of out + shares x."""
    xp, grads = c.xp, dict[str, Array]()
    if c.z is not None:
        grads["z"] = gate_vjp(xp, skip_and_gate(xp, out, _shares(c), c.x, None, c.dtype), c.z, dout, c.dtype)
        dout = skip_and_gate(xp, dout, None, None, c.z, c.dtype)
    if c.D is not None and c.D.ndim == 2:
        wide = cast(xp, dout, c.dtype)
        grads["D"] = over_tokens(xp, wide * cast(xp, c.x, c.dtype), axes=2)
        grads["x"] = wide * cast(xp, c.D, c.dtype)
    return dout, grads | {"dread": dout}


# the state


def pack_state(c: Variables, state: Any) -> Array | None:
    """The core's state before the first token is S: nothing is written again yet."""
    if state is None:
        return None
    if not isinstance(state, Mamba3State):
        raise TypeError(f"{c.name}: state is a {type(state).__qualname__}, expected (S, k, v) as a Mamba3State")
    for name, axes in (("S", "H K V"), ("k", "H K"), ("v", "H V")):
        check_state(c.name, getattr(state, name), c.sizes, axes, f"state.{name}")
    return state.S


def unpack_state(c: Variables, P: Array) -> Mamba3State:
    """S = P + gamma k^T v in the frame of the last token."""
    late = _late(c)
    P = rotate_rows(c.xp, cast(c.xp, P, c.dtype), late.turn[..., None, :], back=True)
    written = product(c.xp, late.own, late.last.v, dtype=c.dtype)[..., None, :]
    return Mamba3State(skip_and_gate(c.xp, P, late.last.k[..., None], written, None, c.dtype), *late.last)


def unpack_state_vjp(c: Variables, P: Array, dstate: Mamba3State) -> tuple[Array, dict[str, Array]]:
    """(gradient of P, gradients of the last tokens, and of the state of sequences without any)."""
    xp, late, (dS, dk, dv) = c.xp, _late(c), dstate
    turn, (k, v) = late.turn[..., None, :], late.last
    read, wide = xp.sum(k[..., None] * dS, axis=-2), sum_dtype(xp, c.dt)
    d = Last(dk + xp.sum(dS * (late.own * v)[..., None, :], axis=-1), dv + late.own * read)
    turned, wide_dS = cast(xp, rotate_rows(xp, P, turn, back=True), wide), cast(xp, dS, wide)
    dtheta = -xp.sum(rows_angle_vjp(xp, turned, wide_dS, c.angle.shape[-1]), axis=-1)
    grads, dlast = last_vjp(_writes(c), _tokens(c), _before(c), d, xp.sum(read * v, axis=-1), dtheta)
    found = _by_name(c, grads)
    found = found if dlast is None else found | {"state": xp.concat(dlast, axis=-1)}
    return rotate_rows(xp, dS, turn), found


def pack_state_vjp(c: Variables, dS: Array, dlast: Array) -> Mamba3State:
    K = c.sizes.K
    return Mamba3State(dS, dlast[..., :K], dlast[..., K:])


SPEC = VariantSpec(
    name="mamba3",
    called="Mamba-3",
    sentence="Channel pairs rotate under a scalar decay; a token also writes the one before (trapezoidal rule).",
    equation="S_t = e^{dt_t A_t} R_t (S_{t-1} + (1 - lambda_t) dt_t B_{t-1}^T x_{t-1}) + lambda_t dt_t B_t^T x_t;  "
    "out_t = (C_t S_t + D x_t) silu(z_t)",
    paper="Lahoti, Li, Chen, Wang, Bick, Kolter, Dao, Gu, Mamba-3, arXiv 2603.15569",
    arrays={
        "x": ArgSpec("T H V", "inputs (the values)"),
        "dt": ArgSpec("T H", "step sizes", limits=POSITIVE, raw_with=("dt_softplus", "dt_bias")),
        "A": ArgSpec("T H|H", "decay rate, < 0", limits=LOG_DECAY),
        "B": ArgSpec("T Hk K", "input vectors (the keys), shared by groups of heads"),
        "C": ArgSpec("T Hq K", "output vectors (the queries), shared by groups of heads"),
        "trap": ArgSpec("T H", "lambda = sigmoid(trap) is the token's share of the step, the rest is the one before"),
        "angle": ArgSpec("T H P", "channels (2 p, 2 p + 1) rotate by pi tanh(angle) dt, 2 P <= K"),
        "D": ArgSpec("H|H V", "skip connection", optional=True),
        "z": ArgSpec("T H V", "gate: out times silu(z)", optional=True),
        "dt_bias": ArgSpec("H", "added to dt", optional=True),
    },
    change=ChangeOfVariables(to_core, to_core_vjp, from_core, from_core_vjp, query="C", key="B", value="x"),
    decay=Decay.SCALAR,
    scaled=False,
    shares_states=False,
    state=StateFormat(Mamba3State, None, pack_state, unpack_state, unpack_state_vjp, pack_state_vjp, composes=False),
    options=STEP_OPTIONS,
)
SAMPLES = Samples(
    {"dt": "positive", "A": "negative", "B": "unit"},
    ({"dt_softplus": True}, {"dt_softplus": True, "dt_limit": (0.3, 1.0)}),
)


@public(SPEC, SAMPLES)
def mamba3(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    trap: Any,
    angle: Any,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    **options: Unpack[StepOptions],
) -> Any:
    """Mamba-3: channel pairs rotate under a scalar decay; a token also writes the one before (trapezoidal rule).

        dt_t = clip(softplus(dt_t + dt_bias))        softplus only with dt_softplus=True
        lambda_t = sigmoid(trap_t)
        S_t = e^{dt_t A_t} R_t (S_{t-1} + (1 - lambda_t) dt_t B_{t-1}^T x_{t-1}) + lambda_t dt_t B_t^T x_t
        out_t = (scale C_t S_t + D x_t) silu(z_t)
        R_t rotates rows (2 p, 2 p + 1) by -pi tanh(angle_tp) dt_t

    x        (..., T, H, V)             inputs (the values)
    dt       (..., T, H)                step sizes
    A        (..., T, H) or (H,)        decay rate, < 0
    B        (..., T, Hk, K)            input vectors (the keys), not rotated; Hk groups of heads share one
    C        (..., T, Hq, K)            output vectors (the queries), not rotated; None: write only
    trap     (..., T, H)                before its sigmoid lambda: the token's share, the rest is the one before
    angle    (..., T, H, P)             of the channel pairs, before tanh, 2 P <= K; channels from 2 P on do not rotate
    D        (H,) or (H, V)             skip connection
    z        (..., T, H, V)             gate: out times silu(z)
    dt_bias  (H,)                       added to dt

    dt_softplus=False, dt_limit=(0, inf): dt is clipped to these bounds. Norms and biases of B and C are the caller's.
    The state is a Mamba3State(S (..., H, K, V), k (..., H, K), v (..., H, V)): S, and the last token's B and x, which
    the next one writes again. S and k are in the frame of the last token: the next call goes on without an angle.
    scale=None means 1. Returns out (..., T, H, V), and the state if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR, erase NONE. Common options: linattn_np.Options.
    Lahoti et al., arXiv 2603.15569.
    """
