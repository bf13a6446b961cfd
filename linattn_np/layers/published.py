"""The token mixer of each variant as its layer was published; where no layer was, that of its family.

Initial values are the papers': A_log = log U(1, 16), dt_bias = softplus^-1 of log U(1e-3, 0.1), and so on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import nn
from ..runtime.arrays import compat
from . import init
from .functions import affine, by_heads, formula, function, multiply, parameter, summed
from .layer import Layer, Step, chain, made
from .learners import LEARNERS
from .mixer import Mixer, Projected, Sizes, Source, decayed, mix, projected
from .parts import linear, low_rank, rms_norm, rotary, short_conv
from .rwkv import TIME_MIXING, tanh
from .scans import SCANS

silu = functools.partial(projected, activation=nn.silu)
sigmoid = functools.partial(projected, activation=nn.sigmoid)
CONVOLVED = projected(conv=4)
UNIT = {"unit": lambda c: function(nn.l2_norm, eps=1e-6)}
ROTATED = projected(then={"rotary": lambda c: rotary()})
QK = ("q", "k")
QKV = ("q", "k", "v")


def each(names: tuple[str, ...], source: Source) -> dict[str, Source]:
    return dict.fromkeys(names, source)


def options(**given: Any) -> Callable[[Sizes], dict[str, Any]]:
    """The same options whatever the sizes."""
    return lambda c: given


# decays of Mamba-2's kind: -e^{A_log} softplus(x W + dt_bias)
RATES: dict[str, Callable[..., init.Init]] = {
    "A_log": functools.partial(init.log_uniform, low=1.0, high=16.0),
    "dt_bias": init.step_bias,
}
DELTA = {"qk_l2norm": True, "l2norm_eps": 1e-6}
STRENGTH = DELTA | {"beta_sigmoid": True}


# arrays that depend on others


def constant(values: Callable[[Sizes], Any]) -> Callable[[Sizes], Layer]:
    """An array that is not trained, in the library and dtype of x."""

    def layer(c: Sizes) -> Layer:
        make = lambda x: compat.array_namespace(x).asarray(values(c), dtype=x.dtype, device=compat.device(x))  # noqa: E731
        return formula(make, lambda dy, x: [None])

    return layer


def alibi_slopes(c: Sizes) -> list[float]:
    """2^{-8 (h + 1) / H}"""
    return [2.0 ** (-8 * (h + 1) / c.H) for h in range(c.H)]


def comba_vectors(c: Sizes) -> list[Step]:
    """p = sigmoid(d) k of unit k, q <- q - D p, with d and D of each head."""
    share = parameter(nn.sigmoid, init.ones(c.H, 1))
    less = formula(lambda q, p, D: q - D * p, lambda dy, q, p, D: [dy, -D * dy, summed(-dy * p, D)], "q p",
                   {"D": init.ones(c.H, 1)})  # fmt: skip
    return [("share", share, ""), ("p", multiply(), "k share"), ("q", less, "q p")]


def erased(c: Sizes) -> list[Step]:
    """a = -kappa, b = rate kappa, of kappa of unit length and rate = sigmoid(x W): a delta rule if k = b."""
    kappa = chain(project=linear(c.D, c.H * c.K), heads=by_heads(c.H, c.K), unit=function(nn.l2_norm, eps=1e-6))
    rate = chain(project=linear(c.D, c.H), activation=function(nn.sigmoid), heads=by_heads(c.H, 1))
    return [
        ("kappa", kappa, "input"),
        ("rate", rate, "input"),
        ("a", affine(-1.0), "kappa"),
        ("b", multiply(), "kappa rate"),
    ]


def slots(c: Sizes) -> list[Step]:
    """s = 1 - e^g: a slot takes what it forgets."""
    rest = formula(lambda g: 1 - _exp(g), lambda dy, g: [-dy * _exp(g)])
    return [("s", rest, "g")]


def _exp(g: Any) -> Any:
    return compat.array_namespace(g).exp(g)


def directions(c: Sizes) -> list[Step]:
    """w of unit length, of low rank and convolved, and beta = 2 sigmoid(x W)."""
    width = c.H * c.K
    w = chain(down=linear(c.D, 32), up=linear(32, width), conv=short_conv(width, 3), heads=by_heads(c.H, c.K),
              unit=function(nn.l2_norm, eps=1e-6))  # fmt: skip
    beta = chain(project=linear(c.D, c.H), activation=function(nn.sigmoid), twice=affine(2.0))
    return [("w", w, "input"), ("beta", beta, "input")]


def ridge(c: Sizes) -> list[Step]:
    """softplus(parameter) + 1/4, 1 at first."""
    raw = parameter(nn.softplus, init.full(c.H, c.K, value=0.11243))  # log(e^{3/4} - 1)
    return [("raw_ridge", raw, ""), ("ridge", affine(1.0, 0.25), "raw_ridge")]


def mamba_rates(c: Sizes) -> list[Step]:
    """A = -e^{A_log}"""
    return [("A", parameter(nn.log_decay, RATES["A_log"](c.H), "a", formula="exp"), "")]


def selected(c: Sizes) -> list[Step]:
    """Mamba: dt, B and C of the convolved x, dt of low rank; A = -e^{A_log}, A_log = log 1, 2, ..., N."""
    width, N = c.H * c.V, c.K
    A_log = init.Init((width, N), lambda rng, shape: np.log(np.broadcast_to(np.arange(1.0, N + 1), shape)))
    return [
        ("dt", low_rank(width, -(-c.D // 16), width), "x"),
        ("B", linear(width, N), "x"),
        ("C", linear(width, N), "x"),
        ("A", parameter(nn.log_decay, A_log, "a", formula="exp"), ""),
    ]


def rate_of_decay(*shape: int) -> init.Init:
    """Lambda of RG-LRU: e^{-8 softplus(Lambda)} is uniform in [0.9, 0.999)."""
    return init.Init(shape, lambda rng, shape: np.log(np.expm1(-np.log(rng.uniform(0.9, 0.999, shape)) / 8)))


def forget_bias(*shape: int) -> init.Init:
    return init.spaced(*shape, first=3.0, last=6.0)


def input_bias(*shape: int) -> init.Init:
    return init.normal(*shape, std=0.1)


def heavy_tail(c: Sizes) -> Layer:
    """A = -max(f(x), 1e-4),   f(x) = 1 + x where x >= 0, else 1 / (1 - x)."""

    def value(x: Any) -> Any:
        xp = compat.array_namespace(x)
        y = xp.where(x >= 0, 1 + x, 1 / (1 + xp.abs(x)))
        return -xp.where(y > 1e-4, y, xp.full_like(y, 1e-4))

    def slope(dy: Any, x: Any) -> list[Any]:
        xp, y = compat.array_namespace(x), value(x)
        inner = xp.where(y < -1e-4, y * y, xp.zeros_like(y))  # (1 / (1 - x))^2
        return [-dy * xp.where(x >= 0, xp.ones_like(y), inner)]

    return formula(value, slope)


def of_heads(c: Sizes) -> Layer:
    """(..., P) as (..., H, P), the same of every head."""

    def wide(x: Any) -> Any:
        return compat.array_namespace(x).broadcast_to(x[..., None, :], (*x.shape[:-1], c.H, x.shape[-1]))

    return formula(wide, lambda dy, x: [compat.array_namespace(dy).sum(dy, axis=-2)])


def angles(c: Sizes, shape: tuple[int, ...]) -> Projected:
    """Angles of half of the channel pairs, the same of every head."""
    P = max(c.K // 4, 1)
    return Projected(P, None, chain(heads=of_heads(c)))


def normed(c: Sizes, shape: tuple[int, ...]) -> Projected:
    """B and C of Mamba-3: one for all heads, or R rows, normalised, plus a bias of each head."""
    *rows, _, K = shape
    plus = formula(lambda x, bias: x + bias, lambda dy, x, bias: [summed(dy, x), summed(dy, bias)], "x",
                   {"bias": init.ones(*rows, c.H, K)})  # fmt: skip
    return projected(then={"norm": lambda c: rms_norm(K), "plus": lambda c: plus})(c, (*rows, 1, K))


def over_rows(*shape: int) -> init.Init:
    """1 / R, of vectors (H, R, V)."""
    return init.full(*shape, value=1 / shape[1])


def level_weights(c: Sizes, shape: tuple[int, ...]) -> Projected:
    """lam = softplus(x W L), L (H, levels) at first 1. Guo et al., arXiv 2506.04761."""
    return projected(then={"scale": lambda c: multiply("x", {"L": init.ones(c.H, c.levels)}),
                           "softplus": lambda c: function(nn.softplus)})(c, shape)  # fmt: skip


def rated(c: Sizes, shape: tuple[int, ...]) -> Projected:
    """g = -e^{A_log} softplus(x W + dt_bias), of Mamba-2 and Gated DeltaNet."""
    gate = function(nn.log_decay, "a", {"A_log": RATES["A_log"](c.H), "bias": RATES["dt_bias"](c.H)})
    return Projected(c.H, None, chain(gate=gate))


def lower_bound(c: Sizes, shape: tuple[int, ...]) -> Projected:
    """HGRN-2's decay, bounded by the share of layers below."""
    return decayed("lower_bound", bound=c.layer / c.layers)(c, shape)


