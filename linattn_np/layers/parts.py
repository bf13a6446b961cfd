"""Pieces of la.nn with their parameters: dense layers, embeddings, norms, short convolutions, rotations, MLPs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import nn
from ..ops.rows import all_times, all_times_vjp
from ..ops.sums import over_tokens
from ..runtime.arrays import compat, is_cupy
from . import init
from .functions import evaluated, function
from .layer import Layer, Mode, Named, Values, chain, compose, made, plus


@made
def linear(D: int, M: int, bias: bool | init.Init = False, std: float | None = None) -> Layer:
    """y = x W + b; W is normal with std D^{-1/2}, b zero or as given."""
    own = {} if bias is False else {"bias": init.zeros(M) if bias is True else bias}
    return _dense({"": {"weight": init.normal(D, M, std=std)} | own})


@made
def linears(D: int, widths: Mapping[str, int], biases: Mapping[str, init.Init] = {}) -> Layer:
    """y_n = x W_n + b_n: dense layers of one x, which is read once; parameters are n/weight, and n/bias if given."""
    own = lambda n: {"bias": biases[n]} if n in biases else {}  # noqa: E731
    return _dense({f"{n}/": {"weight": init.normal(D, M)} | own(n) for n, M in widths.items()})


def _dense(each: Mapping[str, Mapping[str, init.Init]]) -> Layer:
    """nn.linear of one x with several weights, by the beginning of their names."""

    def run(mode: Mode, params: Named, xs: Values, states: Named) -> Any:
        (x,), Ws, biases = xs, [params[f"{n}weight"] for n in each], [params.get(f"{n}bias") for n in each]
        if not _are_alike(x, Ws, biases):
            found = [evaluated(mode, nn.linear, x, W, b) for W, b in zip(Ws, biases, strict=True)]
            return [y for y, _ in found], {}, functools.partial(_summed_vjp, list(each), [pull for _, pull in found])
        xp = compat.array_namespace(x)
        ys = all_times(xp, x, Ws, biases)

        def pullback(dys: Values, dends: Named) -> tuple[Named, Values, Named]:
            known = [(n, W, dy) for n, W, dy in zip(each, Ws, dys, strict=True) if dy is not None]
            dx, dWs = all_times_vjp(xp, x, [W for _, W, _ in known], [dy for _, _, dy in known])
            grads = {f"{n}weight": dW for (n, _, _), dW in zip(known, dWs, strict=True)}
            grads |= {f"{n}bias": over_tokens(xp, dy) for n, _, dy in known if f"{n}bias" in params}
            return grads, [dx], {}

        return ys, {}, pullback

    parameters = {f"{n}{name}": p for n, own in each.items() for name, p in own.items()}
    return Layer(run, parameters, ["x"], [f"y{n}" for n in range(len(each))], name="linear")


def _summed_vjp(names: Sequence[str], pulls: Sequence[Any], dys: Values, dends: Named) -> tuple[Named, Values, Named]:
    """The gradients of dense layers by their own pullbacks."""
    grads, dx = dict[str, Any](), None
    for n, pull, dy in zip(names, pulls, dys, strict=True):
        if dy is not None:
            d = pull(dy)
            grads |= {f"{n}weight": d.weight} | ({} if d.bias is None else {f"{n}bias": d.bias})
            dx = d.x if dx is None else plus(dx, d.x)
    return grads, [dx], {}


def _are_alike(x: Any, Ws: Sequence[Any], biases: Sequence[Any]) -> bool:
    """Whether BLAS multiplies arrays as they are stored: of NumPy or CuPy, of one dtype, and x has rows."""
    if not hasattr(x, "dtype") or not x.ndim:
        return False
    if type(x) is np.ndarray:
        return x.dtype in (np.float32, np.float64) and all(
            type(y) is np.ndarray and y.dtype == x.dtype for y in (*Ws, *biases) if y is not None)  # fmt: skip
    if not is_cupy(compat.array_namespace(x)) or any(b is not None for b in biases):
        return False
    from ..runtime.cuda.products import takes

    return all(W.ndim == 2 and takes(x.reshape(-1, x.shape[-1]), W) for W in Ws)


@made
def low_rank(D: int, rank: int, M: int, bias: bool | init.Init = False) -> Layer:
    """y = x W_1 W_2 + b"""
    return chain(down=linear(D, rank), up=linear(rank, M, bias))


@made
def embedding(V: int, D: int) -> Layer:
    """y_t = W_{ids_t}; W is standard normal."""
    return function(nn.embedding, "ids", {"weight": init.normal(V, D, std=1.0)})


@made
def rms_norm(D: int, eps: float = 1e-5) -> Layer:
    """Rows divided by the root of their mean square, times weights."""
    return function(nn.rms_norm, "x", {"weight": init.ones(D)}, eps=eps)


@made
def gated_norm(D: int, weight: bool = True, **options: Any) -> Layer:
    """rms_norm and an output gate; options of nn.gated_norm."""
    return function(nn.gated_norm, "x gate", {"weight": init.ones(D)} if weight else {}, **options)


@made
def short_conv(D: int, W: int = 4, activation: str | None = "silu", bias: bool = False) -> Layer:
    """Causal convolution of each channel; weights uniform in +-W^{-1/2}."""
    more = {"bias": init.uniform(D, bound=W**-0.5)} if bias else {}
    return function(nn.short_conv, "x", {"weight": init.uniform(D, W, bound=W**-0.5)} | more, activation=activation)


@made
def rotary(**options: Any) -> Layer:
    """Rotary embedding of x (B, T, H, K), whose state is the number of tokens so far."""

    def run(mode: Mode, params: Named, xs: Values, states: Named) -> Any:
        (x,), begin = xs, states.get("position", 0)
        y, pull = evaluated(mode, nn.rotary, x, offset=begin, **options)
        ends = {"position": begin + x.shape[-3]} if mode.states else {}
        return [y], ends, lambda dys, dends: ({}, [None if dys[0] is None else pull(dys[0]).x], {})

    return Layer(run, {}, ["x"], name="rotary")


# hidden layers of a block


@made
def swiglu(D: int, F: int, scale: float = 1.0) -> Layer:
    """y = (x W_up * silu(x W_gate)) W_down. Shazeer, arXiv 2002.05202."""
    return compose(
        ("project: up gate", linears(D, {"up": F, "gate": F}), "x"),
        ("hidden", function(nn.swiglu, "x gate"), "up gate"),
        ("down", linear(F, D, std=scale * F**-0.5), "hidden"),
    )


@made
def squared_relu(D: int, F: int, scale: float = 1.0) -> Layer:
    """y = max(x W_up, 0)^2 W_down. So et al., Primer, arXiv 2109.08668."""
    return compose(
        ("up", linear(D, F), "x"),
        ("hidden", function(nn.squared_relu), "up"),
        ("down", linear(F, D, std=scale * F**-0.5), "hidden"),
    )
