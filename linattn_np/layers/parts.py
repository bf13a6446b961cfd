"""Pieces of la.nn with their parameters: dense layers, embeddings, norms, short convolutions, rotations, MLPs."""

from __future__ import annotations

from typing import Any

from .. import nn
from . import init
from .functions import evaluated, function
from .layer import Layer, Mode, Named, Values, chain, compose


def linear(D: int, M: int, bias: bool | init.Init = False, std: float | None = None) -> Layer:
    """y = x W + b; W is normal with std D^{-1/2}, b zero or as given."""
    more = {} if bias is False else {"bias": init.zeros(M) if bias is True else bias}
    return function(nn.linear, "x", {"weight": init.normal(D, M, std=std)} | more)


def low_rank(D: int, rank: int, M: int, bias: bool | init.Init = False) -> Layer:
    """y = x W_1 W_2 + b"""
    return chain(down=linear(D, rank), up=linear(rank, M, bias))


def embedding(V: int, D: int) -> Layer:
    """y_t = W_{ids_t}; W is standard normal."""
    return function(nn.embedding, "ids", {"weight": init.normal(V, D, std=1.0)})


def rms_norm(D: int, eps: float = 1e-5) -> Layer:
    """Rows divided by the root of their mean square, times weights."""
    return function(nn.rms_norm, "x", {"weight": init.ones(D)}, eps=eps)


def gated_norm(D: int, weight: bool = True, **options: Any) -> Layer:
    """rms_norm and an output gate; options of nn.gated_norm."""
    return function(nn.gated_norm, "x gate", {"weight": init.ones(D)} if weight else {}, **options)


def short_conv(D: int, W: int = 4, activation: str | None = "silu", bias: bool = False) -> Layer:
    """Causal convolution of each channel; weights uniform in +-W^{-1/2}."""
    more = {"bias": init.uniform(D, bound=W**-0.5)} if bias else {}
    return function(nn.short_conv, "x", {"weight": init.uniform(D, W, bound=W**-0.5)} | more, activation=activation)


def rotary(**options: Any) -> Layer:
    """Rotary embedding of x (B, T, H, K), whose state is the number of tokens so far."""

    def run(mode: Mode, params: Named, xs: Values, states: Named) -> Any:
        (x,), begin = xs, states.get("position", 0)
        y, pull = evaluated(mode, nn.rotary, x, offset=begin, **options)
        ends = {"position": begin + x.shape[-3]} if mode.states else {}
        return [y], ends, lambda dys, dends: ({}, [None if dys[0] is None else pull(dys[0]).x], {})

    return Layer(run, {}, ["x"], name="rotary")


# hidden layers of a block


def swiglu(D: int, F: int, scale: float = 1.0) -> Layer:
    """y = (x W_up * silu(x W_gate)) W_down. Shazeer, arXiv 2002.05202."""
    return compose(
        ("up", linear(D, F), "x"),
        ("gate", linear(D, F), "x"),
        ("hidden", function(nn.swiglu, "x gate"), "up gate"),
        ("down", linear(F, D, std=scale * F**-0.5), "hidden"),
    )


def squared_relu(D: int, F: int, scale: float = 1.0) -> Layer:
    """y = max(x W_up, 0)^2 W_down. So et al., Primer, arXiv 2109.08668."""
    return compose(
        ("up", linear(D, F), "x"),
        ("hidden", function(nn.squared_relu), "up"),
        ("down", linear(F, D, std=scale * F**-0.5), "hidden"),
    )
