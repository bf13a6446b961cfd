"""PaTH attention: between a query and a key stand the position maps of the tokens between them."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Decay, Readout
from ...runtime.arrays import Array, cast, device, is_cupy
from ...runtime.constants import constant_zeros
from ...softmax.core import CORE
from ...softmax.types import GatedCache, Inputs, Ungated
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, StateFormat, VariantSpec
from ..shared.arguments import KEYS, LOG_DECAY, QUERIES, VALUES
from ..shared.attention import ATTENTION, DIRECTIONS, MAP_STRENGTH, AttentionOptions, check_options


def to_core(c: Call) -> Inputs:
    """The core's arrays; without g there is no decay."""
    g, heads = c.g, c.sizes.get("Hq", c.sizes["H"])
    beta = cast(c.xp, c.beta, c.dtype) if is_cupy(c.xp) else c.beta  # once, for kernels
    if g is None:
        zero = constant_zeros(c.xp, (1,) * (len(c.batch) + 2), c.dtype, device(c.v))
        g = c.xp.broadcast_to(zero, (*c.batch, c.sizes["T"], heads))
        return Ungated(c.q, c.k, c.v, g, None, c.w, beta)
    return Inputs(c.q, c.k, c.v, g, None, c.w, beta)


def to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    """Gradients by public name."""
    return {"q": d.q, "k": d.k, "v": d.v, "w": d.w, "beta": d.beta, "g": d.g}


SPEC = VariantSpec(
    name="path_attention",
    called="PaTH attention",
    sentence="PaTH attention: softmax attention whose logits pass the Householder-like maps of the tokens between.",
    equation="H_t = I - beta_t w_t^T w_t;  p_tj ~ e^{scale q_t H_t ... H_{j+1} k_j^T + g_t + ... + g_{j+1}}, "
    "sum_j p_tj = 1;  out_t = sum_j p_tj v_j",
    paper="Yang et al., PaTH Attention, arXiv 2505.16381",
    arrays={
        "q": QUERIES,
        "k": KEYS,
        "v": VALUES,
        "w": DIRECTIONS,
        "beta": MAP_STRENGTH,
        "g": ArgSpec("T Hq", "log decay of the token, <= 0", True, limits=LOG_DECAY),
    },
    change=ChangeOfVariables(to_core, to_core_vjp, gate="g"),
    core=CORE,
    decay=Decay.SCALAR,
    readout=Readout.SOFTMAX,
    state=StateFormat(GatedCache, wide=True),
    options=ATTENTION,
    check_options=check_options,
)


@public(SPEC, Samples({"w": "direction"}, ({}, {"window": 9}, {"normalize": False})))
def path_attention(
    q: Any, k: Any, v: Any, w: Any, beta: Any, g: Any = None, **options: Unpack[AttentionOptions]
) -> Any:
    """PaTH attention: softmax attention whose logits pass the Householder-like maps of the tokens between.

        H_t = I - beta_t w_t^T w_t
        p_tj ~ e^{scale q_t H_t ... H_{j+1} k_j^T + g_t + ... + g_{j+1}}, sum_j p_tj = 1
        out_t = sum_j p_tj v_j

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    w      (..., T, Hk, K)   directions of the maps, of unit length: products contract for beta |w|^2 <= 2
    beta   (..., T, Hk)      strengths of the maps in [0, 2]; 2 is a reflection
    g      (..., T, Hq)      log decay of the token, <= 0, -inf a hard reset; the scale does not act on it; optional

    window: a query reads its own token and the window - 1 before it; None: all of the past.
    normalize: False leaves the denominator out.
    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and a GatedCache if return_state, with slots as in
    softmax_attention; its keys are mapped by every token after their own, k_j H_{j+1} ... H_t.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: softmax. Common options: linattn_np.Options.
    Yang et al., PaTH Attention, arXiv 2505.16381.
    """
