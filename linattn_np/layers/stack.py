"""Blocks, stacks and language models.

x <- x + mixer(norm(x)),   x <- x + mlp(norm(x))          a block with norms before its parts
logits = norm(blocks(embedding(ids))) W_head              a language model
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .. import nn
from ..runtime.values import shown
from . import init
from .functions import add, function
from .layer import Layer, Step, compose, made, recomputed
from .mixer import Sizes
from .parts import embedding, linear, rms_norm, squared_relu, swiglu
from .published import mixer
from .rwkv import CHANNEL_MIXING

Named = str | Callable[[Sizes], Layer]  # a token mixer
MLPS: Mapping[str, Callable[..., Layer]] = {"swiglu": swiglu, "squared_relu": squared_relu, **CHANNEL_MIXING}


@made
def block(D: int, mixer: Layer, mlp: Layer | None = None, eps: float = 1e-5) -> Layer:
    """x + mixer(norm(x)), then y + mlp(norm(y)); what a mixer takes or gives besides x passes through."""
    more, outputs = mixer.given[1:], mixer.gives[1:]
    steps: list[Step] = [
        ("norm1", rms_norm(D, eps), "x"),
        (" ".join(("mixer", *outputs)), mixer, " ".join(("norm1", *more))),
        ("y", add(), "x mixer"),
    ]
    if mlp is not None:
        steps += [("norm2", rms_norm(D, eps), "y"), ("mlp", mlp, "norm2"), ("z", add(), "y mlp")]
    return compose(*steps, given=" ".join(("x", *more)), gives=" ".join((steps[-1][0], *outputs)))


@made
def stack(blocks: Sequence[Layer]) -> Layer:
    """Blocks one after the other, by their numbers; what one gives besides x is there for those after it."""
    names = ["x", *(str(n) for n in range(len(blocks)))]
    return compose(
        *((" ".join((str(n), *b.gives[1:])), b, " ".join((names[n], *b.given[1:]))) for n, b in enumerate(blocks)),
        gives=names[-1],
    )


class Model(NamedTuple):
    """A language model: two layers of the same parameters."""

    logits: Layer  # ids (B, T) -> (B, T, V), with states
    loss: Layer  # ids, labels (B, T) -> the mean cross-entropy of the labels that are not -100


def language_model(vocabulary: int, D: int = 64, layers: int = 2, mixers: str | Sequence[Named] = "gated_delta_rule",
                   heads: int = 2, K: int | None = None, V: int | None = None, mlp: str | None = None,
                   hidden: int | None = None, options: Mapping[str, Mapping[str, Any]] = {},
                   recompute: bool = False) -> Model:  # fmt: skip
    """A language model whose layers have these token mixers, again and again.

    mixers     names of variants: "gla", or ["gated_delta_rule"] * 3 + ["softmax_attention"] for a hybrid; or functions
               from Sizes to a layer x (B, T, D) -> (B, T, D)
    K, V       channels of a head, D / heads by default
    mlp        "swiglu", "squared_relu", "rwkv6", "rwkv7", or "none"; None: that of the mixer, else "swiglu"
    hidden     channels of its hidden layer, 8/3 D of swiglu and 4 D of others by default
    options    of variants, by name: {"softmax_attention": {"window": 64}}
    recompute  whether the pullback computes each block again, of which only the input is kept

    Raises ValueError for an unknown mixer or mlp.
    """
    names: list[Named] = [mixers] if isinstance(mixers, str) else list(mixers)
    K = D // heads if K is None else K
    blocks = []
    for n in range(layers):
        name = names[n % len(names)]
        c = Sizes(D, heads, K, K if V is None else V, layer=n, layers=layers)
        own_mlp = name if isinstance(name, str) and name in CHANNEL_MIXING else "swiglu"
        kind = own_mlp if mlp is None else mlp
        if kind != "none" and kind not in MLPS:
            raise ValueError(f"language_model: mlp is {shown(mlp)}, expected one of {', '.join([*MLPS, 'none'])}")
        F = hidden or (8 * D // 3 if kind == "swiglu" else 4 * D)
        own = None if kind == "none" else MLPS[kind](D, F, c.out_scale)
        mixed = mixer(name, c, **options.get(name, {})) if isinstance(name, str) else name(c)
        one = block(D, mixed, own)
        blocks.append(recomputed(one) if recompute else one)
    return model_of(vocabulary, D, blocks)


def model_of(vocabulary: int, D: int, blocks: Sequence[Layer], eps: float = 1e-5) -> Model:
    """A language model of blocks: an embedding before them, a norm and a head after them."""
    body: list[Step] = [("embedding", embedding(vocabulary, D), "ids")]
    body += [("blocks", stack(blocks), "embedding"), ("norm", rms_norm(D, eps), "blocks")]
    loss = function(nn.cross_entropy, "x labels", {"weight": init.normal(D, vocabulary, std=0.02)})
    return Model(compose(*body, ("head", linear(D, vocabulary, std=0.02), "norm"), given="ids").named("logits"),
                 compose(*body, ("head", loss, "norm labels"), given="ids labels").named("loss"))  # fmt: skip
