"""Gated linear attention: one decay per token and key channel, optionally one per value channel."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Decay
from ...products import products
from ...spec import ArgSpec, VariantSpec
from ..shared.arguments import CHANNEL_DECAY, KEYS, LOG_DECAY, QUERIES, VALUES
from ..shared.bounded_gates import BOUNDED_GATES, BoundedGateOptions

SPEC = VariantSpec(
    name="gla",
    called="Gated linear attention",
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
    options=BOUNDED_GATES,
)


@public(SPEC)
def gla(q: Any, k: Any, v: Any, g: Any, gv: Any = None, **options: Unpack[BoundedGateOptions]) -> Any:
    """Gated linear attention: one decay per token and key channel, optionally one per value channel.

        S_t = diag(e^{g_t}) S_{t-1} diag(e^{gv_t}) + k_t^T v_t
        out_t = scale q_t S_t

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    g      (..., T, H, K)    log decay of the key channels, <= 0, -inf a hard reset of the channel
    gv     (..., T, H, V)    log decay of the value channels, <= 0

    gate_lower_bound, below 0: declares that no g is below it. From -1 on CUDA kernels compute a chunk of tokens with
    one reference, which is faster. Where some g is below it results are as exact, and take longer.
    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay VECTOR, erase NONE. Common options: linattn_np.Options.
    Yang, Wang, Shen, Panda, Kim, arXiv 2312.06635.
    """
