"""The linear recurrent unit: constant complex eigenvalues inside the unit circle."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.types import Inputs
from ...runtime.arrays import Array, as_computed, cast, complex_of, conjugate, over_tokens
from ...spec import ArgSpec, ChangeOfVariables, Samples, StateFormat, Variables, VariantSpec


def _log_eigenvalues(c: Variables) -> Array:
    """-exp(nu_log) + i exp(theta_log)"""
    kind = complex_of(c.xp, c.dtype)
    nu, theta = (c.xp.astype(c.xp.exp(cast(c.xp, y, c.dtype)), kind) for y in (c.nu_log, c.theta_log))
    return -nu + 1j * theta


def to_core(c: Variables) -> Inputs:
    """exp(gamma_log) x"""
    x = as_computed(c.xp, c.x, c.dtype)
    x = x if c.gamma_log is None else c.xp.exp(cast(c.xp, c.gamma_log, c.dtype)) * x
    return Inputs(x, None, _log_eigenvalues(c))


def to_core_vjp(c: Variables, d: Inputs) -> dict[str, Array]:
    """Gradients of exponentials."""
    xp = c.xp
    nu, theta = (xp.exp(cast(xp, y, c.dtype)) for y in (c.nu_log, c.theta_log))
    grads = {"nu_log": -nu * xp.real(d.g), "theta_log": theta * xp.imag(d.g)}
    if c.gamma_log is None:
        return {"x": d.x} | grads
    gamma, x = xp.exp(cast(xp, c.gamma_log, c.dtype)), as_computed(xp, c.x, c.dtype)
    return {"x": gamma * d.x, "gamma_log": over_tokens(xp, xp.real(gamma * d.x * conjugate(xp, x)))} | grads


SPEC = VariantSpec(
    name="lru",
    called="LRU",
    sentence="A linear recurrent unit: constant complex eigenvalues inside the unit circle.",
    equation="h_t = l h_{t-1} + exp(gamma_log) x_t, l = exp(-exp(nu_log) + i exp(theta_log));  out_t = scale h_t",
    paper="Orvieto et al., Resurrecting recurrent neural networks for long sequences, arXiv 2303.06349",
    arrays={
        "x": ArgSpec("T D", "inputs, real or complex", is_complex=True),
        "nu_log": ArgSpec("D", "log of the rate of decay"),
        "theta_log": ArgSpec("D", "log of the phase"),
        "gamma_log": ArgSpec("D", "log of the factor of the inputs", optional=True),
    },
    change=ChangeOfVariables(to_core, to_core_vjp, query=None, key=None, value="x"),
    core=CORE,
    scaled=False,
    state=StateFormat(is_complex=True),
)


@public(SPEC, Samples(complex=frozenset(("state",))))
def lru(x: Any, nu_log: Any, theta_log: Any, gamma_log: Any = None, **options: Unpack[Options]) -> Any:
    """LRU: a linear recurrent unit: constant complex eigenvalues inside the unit circle.

        h_t = l h_{t-1} + exp(gamma_log) x_t, l = exp(-exp(nu_log) + i exp(theta_log))
        out_t = scale h_t

    x           (..., T, D)   inputs, real or complex
    nu_log      (D,)          log of the rate of decay
    theta_log   (D,)          log of the phase
    gamma_log   (D,)          log of the factor of the inputs, log sqrt(1 - |l|^2) at first; optional

    Out and state are complex. A layer reads Re(C h_t). scale=None means 1.
    Returns out (..., T, D), and the state (..., D) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: elementwise. Common options: linattn_np.Options.
    Orvieto et al., Resurrecting recurrent neural networks for long sequences, arXiv 2303.06349.
    """
