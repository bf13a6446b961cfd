"""Softmax attention with normalised queries and keys and an output gate, as in Qwen3-Next."""

from __future__ import annotations

from .. import nn
from ..catalog import variants
from .functions import by_heads, function, merged, multiply
from .layer import Layer, chain, compose
from .parts import linear, rms_norm, rotary


def gated_attention(D: int, H: int, K: int, groups: int, dims: int | None = None, base: float = 1e4,
                    eps: float = 1e-6) -> Layer:  # fmt: skip
    """y = (softmax_attention(q, k, v) sigmoid(x W_z)) W_o; q and k are normalised by head and rotated.

    groups: heads of k and v. dims: channels that are rotated, all by default.
    """
    softmax = next(f for f in variants() if f.__name__ == "softmax_attention")
    turned = lambda heads: chain(project=linear(D, heads * K), heads=by_heads(heads, K), norm=rms_norm(K, eps),  # noqa: E731
                                 rotary=rotary(base=base, dims=dims))  # fmt: skip
    return compose(
        ("q", turned(H), "x"),
        ("k", turned(groups), "x"),
        ("v", chain(project=linear(D, groups * K), heads=by_heads(groups, K)), "x"),
        ("o", function(softmax, "q k v"), "q k v"),
        ("flat", merged(H, K), "o"),
        ("z", chain(project=linear(D, H * K), activation=function(nn.sigmoid)), "x"),
        ("gated", multiply(), "flat z"),
        ("out", linear(H * K, D), "gated"),
    )
