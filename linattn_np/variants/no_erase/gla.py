"""Gated linear attention: one decay per token and key channel, optionally one per value channel."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.types import Decay
from ...products import products
from ...spec import ArgSpec, VariantSpec
from ..shared.arguments import CHANNEL_DECAY, KEYS, LOG_DECAY, QUERIES, VALUES

SPEC = VariantSpec(
    name="gla",
    sentence="Linear attention with one decay per token and key channel.",
    equation="S_t = diag(e^{g_t}) S_{t-1} diag(e^{gv_t}) + k_t^T v_t;  out_t = scale q_t S_t",
    paper="Yang, Wang, Shen, Panda, Kim, arXiv 2312.06635",
    arrays={
        "q": QUERIES,
        "k": KEYS,
        "v": VALUES,
        "g": CHANNEL_DECAY,
        "gv": ArgSpec("T H V", "log decay of the value channels, <= 0", optional=True, limits=LOG_DECAY),
    },
    change=products("q", "k", "v", "g", "gv"),
    decay=Decay.VECTOR,
)


@public(SPEC)
def gla(q: Any, k: Any, v: Any, g: Any, gv: Any = None, **options: Unpack[Options]) -> Any:
    """Gated linear attention: one decay per token and key channel, optionally one per value channel.

        S_t = diag(e^{g_t}) S_{t-1} diag(e^{gv_t}) + k_t^T v_t
        out_t = scale q_t S_t

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    g      (..., T, H, K)    log decay of the key channels, <= 0, -inf a hard reset of the channel
    gv     (..., T, H, V)    log decay of the value channels, <= 0

    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay VECTOR, erase NONE. Common options: linattn_np.Options.
    Yang, Wang, Shen, Panda, Kim, arXiv 2312.06635.
    """
