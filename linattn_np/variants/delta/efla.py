"""Exact-flow linear attention: the delta rule as the exact solution of its differential equation over one token."""

from __future__ import annotations

from math import factorial
from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.types import Erase
from ...products import Formula, products
from ...runtime.arrays import Array, Namespace, cast, shared_heads, sum_of_groups
from ...spec import ArgSpec, Samples, Variables, VariantSpec
from ..shared.arguments import POSITIVE, QUERIES, VALUES

NEAR = 0.1  # below, f' is its Taylor series to this power, above a difference that loses one digit
SERIES = [(-1) ** n * n / factorial(n + 1) for n in range(1, 12)]


def flow(xp: Namespace, x: Array) -> Array:
    """f(x) = (1 - e^{-x}) / x, f(0) = 1."""
    safe = xp.where(x == 0, xp.ones_like(x), x)
    return xp.where(x == 0, xp.ones_like(x), -xp.expm1(-safe) / safe)


def flow_slope(xp: Namespace, x: Array) -> Array:
    """f'(x) = (e^{-x} - f(x)) / x, f'(0) = -1/2."""
    near, series = xp.abs(x) < NEAR, xp.zeros_like(x)
    for term in reversed(SERIES):
        series = term + xp.where(near, x, 0 * series) * series
    safe = xp.where(near, xp.ones_like(x), x)
    return xp.where(near, series, (xp.exp(-safe) - flow(xp, safe)) / safe)


def _rates(c: Variables) -> tuple[Array, Array, Array]:
    """(k, beta, beta |k|^2); the last two (..., T, H, 1)."""
    xp, k, beta = c.xp, cast(c.xp, c.k, c.dtype), cast(c.xp, c.beta, c.dtype)[..., None]
    return k, beta, beta * shared_heads(xp, xp.sum(k * k, axis=-1, keepdims=True), beta.shape[-2])


def strength(c: Variables) -> Array:
    """The delta rule's beta is (1 - e^{-beta s}) / s = beta f(beta s), s = |k|^2, f(x) = (1 - e^{-x}) / x."""
    _, beta, x = _rates(c)
    return beta * flow(c.xp, x)


def strength_vjp(c: Variables, db: Array) -> dict[str, Array]:
    """b = beta f(beta s): db / dbeta = f + x f' = e^{-x}, db / ds = beta^2 f', ds / dk = 2 k."""
    k, beta, x = _rates(c)
    dsquare = sum_of_groups(c.xp, db * beta**2 * flow_slope(c.xp, x), k.shape[-2])
    return {"k": 2 * dsquare * k, "beta": (db * c.xp.exp(-x))[..., 0]}


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
    change=products("q", "k", "v", r="k", beta=Formula(strength, strength_vjp)),
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
