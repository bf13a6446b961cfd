"""A gated delta rule whose queries share states, each with an output gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from linattn_np.call.dispatch import public
from linattn_np.call.options import Options
from linattn_np.matrix_state.types import Decay, Erase
from linattn_np.ops.gates import sigmoid
from linattn_np.ops.sums import sum_of_groups
from linattn_np.products import products
from linattn_np.runtime.arrays import Array, cast, shared_heads
from linattn_np.spec import ArgSpec, Call, Samples, VariantSpec
from linattn_np.variants.shared.arguments import QUERIES, STRENGTH, TOKEN_DECAY, UNIT_KEYS, VALUES

UNROUNDED = (lambda c: cast(c.xp, c.v, c.dtype), lambda c, dv: {"v": dv})  # the output is rounded after the gate


def _gate(c: Call, heads: int) -> Array:
    return shared_heads(c.xp, sigmoid(c.xp, cast(c.xp, c.z, c.dtype)), heads)


def from_core(c: Call, out: Array) -> Array:
    """sigmoid(z) out; a gate of fewer heads than the output is shared by groups."""
    return out * _gate(c, out.shape[-2])


def from_core_vjp(c: Call, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    dout = cast(c.xp, dout, c.dtype)
    s = _gate(c, out.shape[-2])
    return dout * s, {"z": sum_of_groups(c.xp, dout * out * s * (1 - s), c.z.shape[-2])}


SPEC = VariantSpec(
    name="gated_readers",
    sentence="A gated delta rule with an output gate per query head.",
    equation="S~ = e^{g_t} S_{t-1};  S_t = S~ + k_t^T beta_t (v_t - k_t S~);  out_t = sigmoid(z_t) * (scale q_t S_t)",
    paper="Doe, Roe, Gated readers, arXiv 2699.00003",
    arrays={
        "q": QUERIES, "k": UNIT_KEYS, "v": VALUES, "g": TOKEN_DECAY, "beta": STRENGTH,
        "z": ArgSpec("T Hq V", "output gate of the query heads, raw"),
    },
    change=replace(
        products("q", "k", "g", "beta", r="k", v=UNROUNDED), from_core=from_core, from_core_vjp=from_core_vjp
    ),
    decay=Decay.SCALAR,
    erase=Erase.DELTA,
)  # fmt: skip


@public(SPEC, Samples({"k": "unit"}))
def gated_readers(q: Any, k: Any, v: Any, g: Any, beta: Any, z: Any, **options: Unpack[Options]) -> Any:
    """A gated delta rule with an output gate per query head.

        S~ = e^{g_t} S_{t-1}
        S_t = S~ + k_t^T beta_t (v_t - k_t S~)
        out_t = sigmoid(z_t) * (scale q_t S_t)

    q     (..., T, Hq, K)   queries
    k     (..., T, Hk, K)   keys, of unit length
    v     (..., T, H, V)    values
    g     (..., T, H)       log decay of the token, <= 0
    beta  (..., T, H)       write strength in [0, 2]
    z     (..., T, Hq, V)   output gate of the query heads, raw

    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR, erase DELTA. Common options: linattn_np.Options.
    Doe, Roe, Gated readers, arXiv 2699.00003.
    """
