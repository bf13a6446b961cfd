"""minLSTM: an LSTM whose gates do not read the state, and sum to 1."""

from __future__ import annotations

import functools
from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.readouts.gated import gated
from ...elementwise.types import GatedInputs, Inputs
from ...ops.gates import log_sigmoid, log_sigmoid_vjp, sigmoid, sigmoid_vjp
from ...ops.product import multiple, product
from ...ops.sums import difference
from ...runtime.arrays import Array, cast
from ...spec import ArgSpec, Call, ChangeOfVariables, VariantSpec
from ..shared.arguments import CHANNELS


def _balance(c: Call) -> Array:
    """log of the quotient of the gates: sigmoid(f) / (sigmoid(f) + sigmoid(i)) is its sigmoid."""
    return difference(c.xp, *(log_sigmoid(c.xp, cast(c.xp, y, c.dtype)) for y in (c.f, c.i)))


def to_core(c: Call) -> Inputs | GatedInputs:
    """The gates over their sum."""
    if (own := gated(c, "min_lstm", c.x, c.f, c.i)) is not None:
        return own
    xp, y = c.xp, _balance(c)
    rest = sigmoid(xp, multiple(xp, -1.0, y, c.dtype))
    return Inputs(product(xp, rest, c.x, dtype=c.dtype), sigmoid(xp, y))


def to_core_vjp(c: Call, d: Inputs | GatedInputs) -> dict[str, Array]:
    """Through the balance of the gates."""
    if isinstance(d, GatedInputs):
        return {"x": d.x, "f": d.y, "i": d.z}
    xp, y = c.xp, _balance(c)
    negative = functools.partial(multiple, xp, -1.0, dtype=c.dtype)
    dy = sigmoid_vjp(xp, y, difference(xp, d.a, product(xp, d.x, c.x, dtype=c.dtype)))
    df, di = (log_sigmoid_vjp(xp, cast(xp, z, c.dtype), s) for s, z in ((dy, c.f), (negative(dy), c.i)))
    return {"x": product(xp, sigmoid(xp, negative(y)), d.x, dtype=c.dtype), "f": df, "i": di}


SPEC = VariantSpec(
    name="min_lstm",
    called="minLSTM",
    sentence="An LSTM whose gates do not read the state, and sum to 1.",
    equation="h_t = (f'_t h_{t-1} + i'_t x_t) / (f'_t + i'_t), f'_t = sigmoid(f_t), i'_t = sigmoid(i_t);  "
    "out_t = scale h_t",
    paper="Feng, Tung, Ahmed, Bengio, Hajimirsadeghi, Were RNNs all we needed?, arXiv 2410.01201",
    arrays={
        "x": CHANNELS,
        "f": ArgSpec("T D", "forget gate before its sigmoid"),
        "i": ArgSpec("T D", "input gate before its sigmoid"),
    },
    change=ChangeOfVariables(to_core, to_core_vjp, query=None, key=None, value="x", by_tokens=True),
    core=CORE,
    scaled=False,
)


@public(SPEC)
def min_lstm(x: Any, f: Any, i: Any, **options: Unpack[Options]) -> Any:
    """minLSTM: an LSTM whose gates do not read the state, and sum to 1.

        h_t = (f'_t h_{t-1} + i'_t x_t) / (f'_t + i'_t), f'_t = sigmoid(f_t), i'_t = sigmoid(i_t)
        out_t = scale h_t

    x      (..., T, D)   candidate states
    f      (..., T, D)   forget gate before its sigmoid
    i      (..., T, D)   input gate before its sigmoid

    scale=None means 1. Returns out (..., T, D), and the state (..., D) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: elementwise. Common options: linattn_np.Options.
    Feng, Tung, Ahmed, Bengio, Hajimirsadeghi, Were RNNs all we needed?, arXiv 2410.01201.
    """
