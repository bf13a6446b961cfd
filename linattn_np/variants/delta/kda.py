"""Kimi delta attention: the gated delta rule with one decay per key channel."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Decay, Erase
from ...products import products
from ...spec import VariantSpec
from ..shared.arguments import CHANNEL_DECAY, QUERIES, STRENGTH, UNIT_KEYS, VALUES
from ..shared.projections import LOG_DECAY, SAMPLES, GatedStrengthOptions, check_raw, gate_arrays, raw_options

SPEC = VariantSpec(
    name="kda",
    called="Kimi delta attention",
    sentence="The gated delta rule with one decay per key channel.",
    equation="S~ = diag(e^{g_t}) S_{t-1};  S_t = S~ + k_t^T beta_t (v_t - k_t S~);  out_t = scale q_t S_t",
    paper="Kimi Team, Kimi Linear, arXiv 2510.26692",
    arrays={"q": QUERIES, "k": UNIT_KEYS, "v": VALUES, "g": CHANNEL_DECAY, "beta": STRENGTH, **gate_arrays("H K")},
    change=products("q", "k", "v", "beta", r="k", **LOG_DECAY),
    decay=Decay.VECTOR,
    erase=Erase.DELTA,
    options=raw_options(),
    check_options=check_raw,
)


@public(SPEC, SAMPLES)
def kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    **options: Unpack[GatedStrengthOptions],
) -> Any:
    """Kimi delta attention: the gated delta rule with one decay per key channel.

        S~ = diag(e^{g_t}) S_{t-1}
        S_t = S~ + k_t^T beta_t (v_t - k_t S~)
        out_t = scale q_t S_t

    q        (..., T, Hq, K)   queries
    k        (..., T, Hk, K)   keys, of unit length (stable for beta |k|^2 <= 2), or of any with qk_l2norm
    v        (..., T, H, V)    values
    g        (..., T, H, K)    log decay of the key channels, <= 0, -inf a hard reset; with A_log a raw projection
    beta     (..., T, H)       write strength in [0, 2]
    A_log    (H,)              given, the log decay is -e^{A_log} softplus(g + dt_bias), as in Mamba-2
    dt_bias  (H, K)            added to the raw g

    qk_l2norm=True: q and k are divided by their length, zero rows stay 0 (and their gradient is passed unchanged).
    l2norm_eps: |q|^2 + eps and |k|^2 + eps under the root, as published models have it (1e-6).
    beta_sigmoid=True: beta is a raw projection, sigmoid(beta) is used, with allow_neg_eigval=True twice that.
    lower_bound, below 0: the log decay is lower_bound sigmoid(e^{A_log} (g + dt_bias)); without A_log its factor is 1.
    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay VECTOR, erase DELTA. Common options: linattn_np.Options.
    Kimi Team, Kimi Linear, arXiv 2510.26692.
    """
