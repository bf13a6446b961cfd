"""Mamba-3: a scalar decay whose channel pairs rotate by an angle of each token, and that writes its last token again.

variants/shared/late_writes.py has the change of variables; here are skip connection and gate.
"""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Decay
from ...ops.step_size import gate_vjp, skip_and_gate
from ...ops.sums import over_tokens
from ...runtime.arrays import Array, cast
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, VariantSpec
from ..shared import step_sizes
from ..shared.late_writes import ARRAYS, STATE, late, to_core, to_core_vjp, weights
from ..shared.step_sizes import STEP_OPTIONS, StepOptions, check_options

# the token's own write, skip connection and gate


def _shares(c: Call) -> Array:
    """scale gamma_t (q_t . k_t) + D, the factor of x: (..., T, H, 1 or V)."""
    shares = late(c).shares[..., 0]
    return shares if c.D is None or c.D.ndim == 1 else shares + cast(c.xp, c.D, c.dtype)


def _finishing(c: Call, *others: Array) -> Any:
    """CUDA kernels for out + shares x and the gate, or None."""
    return step_sizes.row_kernels(c, c.z, *others) if c.D is None or c.D.ndim == 1 else None


def from_core(c: Call, out: Array) -> Array:
    """(out + shares x) silu(z); shares are D alone where the core has the token's own write."""
    if weights(c) is not None:
        return step_sizes.from_core(c, out)
    if (kernels := _finishing(c)) is not None:
        return kernels.finish(c.xp, out, c.x, late(c).shares[..., 0, 0], c.z)
    return skip_and_gate(c.xp, out, _shares(c), c.x, c.z, c.dtype)


def from_core_vjp(c: Call, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    """(gradient of out, gradients of z and of D (H, V)); to_core_vjp adds the rest of out + shares x."""
    if weights(c) is not None:
        return step_sizes.from_core_vjp(c, out, dout)
    if (kernels := _finishing(c, dout)) is not None:
        dz = {}
        if c.z is not None:
            dout, dz["z"] = kernels.finish_vjp(c.xp, out, c.x, late(c).shares[..., 0, 0], c.z, dout)
        return dout, dz | {"dread": dout}
    xp, grads = c.xp, dict[str, Array]()
    if c.z is not None:
        grads["z"] = gate_vjp(xp, skip_and_gate(xp, out, _shares(c), c.x, None, c.dtype), c.z, dout, c.dtype)
        dout = skip_and_gate(xp, dout, None, None, c.z, c.dtype)
    if c.D is not None and c.D.ndim == 2:
        wide = cast(xp, dout, c.dtype)
        grads["D"] = over_tokens(xp, wide * cast(xp, c.x, c.dtype), axes=2)
        grads["x"] = wide * cast(xp, c.D, c.dtype)
    return dout, grads | {"dread": dout}


SPEC = VariantSpec(
    name="mamba3",
    called="Mamba-3",
    sentence="Channel pairs rotate under a scalar decay; a token also writes the one before (trapezoidal rule).",
    equation="S_t = e^{dt_t A_t} R_t (S_{t-1} + (1 - lambda_t) dt_t B_{t-1}^T x_{t-1}) + lambda_t dt_t B_t^T x_t;  "
    "out_t = (C_t S_t + D x_t) silu(z_t)",
    paper="Lahoti, Li, Chen, Wang, Bick, Kolter, Dao, Gu, Mamba-3, arXiv 2603.15569",
    arrays={
        **ARRAYS,
        "D": ArgSpec("H|H V", "skip connection", optional=True),
        "z": ArgSpec("T H V", "gate: out times silu(z)", optional=True),
        "dt_bias": ArgSpec("H", "added to dt", optional=True),
    },
    change=ChangeOfVariables(to_core, to_core_vjp, from_core, from_core_vjp, query="C", key="B", value="x"),
    decay=Decay.SCALAR,
    scaled=False,
    shares_states=False,
    state=STATE,
    options=STEP_OPTIONS,
    check_options=check_options,
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
