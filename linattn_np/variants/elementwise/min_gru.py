"""minGRU: a GRU whose gate does not read the state."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.types import Inputs
from ...ops.gates import sigmoid, sigmoid_vjp
from ...runtime.arrays import Array, cast
from ...spec import ArgSpec, ChangeOfVariables, Variables, VariantSpec
from ..shared.arguments import CHANNELS


def to_core(c: Variables) -> Inputs:
    """sigmoid(z) x, and a = 1 - sigmoid(z) = sigmoid(-z)"""
    x, z = cast(c.xp, c.x, c.dtype), cast(c.xp, c.z, c.dtype)
    return Inputs(sigmoid(c.xp, z) * x, sigmoid(c.xp, -z))


def to_core_vjp(c: Variables, d: Inputs) -> dict[str, Array]:
    """The gate decays and writes: two paths."""
    x, z = cast(c.xp, c.x, c.dtype), cast(c.xp, c.z, c.dtype)
    return {"x": sigmoid(c.xp, z) * d.x, "z": sigmoid_vjp(c.xp, z, d.x * x - d.a)}


SPEC = VariantSpec(
    name="min_gru",
    called="minGRU",
    sentence="A GRU whose update gate does not read the state.",
    equation="h_t = (1 - s_t) h_{t-1} + s_t x_t, s_t = sigmoid(z_t);  out_t = scale h_t",
    paper="Feng, Tung, Ahmed, Bengio, Hajimirsadeghi, Were RNNs all we needed?, arXiv 2410.01201",
    arrays={"x": CHANNELS, "z": ArgSpec("T D", "update gate before its sigmoid")},
    change=ChangeOfVariables(to_core, to_core_vjp, query=None, key=None, value="x"),
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
