"""Softmax attention: weighted averages of all values, or of those in a window."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Readout
from ...runtime.arrays import Array
from ...softmax.core import CORE
from ...softmax.readouts.biased import BiasedInputs
from ...softmax.types import Inputs, KeyValueCache
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, StateFormat, VariantSpec
from ..shared.arguments import KEYS, QUERIES, VALUES
from ..shared.attention import BOTH_WAYS, CausalOptions, check_options


def to_core(c: Call) -> Inputs | BiasedInputs:
    """The core's arrays are the caller's."""
    if c.bias is None:
        return Inputs(c.q, c.k, c.v, None, c.sinks)
    slots, columns = c.sizes.get("L", 0), c.bias.shape[-1]
    if columns != slots + c.sizes["T"]:
        raise ValueError(
            f"{c.name}: bias has {columns} columns, expected L + T = {slots} + {c.sizes['T']}: one for each "
            "slot of the state, then one for each token"
        )
    return BiasedInputs(c.q, c.k, c.v, c.sinks, c.bias)


def to_core_vjp(c: Call, d: Inputs | BiasedInputs) -> dict[str, Array]:
    """Gradients by public name."""
    return {"q": d.q, "k": d.k, "v": d.v, "sinks": d.sinks, "bias": d.bias}


SPEC = VariantSpec(
    name="softmax_attention",
    sentence="Softmax attention: weighted averages of all values, or of those in a window.",
    equation="p_tj = e^{z_tj} / (e^{sink} + sum_i e^{z_ti}), z_tj = scale q_t . k_j + bias_tj;  out_t = sum_j p_tj v_j",
    paper="Vaswani et al., Attention Is All You Need, arXiv 1706.03762; sinks: Xiao et al., arXiv 2309.17453",
    arrays={
        "q": QUERIES,
        "k": KEYS,
        "v": VALUES,
        "sinks": ArgSpec("Hq", "logit of a further key, whose value is 0", True),
        "bias": ArgSpec("T Hq T", "added to the logit of each query and key", True),
    },
    change=ChangeOfVariables(to_core, to_core_vjp),
    core=CORE,
    readout=Readout.SOFTMAX,
    state=StateFormat(KeyValueCache, wide=True),
    options=BOTH_WAYS,
    check_options=check_options,
)


@public(SPEC, Samples(options=({}, {"window": 9}, {"causal": False}, {"normalize": False})))
def softmax_attention(
    q: Any, k: Any, v: Any, sinks: Any = None, bias: Any = None, **options: Unpack[CausalOptions]
) -> Any:
    """Softmax attention: weighted averages of all values, or of those in a window.

        p_tj = e^{z_tj} / (e^{sink} + sum_i e^{z_ti}), z_tj = scale q_t . k_j + bias_tj
        out_t = sum_j p_tj v_j

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    sinks  (Hq,)             logit of a further key, whose value is 0; optional
    bias   (..., T, Hq, T)   added to the logit of each query and key; optional

    bias: with layout="heads_first" (..., Hq, T, T); -inf hides a key; np.broadcast_to shares it among heads or batch
    rows. With a state it is (..., T, Hq, L + T), its slots before the tokens.
    window: a query reads its own token and the window - 1 before it; None: all of the past.
    normalize: False leaves the denominator out.
    causal: False reads all keys, which may be more or fewer than the queries.
    return_lse: True returns (out, lse), with return_state=True (out, lse, state): lse (..., T, max(Hq, H)) is
    log(e^{sink} + sum_i e^{z_ti}), -inf for a query that reads nothing, in float32 or float64. la.merge puts parts of
    the keys together. The pullback takes (dout, dlse, dstate). Not with normalize=False.
    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and a KeyValueCache if return_state: it has the slots
    of the state given and one for each token (with a window, window - 1 at most). With overwrite_state it keeps its
    slots, and the oldest tokens are forgotten.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: softmax. Common options: linattn_np.Options.
    Vaswani et al., Attention Is All You Need, arXiv 1706.03762; sinks: Xiao et al., arXiv 2309.17453.
    """
