"""Exact-flow linear attention: the delta rule as the exact solution of its differential equation over one token."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.types import Erase
from ...ops.strengths import strength, strength_vjp
from ...products import products
from ...runtime.arrays import Array, cast
from ...spec import ArgSpec, Call, Samples, VariantSpec
from ..shared.arguments import POSITIVE, QUERIES, VALUES


def _strength(c: Call) -> Array:
    return strength(c.xp, c.k, c.beta, False, c.dtype)


def _strength_vjp(c: Call, db: Array) -> dict[str, Array]:
    dk, dbeta = strength_vjp(c.xp, c.k, c.beta, False, cast(c.xp, db, c.dtype))
    return {"k": dk, "beta": dbeta}


SPEC = VariantSpec(
    name="efla",
    called="Error-free linear attention",
    sentence="The delta rule as the exact flow of its differential equation over one token.",
    equation="S_t = S_{t-1} + k_t^T b_t (v_t - k_t S_{t-1}), b_t = (1 - e^{-beta_t |k_t|^2}) / |k_t|^2;  "
    "out_t = scale q_t S_t",
    paper="Lei, Zhang, Poria, Error-Free (Exact-Flow) Linear Attention, arXiv 2512.12602",
    arrays={
        "q": QUERIES,
        "k": ArgSpec("T Hk K", "keys, of any length"),
        "v": VALUES,
        "beta": ArgSpec("T H", "length of the step, >= 0", limits=POSITIVE),
    },
    change=products("q", "k", "v", r="k", beta=(_strength, _strength_vjp)),
    erase=Erase.DELTA,
)


@public(SPEC, Samples({"k": "unit", "beta": "positive"}))
def efla(q: Any, k: Any, v: Any, beta: Any, **options: Unpack[Options]) -> Any:
    """Exact-flow (error-free) linear attention: the delta rule as the exact flow of its differential equation.

        S_t = S(beta_t), dS/ds = k_t^T (v_t - k_t S), S(0) = S_{t-1}
            = S_{t-1} + k_t^T b_t (v_t - k_t S_{t-1}), b_t = (1 - e^{-beta_t |k_t|^2}) / |k_t|^2
        out_t = scale q_t S_t

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys, of any length: b_t |k_t|^2 < 1 always
    v      (..., T, H, V)    values
    beta   (..., T, H)       length of the step, >= 0

    delta_rule is one Euler step of the same equation, longhorn one implicit step. scale=None means K**-0.5.
    Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay NONE, erase DELTA. Common options: linattn_np.Options.
    Lei, Zhang, Poria, arXiv 2512.12602.
    """
