"""Forgetting attention (FoX): softmax attention whose past fades."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Decay, Readout
from ...runtime.arrays import Array
from ...softmax.core import CORE
from ...softmax.types import GatedCache, Inputs
from ...spec import Call, ChangeOfVariables, Samples, StateFormat, VariantSpec
from ..shared.arguments import KEYS, QUERIES, VALUES
from ..shared.attention import ATTENTION, QUERY_DECAY, AttentionOptions, check_options


def to_core(c: Call) -> Inputs:
    """The core's arrays are the caller's."""
    return Inputs(c.q, c.k, c.v, c.g)


def to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    """Gradients by public name."""
    return {"q": d.q, "k": d.k, "v": d.v, "g": d.g}


SPEC = VariantSpec(
    name="forgetting_attention",
    sentence="Forgetting attention (FoX): softmax attention whose past fades.",
    equation="p_tj ~ e^{scale q_t . k_j + g_t + ... + g_{j+1}}, sum_j p_tj = 1;  out_t = sum_j p_tj v_j",
    paper="Lin et al., Forgetting Transformer, arXiv 2503.02130",
    arrays={"q": QUERIES, "k": KEYS, "v": VALUES, "g": QUERY_DECAY},
    change=ChangeOfVariables(to_core, to_core_vjp),
    core=CORE,
    decay=Decay.SCALAR,
    readout=Readout.SOFTMAX,
    state=StateFormat(GatedCache, wide=True),
    options=ATTENTION,
    check_options=check_options,
)


@public(SPEC, Samples(options=({}, {"window": 9}, {"normalize": False})))
def forgetting_attention(q: Any, k: Any, v: Any, g: Any, **options: Unpack[AttentionOptions]) -> Any:
    """Forgetting attention (FoX): softmax attention whose past fades.

        p_tj ~ e^{scale q_t . k_j + g_t + ... + g_{j+1}}, sum_j p_tj = 1
        out_t = sum_j p_tj v_j

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    g      (..., T, Hq)      log decay of the token, <= 0, -inf a hard reset; the scale does not act on it

    window: a query reads its own token and the window - 1 before it; None: all of the past.
    normalize: False leaves the denominator out.
    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and a GatedCache if return_state, with slots as in
    softmax_attention.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: softmax. Common options: linattn_np.Options.
    Lin et al., Forgetting Transformer, arXiv 2503.02130.
    """
