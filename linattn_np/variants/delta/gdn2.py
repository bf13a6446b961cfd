"""Gated DeltaNet-2: a delta rule with a decay and an erase gate per key channel, and a write gate per value channel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Decay, Erase
from ...products import products
from ...spec import ArgSpec, VariantSpec
from ..shared.arguments import CHANNEL_DECAY, QUERIES, STRENGTHS, UNIT_KEYS, VALUES
from ..shared.projections import LOG_DECAY, SAMPLES, GateOptions, check_raw, gate_arrays, raw_options

SPEC = VariantSpec(
    name="gdn2",
    called="Gated DeltaNet-2",
    sentence="A delta rule with a decay and an erase gate per key channel, and a write gate per value channel.",
    equation="S~ = diag(e^{g_t}) S_{t-1};  S_t = S~ + k_t^T (w_t * v_t - (b_t * k_t) S~);  out_t = scale q_t S_t",
    paper="Hatamizadeh, Choi, Kautz, Gated DeltaNet-2, arXiv 2605.22791",
    arrays={
        "q": QUERIES,
        "k": UNIT_KEYS,
        "v": VALUES,
        "g": CHANNEL_DECAY,
        "b": ArgSpec("T H K", "erase gate of the key channels, in [0, 2]", limits=STRENGTHS),
        "w": ArgSpec("T H V", "write gate of the value channels"),
        **gate_arrays("H K"),
    },
    change=products("q", "k", v=("w", "v"), r=("b", "k"), **LOG_DECAY),
    decay=Decay.VECTOR,
    erase=Erase.DELTA,
    options=raw_options(beta=False),
    check_options=check_raw,
)


@public(SPEC, replace(SAMPLES, distributions={"k": "unit", "b": "strength", "w": "strength"}))
def gdn2(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    b: Any,
    w: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    **options: Unpack[GateOptions],
) -> Any:
    """Gated DeltaNet-2: a delta rule with a decay and an erase gate per key channel, a write gate per value channel.

        S~ = diag(e^{g_t}) S_{t-1}
        S_t = S~ + k_t^T (w_t * v_t - (b_t * k_t) S~)
        out_t = scale q_t S_t

    q        (..., T, Hq, K)   queries
    k        (..., T, Hk, K)   keys, of unit length, or of any with qk_l2norm
    v        (..., T, H, V)    values
    g        (..., T, H, K)    log decay of the key channels, <= 0, -inf a hard reset; with A_log a raw projection
    b        (..., T, H, K)    erase gate of the key channels, in [0, 2]
    w        (..., T, H, V)    write gate of the value channels
    A_log    (H,)              given, the log decay is -e^{A_log} softplus(g + dt_bias), as in Mamba-2
    dt_bias  (H, K)            added to the raw g

    qk_l2norm=True: q and k are divided by their length, also in b * k; zero rows stay 0 (and their gradient is passed
    unchanged).
    l2norm_eps: |q|^2 + eps and |k|^2 + eps under the root, as published models have it (1e-6).
    lower_bound, below 0: the log decay is lower_bound sigmoid(e^{A_log} (g + dt_bias)); without A_log its factor is 1.
    b = w = beta is kda. scale=None means K**-0.5.
    Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay VECTOR, erase DELTA. Common options: linattn_np.Options.
    Hatamizadeh, Choi, Kautz, Gated DeltaNet-2, arXiv 2605.22791.
    """
