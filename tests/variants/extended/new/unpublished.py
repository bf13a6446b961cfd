"""Linear attention with a decay per key channel."""

from __future__ import annotations

from typing import Any, Unpack

from linattn_np.call.dispatch import public
from linattn_np.call.options import Options
from linattn_np.matrix_state.types import Decay
from linattn_np.products import products
from linattn_np.spec import VariantSpec
from linattn_np.variants.shared.arguments import CHANNEL_DECAY, KEYS, QUERIES, VALUES

SPEC = VariantSpec(
    name="unpublished",
    sentence="Linear attention with a decay per key channel.",
    equation="S_t = diag(e^{g_t}) S_{t-1} + k_t^T v_t;  out_t = scale q_t S_t",
    paper="",
    arrays={"q": QUERIES, "k": KEYS, "v": VALUES, "g": CHANNEL_DECAY},
    change=products("q", "k", "v", "g"),
    decay=Decay.VECTOR,
)


@public(SPEC)
def unpublished(q: Any, k: Any, v: Any, g: Any, **options: Unpack[Options]) -> Any:
    """Linear attention with a decay per key channel.

        S_t = diag(e^{g_t}) S_{t-1} + k_t^T v_t
        out_t = scale q_t S_t

    q  (..., T, Hq, K)   queries
    k  (..., T, Hk, K)   keys
    v  (..., T, H, V)    values
    g  (..., T, H, K)    log decay of the key channels, <= 0

    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay VECTOR, erase NONE. Common options: linattn_np.Options.
    """
