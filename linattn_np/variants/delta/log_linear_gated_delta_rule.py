"""Log-linear gated delta rule: O(log T) states, each with a weight of its own for every query."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.types import Decay, Erase, EraseKey, Readout
from ...spec import Samples, VariantSpec
from ..shared.arguments import QUERIES, STRENGTH, TOKEN_DECAY, UNIT_KEYS, VALUES
from ..shared.levels import LEVELS, STATE, change

SPEC = VariantSpec(
    name="log_linear_gated_delta_rule",
    called="Log-linear gated delta rule",
    sentence="The gated delta rule whose query weighs the past by levels of distance.",
    equation="S~ = e^{g_t} S_{t-1};  S_t = S~ + k_t^T beta_t (v_t - k_t S~), kept by levels "
    "l = bit_length(t xor j) of the token j;  out_t = scale sum_l lam_t[l] q_t S_t[l]",
    paper="Guo et al., Log-Linear Attention, arXiv 2506.04761",
    arrays={"q": QUERIES, "k": UNIT_KEYS, "v": VALUES, "g": TOKEN_DECAY, "beta": STRENGTH, "lam": LEVELS},
    change=change(erase_key=EraseKey.KEY),
    decay=Decay.SCALAR,
    erase=Erase.DELTA,
    readout=Readout.LEVELS,
    state=STATE,
)


@public(SPEC, Samples({"k": "unit"}))
def log_linear_gated_delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, lam: Any, **options: Unpack[Options]) -> Any:
    """Log-linear gated delta rule: the gated delta rule whose query weighs the past by levels of distance.

        S~ = e^{g_t} S_{t-1}
        S_t = S~ + k_t^T beta_t (v_t - k_t S~), kept by levels l = bit_length(t xor j) of the token j
        out_t = scale sum_l lam_t[l] q_t S_t[l]

    q     (..., T, Hq, K)       queries
    k     (..., T, Hk, K)       keys, of unit length
    v     (..., T, H, V)        values
    g     (..., T, H)           log decay of the token, <= 0
    beta  (..., T, H)           write strength in [0, 2]
    lam   (..., T, H, levels)   weight of each level

    Token j is at level l = bit_length(t xor j) for query t, both counted from the first token of the sequence: level 0
    is t itself, level 1 its neighbour in an aligned pair, level l the other half of an aligned block of 2^l tokens.
    S_t[l] is the part of S_t that tokens of level l have written, so lam = 1 is the plain recurrence. T tokens need
    1 + bit_length(T - 1) levels; earlier tokens of a state count.
    The state is a LevelState(S (..., H, levels, K, V), position (...)): S[..., l - 1, :, :] is that of level l after
    `position` tokens, and nothing where bit l - 1 of the position is 0: such entries are not read, and where the
    state is overwritten those of levels that were and stay empty are left as they are.

    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and the state if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR, erase DELTA. Common options: linattn_np.Options.
    Guo et al., Log-Linear Attention, arXiv 2506.04761.
    """
