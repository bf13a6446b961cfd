"""Longhorn as published: the implicit step of online regression, of which the diagonal is kept."""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.types import Inputs
from ...runtime.arrays import Array, cast
from ...runtime.shapes import check_state
from ...spec import ArgSpec, ChangeOfVariables, Samples, StateFormat, Variables, VariantSpec
from ..shared.arguments import POSITIVE


class Step(NamedTuple):
    """k (..., T, N), v (..., T, D), 1 + beta |k|^2 and b = beta / that (..., T, D)."""

    k: Array
    v: Array
    whole: Array
    b: Array


def _step(c: Variables) -> Step:
    k, v, beta = (cast(c.xp, y, c.dtype) for y in (c.k, c.v, c.beta))
    whole = 1 + beta * c.xp.sum(k * k, axis=-1, keepdims=True)
    return Step(k, v, whole, beta / whole)


def to_core(c: Variables) -> Inputs:
    """a = 1 - b k^2, x = b v k: (..., T, D N)"""
    k, v, _, b = _step(c)
    a, x = 1 - b[..., None] * (k * k)[..., None, :], (b * v)[..., None] * k[..., None, :]
    return Inputs(_flat(c, x), _flat(c, a))


def _flat(c: Variables, y: Array) -> Array:
    return c.xp.reshape(y, (*y.shape[:-2], y.shape[-2] * y.shape[-1]))


def _apart(c: Variables, y: Array) -> Array:
    """(..., D N) as (..., D, N)."""
    return c.xp.reshape(y, (*y.shape[:-1], c.v.shape[-1], c.k.shape[-1]))


def to_core_vjp(c: Variables, d: Inputs) -> dict[str, Array]:
    """db = -<da, k^2> + <dx, v k>; dbeta = db / whole^2, dk gets -2 beta b db / whole k."""
    xp, (k, v, whole, b) = c.xp, _step(c)
    da, dx = _apart(c, d.a), _apart(c, d.x)
    along = xp.sum(dx * k[..., None, :], axis=-1)  # (..., T, D)
    db = v * along - xp.sum(da * (k * k)[..., None, :], axis=-1)
    dk = xp.sum((b * v)[..., None] * dx - 2 * b[..., None] * da * k[..., None, :], axis=-2)
    dk = dk - 2 * k * xp.sum(b * b * db, axis=-1, keepdims=True)
    return {"k": dk, "v": b * along, "beta": db / (whole * whole)}


def from_core(c: Variables, out: Array) -> Array:
    """sum_n q_n h_n"""
    return c.xp.sum(_apart(c, out) * cast(c.xp, c.q, c.dtype)[..., None, :], axis=-1)


def from_core_vjp(c: Variables, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    """dh = q dout, dq = sum_d dout_d h_d"""
    xp, dout = c.xp, cast(c.xp, dout, c.dtype)[..., None]
    dh = dout * cast(xp, c.q, c.dtype)[..., None, :]
    return _flat(c, dh), {"q": xp.sum(dout * _apart(c, out), axis=-2)}


def pack(c: Variables, state: Any) -> Any:
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
