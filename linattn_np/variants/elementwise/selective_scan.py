"""The selective scan of Mamba: a small state for each channel, whose decay and input depend on a step size.

dt_t <- clip(dt_t + dt_bias, or softplus of it),   out <- (out + D x) silu(z)
"""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...elementwise.core import CORE
from ...elementwise.readouts.selective import kernels_reason
from ...elementwise.types import Raw, SelectiveInputs
from ...ops.product import product
from ...ops.step_size import gate_vjp, skip_and_gate, step_size_vjp
from ...ops.sums import over_tokens
from ...runtime.arrays import Array, cast
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, StateFormat, VariantSpec
from ..shared.arguments import CHANNELS, LOG_DECAY, POSITIVE
from ..shared.step_sizes import STEP_OPTIONS, StepOptions, check_options, limits, steps


def fused(c: Call) -> SelectiveInputs | None:
    """The inputs of kernels that compute steps, skip and gate too; None where there are none."""
    x = SelectiveInputs(c.x, c.dt, c.A, c.B, c.C, Raw(c.z, c.D, c.dt_bias, c.options["dt_softplus"], limits(c)))
    return x if c.kernels and kernels_reason(x, c.xp, c.dtype) is None else None


def to_core(c: Call) -> SelectiveInputs:
    """The step sizes after their formula."""
    return fused(c) or SelectiveInputs(c.x, steps(c), c.A, c.B, c.C)


def to_core_vjp(c: Call, d: SelectiveInputs) -> dict[str, Array]:
    """ddt has both paths, of the decay and of the input."""
    if d.raw is not None:
        return dict(zip(("x", "dt", "A", "B", "C", "z", "D", "dt_bias"), (*d[:5], *d.raw[:3]), strict=True))
    ddt = step_size_vjp(c.xp, c.dt, c.dt_bias, c.options["dt_softplus"], limits(c), d.dt)
    grads = dict(zip(("x", "dt", "A", "B", "C"), (d.x, ddt, *d[2:5]), strict=True))
    return grads if c.dt_bias is None else grads | {"dt_bias": over_tokens(c.xp, ddt)}


def from_core(c: Call, out: Array) -> Array:
    """(out + D x) silu(z)."""
    return out if (c.D is None and c.z is None) or fused(c) else skip_and_gate(c.xp, out, c.D, c.x, c.z, c.dtype)


def from_core_vjp(c: Call, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    """(gradient of out, gradients of D, z and the skip's part of x)."""
    xp, grads = c.xp, dict[str, Array]()
    if fused(c):
        return dout, grads
    if c.z is not None:
        grads["z"] = gate_vjp(xp, skip_and_gate(xp, out, c.D, c.x, None, c.dtype), c.z, dout, c.dtype)
        dout = skip_and_gate(xp, dout, None, None, c.z, c.dtype)
    if c.D is not None:
        dout = cast(xp, dout, c.dtype)
        grads["x"] = product(xp, dout, c.D, dtype=c.dtype)
        grads["D"] = over_tokens(xp, product(xp, dout, c.x, dtype=c.dtype))
    return dout, grads


SPEC = VariantSpec(
    name="selective_scan",
    called="Selective scan (Mamba)",
    sentence="Every channel has a state of N numbers, which decay and take in by step sizes of the token.",
    equation="h_t = e^{dt_t A} h_{t-1} + (dt_t x_t) B_t^T;  out_t = (h_t C_t + D x_t) silu(z_t)",
    paper="Gu, Dao, Mamba, arXiv 2312.00752",
    arrays={
        "x": CHANNELS,
        "dt": ArgSpec("T D", "step sizes", limits=POSITIVE, raw_with=("dt_softplus", "dt_bias")),
        "A": ArgSpec("D N", "decay rates, < 0, real or complex", limits=LOG_DECAY, is_complex=True),
        "B": ArgSpec("T N", "input vectors, real or complex", is_complex=True),
        "C": ArgSpec("T N", "output vectors, real or complex", is_complex=True),
        "D": ArgSpec("D", "skip connection", optional=True),
        "z": ArgSpec("T D", "gate: out times silu(z)", optional=True),
        "dt_bias": ArgSpec("D", "added to dt", optional=True),
    },
    change=ChangeOfVariables(
        to_core, to_core_vjp, from_core, from_core_vjp, query=None, key=None, value="x", by_tokens=True, keeps_out=True
    ),
    core=CORE,
    scaled=False,
    state=StateFormat(axes={"state": "D N"}, is_complex=True),
    options=STEP_OPTIONS,
    check_options=check_options,
)
SAMPLES = Samples(
    {"dt": "positive", "A": "negative"}, ({"dt_softplus": True}, {"dt_softplus": True, "dt_limit": (0.3, 1.0)})
)


@public(SPEC, SAMPLES)
def selective_scan(
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
    """Selective scan: every channel has a state of N numbers, which decay and take in by step sizes of the token.

        dt_t = clip(softplus(dt_t + dt_bias))        softplus only with dt_softplus=True
        h_t = e^{dt_t A} h_{t-1} + (dt_t x_t) B_t^T             h_t[d, n]: dt_t[d] A[d, n], dt_t[d] x_t[d] B_t[n]
        out_t = (scale h_t C_t + D x_t) silu(z_t)

    x        (..., T, D)   inputs
    dt       (..., T, D)   step sizes
    A        (D, N)        decay rates, < 0, real or complex
    B        (..., T, N)   input vectors, real or complex
    C        (..., T, N)   output vectors, real or complex
    D        (D,)          skip connection
    z        (..., T, D)   gate: out times silu(z)
    dt_bias  (D,)          added to dt

    dt_softplus=False, dt_limit=(0, inf): dt is clipped to these bounds. If one of A, B and C is complex, so is the
    state, and the sum over n counts each number with its conjugate: twice the real part. scale=None means 1.
    Returns out (..., T, D), and the state (..., D, N) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: elementwise. Common options: linattn_np.Options.
    Gu, Dao, Mamba, arXiv 2312.00752.
    """
