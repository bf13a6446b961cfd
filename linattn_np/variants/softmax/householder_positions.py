"""Householder positions: softmax attention of queries and keys less their own delta-rule outputs."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Readout
from ...runtime.arrays import Array
from ...softmax.core import CORE
from ...softmax.readouts.householder import HouseholderInputs
from ...softmax.types import HouseholderCache
from ...spec import Call, ChangeOfVariables, Samples, StateFormat, VariantSpec
from ..shared.arguments import KEYS, QUERIES, VALUES
from ..shared.attention import ATTENTION, DIRECTIONS, MAP_STRENGTH, AttentionOptions, check_options


def to_core(c: Call) -> HouseholderInputs:
    """The core's arrays are the caller's."""
    return HouseholderInputs(c.q, c.k, c.v, c.w, c.beta)


def to_core_vjp(c: Call, d: HouseholderInputs) -> dict[str, Array]:
    """Gradients by public name."""
    return d._asdict()


SPEC = VariantSpec(
    name="householder_positions",
    sentence="Softmax attention of queries and keys less their own delta-rule outputs, whose keys and values are w.",
    equation="P_t = (I - beta_t w_t^T w_t) P_{t-1};  p_tj ~ e^{scale (q_t P_t) . (k_j P_j)}, sum_j p_tj = 1;  "
    "out_t = sum_j p_tj v_j",
    paper="with reflections a case of PaTH: Yang et al., PaTH Attention, arXiv 2505.16381",
    arrays={"q": QUERIES, "k": KEYS, "v": VALUES, "w": DIRECTIONS, "beta": MAP_STRENGTH},
    change=ChangeOfVariables(to_core, to_core_vjp),
    core=CORE,
    readout=Readout.SOFTMAX,
    state=StateFormat(
        HouseholderCache,
        wide=True,
        unit=frozenset("P"),
        axes={"k": "L Hk K", "v": "L H V", "P": "Hk K K", "length": ""},
    ),
    options=ATTENTION,
    check_options=check_options,
)


# weak maps: P shrinks by the product of all |1 - beta|, but rounding errors are relative to 1, not to P
@public(SPEC, Samples({"w": "direction", "beta": "share"}, ({}, {"window": 9})))
def householder_positions(q: Any, k: Any, v: Any, w: Any, beta: Any, **options: Unpack[AttentionOptions]) -> Any:
    """Softmax attention of queries and keys less their own delta-rule outputs, whose keys and values are w.

        P_t = (I - beta_t w_t^T w_t) P_{t-1}, P_0 = I
        p_tj ~ e^{scale (q_t P_t) . (k_j P_j)}, sum_j p_tj = 1
        out_t = sum_j p_tj v_j

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    w      (..., T, Hk, K)   directions of the maps, of unit length
    beta   (..., T, Hk)      strengths of the maps in [0, 2]; 2 is a reflection, and then this is path_attention

    window: a query reads its own token and the window - 1 before it; None: all of the past.
    normalize: False leaves the denominator out.
    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and a HouseholderCache if return_state, with slots as
    in softmax_attention, keys times P of their token, and P of the last one.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: softmax. Common options: linattn_np.Options.
    With reflections a case of PaTH: Yang et al., PaTH Attention, arXiv 2505.16381.
    """
