"""S4D: a diagonal state space of N complex states a channel, discretised by a zero-order hold."""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.types import Inputs
from ...runtime.arrays import Array, Namespace, as_computed, cast, complex_of, over_tokens
from ...runtime.shapes import check_state
from ...spec import ArgSpec, ChangeOfVariables, Samples, StateFormat, Variables, VariantSpec
from ..shared.arguments import CHANNELS


class System(NamedTuple):
    """A continuous system and its steps: dt (D, 1), A, z = dt A, e^z - 1 (D, N)."""

    dt: Array
    A: Array
    z: Array
    gain: Array


def _system(c: Variables) -> System:
    xp, kind = c.xp, complex_of(c.xp, c.dtype)
    dt, decay, angle = (cast(xp, y, c.dtype) for y in (c.dt_log, c.A_log, c.A_imag))
    dt, decay = xp.exp(dt)[:, None], -xp.exp(decay)
    A = xp.astype(decay, kind) + 1j * xp.astype(angle, kind)
    return System(dt, A, xp.astype(dt, kind) * A, complex_expm1(xp, dt * decay, dt * angle, kind))


def complex_expm1(xp: Namespace, u: Array, v: Array, kind: Any) -> Array:
    """e^{u + iv} - 1, exact near 0"""
    half = xp.sin(v / 2)
    re, im = xp.expm1(u) * xp.cos(v) - 2 * half * half, xp.exp(u) * xp.sin(v)
    return xp.astype(re, kind) + 1j * xp.astype(im, kind)


def to_core(c: Variables) -> Inputs:
    """Every channel drives N states: (e^z - 1) / A x, log factors z."""
    xp, at = c.xp, _system(c)
    x = cast(xp, c.x, c.dtype)
    driven = (at.gain / at.A) * xp.astype(x, at.A.dtype)[..., None]
    D, N = at.z.shape
    return Inputs(xp.reshape(driven, (*x.shape[:-1], D * N)), None, xp.reshape(at.z, (D * N,)))


def to_core_vjp(c: Variables, d: Inputs) -> dict[str, Array]:
    """Of the gain (e^z - 1) / A through z and through A."""
    xp, at = c.xp, _system(c)
    x, dx = cast(xp, c.x, c.dtype), xp.reshape(d.x, (*c.x.shape, at.z.shape[-1]))
    dgain = over_tokens(xp, dx * xp.astype(x, dx.dtype)[..., None], 2)
    over = xp.conj(1 / at.A)
    dz = xp.reshape(d.g, at.z.shape) + dgain * over * xp.conj(at.gain + 1)
    dA = xp.astype(at.dt, dz.dtype) * dz - dgain * xp.conj(at.gain) * over * over
    ddt = xp.sum(xp.real(dz * xp.conj(at.A)), axis=-1)
    return {"x": xp.sum(xp.real(dx * xp.conj(at.gain / at.A)), axis=-1), "dt_log": at.dt[:, 0] * ddt,
            "A_log": xp.real(at.A) * xp.real(dA), "A_imag": xp.imag(dA)}  # fmt: skip


def from_core(c: Variables, out: Array) -> Array:
    """2 Re(sum_n C_n h_n) + D x"""
    xp, C = c.xp, as_computed(c.xp, c.C, c.dtype)
    y = 2 * xp.sum(xp.real(C * xp.reshape(out, (*c.x.shape, C.shape[-1]))), axis=-1)
    return y if c.D is None else y + cast(xp, c.D, c.dtype) * cast(xp, c.x, c.dtype)


def from_core_vjp(c: Variables, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    """dh_n = 2 dout C_n*, dC_n = sum 2 dout h_n*"""
    xp, C, dout = c.xp, as_computed(c.xp, c.C, c.dtype), cast(c.xp, dout, c.dtype)
    h = xp.reshape(out, (*c.x.shape, C.shape[-1]))
    twice = xp.astype(2 * dout, h.dtype)[..., None]
    C = xp.astype(C, h.dtype)
    grads = {"C": over_tokens(xp, twice * xp.conj(h), 2)}
    if c.D is not None:
        grads |= {"D": over_tokens(xp, dout * cast(xp, c.x, c.dtype)), "x": dout * cast(xp, c.D, c.dtype)}
    return xp.reshape(twice * xp.conj(C), out.shape), grads


def pack(c: Variables, state: Any) -> Any:
    """(..., D, N) as the core's (..., D N)."""
    if state is None:
        return None
    check_state(c.name, state, c.sizes, "D N", complex=True)
    return c.xp.reshape(state, (*state.shape[:-2], state.shape[-2] * state.shape[-1]))


def unpack(c: Variables, S: Array) -> Array:
    """The inverse of pack."""
    return c.xp.reshape(S, (*S.shape[:-1], *c.A_log.shape))


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
    change=ChangeOfVariables(to_core, to_core_vjp, from_core, from_core_vjp, query=None, key=None, value="x"),
    core=CORE,
    scaled=False,
    state=StateFormat(pack=pack, unpack=unpack, axes={"state": "D N"}, is_complex=True),
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

    A call makes arrays of T D N complex numbers. A state stands for itself and its conjugate. scale=None means 1.
    Returns out (..., T, D), and the state (..., D, N) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: elementwise. Common options: linattn_np.Options.
    Gu, Gupta, Goel, Re, On the parameterization and initialization of diagonal state space models, arXiv 2206.11893.
    """
