"""minLSTM: an LSTM whose gates do not read the state, and sum to 1."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.types import Inputs
from ...ops.gates import sigmoid, sigmoid_vjp, softplus
from ...runtime.arrays import Array, cast
from ...spec import ArgSpec, ChangeOfVariables, Variables, VariantSpec
from ..shared.arguments import CHANNELS


def _balance(c: Variables) -> Array:
    """log of the quotient of the gates: sigmoid(f) / (sigmoid(f) + sigmoid(i)) is its sigmoid."""
    f, i = cast(c.xp, c.f, c.dtype), cast(c.xp, c.i, c.dtype)
    return softplus(c.xp, -i) - softplus(c.xp, -f)


def to_core(c: Variables) -> Inputs:
    """The gates over their sum."""
    y = _balance(c)
    return Inputs(sigmoid(c.xp, -y) * cast(c.xp, c.x, c.dtype), sigmoid(c.xp, y))


def to_core_vjp(c: Variables, d: Inputs) -> dict[str, Array]:
    """Through the balance of the gates."""
    xp, y = c.xp, _balance(c)
    dy = sigmoid_vjp(xp, y, d.a - d.x * cast(xp, c.x, c.dtype))
    df, di = (s * sigmoid(xp, -cast(xp, z, c.dtype)) for s, z in ((dy, c.f), (-dy, c.i)))
    return {"x": sigmoid(xp, -y) * d.x, "f": df, "i": di}


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
    change=ChangeOfVariables(to_core, to_core_vjp, query=None, key=None, value="x"),
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
