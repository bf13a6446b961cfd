"""Attention with linear biases: softmax attention that fades with the distance."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Decay, Readout
from ...ops.product import multiple
from ...ops.sums import over_tokens
from ...runtime.arrays import Array
from ...softmax.core import CORE
from ...softmax.types import GatedCache, Inputs
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, StateFormat, VariantSpec
from ..shared.arguments import KEYS, POSITIVE, QUERIES, VALUES
from ..shared.attention import ATTENTION, AttentionOptions, check_options


def to_core(c: Call) -> Inputs:
    """g = -slope of the head, at every token."""
    g = multiple(c.xp, -1.0, c.slopes, c.dtype)
    g = c.xp.broadcast_to(g, (*c.batch, c.sizes["T"], g.shape[0]))
    return Inputs(c.q, c.k, c.v, g)


def to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    """A slope acts at every token."""
    return {"q": d.q, "k": d.k, "v": d.v, "slopes": multiple(c.xp, -1.0, over_tokens(c.xp, d.g), c.dtype)}


SPEC = VariantSpec(
    name="alibi",
    called="ALiBi",
    sentence="Attention with linear biases (ALiBi): softmax attention that fades with the distance.",
    equation="p_tj ~ e^{scale q_t . k_j - slope (t - j)}, sum_j p_tj = 1;  out_t = sum_j p_tj v_j",
    paper="Press, Smith, Lewis, Train Short, Test Long, arXiv 2108.12409",
    arrays={
        "q": QUERIES,
        "k": KEYS,
        "v": VALUES,
        "slopes": ArgSpec("Hq", "minus the log decay of the head", limits=POSITIVE),
    },
    change=ChangeOfVariables(to_core, to_core_vjp, gate="slopes"),
    core=CORE,
    decay=Decay.SCALAR,
    readout=Readout.SOFTMAX,
    state=StateFormat(GatedCache, wide=True),
    options=ATTENTION,
    check_options=check_options,
)


@public(SPEC, Samples({"slopes": "positive"}))
def alibi(q: Any, k: Any, v: Any, slopes: Any, **options: Unpack[AttentionOptions]) -> Any:
    """Attention with linear biases (ALiBi): softmax attention that fades with the distance.

        p_tj ~ e^{scale q_t . k_j - slope (t - j)}, sum_j p_tj = 1
        out_t = sum_j p_tj v_j

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    slopes (Hq,)             minus the log decay of the head

    window: a query reads its own token and the window - 1 before it; None: all of the past.
    normalize: False leaves the denominator out.
    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and a GatedCache if return_state, with slots as in
    softmax_attention.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: softmax. Common options: linattn_np.Options.
    Press, Smith, Lewis, Train Short, Test Long, arXiv 2108.12409.
    """
