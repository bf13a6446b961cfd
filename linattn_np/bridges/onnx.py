"""The operators LinearAttention and CausalConvWithState of the ONNX standard (opset 27), computed by this library.

`linear_attention` and `causal_conv_with_state` have the inputs and outputs of the operators. `LinearAttention` and
`CausalConvWithState` are the same as operators of ONNX's reference evaluator:

    ReferenceEvaluator(model, new_ops=[LinearAttention, CausalConvWithState]).run(None, inputs)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

import linattn_np as la

from ..runtime.doorway import expect, expect_one_dtype, expect_whole
from ..runtime.values import is_whole, is_word, shown

OPSET = 27  # since which the standard has the operators
DEFAULT_CHUNK = 64  # the attribute's default, which leaves the choice to the library
Arrays = dict[str, Any]

# update_rule -> the functions for a decay per head and for one per key channel
RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "linear": (la.linear_attention, la.linear_attention), "gated": (la.simple_gla, la.gla),
    "delta": (la.delta_rule, la.delta_rule), "gated_delta": (la.gated_delta_rule, la.kda),
}  # fmt: skip
OPTIONAL = ("past_state", "decay", "beta")
NEEDS = {"linear": (), "gated": ("decay",), "delta": ("beta",), "gated_delta": ("decay", "beta")}


def linear_attention(
    query: Any, key: Any, value: Any, past_state: Any = None, decay: Any = None, beta: Any = None, **attributes: Any
) -> tuple[Any, Any]:
    """(output, present_state) of the operator LinearAttention on NumPy arrays with packed heads.

        linear        S_t = S_{t-1} + k_t^T v_t
        gated         S_t = diag(e^{decay_t}) S_{t-1} + k_t^T v_t
        delta         S_t = S_{t-1} + k_t^T beta_t (v_t - k_t S_{t-1})
        gated_delta   S~ = diag(e^{decay_t}) S_{t-1};  S_t = S~ + k_t^T beta_t (v_t - k_t S~)
        output_t = scale q_t S_t

    query       (B, T, Hq K)
    key         (B, T, H K)             H divides Hq
    value       (B, T, H V)
    past_state  (B, H, K, V)            optional: zeros
    decay       (B, T, H) or (B, T, H K)
    beta        (B, T, H) or (B, T, 1)

    Attributes: q_num_heads=Hq and kv_num_heads=H; update_rule="gated_delta"; scale=0.0, which means K**-0.5;
    chunk_size=64, a hint: 64 leaves the choice to the library. output has the dtype of query, present_state that of
    past_state, or of query without one. Raises ValueError for shapes and attributes that the standard excludes.
    """
    rule, Hq, H, scale, chunk_size = _attributes(**attributes)
    arrays = {"query": query, "key": key, "value": value, "past_state": past_state, "decay": decay, "beta": beta}
    _check_given(rule, arrays)
    K, V = _widths(arrays, Hq, H)
    q, k, v = _unpacked(query, Hq), _unpacked(key, H), _unpacked(value, H)
    B, T = q.shape[:2]
    given: Arrays = {}
    by_channel = False
    if decay is not None:
        by_channel = _last(decay, "decay", (H, H * K)) != H
        given["g"] = _unpacked(decay, H) if by_channel else decay
    if beta is not None:
        _last(beta, "beta", (H, 1))
        given["beta"] = np.broadcast_to(beta, (B, T, H))
    if past_state is not None and past_state.shape != (B, H, K, V):
        raise ValueError(
            f"LinearAttention: past_state has shape {past_state.shape}, expected (B, H, K, V) = {(B, H, K, V)}"
        )
    out, state = RULES[rule][by_channel](q, k, v, **given, scale=scale or K**-0.5, chunk_size=chunk_size,
                                         state=past_state, return_state=True)  # fmt: skip
    dtype = (query if past_state is None else past_state).dtype
    return out.reshape(B, T, Hq * V).astype(query.dtype, copy=False), state.astype(dtype, copy=False)


class LinearAttention(OpRun):
    """The operator for ONNX's reference evaluator."""

    op_domain = ""

    def _run(self, query: Any, key: Any, value: Any, *optional: Any, **attributes: Any) -> tuple[Any, Any]:
        return linear_attention(query, key, value, *optional, **{n: x for n, x in attributes.items() if x is not None})


ACTIVATIONS = ("none", "silu", "swish")


