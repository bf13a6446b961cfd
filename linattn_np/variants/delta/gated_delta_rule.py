"""Gated delta rule: decay the state, erase what the key held, write the new value."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Decay, Erase
from ...products import products
from ...spec import VariantSpec
from ..shared.arguments import QUERIES, STRENGTH, TOKEN_DECAY, UNIT_KEYS, VALUES
from ..shared.projections import (
    LOG_DECAY,
    SAMPLES,
    MappedGatedOptions,
    check_raw,
    gate_arrays,
    raw_options,
    with_feature_map,
)

SPEC = with_feature_map(
    VariantSpec(
        name="gated_delta_rule",
        sentence="Decay the state, erase what the key held, write the new value.",
        equation="S~ = e^{g_t} S_{t-1};  S_t = S~ + k_t^T beta_t (v_t - k_t S~);  out_t = scale q_t S_t",
        paper="Yang, Kautz, Hatamizadeh, Gated Delta Networks, arXiv 2412.06464",
        arrays={"q": QUERIES, "k": UNIT_KEYS, "v": VALUES, "g": TOKEN_DECAY, "beta": STRENGTH, **gate_arrays()},
        change=products("q", "k", "v", "beta", r="k", **LOG_DECAY),
        decay=Decay.SCALAR,
        erase=Erase.DELTA,
        options=raw_options(),
        check_options=check_raw,
    )
)


@public(SPEC, SAMPLES)
def gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    **options: Unpack[MappedGatedOptions],
) -> Any:
    """Gated delta rule: decay the state, erase what the key held, write the new value.

        S~ = e^{g_t} S_{t-1}
        S_t = S~ + k_t^T beta_t (v_t - k_t S~)
        out_t = scale q_t S_t

    q        (..., T, Hq, K)   queries
    k        (..., T, Hk, K)   keys, of unit length (stable for beta |k|^2 <= 2), or of any with qk_l2norm
    v        (..., T, H, V)    values
    g        (..., T, H)       log decay of the token, <= 0, -inf a hard reset; with A_log a raw projection
    beta     (..., T, H)       write strength in [0, 2]; above 1 the erased part changes sign
    A_log    (H,)              given, the log decay is -e^{A_log} softplus(g + dt_bias), as in Mamba-2
    dt_bias  (H,)              added to the raw g

    feature_map: a map of q and k as in linear_attention, before qk_l2norm; the state is then (..., H, M, V).
    qk_l2norm=True: q and k are divided by their length, zero rows stay 0 (and their gradient is passed unchanged).
    l2norm_eps: |q|^2 + eps and |k|^2 + eps under the root, as published models have it (1e-6).
    beta_sigmoid=True: beta is a raw projection, sigmoid(beta) is used, with allow_neg_eigval=True twice that.
    lower_bound, below 0: the log decay is lower_bound sigmoid(e^{A_log} (g + dt_bias)); without A_log its factor is 1.
    The key reads the decayed state. scale=None means K**-0.5.
    Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR, erase DELTA. Common options: linattn_np.Options.
    Yang, Kautz, Hatamizadeh, Gated Delta Networks, arXiv 2412.06464.
    """
