"""The delta rule of silu(v)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from linattn_np.call.dispatch import public
from linattn_np.call.options import Options
from linattn_np.matrix_state.types import Erase
from linattn_np.ops.gates import silu, silu_vjp
from linattn_np.products import products
from linattn_np.runtime.arrays import Array, cast
from linattn_np.spec import Call, Samples, VariantSpec
from linattn_np.variants.shared.arguments import QUERIES, STRENGTH, UNIT_KEYS, VALUES


def values(c: Call) -> Array:
    return silu(c.xp, cast(c.xp, c.v, c.dtype))


def values_vjp(c: Call, dv: Array) -> dict[str, Array]:
    return {"v": silu_vjp(c.xp, cast(c.xp, c.v, c.dtype), dv)}


SPEC = VariantSpec(
    name="silu_values",
    sentence="The delta rule of silu(v).",
    equation="S_t = S_{t-1} + k_t^T beta_t (silu(v_t) - k_t S_{t-1});  out_t = scale q_t S_t",
    paper="Doe, Roe, Silu values, arXiv 2699.00002",
    arrays={"q": QUERIES, "k": UNIT_KEYS, "v": VALUES, "beta": STRENGTH},
    change=replace(products("q", "k", "beta", r="k", v=(values, values_vjp)), linear=False),
    erase=Erase.DELTA,
)


@public(SPEC, Samples({"k": "unit"}))
def silu_values(q: Any, k: Any, v: Any, beta: Any, **options: Unpack[Options]) -> Any:
    """The delta rule of silu(v).

        S_t = S_{t-1} + k_t^T beta_t (silu(v_t) - k_t S_{t-1})
        out_t = scale q_t S_t

    q     (..., T, Hq, K)   queries
    k     (..., T, Hk, K)   keys, of unit length
    v     (..., T, H, V)    values
    beta  (..., T, H)       write strength in [0, 2]

    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay NONE, erase DELTA. Common options: linattn_np.Options.
    Doe, Roe, Silu values, arXiv 2699.00002.
    """
