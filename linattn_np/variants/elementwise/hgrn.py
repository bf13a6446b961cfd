"""HGRN: a channel takes in the share that it forgets."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.readouts.gated import gated
from ...elementwise.types import GatedInputs, Inputs
from ...ops.complement import complement, complement_vjp
from ...ops.product import product
from ...runtime.arrays import Array
from ...spec import Call, ChangeOfVariables, VariantSpec
from ..shared.arguments import CHANNELS, DECAY


def to_core(c: Call) -> Inputs | GatedInputs:
    """(1 - e^g) x, g"""
    if (own := gated(c, "hgrn", c.x, c.g)) is not None:
        return own
    return Inputs(product(c.xp, complement(c.xp, c.g, c.dtype), c.x, dtype=c.dtype), None, c.g)


def to_core_vjp(c: Call, d: Inputs | GatedInputs) -> dict[str, Array]:
    """The gate decays and writes: two paths."""
    if isinstance(d, GatedInputs):
        return {"x": d.x, "g": d.y}
    dk = product(c.xp, c.x, d.x, dtype=c.dtype)
    dx = product(c.xp, complement(c.xp, c.g, c.dtype), d.x, dtype=c.dtype)
    return {"x": dx, "g": complement_vjp(c.xp, c.g, d.g, dk, c.dtype)}


SPEC = VariantSpec(
    name="hgrn",
    called="HGRN",
    sentence="A gated recurrence of channels that take in the share that they forget.",
    equation="h_t = e^{g_t} h_{t-1} + (1 - e^{g_t}) x_t;  out_t = scale h_t",
    paper="Qin, Yang, Zhong, HGRN, arXiv 2311.04823",
    arrays={"x": CHANNELS, "g": DECAY},
    change=ChangeOfVariables(to_core, to_core_vjp, query=None, key=None, value="x", by_tokens=True),
    core=CORE,
    scaled=False,
)


@public(SPEC)
def hgrn(x: Any, g: Any, **options: Unpack[Options]) -> Any:
    """HGRN: a gated recurrence of channels that take in the share that they forget.

        h_t = e^{g_t} h_{t-1} + (1 - e^{g_t}) x_t
        out_t = scale h_t

    x      (..., T, D)   inputs
    g      (..., T, D)   log decay, <= 0, -inf a hard reset that takes all of x in

    A layer makes g = log(b + (1 - b) sigmoid(z)) with its lower bound b. scale=None means 1.
    Returns out (..., T, D), and the state (..., D) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: elementwise. Common options: linattn_np.Options.
    Qin, Yang, Zhong, HGRN, arXiv 2311.04823.
    """
