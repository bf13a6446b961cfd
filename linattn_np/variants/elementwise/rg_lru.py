"""The real-gated linear recurrent unit of Griffin and RecurrentGemma."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.types import Inputs
from ...ops.gates import sigmoid, sigmoid_vjp, softplus, softplus_vjp
from ...runtime.arrays import Array, cast, over_tokens
from ...spec import ArgSpec, ChangeOfVariables, Variables, VariantSpec
from ..shared.arguments import CHANNELS

RATE = 8.0  # c of the paper


def _log_decay(c: Variables) -> Array:
    """g = -c softplus(Lambda) sigmoid(r)"""
    Lambda, r = cast(c.xp, c.Lambda, c.dtype), cast(c.xp, c.r, c.dtype)
    return -RATE * softplus(c.xp, Lambda) * sigmoid(c.xp, r)


def _root(c: Variables, g: Array) -> Array:
    """sqrt(1 - e^{2 g})"""
    return c.xp.sqrt(-c.xp.expm1(2 * g))


def to_core(c: Variables) -> Inputs:
    """sqrt(1 - a^2) sigmoid(i) x, log a"""
    g = _log_decay(c)
    return Inputs(_root(c, g) * sigmoid(c.xp, cast(c.xp, c.i, c.dtype)) * cast(c.xp, c.x, c.dtype), None, g)


def to_core_vjp(c: Variables, d: Inputs) -> dict[str, Array]:
    """The decay decays and scales the input: two paths. The slope of the root is taken as 0 where a is 1."""
    xp, g = c.xp, _log_decay(c)
    x, i, r, Lambda = (cast(xp, y, c.dtype) for y in (c.x, c.i, c.r, c.Lambda))
    root, gate = _root(c, g), sigmoid(xp, i)
    is_open = root > 0
    slope = xp.where(is_open, xp.exp(2 * g) / xp.where(is_open, root, xp.ones_like(root)), xp.zeros_like(root))
    dg = d.g - d.x * gate * x * slope
    rate = -RATE * softplus(xp, Lambda)
    return {"x": root * gate * d.x, "i": sigmoid_vjp(xp, i, root * x * d.x), "r": sigmoid_vjp(xp, r, rate * dg),
            "Lambda": softplus_vjp(xp, Lambda, over_tokens(xp, -RATE * sigmoid(xp, r) * dg))}  # fmt: skip


SPEC = VariantSpec(
    name="rg_lru",
    called="RG-LRU",
    sentence="A linear recurrent unit with a gated decay and inputs of one variance.",
    equation="h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(i_t) x_t, log a_t = -8 softplus(Lambda) sigmoid(r_t);  "
    "out_t = scale h_t",
    paper="De et al., Griffin, arXiv 2402.19427",
    arrays={
        "x": CHANNELS,
        "r": ArgSpec("T D", "recurrence gate before its sigmoid"),
        "i": ArgSpec("T D", "input gate before its sigmoid"),
        "Lambda": ArgSpec("D", "rate of the decay before its softplus"),
    },
    change=ChangeOfVariables(to_core, to_core_vjp, query=None, key=None, value="x"),
    core=CORE,
    scaled=False,
)


@public(SPEC)
def rg_lru(x: Any, r: Any, i: Any, Lambda: Any, **options: Unpack[Options]) -> Any:
    """RG-LRU: a linear recurrent unit with a gated decay and inputs of one variance.

        h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(i_t) x_t, log a_t = -8 softplus(Lambda) sigmoid(r_t)
        out_t = scale h_t

    x        (..., T, D)   inputs
    r        (..., T, D)   recurrence gate before its sigmoid
    i        (..., T, D)   input gate before its sigmoid
    Lambda   (D,)          rate of the decay before its softplus

    sqrt(1 - a^2) is computed without cancellation; its slope is taken as 0 where a is 1. RecurrentGemma takes in the
    first token of a sequence with the factor 1: divide x_1 by sqrt(1 - a_1^2). scale=None means 1.
    Returns out (..., T, D), and the state (..., D) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: elementwise. Common options: linattn_np.Options.
    De et al., Griffin, arXiv 2402.19427.
    """
