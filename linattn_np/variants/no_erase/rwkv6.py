"""RWKV-6: vector decay, read before the write, with a bonus for the token itself."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.types import Decay, ReadState
from ...products import products
from ...spec import ArgSpec, VariantSpec
from ..shared.arguments import CHANNEL_DECAY, KEYS, VALUES

SPEC = VariantSpec(
    name="rwkv6",
    called="RWKV-6",
    sentence="Vector decay, read before the write, with a bonus for the token itself.",
    equation="out_t = scale q_t (S_{t-1} + diag(u) k_t^T v_t);  S_t = diag(e^{g_t}) S_{t-1} + k_t^T v_t",
    paper="Peng et al., Eagle and Finch, arXiv 2404.05892",
    arrays={
        "q": ArgSpec("T Hq K", "queries (the paper's r)"),
        "k": KEYS,
        "v": VALUES,
        "g": CHANNEL_DECAY,
        "u": ArgSpec("H K", "bonus of the token's own write"),
    },
    change=products("q", "k", "v", "g", "u"),
    decay=Decay.VECTOR,
    query_reads=ReadState.PREVIOUS,
    scaled=False,
)


@public(SPEC)
def rwkv6(q: Any, k: Any, v: Any, g: Any, u: Any, **options: Unpack[Options]) -> Any:
    """RWKV-6: vector decay, read before the write, with a bonus for the token itself.

        out_t = scale q_t (S_{t-1} + diag(u) k_t^T v_t)
        S_t = diag(e^{g_t}) S_{t-1} + k_t^T v_t

    q      (..., T, Hq, K)   queries (the paper's r)
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    g      (..., T, H, K)    log decay of the key channels, <= 0 (the paper's w is e^g); acts from the next read on
    u      (H, K)            bonus of the token's own write

    scale=None means 1. Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay VECTOR, erase NONE, reads the PREVIOUS state. Common options: linattn_np.Options.
    Peng et al., Eagle and Finch, arXiv 2404.05892.
    """
