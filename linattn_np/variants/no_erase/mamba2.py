"""Mamba-2: the state space dual form, a scalar decay driven by the step size dt; TransXSSM: with rotated B and C."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Decay
from ...spec import ArgSpec, ChangeOfVariables, Samples, VariantSpec
from ..shared.arguments import LOG_DECAY, POSITIVE
from ..shared.rotated import ROTATED_STATE, THETA, Rotated
from ..shared.step_sizes import STEP_OPTIONS, StepOptions, check_options, from_core, from_core_vjp, to_core, to_core_vjp

SPEC = VariantSpec(
    name="mamba2",
    called="Mamba-2",
    sentence="State space dual form: a scalar decay and a value scale driven by one step size.",
    equation="S_t = e^{dt_t A} S_{t-1} + B_t^T (dt_t x_t);  out_t = (C_t S_t + D x_t) silu(z_t)",
    paper="Dao, Gu, Transformers are SSMs, arXiv 2405.21060",
    arrays={
        "x": ArgSpec("T H V", "inputs (the values)"),
        "dt": ArgSpec("T H", "step sizes", limits=POSITIVE, raw_with=("dt_softplus", "dt_bias")),
        "A": ArgSpec("H", "decay rate of the head, < 0 (-exp(A_log))", limits=LOG_DECAY),
        "B": ArgSpec("T Hk K", "input vectors (the keys), shared by groups of heads"),
        "C": ArgSpec("T Hq K", "output vectors (the queries), shared by groups of heads"),
        "D": ArgSpec("H|H V", "skip connection", optional=True),
        "z": ArgSpec("T H V", "gate: out times silu(z)", optional=True),
        "dt_bias": ArgSpec("H", "added to dt", optional=True),
    },
    change=ChangeOfVariables(to_core, to_core_vjp, from_core, from_core_vjp, query="C", key="B", value="x"),
    decay=Decay.SCALAR,
    scaled=False,
    shares_states=False,
    options=STEP_OPTIONS,
    check_options=check_options,
)
SAMPLES = Samples(
    {"dt": "positive", "A": "negative", "B": "unit", "theta": "angle"},
    ({"dt_softplus": True}, {"dt_softplus": True, "dt_limit": (0.3, 1.0)}),
)


@public(SPEC, SAMPLES)
def mamba2(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    **options: Unpack[StepOptions],
) -> Any:
    """Mamba-2 (SSD): a scalar decay and a value scale driven by one step size.

        dt_t = clip(softplus(dt_t + dt_bias))        softplus only with dt_softplus=True
        S_t = e^{dt_t A} S_{t-1} + B_t^T (dt_t x_t)
        out_t = (scale C_t S_t + D x_t) silu(z_t)

    x        (..., T, H, V)     inputs (the values)
    dt       (..., T, H)        step sizes
    A        (H,)               decay rate of the head, < 0 (-exp(A_log))
    B        (..., T, Hk, K)    input vectors (the keys); Hk groups of heads share one
    C        (..., T, Hq, K)    output vectors (the queries); Hq groups of heads share one; None: write only
    D        (H,) or (H, V)     skip connection
    z        (..., T, H, V)     gate: out times silu(z)
    dt_bias  (H,)               added to dt

    dt_softplus=False, dt_limit=(0, inf): dt is clipped to these bounds.
    scale=None means 1. Returns out (..., T, H, V), and the state (..., H, K, V) if return_state; mamba_ssm stores
    the transpose (..., H, V, K). Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR, erase NONE. Common options: linattn_np.Options.
    Dao, Gu, Transformers are SSMs, arXiv 2405.21060.
    """


TRANSXSSM = replace(
    SPEC,
    name="transxssm",
    called="TransXSSM",
    sentence="Mamba-2 whose input and output vectors rotate with their position.",
    equation="S_t = e^{dt_t A} R S_{t-1} + B_t^T (dt_t x_t), R rotates pairs of rows by theta;  "
    "out_t = (C_t S_t + D x_t) silu(z_t)",
    paper="Wu, Shen et al., TransXSSM, arXiv 2506.09507; Dao, Gu, arXiv 2405.21060",
    arrays={**SPEC.arrays, "theta": THETA},
    change=Rotated(SPEC.change).change,
    state=ROTATED_STATE,
)


@public(TRANSXSSM, SAMPLES)
def transxssm(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    theta: Any = None,
    **options: Unpack[StepOptions],
) -> Any:
    """TransXSSM: Mamba-2 whose input and output vectors rotate with their position.

        dt_t = clip(softplus(dt_t + dt_bias))        softplus only with dt_softplus=True
        S_t = e^{dt_t A} R S_{t-1} + B_t^T (dt_t x_t)        R rotates rows (2 p, 2 p + 1) by -theta_p
        out_t = (scale C_t S_t + D x_t) silu(z_t)

    x        (..., T, H, V)     inputs (the values)
    dt       (..., T, H)        step sizes
    A        (H,)               decay rate of the head, < 0 (-exp(A_log))
    B        (..., T, Hk, K)    input vectors (the keys), not rotated; Hk groups of heads share one
    C        (..., T, Hq, K)    output vectors (the queries), not rotated; None: write only
    D        (H,) or (H, V)     skip connection
    z        (..., T, H, V)     gate: out times silu(z)
    dt_bias  (H,)               added to dt
    theta    (P,)               angle per token of channels (2 p, 2 p + 1), with its gradient; channels from 2 P on do
                                not rotate. None: 10000^{-linspace(0, 1, K // 2)}

    dt_softplus=False, dt_limit=(0, inf): dt is clipped to these bounds. The state is in the frame of the last token:
    the next call goes on without an offset.
    scale=None means 1. Returns out (..., T, H, V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR, erase NONE. Common options: linattn_np.Options.
    Wu, Shen et al., arXiv 2506.09507; Dao, Gu, arXiv 2405.21060.
    """
