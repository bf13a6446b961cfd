"""Longhorn as published: the implicit step of online regression, of which the diagonal is kept."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.readouts.selective import kernels_reason
from ...elementwise.types import Raw, SelectiveInputs
from ...ops.strengths import strength, strength_vjp
from ...ops.sums import added
from ...runtime.arrays import Array
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, StateFormat, VariantSpec
from ..shared.arguments import POSITIVE


def to_core(c: Call) -> SelectiveInputs:
    """A selective scan of steps b = beta / (1 + beta |k|^2) that erase along their keys: D strengths of one key.

    raw: kernels make b of beta themselves.
    """
    fused = SelectiveInputs(c.v, c.beta, None, c.k, c.q, Raw())
    if c.kernels and kernels_reason(fused, c.xp, c.dtype) is None:
        return fused
    b = strength(c.xp, c.k[..., None, :], c.beta, True, c.dtype)
    return SelectiveInputs(c.v, b[..., 0], None, c.k, c.q)


def to_core_vjp(c: Call, d: SelectiveInputs) -> dict[str, Array]:
    """dk also has the path of b."""
    if d.raw is not None:
        return {"q": d.C, "k": d.B, "v": d.x, "beta": d.dt}
    of_strength, dbeta = strength_vjp(c.xp, c.k[..., None, :], c.beta, True, d.dt[..., None])
    return {"q": d.C, "k": added(c.xp, d.B, of_strength[..., 0, :]), "v": d.x, "beta": dbeta}


SPEC = VariantSpec(
    name="diagonal_longhorn",
    sentence="Longhorn as published: the implicit step of online regression, of which the diagonal is kept.",
    equation="h_t = (1 - b_t^T k_t^2) h_{t-1} + (b_t v_t)^T k_t, b_t = beta_t / (1 + beta_t k_t k_t^T);  "
    "out_t = scale q_t h_t^T",
    paper="Liu, Wang, Li, Feng, Stone, Liu, Longhorn, arXiv 2407.14207",
    arrays={
        "q": ArgSpec("T N", "queries"),
        "k": ArgSpec("T N", "keys, of any length"),
        "v": ArgSpec("T D", "values"),
        "beta": ArgSpec("T D", "weight of the error of a channel, >= 0", limits=POSITIVE),
    },
    change=ChangeOfVariables(to_core, to_core_vjp, query=None, key=None, value="v", by_tokens=True),
    core=CORE,
    scaled=False,
    state=StateFormat(axes={"state": "D N"}),
)


@public(SPEC, Samples({"beta": "positive"}))
def diagonal_longhorn(q: Any, k: Any, v: Any, beta: Any, **options: Unpack[Options]) -> Any:
    """Longhorn as published: the implicit step of online regression, of which the diagonal is kept.

        h_t = (1 - b_t^T k_t^2) h_{t-1} + (b_t v_t)^T k_t, b_t = beta_t / (1 + beta_t |k_t|^2)
        out_t = scale q_t h_t^T

    q      (..., T, N)   queries
    k      (..., T, N)   keys, of any length
    v      (..., T, D)   values
    beta   (..., T, D)   weight of the error of a channel, >= 0 (the paper: a sigmoid)

    `longhorn` erases along the whole key. scale=None means 1.
    Returns out (..., T, D), and the state (..., D, N) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: elementwise. Common options: linattn_np.Options.
    Liu, Wang, Li, Feng, Stone, Liu, Longhorn, arXiv 2407.14207.
    """
