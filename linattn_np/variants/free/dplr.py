"""Diagonal plus low rank: any rank-one map of the old state before the write; RWKV-7 is a model of that form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.types import Decay, Erase, ReadState
from ...products import products
from ...spec import ArgSpec, Samples, VariantSpec
from ..shared.arguments import CHANNEL_DECAY, QUERIES, VALUES

SPEC = VariantSpec(
    name="dplr",
    called="Diagonal plus low rank",
    sentence="Diagonal decay plus any rank-one map of the old state.",
    equation="S_t = diag(e^{g_t}) S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t;  out_t = scale q_t S_t",
    paper="Peng et al., RWKV-7 Goose, arXiv 2503.14456",
    arrays={
        "q": QUERIES,
        "k": ArgSpec("T Hk K", "keys"),
        "v": VALUES,
        "g": CHANNEL_DECAY,
        "a": ArgSpec("T Hk K", "reads the state before its decay"),
        "b": ArgSpec("T Hk K", "keys under which the value read by a is written"),
    },
    change=products("q", "k", "v", "g", "a", "b"),
    decay=Decay.VECTOR,
    erase=Erase.FREE,
    erase_reads=ReadState.PREVIOUS,
    scaled=False,
)
SAMPLES = Samples({"k": "unit", "a": "unit", "b": "half unit"})


@public(SPEC, SAMPLES)
def dplr(q: Any, k: Any, v: Any, g: Any, a: Any, b: Any, **options: Unpack[Options]) -> Any:
    """Diagonal plus low rank: any rank-one map of the old state before the write.

        S_t = diag(e^{g_t}) S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t
        out_t = scale q_t S_t

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    g      (..., T, H, K)    log decay of the key channels, <= 0, -inf a hard reset of the channel
    a      (..., T, Hk, K)   reads the state before its decay
    b      (..., T, Hk, K)   keys under which the value read by a is written; opposite to a, or the state grows

    scale=None means 1. Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay VECTOR, erase FREE. Common options: linattn_np.Options.
    Peng et al., RWKV-7 Goose, arXiv 2503.14456.
    """


RWKV7 = replace(
    SPEC, name="rwkv7", called="RWKV-7", sentence="Diagonal decay, and a rank-one correction read from the old state."
)


@public(RWKV7, SAMPLES)
def rwkv7(q: Any, k: Any, v: Any, g: Any, a: Any, b: Any, **options: Unpack[Options]) -> Any:
    """RWKV-7: diagonal decay, and a rank-one correction read from the old state.

        S_t = diag(e^{g_t}) S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t
        out_t = scale q_t S_t

    q      (..., T, Hq, K)   queries (the paper's r)
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    g      (..., T, H, K)    log decay of the key channels (the paper's log w, in (-0.6065, 0)), -inf allowed
    a      (..., T, Hk, K)   reads the state before its decay: -kappa, kappa of unit length
    b      (..., T, Hk, K)   keys under which the value read by a is written: kappa times the in-context rate in [0, 1]

    scale=None means 1.
    Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay VECTOR, erase FREE. Common options: linattn_np.Options.
    Peng et al., RWKV-7 Goose, arXiv 2503.14456.
    """