def causal_conv_with_state(
    input: Any, weight: Any, bias: Any = None, past_state: Any = None, activation: str = "none"
) -> tuple[Any, Any]:
    """(output, present_state) of the operator CausalConvWithState on NumPy arrays.

        output_t = act(bias + sum_{i < k} weight_{k-1-i} input_{t-i})

    input       (B, C, T)
    weight      (C, 1, k)
    bias        (C,)            optional: zeros
    past_state  (B, C, k - 1)   optional: zeros

    Attribute: activation="none", "silu" or "swish", which is the same. present_state (B, C, k - 1) are the last inputs,
    of past_state too. Sums are float32, float64 for float64; results have the dtype of input. Raises
    TypeError or ValueError for arrays and attributes that the standard excludes.
    """
    fn = "CausalConvWithState"
    if not is_word(activation, ACTIVATIONS):
        raise ValueError(f"{fn}: activation is {shown(activation)}, expected one of {', '.join(ACTIVATIONS)}")
    sizes = expect(fn, {"1": 1}, input=(input, "B C T"), weight=(weight, "C 1 k"), bias=(bias, "C?"))
    expect_whole(fn, "k of weight", sizes["k"])
    expect(fn, sizes | {"k-1": sizes["k"] - 1}, past_state=(past_state, "B C k-1?"))
    expect_one_dtype(fn, input=input, weight=weight, bias=bias, past_state=past_state)
    x, past = (None if y is None else np.swapaxes(y, 1, 2) for y in (input, past_state))
    conv: Any = la.nn.short_conv(x, weight[:, 0], bias, state=past, return_state=True,
                            activation=None if activation == "none" else "silu")  # fmt: skip
    output, present = (np.swapaxes(y, 1, 2) for y in conv)
    return output, present


class CausalConvWithState(OpRun):
    """The operator for ONNX's reference evaluator."""

    op_domain = ""

    def _run(self, input: Any, weight: Any, *optional: Any, **attributes: Any) -> tuple[Any, Any]:
        given = {n: x for n, x in attributes.items() if x is not None}
        return causal_conv_with_state(input, weight, *optional, **given)


def _attributes(
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    update_rule: str = "gated_delta",
    scale: float = 0.0,
    chunk_size: int = DEFAULT_CHUNK,
) -> tuple[str, int, int, float, int | None]:
    """(update rule, Hq, H, scale, chunk size of the library), checked."""
    if not is_word(update_rule, RULES):
        raise ValueError(f"LinearAttention: update_rule is {shown(update_rule)}, expected one of {', '.join(RULES)}")
    Hq, H = (n if is_whole(n) and n is not None else 0 for n in (q_num_heads, kv_num_heads))
    if not H or not Hq or Hq % H:
        raise ValueError(
            f"LinearAttention: q_num_heads is {shown(q_num_heads)} and kv_num_heads "
            f"{shown(kv_num_heads)}, expected numbers from 1, the second a divisor of the first"
        )
    return update_rule, Hq, H, float(scale), None if chunk_size == DEFAULT_CHUNK else chunk_size


def _check_given(rule: str, arrays: Arrays) -> None:
    """Three axes in each array, and those that the rule needs."""
    for name, x in arrays.items():
        if not isinstance(x, np.ndarray) and not (x is None and name in OPTIONAL):
            raise TypeError(f"LinearAttention: {name} is {shown(x)}, expected a NumPy array")
        if x is not None and name != "past_state" and x.ndim != 3:
            raise ValueError(f"LinearAttention: {name} has shape {x.shape}, expected three axes (B, T, heads width)")
        if name in ("decay", "beta") and (x is None) == (name in NEEDS[rule]):
            expected = "it to be given" if x is None else "None"
            raise ValueError(
                f"LinearAttention: {name} is {'None' if x is None else 'given'} with update_rule "
                f"{rule!r}, expected {expected}"
            )
        if x is not None and name != "past_state" and x.shape[:2] != arrays["query"].shape[:2]:
            raise ValueError(
                f"LinearAttention: {name} has shape {x.shape}, expected (B, T) = "
                f"{arrays['query'].shape[:2]} as in query"
            )


def _widths(arrays: Arrays, Hq: int, H: int) -> tuple[int, int]:
    """(K, V)."""
    K, V = arrays["query"].shape[2] // Hq, arrays["value"].shape[2] // H
    for name, width in (("query", Hq * K), ("key", H * K), ("value", H * V)):
        if arrays[name].shape[2] != width:
            heads = Hq if name == "query" else H
            raise ValueError(
                f"LinearAttention: {name} has shape {arrays[name].shape}, expected {heads} heads of one "
                f"width{' K = ' + str(K) if name == 'key' else ''}"
            )
    return K, V


def _last(x: Any, name: str, widths: tuple[int, int]) -> int:
    """The last axis of decay or beta."""
    if x.shape[2] not in widths:
        raise ValueError(
            f"LinearAttention: {name} has shape {x.shape}, expected a last axis of {widths[0]} or {widths[1]}"
        )
    return int(x.shape[2])


def _unpacked(x: Any, heads: int) -> Any:
    """(B, T, heads width) as (B, T, heads, width)."""
    return x.reshape(*x.shape[:2], heads, -1) if x.size else x.reshape(*x.shape[:2], heads, x.shape[2] // heads)
