"""S4D: a diagonal state space of N complex states a channel, discretised by a zero-order hold."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.readouts.diagonal import compiled
from ...elementwise.types import SystemInputs
from ...ops.product import product
from ...ops.step_size import skip_and_gate
from ...ops.sums import over_tokens
from ...ops.zero_order_hold import hold, hold_vjp
from ...runtime.arrays import Array, cast, is_cupy
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, StateFormat, VariantSpec
from ..shared.arguments import CHANNELS


def held(c: Call) -> SystemInputs:
    """The inputs of kernels."""
    return SystemInputs(c.x, None, None, c.C, c.D, (c.dt_log, c.A_log, c.A_imag))


def skips(c: Call) -> bool:
    """Whether compiled code computes the skip too."""
    return compiled(held(c), c.plan, c.options["backend"]) is not None


def to_core(c: Call) -> SystemInputs:
    """Log factors dt A; every channel drives its states by (e^{dt A} - 1) / A x."""
    if is_cupy(c.xp) and skips(c):
        return held(c)
    return SystemInputs(c.x, *hold(c.xp, c.dt_log, c.A_log, c.A_imag, c.dtype), c.C, c.D if skips(c) else None)


def to_core_vjp(c: Call, d: SystemInputs) -> dict[str, Array]:
    grads = d.held or hold_vjp(c.xp, c.dt_log, c.A_log, c.A_imag, d.A, d.B, c.dtype)
    found = dict(zip(("x", "C", "dt_log", "A_log", "A_imag"), (d.x, d.C, *grads), strict=True))
    return found if d.D is None else found | {"D": d.D}


def from_core(c: Call, out: Array) -> Array:
    """out + D x"""
    return out if c.D is None or skips(c) else skip_and_gate(c.xp, out, c.D, c.x, None, c.dtype)


def from_core_vjp(c: Call, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    """(gradient of out, gradients of D and the skip's part of x)."""
    if c.D is None or skips(c):
        return dout, {}
    dout = cast(c.xp, dout, c.dtype)
    dD = over_tokens(c.xp, product(c.xp, dout, c.x, dtype=c.dtype))
    return dout, {"D": dD, "x": product(c.xp, dout, c.D, dtype=c.dtype)}


SPEC = VariantSpec(
    name="s4d",
    called="S4D",
    sentence="A diagonal state space of N complex states a channel, discretised by a zero-order hold.",
    equation="h_t = e^{dt A} h_{t-1} + (e^{dt A} - 1) / A x_t;  out_t = 2 Re(C h_t) + D x_t",
    paper="Gu, Gupta, Goel, Re, On the parameterization and initialization of diagonal state space models, "
    "arXiv 2206.11893",
    arrays={
        "x": CHANNELS,
        "dt_log": ArgSpec("D", "log of the step size"),
        "A_log": ArgSpec("D N", "log of the rates of decay: Re A = -exp(A_log)"),
        "A_imag": ArgSpec("D N", "frequencies: Im A"),
        "C": ArgSpec("D N", "weights of the states, complex", is_complex=True),
        "D": ArgSpec("D", "weight of the input itself", optional=True),
    },
    change=ChangeOfVariables(
        to_core, to_core_vjp, from_core, from_core_vjp, query=None, key=None, value="x", by_tokens=True
    ),
    core=CORE,
    scaled=False,
    state=StateFormat(axes={"state": "D N"}, is_complex=True),
)


@public(SPEC, Samples(complex=frozenset(("C", "state"))))
def s4d(x: Any, dt_log: Any, A_log: Any, A_imag: Any, C: Any, D: Any = None, **options: Unpack[Options]) -> Any:
    """S4D: a diagonal state space of N complex states a channel, discretised by a zero-order hold.

        h_t = e^{dt A} h_{t-1} + (e^{dt A} - 1) / A x_t
        out_t = 2 Re(C h_t) + D x_t

    x        (..., T, D)   inputs
    dt_log   (D,)          log of the step size
    A_log    (D, N)        log of the rates of decay: Re A = -exp(A_log)
    A_imag   (D, N)        frequencies: Im A
    C        (D, N)        weights of the states, complex; or real
    D        (D,)          weight of the input itself; optional

    A state stands for itself and its conjugate. scale=None means 1.
    Returns out (..., T, D), and the state (..., D, N) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: elementwise. Common options: linattn_np.Options.
    Gu, Gupta, Goel, Re, On the parameterization and initialization of diagonal state space models, arXiv 2206.11893.
    """
