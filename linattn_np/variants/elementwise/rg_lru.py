"""The real-gated linear recurrent unit of Griffin and RecurrentGemma."""

from __future__ import annotations

import functools
from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.readouts.gated import gated
from ...elementwise.types import GatedInputs, Inputs
from ...ops.complement import complement, complement_vjp
from ...ops.gates import root, root_vjp, sigmoid, sigmoid_vjp, softplus, softplus_vjp
from ...ops.product import multiple, product
from ...ops.sums import over_tokens
from ...runtime.arrays import Array, cast
from ...spec import ArgSpec, Call, ChangeOfVariables, VariantSpec
from ..shared.arguments import CHANNELS

RATE = 8.0  # c of the paper


def _rate(c: Call) -> Array:
    """-c softplus(Lambda)"""
    return multiple(c.xp, -RATE, softplus(c.xp, cast(c.xp, c.Lambda, c.dtype)), c.dtype)


def _log_decay(c: Call) -> Array:
    """g = -c softplus(Lambda) sigmoid(r)"""
    return product(c.xp, _rate(c), sigmoid(c.xp, cast(c.xp, c.r, c.dtype)), dtype=c.dtype)


def _rest(c: Call, g: Array) -> Array:
    """1 - e^{2 g}"""
    return complement(c.xp, multiple(c.xp, 2.0, g, c.dtype), c.dtype)


def to_core(c: Call) -> Inputs | GatedInputs:
    """sqrt(1 - a^2) sigmoid(i) x, log a"""
    if (own := gated(c, "rg_lru", c.x, c.r, c.i, c.Lambda)) is not None:
        return own
    g = _log_decay(c)
    gate = sigmoid(c.xp, cast(c.xp, c.i, c.dtype))
    return Inputs(product(c.xp, root(c.xp, _rest(c, g), c.dtype), gate, c.x, dtype=c.dtype), None, g)


def to_core_vjp(c: Call, d: Inputs | GatedInputs) -> dict[str, Array]:
    """The decay decays and scales the input: two paths. The slope of the root is taken as 0 where a is 1."""
    if isinstance(d, GatedInputs):
        return {"x": d.x, "r": d.y, "i": d.z, "Lambda": d.parameters[0]}
    xp, g = c.xp, _log_decay(c)
    times = functools.partial(product, xp, dtype=c.dtype)
    i, r, Lambda = (cast(xp, y, c.dtype) for y in (c.i, c.r, c.Lambda))
    rest, gate = _rest(c, g), sigmoid(xp, i)
    driven = times(d.x, c.x)  # the gradient of sqrt(rest) sigmoid(i)
    drest = root_vjp(xp, rest, times(driven, gate), c.dtype)
    dg = complement_vjp(xp, multiple(xp, 2.0, g, c.dtype), d.g, multiple(xp, 2.0, drest, c.dtype), c.dtype)
    of_rate = multiple(xp, -RATE, times(sigmoid(xp, r), dg), c.dtype)
    scale = root(xp, rest, c.dtype)
    return {"x": times(scale, gate, d.x), "i": sigmoid_vjp(xp, i, times(scale, driven)),
            "r": sigmoid_vjp(xp, r, times(_rate(c), dg)),
            "Lambda": softplus_vjp(xp, Lambda, over_tokens(xp, of_rate))}  # fmt: skip


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
    change=ChangeOfVariables(to_core, to_core_vjp, query=None, key=None, value="x", by_tokens=True),
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
