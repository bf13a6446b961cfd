"""Log-linear gated linear attention: O(log T) states, each with a weight of its own for every query."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.types import Decay, Readout
from ...spec import VariantSpec
from ..shared.arguments import KEYS, QUERIES, TOKEN_DECAY, VALUES
from ..shared.levels import LEVELS, STATE, change

SPEC = VariantSpec(
    name="log_linear_gla",
    called="Log-linear gated linear attention",
    sentence="Simple gated linear attention whose query weighs the past by levels of distance.",
    equation="S_t = e^{g_t} S_{t-1} + k_t^T v_t, kept by levels l = bit_length(t xor j) of the token j;  "
    "out_t = scale sum_l lam_t[l] q_t S_t[l]",
    paper="Guo et al., Log-Linear Attention, arXiv 2506.04761",
    arrays={"q": QUERIES, "k": KEYS, "v": VALUES, "g": TOKEN_DECAY, "lam": LEVELS},
    change=change(),
    decay=Decay.SCALAR,
    readout=Readout.LEVELS,
    state=STATE,
)


@public(SPEC)
def log_linear_gla(q: Any, k: Any, v: Any, g: Any, lam: Any, **options: Unpack[Options]) -> Any:
    """Log-linear gated linear attention: simple gated linear attention whose query weighs the past by levels.

        S_t = e^{g_t} S_{t-1} + k_t^T v_t, kept by levels l = bit_length(t xor j) of the token j
        out_t = scale sum_l lam_t[l] q_t S_t[l]

    q    (..., T, Hq, K)       queries
    k    (..., T, Hk, K)       keys
    v    (..., T, H, V)        values
    g    (..., T, H)           log decay of the token, <= 0
    lam  (..., T, H, levels)   weight of each level

    Token j is at level l = bit_length(t xor j) for query t, both counted from the first token of the sequence: level 0
    is t itself, level 1 its neighbour in an aligned pair, level l the other half of an aligned block of 2^l tokens.
    S_t[l] is the part of S_t that tokens of level l have written, so lam = 1 is the plain recurrence. T tokens need
    1 + bit_length(T - 1) levels; earlier tokens of a state count.
    The state is a LevelState(S (..., H, levels, K, V), position (...)): S[..., l - 1, :, :] is that of level l after
    `position` tokens, and nothing where bit l - 1 of the position is 0: such entries are not read, and where the
    state is overwritten those of levels that were and stay empty are left as they are.

    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and the state if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR, erase NONE. Common options: linattn_np.Options.
    Guo et al., Log-Linear Attention, arXiv 2506.04761.
    """
