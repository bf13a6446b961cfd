"""DeltaFormer: softmax attention whose values are new to what the past predicts."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.types import Decay, Erase, Readout
from ...runtime.arrays import Array
from ...softmax.core import CORE
from ...softmax.readouts.deltaformer import DeltaInputs
from ...softmax.types import GatedCache
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, StateFormat, VariantSpec
from ..shared.arguments import KEYS, LOG_DECAY, QUERIES, STRENGTHS, VALUES


class DeltaformerOptions(Options, total=False):
    """The common options, and whether both kernels are normalised."""

    normalize: bool


def to_core(c: Call) -> DeltaInputs:
    """The core's arrays are the caller's."""
    return DeltaInputs(c.q, c.k, c.v, c.beta, c.w, c.g)


def to_core_vjp(c: Call, d: DeltaInputs) -> dict[str, Array]:
    """Gradients by public name."""
    return d._asdict()


SPEC = VariantSpec(
    name="deltaformer",
    called="DeltaFormer",
    sentence="DeltaFormer: softmax attention whose values are new to what the past predicts.",
    equation="u_t = v_t - beta_t sum_{j<t} p_tj u_j, p_tj ~ e^{scale w_t . k_j + g_t + ... + g_{j+1}}, sum_j p_tj = 1;"
             "  out_t = sum_{j<=t} a_tj u_j, a_tj ~ e^{scale q_t . k_j + g_t + ... + g_{j+1}}, sum_j a_tj = 1",
    paper="Zhong et al., Understanding Transformer from the Perspective of Associative Memory, arXiv 2505.19488",
    arrays={"q": QUERIES, "k": KEYS, "v": VALUES,
            "beta": ArgSpec("T H", "strength in [0, 2]", limits=STRENGTHS),
            "w": ArgSpec("T Hk K", "keys that predict the values; None: k", True),
            "g": ArgSpec("T H", "log decay of the token, <= 0", True, limits=LOG_DECAY)},
    change=ChangeOfVariables(to_core, to_core_vjp),
    core=CORE,
    decay=Decay.SCALAR,
    erase=Erase.DELTA,
    readout=Readout.SOFTMAX,
    state=StateFormat(GatedCache, wide=True, axes={"k": "L Hk K", "v": "L H V", "b": "L H", "length": ""}),
    options={"normalize": True},
)  # fmt: skip


@public(SPEC, Samples({"k": "half unit"}, options=({}, {"normalize": False})))
def deltaformer(
    q: Any, k: Any, v: Any, beta: Any, w: Any = None, g: Any = None, **options: Unpack[DeltaformerOptions]
) -> Any:
    """DeltaFormer: softmax attention whose values are new to what the past predicts.

        u_t = v_t - beta_t sum_{j<t} p_tj u_j, p_tj ~ e^{scale w_t . k_j + g_t + ... + g_{j+1}}, sum_j p_tj = 1
        out_t = sum_{j<=t} a_tj u_j, a_tj ~ e^{scale q_t . k_j + g_t + ... + g_{j+1}}, sum_j a_tj = 1

    q     (..., T, Hq, K)   queries
    k     (..., T, Hk, K)   keys
    v     (..., T, H, V)    values
    beta  (..., T, H)       strength in [0, 2]
    w     (..., T, Hk, K)   keys that predict the values; None: k
    g     (..., T, H)       log decay of the token, <= 0; optional

    normalize: False leaves both denominators out: e^{scale w_t . k_j} predicts, e^{scale q_t . k_j} reads. u is bounded
    as long as beta_t e^{scale w_t . k_t} is below 2. In the quotient p_tj a finite g_t cancels, however large it is;
    after a reset, g_t = -inf, nothing predicts: u_t = v_t.
    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and a GatedCache if return_state, with u in the place
    of values and slots as in softmax_attention. u is computed once for each head of the values.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: softmax. Common options: linattn_np.Options.
    Zhong et al., Understanding Transformer from the Perspective of Associative Memory, arXiv 2505.19488.
    """
