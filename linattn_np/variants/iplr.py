"""Identity plus low rank: the diagonal plus low rank recurrence without a decay."""

from __future__ import annotations

from typing import Any, Unpack

from ..call import public
from ..card import Card, Given, same_names
from ..cores.kinds import Erase
from ..options import Options

CARD = Card(
    name="iplr",
    sentence="Any rank-one map of the old state, without a decay.",
    equation="S_t = S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t;  out_t = scale q_t S_t",
    paper="Yang, Wang, Zhang, Shen, Kim, arXiv 2406.06484 (generalised); Peng et al., arXiv 2503.14456",
    arrays={
        "q": Given("T Hq K", "normal", "queries"),
        "k": Given("T Hk K", "unit", "keys"),
        "v": Given("T H V", "normal", "values"),
        "a": Given("T Hk K", "unit", "reads the state"),
        "b": Given("T Hk K", "half unit", "writes what a read"),
    },
    **same_names("q", "k", "v", "a", "b"),
    erase=Erase.FREE,
    scaled=False,
)


@public(CARD)
def iplr(q: Any, k: Any, v: Any, a: Any, b: Any, **options: Unpack[Options]) -> Any:
    """Identity plus low rank: any rank-one map of the old state before the write, without a decay.

        S_t = S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t
        out_t = scale q_t S_t

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    a      (..., T, Hk, K)   reads the state
    b      (..., T, Hk, K)   writes what a read; a and b should point opposite ways, or the state grows

    scale=None means 1. Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay NONE, erase FREE. Common options: linattn_np.options.Options.
    Yang, Wang, Zhang, Shen, Kim, arXiv 2406.06484; Peng et al., arXiv 2503.14456.
    """
