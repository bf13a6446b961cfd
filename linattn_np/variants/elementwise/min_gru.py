"""minGRU: a GRU whose gate does not read the state."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.readouts.gated import gated
from ...elementwise.types import GatedInputs, Inputs
from ...ops.gates import sigmoid, sigmoid_vjp
from ...ops.product import multiple, product
from ...ops.sums import difference
from ...runtime.arrays import Array, cast
from ...spec import ArgSpec, Call, ChangeOfVariables, VariantSpec
from ..shared.arguments import CHANNELS


def to_core(c: Call) -> Inputs | GatedInputs:
    """The shares that are taken in and kept: sigmoid(z) x, sigmoid(-z)."""
    if (own := gated(c, "min_gru", c.x, c.z)) is not None:
        return own
    xp, z = c.xp, cast(c.xp, c.z, c.dtype)
    return Inputs(product(xp, sigmoid(xp, z), c.x, dtype=c.dtype), sigmoid(xp, multiple(xp, -1.0, z, c.dtype)))


def to_core_vjp(c: Call, d: Inputs | GatedInputs) -> dict[str, Array]:
    """The slope of sigmoid(-z) is that of -sigmoid(z)."""
    if isinstance(d, GatedInputs):
        return {"x": d.x, "z": d.y}
    xp, z = c.xp, cast(c.xp, c.z, c.dtype)
    ds = difference(xp, product(xp, d.x, c.x, dtype=c.dtype), d.a)
    return {"x": product(xp, sigmoid(xp, z), d.x, dtype=c.dtype), "z": sigmoid_vjp(xp, z, ds)}


SPEC = VariantSpec(
    name="min_gru",
    called="minGRU",
    sentence="A GRU whose update gate does not read the state.",
    equation="h_t = (1 - s_t) h_{t-1} + s_t x_t, s_t = sigmoid(z_t);  out_t = scale h_t",
    paper="Feng, Tung, Ahmed, Bengio, Hajimirsadeghi, Were RNNs all we needed?, arXiv 2410.01201",
    arrays={"x": CHANNELS, "z": ArgSpec("T D", "update gate before its sigmoid")},
    change=ChangeOfVariables(to_core, to_core_vjp, query=None, key=None, value="x", by_tokens=True),
    core=CORE,
    scaled=False,
)


@public(SPEC)
def min_gru(x: Any, z: Any, **options: Unpack[Options]) -> Any:
    """minGRU: a GRU whose update gate does not read the state.

        h_t = (1 - s_t) h_{t-1} + s_t x_t, s_t = sigmoid(z_t)
        out_t = scale h_t

    x      (..., T, D)   candidate states; in the paper's log-space form they are positive
    z      (..., T, D)   update gate before its sigmoid

    scale=None means 1. Returns out (..., T, D), and the state (..., D) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: elementwise. Common options: linattn_np.Options.
    Feng, Tung, Ahmed, Bengio, Hajimirsadeghi, Were RNNs all we needed?, arXiv 2410.01201.
    """
