"""Delta rule: erase what the key held, then write the new value."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Erase
from ...products import products
from ...spec import VariantSpec
from ..shared.arguments import QUERIES, STRENGTH, UNIT_KEYS, VALUES
from ..shared.projections import SAMPLES, MappedStrengthOptions, check_raw, raw_options, with_feature_map

SPEC = with_feature_map(
    VariantSpec(
        name="delta_rule",
        sentence="Erase what the key held, then write the new value.",
        equation="S_t = S_{t-1} + k_t^T beta_t (v_t - k_t S_{t-1});  out_t = scale q_t S_t",
        paper="Schlag, Irie, Schmidhuber, arXiv 2102.11174; Yang, Wang, Zhang, Shen, Kim, arXiv 2406.06484",
        arrays={"q": QUERIES, "k": UNIT_KEYS, "v": VALUES, "beta": STRENGTH},
        change=products("q", "k", "v", "beta", r="k"),
        erase=Erase.DELTA,
        options=raw_options(gate=False),
        check_options=check_raw,
    )
)


@public(SPEC, SAMPLES)
def delta_rule(q: Any, k: Any, v: Any, beta: Any, **options: Unpack[MappedStrengthOptions]) -> Any:
    """Delta rule (DeltaNet): erase what the key held, then write the new value.

        S_t = S_{t-1} + k_t^T beta_t (v_t - k_t S_{t-1})
        out_t = scale q_t S_t

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys, of unit length (stable for beta |k|^2 <= 2), or of any with qk_l2norm
    v      (..., T, H, V)    values
    beta   (..., T, H)       write strength in [0, 2]; above 1 the erased part changes sign

    feature_map: a map of q and k as in linear_attention, before qk_l2norm; the state is then (..., H, M, V).
    qk_l2norm=True: q and k are divided by their length, zero rows stay 0 (and their gradient is passed unchanged).
    l2norm_eps: |q|^2 + eps and |k|^2 + eps under the root, as published models have it (1e-6).
    beta_sigmoid=True: beta is a raw projection, sigmoid(beta) is used, with allow_neg_eigval=True twice that.
    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay NONE, erase DELTA. Common options: linattn_np.Options.
    Schlag, Irie, Schmidhuber, arXiv 2102.11174; Yang, Wang, Zhang, Shen, Kim, arXiv 2406.06484.
    """
