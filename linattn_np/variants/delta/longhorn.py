"""Longhorn in its exact form: one implicit step of online regression per token, a delta rule."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.types import Erase
from ...ops.strengths import strength, strength_vjp
from ...products import products
from ...runtime.arrays import Array, cast
from ...spec import ArgSpec, Call, VariantSpec
from ..shared.arguments import POSITIVE, QUERIES, VALUES


def _strength(c: Call) -> Array:
    return strength(c.xp, c.k, c.beta, True, c.dtype)


def _strength_vjp(c: Call, db: Array) -> dict[str, Array]:
    dk, dbeta = strength_vjp(c.xp, c.k, c.beta, True, cast(c.xp, db, c.dtype))
    return {"k": dk, "beta": dbeta}


SPEC = VariantSpec(
    name="longhorn",
    sentence="The delta rule with the step of an implicit update.",
    equation="S_t = S_{t-1} + k_t^T b_t (v_t - k_t S_{t-1}), b_t = beta_t / (1 + beta_t k_t k_t^T);  "
    "out_t = scale q_t S_t",
    paper="Liu, Wang, Li, Feng, Stone, Liu, Longhorn, arXiv 2407.14207",
    arrays={
        "q": QUERIES,
        "k": ArgSpec("T Hk K", "keys, of any length"),
        "v": VALUES,
        "beta": ArgSpec("T H", "weight of the token's error, >= 0", limits=POSITIVE),
    },
    change=products("q", "k", "v", r="k", beta=(_strength, _strength_vjp)),
    erase=Erase.DELTA,
    scaled=False,
)


@public(SPEC)
def longhorn(q: Any, k: Any, v: Any, beta: Any, **options: Unpack[Options]) -> Any:
    """Longhorn, exact: the delta rule with the step of an implicit update.

        S_t = argmin over S of |S - S_{t-1}|^2 + beta_t |k_t S - v_t|^2
            = S_{t-1} + k_t^T b_t (v_t - k_t S_{t-1}), b_t = beta_t / (1 + beta_t |k_t|^2)
        out_t = scale q_t S_t

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys, of any length: b_t |k_t|^2 < 1 always
    v      (..., T, H, V)    values
    beta   (..., T, H)       weight of the token's error, >= 0

    The published model uses only the diagonal of k^T k, so that its state decays elementwise; here the erase is the
    full rank-one matrix. scale=None means 1.
    Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay NONE, erase DELTA. Common options: linattn_np.Options.
    Liu et al., arXiv 2407.14207.
    """
