"""DeltaProduct: several steps of the delta rule per token, gated or not."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Decay, Erase, EraseKey, Inputs, both
from ...runtime.arrays import Array
from ...spec import ArgSpec, Call, ChangeOfVariables, VariantSpec
from ..shared.arguments import GATE, LOG_DECAY, QUERIES, SIGMOID, STRENGTHS
from ..shared.projections import (
    SAMPLES,
    GatedStrengthOptions,
    check_raw,
    gate_arrays,
    gate_bias,
    gate_bias_vjp,
    raw_gate,
    raw_gate_vjp,
    raw_options,
)


def _in_line(c: Call, x: Array) -> Array:
    """(..., T, n, H, D) as (..., T n, H, D)."""
    lead = len(c.batch)
    return c.xp.reshape(x, (*x.shape[:lead], x.shape[lead] * x.shape[lead + 1], *x.shape[lead + 2 :]))


def _by_token(c: Call, x: Array) -> Array:
    """(..., T n, H, D) as (..., T, n, H, D)."""
    lead = len(c.batch)
    return c.xp.reshape(x, (*x.shape[:lead], c.sizes["T"], c.sizes["n"], *x.shape[lead + 1 :]))


def to_core(c: Call) -> Inputs:
    """T n micro-steps: a token decays the state at its first and reads it at its last (plan.micro_steps)."""
    if c.sizes["n"] < 1:
        raise ValueError(f"{c.name}: k has n = 0 micro-steps per token, expected 1 or more")
    k, beta = _in_line(c, c.k), _in_line(c, c.beta[..., None])
    return Inputs(c.q, k, _in_line(c, c.v), raw_gate(c), r=k, beta=beta, A_log=c.A_log, bias=gate_bias(c))


def to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    """The gradients, with the axis n of micro-steps restored."""
    grads = {"k": _by_token(c, both(d.k, d.r)), "v": _by_token(c, d.v), "beta": _by_token(c, d.beta)[..., 0]}
    if c.q is not None:
        grads["q"] = d.q
    if c.g is not None:
        grads |= raw_gate_vjp(c, d.g)
    if c.A_log is not None:
        grads["A_log"] = d.A_log
    if c.dt_bias is not None:
        grads |= gate_bias_vjp(c, d.bias)
    return grads


SPEC = VariantSpec(
    name="delta_product",
    called="DeltaProduct",
    sentence="Several steps of the delta rule per token; with a gate if one is given.",
    equation="S~ = e^{g_t} S_{t-1};  for each of n steps: S~ = S~ + k^T beta (v - k S~);  S_t = S~;  "
    "out_t = scale q_t S_t",
    paper="Siems, Carstensen, Zela, Hutter, Pontil, Grazzi, DeltaProduct, arXiv 2502.10297",
    arrays={
        "q": QUERIES,
        "k": ArgSpec("T n Hk K", "keys of the n steps, of unit length"),
        "v": ArgSpec("T n H V", "values of the n steps"),
        "beta": ArgSpec("T n H", "write strengths of the n steps, in [0, 2]", limits=STRENGTHS, raw_with=SIGMOID),
        "g": ArgSpec(
            "T H", "log decay of the token, <= 0; None: no decay", optional=True, limits=LOG_DECAY, raw_with=GATE
        ),
        **gate_arrays(),
    },
    change=ChangeOfVariables(to_core, to_core_vjp, erase_key=EraseKey.KEY),
    decay=Decay.SCALAR,
    erase=Erase.DELTA,
    micro_steps="n",
    options=raw_options(),
    check_options=check_raw,
)


@public(SPEC, SAMPLES)
def delta_product(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    g: Any = None,
    A_log: Any = None,
    dt_bias: Any = None,
    **options: Unpack[GatedStrengthOptions],
) -> Any:
    """DeltaProduct: several steps of the delta rule per token; gated DeltaProduct with g.

        S~ = e^{g_t} S_{t-1}
        for j = 1 .. n:  S~ = S~ + k_tj^T beta_tj (v_tj - k_tj S~)
        S_t = S~
        out_t = scale q_t S_t

    q        (..., T, Hq, K)      queries
    k        (..., T, n, Hk, K)   keys of the n steps, of unit length (stable for beta |k|^2 <= 2) or with qk_l2norm
    v        (..., T, n, H, V)    values of the n steps
    beta     (..., T, n, H)       write strengths of the n steps, in [0, 2]; above 1 the erased part changes sign
    g        (..., T, H)          log decay of the token, <= 0, -inf a hard reset; None: no decay; raw with A_log
    A_log    (H,)                 given, the log decay is -e^{A_log} softplus(g + dt_bias), as in Mamba-2
    dt_bias  (H,)                 added to the raw g

    qk_l2norm=True: q and k are divided by their length, zero rows stay 0 (and their gradient is passed unchanged).
    l2norm_eps: |q|^2 + eps and |k|^2 + eps under the root, as published models have it (1e-6).
    beta_sigmoid=True: beta is a raw projection, sigmoid(beta) is used, with allow_neg_eigval=True twice that.
    lower_bound, below 0: the log decay is lower_bound sigmoid(e^{A_log} (g + dt_bias)); without A_log its factor is 1.
    n steps multiply the state by a product of n generalised Householder matrices: with beta = 2, any permutation of
    n + 1 things in one token. layout="heads_first": (..., H, T, n, K). scale=None means K**-0.5.
    Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR (NONE without g), erase DELTA. Common options: linattn_np.Options.
    Siems et al., arXiv 2502.10297.
    """
