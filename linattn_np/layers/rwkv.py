"""RWKV-4, 6 and 7: time mixing (a token mixer) and channel mixing (a hidden layer). arXiv 2404.05892, 2503.14456.

Their norms before the mixers are the stack's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import nn
from ..runtime.arrays import compat
from . import init
from .functions import add, affine, by_heads, formula, function, merged, multiply, parameter, summed, variant
from .init import Init
from .layer import Layer, Step, chain, compose, made
from .mixer import Sizes
from .parts import linear

EPS = 64e-5  # of the norm of each head


def time_mixing_4(c: Sizes, **options: Any) -> Layer:
    """y = (sigmoid(r) rwkv4(k, v; w, u)) W_o,   r, k, v of the token and the one before, w = e^{decay}.

    Peng et al., arXiv 2305.13048.
    """
    width = c.H * c.V
    speed = Init((width,), lambda rng, shape: -5 + 8 * _ramp(width) ** (0.7 + 1.3 * _depth(c)))
    u = Init((width,), lambda rng, shape: np.log(0.3) + 0.5 * ((np.arange(width) + 1) % 3 - 1))
    shifted = lambda *powers: function(nn.token_shift, "x", {"mix": share(c, *powers)})  # noqa: E731
    return compose(
        ("x_k", shifted(1.0), "x"),
        ("x_v", shifted(1.0, 0.3), "x"),
        ("x_r", shifted(0.5), "x"),
        ("k", linear(c.D, width), "x_k"),
        ("v", linear(c.D, width), "x_v"),
        ("r", chain(project=linear(c.D, width), activation=function(nn.sigmoid)), "x_r"),
        ("rate", parameter(nn.log_decay, speed, "a", formula="exp"), ""),
        ("w", affine(-1.0), "rate"),
        ("o", function(variant("rwkv4"), "k v w", {"u": u}, **options), "k v w"),
        ("gated", multiply(), "o r"),
        ("out", linear(width, c.D, std=c.out_scale * width**-0.5), "gated"),
    ).named("rwkv4")


@made
def time_mixing_6(c: Sizes, **options: Any) -> Layer:
    """Each of r, k, v, g, w reads x_t + m_t (x_{t-1} - x_t), whose shares m_t depend on the token.

    m = mu + tanh((x + mu_x d) W_1) W_2,   d = x_{t-1} - x_t
    o = rwkv6(r, k, v, w, u),   w = -e^{w_0 + tanh(x_w A) B}
    y = (group_norm(o) silu(g)) W_o
    """
    width, names, rank = c.H * c.K, ("w", "k", "v", "r", "g"), 32
    steps: list[Step] = [("before", function(nn.token_shift), "x"), ("d", difference(), "before x")]
    for n in names:
        lift = init.uniform(rank, c.D, bound=0.01)
        steps += [
            (f"inner_{n}", lerp(share(c, 1.0)), "x d"),
            (f"mu_{n}", chain(down=_dense(init.zeros(c.D, rank)), tanh=tanh(), up=_dense(lift, share(c, *SHARES_6[n]))),
             f"inner_{n}"),
            (f"x_{n}", added_product(), f"x d mu_{n}"),
        ]  # fmt: skip
    decay = chain(down=linear(c.D, rank), tanh=tanh(), up=_dense(init.uniform(rank, width, bound=0.01), _speed_6(c)),
                  heads=by_heads(c.H, c.K), gate=function(nn.log_decay, "a", formula="exp"))  # fmt: skip
    operator = function(variant("rwkv6"), "q k v g", {"u": _bonus_6(c)}, **options)
    return compose(
        *steps,
        *((n, _heads(c), f"x_{n}") for n in ("r", "k", "v")),
        ("decay", decay, "x_w"),
        ("gate", chain(project=linear(c.D, width), activation=function(nn.silu)), "x_g"),
        ("o", operator, "r k v decay"),
        *_output(c),
    )


@made
def time_mixing_7(c: Sizes, **options: Any) -> Layer:
    """A decay, a rate a of the state's correction, and a value residual from the first layer, whose values are v.

        kappa = k k_k of unit length,   k~ = k (1 + (a - 1) k_a),   w = -e^{-1/2} sigmoid(w_0 + tanh(x_w W_1) W_2)
        o = rwkv7(r, k~, v, w, -kappa, a kappa)
        y = ((group_norm(o) + (r k~ r_k summed) v) g) W_o

    The layer of the first block returns (y, v), those above it take (x, v).
    """
    width, first = c.H * c.K, c.layer == 0
    gate = lambda rank, last, bias=None, act=None: chain(  # noqa: E731
        down=_dense(init.normal(c.D, rank)), **({"act": act} if act else {}), up=_dense(init.normal(rank, width), bias),
        **last)  # fmt: skip
    sigmoid, heads = {"sigmoid": function(nn.sigmoid)}, {"heads": by_heads(c.H, c.K)}
    decay = {**heads, "gate": function(nn.log_decay, "a", formula="bounded", bound=-float(np.exp(-0.5)))}
    values: list[Step] = [("v", _heads(c), "x_v")]
    if not first:
        values = [("own", _heads(c), "x_v"), ("mix", gate(32, {**sigmoid, **heads}, init.ones(width)), "x_v"),
                  ("v", between(), "own v mix")]  # fmt: skip
    return compose(
        *((f"x_{n}", function(nn.token_shift, "x", {"mix": share(c, power)}), "x") for n, power in SHARES_7.items()),
        ("r", _heads(c), "x_r"),
        ("k", _heads(c), "x_k"),
        *values,
        ("decay", gate(64, decay, _speed_7(c), tanh()), "x_w"),
        ("a", gate(64, {**sigmoid, **heads}, init.zeros(width)), "x_a"),
        ("gate", gate(128, {}, None, function(nn.sigmoid)), "x_g"),
        ("scaled", _times(init.full(c.H, c.K, value=0.85)), "k"),
        ("kappa", function(nn.l2_norm, eps=1e-12), "scaled"),
        ("retained", retained(init.ones(c.H, c.K)), "k a"),
        ("erased", affine(-1.0), "kappa"),
        ("b", multiply(), "kappa a"),
        ("o", function(variant("rwkv7"), "q k v g a b", **options), "r retained v decay erased b"),
        ("bonus", bonus(init.full(c.H, c.K, value=-0.04)), "r retained v"),
        *_output(c, "bonus"),
        given="x" if first else "x v",
        gives="out v" if first else "out",
    )


@made
def channel_mixing_6(D: int, F: int, scale: float = 1.0) -> Layer:
    """y = sigmoid(x_r W_r) (max(x_k W_k, 0)^2 W_v)"""
    shifted = lambda: function(nn.token_shift, "x", {"mix": init.spaced(D, first=1.0, last=0.0)})  # noqa: E731
    return compose(
        ("x_k", shifted(), "x"),
        ("x_r", shifted(), "x"),
        ("up", linear(D, F), "x_k"),
        ("hidden", function(nn.squared_relu), "up"),
        ("down", linear(F, D, std=scale * F**-0.5), "hidden"),
        ("gate", chain(project=linear(D, D), activation=function(nn.sigmoid)), "x_r"),
        ("y", multiply(), "down gate"),
    )


@made
def channel_mixing_7(D: int, F: int, scale: float = 1.0) -> Layer:
    """y = max(x_k W_k, 0)^2 W_v"""
    return compose(
        ("x_k", function(nn.token_shift, "x", {"mix": init.spaced(D, first=1.0, last=0.0)}), "x"),
        ("up", linear(D, F), "x_k"),
        ("hidden", function(nn.squared_relu), "up"),
        ("down", linear(F, D, std=scale * F**-0.5), "hidden"),
    )


TIME_MIXING: Mapping[str, Callable[..., Layer]] = {
    "rwkv4": time_mixing_4,
    "rwkv6": time_mixing_6,
    "rwkv7": time_mixing_7,
}
CHANNEL_MIXING: Mapping[str, Callable[..., Layer]] = {
    "rwkv4": channel_mixing_6,
    "rwkv6": channel_mixing_6,
    "rwkv7": channel_mixing_7,
}


# published initial values; r = layer / (layers - 1), s = 1 - layer / layers


SHARES_6 = {"w": (1.0,), "k": (1.0,), "v": (1.0, 0.3), "r": (0.5,), "g": (0.5,)}  # powers, and what v has less
SHARES_7 = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}


def _depth(c: Sizes) -> float:
    return c.layer / max(c.layers - 1, 1)


def share(c: Sizes, power: float, less: float = 0.0) -> Init:
    """1 - ((i / D)^{power s} + less r): of the token before, by channel i."""
    s = 1 - c.layer / c.layers
    return Init((c.D,), lambda rng, shape: 1 - ((np.arange(c.D) / c.D) ** (power * s) + less * _depth(c)))


def _ramp(width: int) -> Any:
    return np.arange(width) / max(width - 1, 1)


def _speed_6(c: Sizes) -> Init:
    """w_0 = -6 + 5 i^{0.7 + 1.3 r}, i from 0 to 1."""
    return Init((c.H * c.K,), lambda rng, shape: -6 + 5 * _ramp(*shape) ** (0.7 + 1.3 * _depth(c)))


def _speed_7(c: Sizes) -> Init:
    """w_0 = -6.5 + 5 i^{0.85 + r^{1/2}}"""
    return Init((c.H * c.K,), lambda rng, shape: -6.5 + 5 * _ramp(*shape) ** (0.85 + _depth(c) ** 0.5))


def _bonus_6(c: Sizes) -> Init:
    """u = r (1 - i) + 0.1 ((i + 1) mod 3 - 1)"""

    def draw(rng: Any, shape: tuple[int, ...]) -> Any:
        n = np.arange(c.H * c.K)
        return (_depth(c) * (1 - _ramp(c.H * c.K)) + 0.1 * ((n + 1) % 3 - 1)).reshape(shape)

    return Init((c.H, c.K), draw)


# parts


def _dense(weight: Init, bias: Init | None = None) -> Layer:
    return function(nn.linear, "x", {"weight": weight} | ({} if bias is None else {"bias": bias}))


def _heads(c: Sizes) -> Layer:
    return chain(project=linear(c.D, c.H * c.K), heads=by_heads(c.H, c.K))


def _output(c: Sizes, more: str = "") -> list[Step]:
    """(group_norm(o) + more) gate W_o"""
    width = c.H * c.K
    norm = function(nn.group_norm, "x", {"weight": init.ones(width), "bias": init.zeros(width)}, groups=c.H, eps=EPS)
    steps: list[Step] = [("flat", merged(c.H, c.K), "o"), ("norm", norm, "flat")]
    if more:
        steps += [("more", merged(c.H, c.K), more), ("sum", add(), "norm more")]
    last = "sum" if more else "norm"
    out = linear(width, c.D, std=c.out_scale * width**-0.5)
    return [*steps, ("gated", multiply(), f"{last} gate"), ("out", out, "gated")]


def tanh() -> Layer:
    """tanh x, dx = (1 - tanh^2 x) dy"""
    f = lambda x: compat.array_namespace(x).tanh(x)  # noqa: E731
    return formula(f, lambda dy, x: [dy * (1 - f(x) ** 2)])


def difference() -> Layer:
    """x - y"""
    return formula(lambda x, y: x - y, lambda dy, x, y: [dy, -dy], "x y")


def lerp(mix: Init) -> Layer:
    """x + mix d"""
    return formula(lambda x, d, mix: x + d * mix, lambda dy, x, d, mix: [dy, dy * mix, summed(dy * d, mix)], "x d",
                   {"mix": mix})  # fmt: skip


def added_product() -> Layer:
    """x + d m"""
    return formula(lambda x, d, m: x + d * m, lambda dy, x, d, m: [dy, dy * m, dy * d], "x d m")


def between() -> Layer:
    """x + (first - x) m"""
    return formula(lambda x, first, m: x + (first - x) * m,
                   lambda dy, x, first, m: [dy * (1 - m), dy * m, dy * (first - x)], "x first m")  # fmt: skip


def _times(weight: Init) -> Layer:
    """x weight"""
    return multiply("x", {"weight": weight})


def retained(share: Init) -> Layer:
    """k (1 + (a - 1) share)"""
    return formula(
        lambda k, a, share: k * (1 + (a - 1) * share),
        lambda dy, k, a, share: [dy * (1 + (a - 1) * share), dy * k * share, summed(dy * k * (a - 1), share)],
        "k a", {"share": share})  # fmt: skip


def bonus(weight: Init) -> Layer:
    """(sum over channels of r k weight) v"""

    def f(r: Any, k: Any, v: Any, weight: Any) -> Any:
        return _sum(r * k * weight) * v

    def f_vjp(dy: Any, r: Any, k: Any, v: Any, weight: Any) -> list[Any]:
        d = _sum(dy * v)
        return [d * k * weight, d * r * weight, dy * _sum(r * k * weight), summed(d * r * k, weight)]

    return formula(f, f_vjp, "r k v", {"weight": weight})


def _sum(x: Any) -> Any:
    return compat.array_namespace(x).sum(x, axis=-1, keepdims=True)
