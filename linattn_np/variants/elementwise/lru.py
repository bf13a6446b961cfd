"""The linear recurrent unit: constant complex eigenvalues inside the unit circle."""

from __future__ import annotations

import functools
from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.readouts.gated import gated
from ...elementwise.types import GatedInputs, Inputs
from ...ops.gates import exponential
from ...ops.parts import from_parts, times_real
from ...ops.product import multiple, product
from ...ops.sums import added, over_tokens
from ...runtime.arrays import Array, is_complex
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, StateFormat, VariantSpec


def _exp(c: Call, x: Array) -> Array:
    return exponential(c.xp, x, c.dtype)


def to_core(c: Call) -> Inputs | GatedInputs:
    """exp(gamma_log) x; g = -exp(nu_log) + i exp(theta_log)"""
    if (own := gated(c, "lru", c.x, None, None, c.nu_log, c.theta_log, c.gamma_log)) is not None:
        return own
    g = from_parts(c.xp, multiple(c.xp, -1.0, _exp(c, c.nu_log), c.dtype), _exp(c, c.theta_log), c.dtype)
    x = c.x if c.gamma_log is None else times_real(c.xp, _exp(c, c.gamma_log), c.x, c.dtype)
    return Inputs(x, None, g)


def to_core_vjp(c: Call, d: Inputs | GatedInputs) -> dict[str, Array]:
    """Gradients of exponentials."""
    if isinstance(d, GatedInputs):
        given = zip(("nu_log", "theta_log", "gamma_log"), d.parameters, strict=True)
        return {"x": d.x} | {n: y for n, y in given if y is not None}
    xp, times = c.xp, functools.partial(product, c.xp, dtype=c.dtype)
    grads = {"nu_log": multiple(xp, -1.0, times(_exp(c, c.nu_log), xp.real(d.g)), c.dtype),
             "theta_log": times(_exp(c, c.theta_log), xp.imag(d.g))}  # fmt: skip
    if c.gamma_log is None:
        return {"x": d.x} | grads
    gamma, parts = _exp(c, c.gamma_log), (xp.real, xp.imag) if is_complex(c.x) else (xp.real,)
    along = functools.reduce(functools.partial(added, xp), (times(gamma, part(d.x), part(c.x)) for part in parts))
    dx = times_real(xp, gamma, d.x if is_complex(c.x) else xp.real(d.x), c.dtype)
    return {"x": dx, "gamma_log": over_tokens(xp, along)} | grads


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
    change=ChangeOfVariables(to_core, to_core_vjp, query=None, key=None, value="x", by_tokens=True),
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
