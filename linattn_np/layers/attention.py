"""Softmax attention with normalised queries and keys and an output gate, as in Qwen3-Next."""

from __future__ import annotations

from .. import nn
from .functions import by_heads, function, merged, multiply, variant
from .layer import Layer, chain, compose, made
from .parts import linear, linears, rms_norm, rotary


@made
def gated_attention(D: int, H: int, K: int, groups: int, dims: int | None = None, base: float = 1e4,
                    eps: float = 1e-6) -> Layer:  # fmt: skip
    """y = (softmax_attention(q, k, v) sigmoid(x W_z)) W_o; q and k are normalised by head and rotated.

    groups: heads of k and v. dims: channels that are rotated, all by default.
    """
    rotated = lambda heads: chain(heads=by_heads(heads, K), norm=rms_norm(K, eps), rotary=rotary(base=base, dims=dims))  # noqa: E731
    widths = {"q": H * K, "k": groups * K, "v": groups * K, "z": H * K}
    return compose(
        ("project: q_in k_in v_in z_in", linears(D, widths), "x"),
        ("q", rotated(H), "q_in"),
        ("k", rotated(groups), "k_in"),
        ("v", by_heads(groups, K), "v_in"),
        ("o", function(variant("softmax_attention"), "q k v"), "q k v"),
        ("flat", merged(H, K), "o"),
        ("z", function(nn.sigmoid), "z_in"),
        ("gated", multiply(), "flat z"),
        ("out", linear(H * K, D), "gated"),
    )
