"""Longhorn as published: the implicit step of online regression, of which the diagonal is kept."""

from __future__ import annotations

import functools
from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.types import Inputs
from ...ops.product import multiple, product, rest
from ...ops.strengths import strength, strength_vjp
from ...ops.sums import added, difference, over_rows, row_inner
from ...runtime.arrays import Array
from ...runtime.shapes import check_state
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, StateFormat, VariantSpec
from ..shared.arguments import POSITIVE


def _strength(c: Call) -> Array:
    """b = beta / (1 + beta |k|^2), as a column (..., T, D, 1) of (..., T, D, N): one key of D strengths."""
    return strength(c.xp, c.k[..., None, :], c.beta, True, c.dtype)


def to_core(c: Call) -> Inputs:
    """a = 1 - b k^2, x = b v k: (..., T, D N)"""
    b, k = _strength(c), c.k[..., None, :]
    x = product(c.xp, b, c.v[..., None], k, dtype=c.dtype)
    return Inputs(_flat(c, x), _flat(c, rest(c.xp, b, product(c.xp, k, k, dtype=c.dtype), c.dtype)))


def _flat(c: Call, y: Array) -> Array:
    return c.xp.reshape(y, (*y.shape[:-2], y.shape[-2] * y.shape[-1]))


def _apart(c: Call, y: Array) -> Array:
    """(..., D N) as (..., D, N)."""
    return c.xp.reshape(y, (*y.shape[:-1], c.v.shape[-1], c.k.shape[-1]))


def to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    """db = <dx, v k> - <da, k^2>; dk through x, through a, and through b."""
    xp, b, k, da, dx = c.xp, _strength(c), c.k[..., None, :], _apart(c, d.a), _apart(c, d.x)
    times = functools.partial(product, xp, dtype=c.dtype)
    along = row_inner(xp, dx, k, c.dtype)  # (..., T, D)
    db = difference(xp, times(c.v, along), row_inner(xp, da, times(k, k), c.dtype))
    of_strength, dbeta = strength_vjp(xp, k, c.beta, True, db[..., None])
    dk = added(xp, over_rows(xp, times(dx, b, c.v[..., None])), of_strength[..., 0, :])
    dk = difference(xp, dk, multiple(xp, 2.0, times(c.k, over_rows(xp, times(da, b))), c.dtype))
    return {"k": dk, "v": times(b[..., 0], along), "beta": dbeta}


def from_core(c: Call, out: Array) -> Array:
    """sum_n q_n h_n"""
    return row_inner(c.xp, _apart(c, out), c.q[..., None, :], c.dtype)


def from_core_vjp(c: Call, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    """dh = q dout, dq = sum_d dout_d h_d"""
    xp, dout = c.xp, dout[..., None]
    dh = product(xp, dout, c.q[..., None, :], dtype=c.dtype)
    return _flat(c, dh), {"q": over_rows(xp, product(xp, dout, _apart(c, out), dtype=c.dtype))}


def pack(c: Call, state: Any) -> Any:
    """(..., D, N) as the core's (..., D N)."""
    if state is None:
        return None
    check_state(c.name, state, c.sizes, "D N")
    return _flat(c, state)


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
    change=ChangeOfVariables(to_core, to_core_vjp, from_core, from_core_vjp, query=None, key=None, value="v"),
    core=CORE,
    scaled=False,
    state=StateFormat(pack=pack, unpack=_apart, axes={"state": "D N"}),
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

    `longhorn` erases along the whole key. A call makes arrays of T D N numbers. scale=None means 1.
    Returns out (..., T, D), and the state (..., D, N) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: elementwise. Common options: linattn_np.Options.
    Liu, Wang, Li, Feng, Stone, Liu, Longhorn, arXiv 2407.14207.
    """
