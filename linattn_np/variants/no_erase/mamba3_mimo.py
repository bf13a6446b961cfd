"""Mamba-3 with several inputs and outputs (MIMO): every token writes and reads R rows of one state.

variants/shared/late_writes.py has the change of variables, ops/ranks.py how rows come from x and become an output.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Decay, Inputs
from ...ops.ranks import Heads, Reads, read_out, read_out_vjp, spread_vjp
from ...runtime.arrays import Array
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, VariantSpec
from ..shared import late_writes
from ..shared.late_writes import ARRAYS, STATE, late, values
from ..shared.step_sizes import STEP_OPTIONS, StepOptions, check_options


def to_core(c: Call) -> Inputs:
    if c.sizes["R"] < 1:
        raise ValueError(f"{c.name}: B has R = 0 rows per token, expected 1 or more")
    return late_writes.to_core(c)


def to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    return _of_values(c, late_writes.to_core_vjp(c, d))


def _of_values(c: Call, grads: dict[str, Array]) -> dict[str, Array]:
    """The gradients with those of x and mimo_x in the place of that of the values."""
    if grads.get("x") is None:
        return grads
    if late_writes.spreads(c):
        dx, dm = grads["x"][..., 0, :, :], grads.pop("m")
    else:
        dx, dm = spread_vjp(c.xp, c.x, c.mimo_x, grads["x"])
    return grads | {"x": dx, "mimo_x": dm}


def _reads(c: Call, out: Array) -> tuple[Reads, Heads]:
    found = late(c)
    m = c.mimo_x if late_writes.spreads(c) else None
    return Reads(out, found.later, found.v, found.shares, values(c), m), Heads(c.z, c.mimo_z, c.mimo_o)


def from_core(c: Call, out: Array) -> Array:
    """sum_r mimo_o_r * u_r * silu(mimo_z_r * z), u_r what query r reads."""
    return read_out(c.xp, *_reads(c, out), c.dtype)


def from_core_vjp(c: Call, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    """(gradient of the core's output, gradients of z, mimo_z and mimo_o)."""
    du, (dz, dgates, douts), dlater = read_out_vjp(c.xp, *_reads(c, out), dout, c.dtype)
    return du, {"z": dz, "mimo_z": dgates, "mimo_o": douts, "dread": du, "dlater": dlater}


def unpack_state_vjp(c: Call, P: Array, dstate: Any) -> tuple[Array, dict[str, Array]]:
    dP, grads = late_writes.unpack_state_vjp(c, P, dstate)
    return dP, _of_values(c, grads)


SPEC = VariantSpec(
    name="mamba3_mimo",
    called="Mamba-3 MIMO",
    sentence="Mamba-3 with several inputs and outputs: a token writes and reads R rows of one state.",
    equation="W_t = sum_r B_tr^T x_tr, x_tr = mimo_x_r * x_t;  "
    "S_t = e^{dt_t A_t} R_t (S_{t-1} + (1 - lambda_t) dt_t W_{t-1}) + lambda_t dt_t W_t;  "
    "out_t = sum_r mimo_o_r * (C_tr S_t + D x_tr) * silu(mimo_z_r * z_t)",
    paper="Lahoti, Li, Chen, Wang, Bick, Kolter, Dao, Gu, Mamba-3, arXiv 2603.15569",
    arrays={
        **ARRAYS,
        "B": ArgSpec("T R Hk K", "input vectors (the keys) of the R rows, shared by groups of heads"),
        "C": ArgSpec("T R Hq K", "output vectors (the queries) of the R rows, shared by groups of heads"),
        "mimo_x": ArgSpec("H R V", "row r writes mimo_x_r * x"),
        "mimo_o": ArgSpec("H R V", "the output is the sum of mimo_o_r * row r"),
        "D": ArgSpec("H", "skip connection", optional=True),
        "z": ArgSpec("T H V", "gate: row r times silu(mimo_z_r * z)", optional=True),
        "mimo_z": ArgSpec("H R V", "gates of the rows; None: silu(z) for all", optional=True),
        "dt_bias": ArgSpec("H", "added to dt", optional=True),
    },
    change=ChangeOfVariables(
        to_core, to_core_vjp, from_core, from_core_vjp, query="C", key="B", value="x", by_heads=True
    ),
    decay=Decay.SCALAR,
    scaled=False,
    shares_states=False,
    micro_steps="R",
    state=replace(STATE, unpack_vjp=unpack_state_vjp, axes={"S": "H K V", "k": "H R K", "v": "H R V"}),
    options=STEP_OPTIONS,
    check_options=check_options,
)
SAMPLES = Samples(
    {"dt": "positive", "A": "negative", "B": "unit"},
    ({"dt_softplus": True}, {"dt_softplus": True, "dt_limit": (0.3, 1.0)}),
)


@public(SPEC, SAMPLES)
def mamba3_mimo(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    trap: Any,
    angle: Any,
    mimo_x: Any,
    mimo_o: Any,
    D: Any = None,
    z: Any = None,
    mimo_z: Any = None,
    dt_bias: Any = None,
    **options: Unpack[StepOptions],
) -> Any:
    """Mamba-3 with several inputs and outputs: a token writes and reads R rows of one state.

        dt_t = clip(softplus(dt_t + dt_bias))        softplus only with dt_softplus=True
        lambda_t = sigmoid(trap_t),  x_tr = mimo_x_r * x_t
        W_t = sum_r B_tr^T x_tr
        S_t = e^{dt_t A_t} R_t (S_{t-1} + (1 - lambda_t) dt_t W_{t-1}) + lambda_t dt_t W_t
        out_t = sum_r mimo_o_r * (scale C_tr S_t + D x_tr) * silu(mimo_z_r * z_t)
        R_t rotates channels (2 p, 2 p + 1) of the state by -pi tanh(angle_tp) dt_t

    x        (..., T, H, V)             inputs (the values)
    dt       (..., T, H)                step sizes
    A        (..., T, H) or (H,)        decay rate, < 0
    B        (..., T, R, Hk, K)         input vectors (the keys) of the R rows; Hk groups of heads share them
    C        (..., T, R, Hq, K)         output vectors (the queries) of the R rows; None: write only
    trap     (..., T, H)                before its sigmoid lambda: the token's share, the rest is the one before
    angle    (..., T, H, P)             of the channel pairs, before tanh, 2 P <= K; channels from 2 P on do not rotate
    mimo_x   (H, R, V)                  row r writes mimo_x_r * x
    mimo_o   (H, R, V)                  the output is the sum of mimo_o_r * row r
    D        (H,)                       skip connection
    z        (..., T, H, V)             gate: row r times silu(mimo_z_r * z)
    mimo_z   (H, R, V)                  gates of the rows; None: silu(z) for all
    dt_bias  (H,)                       added to dt

    R is the rank: B^T x is a matrix of rank R, whose cost in memory is that of R = 1 and in arithmetic R times that.
    R = 1 with mimo_x = mimo_o = 1 is mamba3.
    dt_softplus=False, dt_limit=(0, inf): dt is clipped to these bounds. Norms and biases of B and C are the caller's.
    The state is a Mamba3State(S (..., H, K, V), k (..., H, R, K), v (..., H, R, V)): S, and the last token's B and
    mimo_x * x, which the next one writes again. S and k are in the frame of the last token.
    scale=None means 1. Returns out (..., T, H, V), and the state if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR, erase NONE. Common options: linattn_np.Options.
    Lahoti et al., arXiv 2603.15569.
    """
