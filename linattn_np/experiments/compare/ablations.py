"""Mixers that differ from a published one in one part: a claim about the part is measured on both.

plain          S_t = S_{t-1} + k_t^T v_t of convolved q, k, v; norm of each head, silu gate
decayed        the same with a log decay of each head, simple_gla
plain_elu      plain with elu(x) + 1 of q and k; plain_normalised: also divided by the sum of weights
sums           S_t = S_{t-1} + k_t^T v_t with the arrays of delta_rule but its strength
unconvolved    delta_rule without short convolutions, as in the state tracking of arXiv 2411.12537
rotated        decayed with rotary embeddings of q and k
unrotated      softmax attention without rotary embeddings
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from linattn_np import nn
from linattn_np.layers import PUBLISHED, Layer, Mixer, Sizes, function, mix, mixer, projected, rotary

CONVOLVED = projected(conv=4)
PLAIN = Mixer(dict.fromkeys("qkv", CONVOLVED), gate="silu")
ROTATED = projected(conv=4, then={"rotary": lambda c: rotary()})
UNIT = projected(conv=4, then={"unit": lambda c: function(nn.l2_norm, eps=1e-6)})
SIMPLE, DELTA = PUBLISHED["simple_gla"], PUBLISHED["delta_rule"]


def _with(own: Mixer, **given: Any) -> Mixer:
    return own._replace(options=lambda c: own.options(c) | given)


ABLATIONS: Mapping[str, tuple[str, Mixer]] = {
    "plain": ("linear_attention", PLAIN),
    "plain_elu": ("linear_attention", _with(PLAIN, feature_map="elu+1")),
    "plain_normalised": ("linear_attention", _with(PLAIN, feature_map="elu+1", normalize=True)),
    "sums": ("linear_attention", Mixer({"q": UNIT, "k": UNIT, "v": CONVOLVED})),
    "unconvolved": ("delta_rule", DELTA._replace(sources={})),
    "decayed": ("simple_gla", SIMPLE),
    "rotated": ("simple_gla", SIMPLE._replace(sources={**SIMPLE.sources, "q": ROTATED, "k": ROTATED})),
    "unrotated": ("softmax_attention", Mixer(norm=None)),
}


def layer_of(name: str, c: Sizes, options: Mapping[str, Any]) -> Layer:
    """The mixer of a name: a published one or an ablation, with options of its variant."""
    if name not in ABLATIONS:
        return mixer(name, c, **options)
    variant, own = ABLATIONS[name]
    return mix(variant, _with(own, **options), c)
