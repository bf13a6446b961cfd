"""HGRN-2: vector decay; a channel writes with 1 - e^g, the share that it forgets."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Decay, Inputs
from ...ops.complement import complement, complement_vjp
from ...runtime.arrays import Array, dtype_name
from ...spec import Call, ChangeOfVariables, VariantSpec
from ..shared.arguments import CHANNEL_DECAY, QUERIES, VALUES
from ..shared.bounded_gates import BOUNDED_GATES, BoundedGateOptions


def to_core(c: Call) -> Inputs:
    """k = 1 - e^g; the kernels of a bfloat16 call round it, as all factors of their products."""
    stored = c.v.dtype if c.kernels and dtype_name(c.v) == "bfloat16" else None
    return Inputs(c.q, complement(c.xp, c.g, c.dtype, stored), c.v, c.g)


def to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    """The gate decays and makes the key: two paths, whose gradients kernels may have added."""
    return {"q": d.q, "v": d.v, "g": d.g if d.k is None else complement_vjp(c.xp, c.g, d.g, d.k, c.dtype)}


SPEC = VariantSpec(
    name="hgrn2",
    called="HGRN-2",
    sentence="Vector decay; a channel writes with 1 - e^g, the share that it forgets.",
    equation="S_t = diag(e^{g_t}) S_{t-1} + (1 - e^{g_t})^T v_t;  out_t = scale q_t S_t",
    paper="Qin et al., HGRN2, arXiv 2404.07904",
    arrays={"q": QUERIES, "v": VALUES, "g": CHANNEL_DECAY},
    change=ChangeOfVariables(to_core, to_core_vjp, key="g", complement_keys=True),
    decay=Decay.VECTOR,
    options=BOUNDED_GATES,
    scaled=False,
)


@public(SPEC)
def hgrn2(q: Any, v: Any, g: Any, **options: Unpack[BoundedGateOptions]) -> Any:
    """HGRN-2: vector decay; a channel writes with 1 - e^g, the share that it forgets.

        S_t = diag(e^{g_t}) S_{t-1} + (1 - e^{g_t})^T v_t
        out_t = scale q_t S_t

    q      (..., T, Hq, K)   queries
    v      (..., T, H, V)    values (the paper's input)
    g      (..., T, H, K)    log decay of the key channels, <= 0, -inf a hard reset that takes all of v in

    gate_lower_bound, below 0: declares that no g is below it. From -1 on CUDA kernels compute a chunk of tokens with
    one reference, which is faster. Where some g is below it results are as exact, and take longer.
    A layer makes g = log(b + (1 - b) sigmoid(x)) with its lower bound b. scale=None means 1.
    Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay VECTOR, erase NONE. Common options: linattn_np.Options.
    Qin et al., HGRN2, arXiv 2404.07904.
    """
