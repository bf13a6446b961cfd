"""Longhorn in its exact form: the delta rule that an implicit step of online regression makes."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.types import Erase
from ...products import Formula, products
from ...runtime.arrays import Array, cast
from ...spec import ArgSpec, Variables, VariantSpec
from ..shared.arguments import POSITIVE, QUERIES, VALUES


def _strength(c: Variables) -> tuple[Array, Array, Array]:
    """(k, beta, 1 / (1 + beta |k|^2)); the last two (..., T, H, 1), |k|^2 broadcast to the states that share k."""
    xp = c.xp
    k, beta = cast(xp, c.k, c.dtype), cast(xp, c.beta, c.dtype)[..., None]
    square = xp.sum(k * k, axis=-1)[..., None]  # (..., T, Hk, 1)
    share = beta.shape[-2] // max(k.shape[-2], 1)
    square = xp.broadcast_to(square, (*square.shape[:-1], share))
    return k, beta, 1 / (1 + beta * xp.reshape(square, beta.shape))


def strength(c: Variables) -> Array:
    """The delta rule's beta is beta / (1 + beta |k|^2)."""
    _, beta, over = _strength(c)
    return beta * over


def strength_vjp(c: Variables, db: Array) -> dict[str, Array]:
    """b = beta / (1 + beta s), s = |k|^2: db / dbeta = 1 / (1 + beta s)^2, db / ds = -b^2, ds / dk = 2 k."""
    xp, (k, beta, over) = c.xp, _strength(c)
    dsquare = -db * (beta * over) ** 2
    dsquare = xp.reshape(dsquare, (*k.shape[:-1], dsquare.shape[-2] // max(k.shape[-2], 1)))
    dsquare = xp.sum(dsquare, axis=-1, keepdims=True)  # over the states that share a key
    return {"k": 2 * dsquare * k, "beta": (db * over**2)[..., 0]}


SPEC = VariantSpec(
    name="longhorn",
    sentence="The delta rule with the step that an implicit update takes.",
    equation="S_t = S_{t-1} + k_t^T b_t (v_t - k_t S_{t-1}), b_t = beta_t / (1 + beta_t k_t k_t^T);  "
    "out_t = scale q_t S_t",
    paper="Liu, Wang, Li, Feng, Stone, Liu, Longhorn, arXiv 2407.14207",
    arrays={
        "q": QUERIES,
        "k": ArgSpec("T Hk K", "keys, of any length"),
        "v": VALUES,
        "beta": ArgSpec("T H", "weight of the token's error, >= 0", limits=POSITIVE),
    },
    change=products("q", "k", "v", r="k", beta=Formula(strength, strength_vjp)),
    erase=Erase.DELTA,
    scaled=False,
)


@public(SPEC)
def longhorn(q: Any, k: Any, v: Any, beta: Any, **options: Unpack[Options]) -> Any:
    """Longhorn, exact: the delta rule with the step that an implicit update takes.

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
