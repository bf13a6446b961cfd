"""Linear attention with a decay per token and a gate on the output."""

from __future__ import annotations

from typing import Any, Unpack

from linattn_np.call.dispatch import public
from linattn_np.call.options import Options
from linattn_np.matrix_state.types import Decay, Inputs
from linattn_np.ops.gates import sigmoid
from linattn_np.runtime.arrays import Array, cast
from linattn_np.spec import ArgSpec, Call, ChangeOfVariables, VariantSpec
from linattn_np.variants.shared.arguments import KEYS, QUERIES, TOKEN_DECAY, VALUES


def to_core(c: Call) -> Inputs:
    """The values in the compute dtype: the output is rounded once, after the gate."""
    return Inputs(c.q, c.k, cast(c.xp, c.v, c.dtype), c.g[..., None])


def to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    return {"q": d.q, "k": d.k, "v": d.v, "g": d.g[..., 0]}


def from_core(c: Call, out: Array) -> Array:
    """sigmoid(z) out."""
    return out * sigmoid(c.xp, cast(c.xp, c.z, c.dtype))


def from_core_vjp(c: Call, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    dout = cast(c.xp, dout, c.dtype)
    s = sigmoid(c.xp, cast(c.xp, c.z, c.dtype))
    return dout * s, {"z": dout * out * s * (1 - s)}


SPEC = VariantSpec(
    name="gated_output",
    sentence="Linear attention with a decay per token and a gate on the output.",
    equation="S_t = e^{g_t} S_{t-1} + k_t^T v_t;  out_t = sigmoid(z_t) * (scale q_t S_t)",
    paper="Doe, Roe, Gated outputs, arXiv 2699.00001",
    arrays={"q": QUERIES, "k": KEYS, "v": VALUES, "g": TOKEN_DECAY, "z": ArgSpec("T H V", "output gate, raw")},
    change=ChangeOfVariables(to_core, to_core_vjp, from_core, from_core_vjp),
    decay=Decay.SCALAR,
    shares_states=False,
)


@public(SPEC)
def gated_output(q: Any, k: Any, v: Any, g: Any, z: Any, **options: Unpack[Options]) -> Any:
    """Linear attention with a decay per token and a gate on the output.

        S_t = e^{g_t} S_{t-1} + k_t^T v_t
        out_t = sigmoid(z_t) * (scale q_t S_t)

    q  (..., T, Hq, K)   queries
    k  (..., T, Hk, K)   keys
    v  (..., T, H, V)    values
    g  (..., T, H)       log decay of the token, <= 0
    z  (..., T, H, V)    output gate, raw

    scale=None means K**-0.5. Returns out (..., T, H, V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR, erase NONE. Common options: linattn_np.Options.
    Doe, Roe, Gated outputs, arXiv 2699.00001.
    """
