"""Stick-breaking attention: a query takes shares of what nearer tokens left."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.types import Readout
from ...runtime.arrays import Array
from ...softmax.core import CORE
from ...softmax.readouts.stick_breaking import StickInputs
from ...softmax.types import KeyValueCache
from ...spec import Call, ChangeOfVariables, Samples, StateFormat, VariantSpec
from ..shared.arguments import KEYS, QUERIES, VALUES


class StickBreakingOptions(Options, total=False):
    """The common options, and whether a query reads its own token."""

    attend_current: bool


def to_core(c: Call) -> StickInputs:
    """The core's arrays are the caller's."""
    return StickInputs(c.q, c.k, c.v)


def to_core_vjp(c: Call, d: StickInputs) -> dict[str, Array]:
    """Gradients by public name."""
    return d._asdict()


SPEC = VariantSpec(
    name="stick_breaking_attention",
    called="Stick-breaking attention",
    sentence="Stick-breaking attention: a query takes shares of what nearer tokens left.",
    equation="s_tj = sigmoid(scale q_t . k_j);  a_tj = s_tj prod_{j<i<t} (1 - s_ti);  out_t = sum_{j<t} a_tj v_j",
    paper="Tan et al., Scaling Stick-Breaking Attention, arXiv 2410.17980",
    arrays={"q": QUERIES, "k": KEYS, "v": VALUES},
    change=ChangeOfVariables(to_core, to_core_vjp),
    core=CORE,
    readout=Readout.SOFTMAX,
    state=StateFormat(KeyValueCache, wide=True),
    options={"attend_current": False},
)


@public(SPEC, Samples(options=({}, {"attend_current": True})))
def stick_breaking_attention(q: Any, k: Any, v: Any, **options: Unpack[StickBreakingOptions]) -> Any:
    """Stick-breaking attention: a query takes shares of what nearer tokens left.

        s_tj = sigmoid(scale q_t . k_j)
        a_tj = s_tj prod_{j<i<t} (1 - s_ti)
        out_t = sum_{j<t} a_tj v_j

    q  (..., T, Hq, K)   queries
    k  (..., T, Hk, K)   keys
    v  (..., T, H, V)    values

    attend_current: True lets a query take of its own token first, j and i up to t.
    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and a KeyValueCache if return_state, with slots as in
    softmax_attention. Weights of a query sum to at most 1: values of 1 give the sum.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: softmax. Common options: linattn_np.Options.
    Tan et al., Scaling Stick-Breaking Attention, arXiv 2410.17980.
    """