MAMBA = Mixer({"x": projected(conv=4, conv_bias=True), "B": projected(conv=4, conv_bias=True),
               "C": projected(conv=4, conv_bias=True)}, {"D": init.ones, "dt_bias": init.step_bias}, mamba_rates,
              options(dt_softplus=True), "all", "silu", True, groups=1)  # fmt: skip
MAMBA3 = Mixer({"B": normed, "C": normed, "A": projected(then={"tail": heavy_tail}), "angle": angles, "z": projected()},
               {"D": init.ones, "dt_bias": init.step_bias}, options=options(dt_softplus=True), norm=None)  # fmt: skip
DELTA_NET = Mixer(each(QKV, CONVOLVED), options=options(**STRENGTH))
GATED_DELTA_NET = Mixer(each(QKV, CONVOLVED) | {"g": projected()}, RATES, options=options(**STRENGTH), gate="silu")
KIMI = GATED_DELTA_NET._replace(sources=each(QKV, CONVOLVED) | {"g": projected(rank=16)}, gate="sigmoid", gate_rank=16)
PRECONDITIONED = each(QK, projected(conv=4, then=UNIT)) | {
    "v": CONVOLVED,
    "g_square": decayed(),
    "beta_square": sigmoid(),
}
RETENTION = Mixer(norm="plain", gate="silu")
KERNEL = Mixer(norm=None)  # normalised by itself
ATTENTION = Mixer(each(QK, ROTATED), norm=None)

