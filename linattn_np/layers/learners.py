"""Mixers whose weights learn at test time: TTT, Titans, Atlas, LaCT. fast_weights has the equations.

Initial weights, step sizes and what remains of momenta are parameters or projections of x, as in the papers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import nn
from ..runtime.arrays import compat
from . import init
from .functions import affine, function
from .init import Init
from .layer import Layer, Mode, Named, Step, Values
from .mixer import Mixer, Projected, Sizes, decayed, projected
from .parts import rotary

BATCH = 16  # tokens of a mini-batch
CONVOLVED = projected(conv=4)
UNIT = projected(conv=4, then={"unit": lambda c: function(nn.l2_norm, eps=1e-6)})
ROTATED = projected(then={"rotary": lambda c: rotary()})


def rate(scale: float, bias: float = 0.0) -> Any:
    """scale sigmoid(x W + b), b at first `bias`; scale is divided by the channels of a key if it is negative."""

    def source(c: Sizes, shape: tuple[int, ...]) -> Projected:
        own = -scale / c.K if scale < 0 else scale
        return projected(activation=nn.sigmoid, bias=lambda *n: init.full(*n, value=bias),
                         then={"scale": lambda c: affine(own)})(c, shape)  # fmt: skip

    return source


def gains(c: Sizes) -> list[Step]:
    """gain_t = max(1 / (1 + n) + w_n, 0) of the place n of a token in its mini-batch; w is trained."""
    return [("gain", place_share(c.H), "input")]


def place_share(H: int) -> Layer:
    """(B, T, H) of any x (B, T, ...), whose state is the number of tokens so far."""

    def run(mode: Mode, params: Named, xs: Values, states: Named) -> Any:
        (x,), w, begin = xs, params["w"], states.get("position", 0)
        xp, at = compat.array_namespace(x), (begin + np.arange(x.shape[1])) % BATCH
        hot = xp.asarray(np.eye(BATCH)[at], dtype=w.dtype, device=compat.device(x))  # (T, BATCH)
        share = xp.asarray(1 / (1 + at), dtype=w.dtype, device=compat.device(x)) + hot @ w
        y = xp.where(share > 0, share, xp.zeros_like(share))
        whole = xp.zeros((*x.shape[:2], H), dtype=w.dtype, device=compat.device(x)) + y[:, None]
        ends = {"position": begin + x.shape[1]} if mode.states else {}

        def pullback(dys: Values, dends: Named) -> tuple[Named, Values, Named]:
            d = xp.where(share > 0, xp.sum(dys[0], axis=(0, 2)), xp.zeros_like(share))
            return {"w": xp.matrix_transpose(hot) @ d}, [None], {}

        return [whole], ends, pullback

    return Layer(run, {"w": init.zeros(BATCH)}, ["x"], name="place_share")


def wide(factor: int) -> Any:
    """Hidden layers of `factor` times the channels of a key."""
    return lambda c: c._replace(M=factor * c.K)


def small(*shape: int) -> Init:
    return init.normal(*shape, std=0.02)


def fan_in(*shape: int) -> Init:
    """Normal with std K^{-1/2} of matrices (H, K, M)."""
    return init.normal(*shape, std=shape[-2] ** -0.5)


# arXiv 2407.04620: rotated q and k, a step size of each token, gains of about 1 / place
TTT = Mixer(dict.fromkeys("qk", ROTATED) | {"eta": rate(-1.0)}, more=gains, norm="all")
NORM = {"weight": init.ones, "shift": init.zeros}
# arXiv 2501.00663: convolved q, k, v; step size, momentum and decay of each token
TITANS = Mixer({"q": UNIT, "k": UNIT, "v": CONVOLVED, "eta": rate(1 / BATCH), "mu": projected(activation=nn.sigmoid),
                "g": decayed(bias=lambda *n: init.full(*n, value=3.0))}, gate="silu")  # fmt: skip
TWO_LAYERS: Mapping[str, Any] = {"W1": fan_in, "W2": small}

LEARNERS: Mapping[str, Mixer] = {
    "ttt_linear": TTT._replace(parameters={"W": small, "b": init.zeros, **NORM}),
    "ttt_mlp": TTT._replace(sources={**TTT.sources, "eta": rate(-0.1)}, sizes=wide(4),
                            parameters={"W1": small, "b1": init.zeros, "W2": small, "b2": init.zeros, **NORM}),
    "titans_linear": TITANS._replace(parameters={"W": small}),
    "titans": TITANS._replace(parameters=TWO_LAYERS, sizes=wide(4)),
    "atlas": TITANS._replace(sources={**TITANS.sources, "share": projected(activation=nn.sigmoid)},
                             parameters=TWO_LAYERS, sizes=wide(4)),
    # arXiv 2505.23884: silu of q, k and v, unit q and k; softplus of a projection, at first 0.01
    "lact": Mixer(dict.fromkeys("qk", projected(activation=nn.silu, then={"unit": lambda c: function(nn.l2_norm)}))
                  | {"v": projected(activation=nn.silu), "mu": projected(activation=nn.sigmoid)}
                  | dict.fromkeys(("eta_A", "eta_B", "eta_W"), projected(
                      activation=nn.softplus, bias=lambda *n: init.full(*n, value=float(np.log(np.expm1(0.01)))))),
                  {"A": fan_in, "B": fan_in, "W": fan_in}, sizes=wide(1)),
}  # fmt: skip
