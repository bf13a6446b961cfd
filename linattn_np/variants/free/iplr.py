"""Identity plus low rank: the diagonal plus low rank recurrence without a decay."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.types import Erase, ReadState
from ...products import products
from ...spec import ArgSpec, Samples, VariantSpec
from ..shared.arguments import QUERIES, VALUES

SPEC = VariantSpec(
    name="iplr",
    called="Identity plus low rank",
    sentence="Any rank-one map of the old state, without a decay.",
    equation="S_t = S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t;  out_t = scale q_t S_t",
    paper="Yang, Wang, Zhang, Shen, Kim, arXiv 2406.06484 (generalised); Peng et al., arXiv 2503.14456",
    arrays={
        "q": QUERIES,
        "k": ArgSpec("T Hk K", "keys"),
        "v": VALUES,
        "a": ArgSpec("T Hk K", "reads the state"),
        "b": ArgSpec("T Hk K", "keys under which the value read by a is written"),
    },
    change=products("q", "k", "v", "a", "b"),
    erase=Erase.FREE,
    erase_reads=ReadState.PREVIOUS,
    scaled=False,
)


@public(SPEC, Samples({"k": "unit", "a": "unit", "b": "half unit"}))
def iplr(q: Any, k: Any, v: Any, a: Any, b: Any, **options: Unpack[Options]) -> Any:
    """Identity plus low rank: any rank-one map of the old state before the write, without a decay.

        S_t = S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t
        out_t = scale q_t S_t

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    a      (..., T, Hk, K)   reads the state
    b      (..., T, Hk, K)   keys under which the value read by a is written; opposite to a, or the state grows

    scale=None means 1. Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay NONE, erase FREE. Common options: linattn_np.Options.
    Yang, Wang, Zhang, Shen, Kim, arXiv 2406.06484; Peng et al., arXiv 2503.14456.
    """