PUBLISHED: Mapping[str, Mixer] = {
    # no decay
    "linear_attention": KERNEL._replace(options=options(feature_map="elu+1", normalize=True)),
    "performer": KERNEL,
    "based": KERNEL,
    "rebased": KERNEL._replace(parameters={"gamma": init.ones, "shift": init.zeros}),
    "rfa": KERNEL._replace(sources={"g": decayed()}),
    # a decay of the head
    "lightning_attention": Mixer(each(QKV, silu()), norm="all", gate="sigmoid",
                                 options=lambda c: {"layer": c.layer, "num_layers": c.layers}),
    "retention": RETENTION._replace(sources=each(QK, ROTATED)),
    "retnet": RETENTION,
    "simple_gla": Mixer(each(QKV, CONVOLVED) | {"g": decayed(divisor=16.0)}, gate="silu"),
    "mamba2": MAMBA,
    "transxssm": MAMBA,
    "mlstm": Mixer({"i": projected(bias=input_bias), "f": projected(bias=forget_bias)},
                   options=options(soft_cap=15.0), gate="sigmoid"),
    "mesa_net": Mixer(each(QK, projected(conv=4, then=UNIT)) | {"g": decayed(), "beta": sigmoid()}, more=ridge),
    "mamba3": MAMBA3,
    "mamba3_mimo": MAMBA3._replace(
        parameters={**MAMBA3.parameters, "mimo_x": over_rows, "mimo_o": over_rows, "mimo_z": init.ones}),
    "log_linear_gla": Mixer(each(QKV, CONVOLVED) | {"g": rated, "lam": level_weights}, gate="silu"),
    "log_linear_gated_delta_rule": Mixer(each(QK, projected(conv=4, then=UNIT)) | {
        "v": CONVOLVED, "g": rated, "beta": sigmoid(), "lam": level_weights}, gate="silu"),
    # a decay of each channel
    "gla": Mixer({"g": decayed(rank=16, bias=init.zeros, divisor=16.0)}, gate="silu"),
    "dfw": Mixer({"g": decayed(), "gv": decayed()}),
    "gsa": Mixer(each(QKV, silu()) | {"g": decayed(divisor=8.0)}, more=slots, norm="all"),
    "abc": Mixer(each(QK, ROTATED), gate="silu"),
    "hgrn2": Mixer({"q": silu(), "g": lower_bound}, norm="all"),
    # the delta rule
    "delta_rule": DELTA_NET,
    "efla": Mixer({"q": projected(conv=4, then=UNIT), "k": CONVOLVED, "v": CONVOLVED, "beta": sigmoid()}),
    "longhorn": Mixer(each(QKV, CONVOLVED) | {"beta": sigmoid()}),
    "delta_product": DELTA_NET._replace(options=options(**STRENGTH, allow_neg_eigval=True)),
    "gated_delta_rule": GATED_DELTA_NET,
    "comba": Mixer(each(QK, projected(conv=4, then=UNIT)) | {"v": CONVOLVED, "g": projected()}, RATES, comba_vectors,
                   options(beta_sigmoid=True), gate="silu"),
    "kda": KIMI,
    "preconditioned_gated_delta_rule": GATED_DELTA_NET._replace(
        sources=PRECONDITIONED | {"g": projected()}, options=options(beta_sigmoid=True)),
    "preconditioned_kda": KIMI._replace(sources=PRECONDITIONED | {"g": projected(rank=16)},
                                        options=options(beta_sigmoid=True)),
    "gdn2": GATED_DELTA_NET._replace(sources=each(QKV, CONVOLVED) | {"g": projected(rank=16), "b": sigmoid(rank=16),
                                     "w": sigmoid(rank=16)}, options=options(**DELTA)),
    # a free rank-one term
    "iplr": Mixer(each(QKV, CONVOLVED), more=erased),
    "dplr": Mixer(each(QKV, CONVOLVED) | {"g": decayed("bounded", bound=-0.6065)}, more=erased, gate="silu"),
    "momentum_delta_rule": Mixer(each(QK, projected(conv=4, then=UNIT)) | {"v": CONVOLVED, "g": decayed(divisor=16.0),
                                 "beta": sigmoid(), "mu": sigmoid()}, gate="silu"),
    # a decay of each entry of the state
    "matrix_gate": Mixer({"g": decayed(rank=16, divisor=16.0)}, gate="silu"),
    # channels
    "hgrn": Mixer({"x": silu(), "g": lower_bound}, gate="silu"),
    "min_gru": Mixer(norm=None),
    "min_lstm": Mixer(norm=None),
    "block_scan": Mixer({"a": projected(then={"tanh": lambda c: tanh(), "share": lambda c: affine(1 / c.K)})},
                        norm=None),
    "rg_lru": Mixer({"x": projected(conv=4)}, {"Lambda": rate_of_decay}, norm=None),
    "diagonal_longhorn": Mixer(each(QKV, CONVOLVED) | {"beta": sigmoid()}, gate="silu"),
    "selective_scan": Mixer({"x": projected(conv=4, conv_bias=True), "z": projected()},
                            {"D": init.ones, "dt_bias": init.step_bias}, selected, options(dt_softplus=True), None),
    # softmax
    "softmax_attention": ATTENTION,
    "alibi": KERNEL._replace(more=lambda c: [("slopes", constant(alibi_slopes)(c), "input")]),
    "forgetting_attention": KERNEL._replace(sources={"g": decayed(bias=forget_bias)}),
    "stick_breaking_attention": KERNEL,
    "deltaformer": KERNEL._replace(sources={"k": projected(then=UNIT), "beta": sigmoid()}),
    "path_attention": KERNEL._replace(more=directions),
    "householder_positions": KERNEL._replace(more=directions),
    # weights that learn at test time
    **LEARNERS,
}  # fmt: skip


COMPOSED: Mapping[str, Callable[..., Layer]] = {**TIME_MIXING, **SCANS}  # layers of their own


@made
def mixer(name: str, c: Sizes, **options: Any) -> Layer:
    """The published token mixer of a variant; options: of the variant, such as window=64.

    Raises ValueError for a name without one.
    """
    if name in COMPOSED:
        return COMPOSED[name](c, **options)
    if name not in PUBLISHED:
        known = ", ".join(sorted([*PUBLISHED, *COMPOSED]))
        raise ValueError(f"mixer: name is {name!r}, expected one of {known}")
    own = PUBLISHED[name]
    return mix(name, own._replace(options=lambda c: own.options(c) | options), c)
