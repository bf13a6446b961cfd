"""Layers without a framework: parameters are a dict of arrays, gradients come from la.vjp.

model = la.layers.language_model(256, D=64, layers=2, mixers="gated_delta_rule")
params = model.loss.init(np.random.default_rng(0))
loss, pullback = la.vjp(model.loss, params, ids, labels)
gradients = pullback(1.0).params                          a dict with the same names

logits, state = model.logits(params, prompt, return_state=True)
logits, state = la.step(model.logits, params, token, state=state, return_state=True)
"""

from .attention import gated_attention
from .functions import affine, by_heads, formula, function, merged, multiply, parameter
from .init import Init
from .layer import Layer, chain, compose, recomputed
from .mixer import Mixer, Projected, Sizes, decayed, mix, projected
from .parts import embedding, gated_norm, linear, linears, low_rank, rms_norm, rotary, short_conv, squared_relu, swiglu
from .published import PUBLISHED, mixer
from .rwkv import channel_mixing_6, channel_mixing_7, time_mixing_6, time_mixing_7
from .stack import Model, block, language_model, model_of, stack

__all__ = ["PUBLISHED", "Init", "Layer", "Mixer", "Model", "Projected", "Sizes", "affine", "block", "by_heads", "chain",
           "channel_mixing_6", "channel_mixing_7", "compose", "decayed", "embedding", "formula", "function",
           "gated_attention", "gated_norm", "language_model", "linear", "linears", "low_rank", "merged", "mix", "mixer",
           "model_of", "multiply", "parameter", "projected", "recomputed", "rms_norm", "rotary", "short_conv",
           "squared_relu", "stack", "swiglu", "time_mixing_6", "time_mixing_7"]  # fmt: skip
