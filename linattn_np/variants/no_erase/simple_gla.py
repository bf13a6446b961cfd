"""Simple gated linear attention: one decay per token and head."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Decay
from ...products import products
from ...spec import VariantSpec
from ..shared.arguments import KEYS, QUERIES, TOKEN_DECAY, VALUES
from ..shared.projections import MappedOptions, with_feature_map

SPEC = with_feature_map(
    VariantSpec(
        name="simple_gla",
        called="Simple gated linear attention",
        sentence="Linear attention with one decay per token and head; also gated retention.",
        equation="S_t = e^{g_t} S_{t-1} + k_t^T v_t;  out_t = scale q_t S_t",
        paper="Sun et al., You Only Cache Once (gated retention), arXiv 2405.05254; Yang et al., arXiv 2312.06635",
        arrays={"q": QUERIES, "k": KEYS, "v": VALUES, "g": TOKEN_DECAY},
        change=products("q", "k", "v", "g"),
        decay=Decay.SCALAR,
    )
)


@public(SPEC)
def simple_gla(q: Any, k: Any, v: Any, g: Any, **options: Unpack[MappedOptions]) -> Any:
    """Simple gated linear attention, which is also gated retention: one decay per token and head.

        S_t = e^{g_t} S_{t-1} + k_t^T v_t
        out_t = scale q_t S_t

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    g      (..., T, H)       log decay of the token, <= 0, -inf a hard reset

    feature_map: a map of q and k as in linear_attention; the state is then (..., H, M, V).
    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR, erase NONE. Common options: linattn_np.Options.
    Sun et al., You Only Cache Once, arXiv 2405.05254; Yang et al., arXiv 2312.06635.
    """
