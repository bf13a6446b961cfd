"""Comba: a delta rule whose erase vector p differs from its key and reads the state before its decay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Decay, Erase, ReadState
from ...products import products
from ...spec import ArgSpec, VariantSpec
from ..shared.arguments import QUERIES, STRENGTH, TOKEN_DECAY, UNIT_KEYS, VALUES
from ..shared.projections import LOG_DECAY, SAMPLES, GatedStrengthOptions, check_raw, gate_arrays, raw_options

SPEC = VariantSpec(
    name="comba",
    sentence="A delta rule whose erase vector p differs from its key and reads the state before its decay.",
    equation="S_t = e^{g_t} S_{t-1} + k_t^T beta_t (v_t - p_t S_{t-1});  out_t = scale q_t S_t",
    paper="Hu et al., Comba, arXiv 2506.02475",
    arrays={
        "q": QUERIES,
        "k": UNIT_KEYS,
        "v": VALUES,
        "p": ArgSpec("T Hk K", "erase vectors"),
        "g": TOKEN_DECAY,
        "beta": STRENGTH,
        **gate_arrays(),
    },
    change=products("q", "k", "v", "beta", r="p", **LOG_DECAY),
    decay=Decay.SCALAR,
    erase=Erase.DELTA,
    erase_reads=ReadState.PREVIOUS,
    options=raw_options(),
    check_options=check_raw,
)


@public(SPEC, replace(SAMPLES, distributions={"k": "unit", "p": "half unit"}))
def comba(
    q: Any,
    k: Any,
    v: Any,
    p: Any,
    g: Any,
    beta: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    **options: Unpack[GatedStrengthOptions],
) -> Any:
    """Comba: a delta rule whose erase vector p differs from its key and reads the state before its decay.

        S_t = e^{g_t} S_{t-1} + k_t^T beta_t (v_t - p_t S_{t-1})
        out_t = scale q_t S_t

    q        (..., T, Hq, K)   queries (after the layer's output correction q - D p, where it has one)
    k        (..., T, Hk, K)   keys, of unit length, or of any with qk_l2norm
    v        (..., T, H, V)    values
    p        (..., T, Hk, K)   erase vectors, a fraction of k (of unit length) in the paper
    g        (..., T, H)       log decay of the token, <= 0, -inf a hard reset; with A_log a raw projection
    beta     (..., T, H)       write strength in [0, 2]
    A_log    (H,)              given, the log decay is -e^{A_log} softplus(g + dt_bias), as in Mamba-2
    dt_bias  (H,)              added to the raw g

    qk_l2norm=True: q and k are divided by their length, zero rows stay 0 (and their gradient is passed unchanged).
    l2norm_eps: |q|^2 + eps and |k|^2 + eps under the root, as published models have it (1e-6).
    beta_sigmoid=True: beta is a raw projection, sigmoid(beta) is used, with allow_neg_eigval=True twice that.
    lower_bound, below 0: the log decay is lower_bound sigmoid(e^{A_log} (g + dt_bias)); without A_log its factor is 1.
    p is not normalised.
    p reads the state before its decay; a public recurrent reference reads the decayed state and disagrees with its
    own chunk form. scale=None means K**-0.5.
    Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR, erase DELTA (reads the PREVIOUS state). Common options: linattn_np.Options.
    Hu et al., Comba, arXiv 2506.02475.
    """
