"""Decaying fast weights: one decay per key channel and one per value channel."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.types import Decay
from ...products import products
from ...spec import VariantSpec
from ..shared.arguments import CHANNEL_DECAY, KEYS, QUERIES, VALUE_DECAY, VALUES

SPEC = VariantSpec(
    name="dfw",
    called="Decaying fast weights",
    sentence="One decay per key channel times one per value channel.",
    equation="S_t = diag(e^{g_t}) S_{t-1} diag(e^{gv_t}) + k_t^T v_t;  out_t = scale q_t S_t",
    paper="Mao, Fine-Tuning Pre-trained Transformers into Decaying Fast Weights, arXiv 2210.04243",
    arrays={"q": QUERIES, "k": KEYS, "v": VALUES, "g": CHANNEL_DECAY, "gv": VALUE_DECAY},
    change=products("q", "k", "v", "g", "gv"),
    decay=Decay.VECTOR,
    scaled=False,
)


@public(SPEC)
def dfw(q: Any, k: Any, v: Any, g: Any, gv: Any, **options: Unpack[Options]) -> Any:
    """Decaying fast weights: an entry of the state decays with its row and with its column.

        S_t = diag(e^{g_t}) S_{t-1} diag(e^{gv_t}) + k_t^T v_t
        out_t = scale q_t S_t

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    g      (..., T, H, K)    log decay of the key channels, <= 0: log sigmoid of the paper's gate of the keys
    gv     (..., T, H, V)    log decay of the value channels, <= 0: log sigmoid of its gate of the values

    scale=None means 1. Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay VECTOR on both axes, erase NONE. Common options: linattn_np.Options.
    Mao, arXiv 2210.04243.
    """
