"""Token mixers of channels that do not mix in the recurrence: LRU, S4D, and gated sums by `scan`.

D channels of the model are H V channels of the recurrence. Complex values are two real parameters, or two projections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import nn
from ..runtime.arrays import compat
from . import init
from .functions import add, formula, function, multiply, variant
from .init import Init
from .layer import Layer, Step, compose
from .mixer import Sizes
from .parts import linear, linears
from .rwkv import tanh


def lru(c: Sizes, **options: Any) -> Layer:
    """y = Re(C lru(B x)) + D x,   out = (a W_1) sigmoid(a W_2),   a = gelu(y). Orvieto et al., arXiv 2303.06349.

    B and C are complex. |l| at first: even on the ring from 0.9 to 0.999, phases uniform.
    """
    N = c.H * c.V
    radius = np.sqrt(0.9**2 + (np.arange(N) + 0.5) / N * (0.999**2 - 0.9**2))
    fixed = lambda x: Init((N,), lambda rng, shape: x)  # noqa: E731
    eigenvalues = {"nu_log": fixed(np.log(-np.log(radius))), "gamma_log": fixed(0.5 * np.log1p(-(radius**2))),
                   "theta_log": Init((N,), lambda rng, shape: np.log(rng.uniform(1e-3, 2 * np.pi, shape)))}  # fmt: skip
    return compose(
        ("project: re im", linears(c.D, {"re": N, "im": N}), "x"),
        ("u", complex_of("re im"), "re im"),
        ("h", function(variant("lru"), "x", eigenvalues, **options), "u"),
        ("parts", parts(), "h"),
        ("read", linear(2 * N, c.D), "parts"),
        *_glu(c),
    ).named("lru")


def s4d(c: Sizes, **options: Any) -> Layer:
    """y = s4d(x W; dt, A, C) + D x W,   out = (a W_1) sigmoid(a W_2),   a = gelu(y). Gu et al., arXiv 2206.11893.

    S4D-Lin: A = -1/2 + i pi n at first, n = 0, 1, ..., K / 2 - 1.
    """
    width, N = c.H * c.V, max(c.K // 2, 1)
    steps = Init((width,), lambda rng, shape: rng.uniform(np.log(1e-3), np.log(0.1), shape))
    A_imag = Init((width, N), lambda rng, shape: np.broadcast_to(np.pi * np.arange(N), shape))
    own = {"dt_log": steps, "A_log": init.full(width, N, value=float(np.log(0.5))), "A_imag": A_imag,
           "D": init.normal(width, std=1.0)}  # fmt: skip
    parts_of_C = {n: init.normal(width, N, std=0.5**0.5) for n in ("re", "im")}
    return compose(
        ("u", linear(c.D, width), "x"),
        ("C", complex_of("", parts_of_C), ""),
        ("read", function(variant("s4d"), "x C", own, **options), "u C"),
        *_glu(c, width, skip=False),
    ).named("s4d")


def scan(c: Sizes, **options: Any) -> Layer:
    """h_t = a_t h_{t-1} + (1 - a_t) tanh(x W),   out = (h sigmoid(x W_o)) W: the quasi-recurrent network.

    a = sigmoid(x W_a). Bradbury et al., arXiv 1611.01576; Martin and Cundy, arXiv 1709.04057.
    """
    width = c.H * c.V
    rest = formula(lambda a, z: (1 - a) * z, lambda dy, a, z: [-dy * z, dy * (1 - a)], "a z")
    return compose(
        ("project: a_in z_in o_in", linears(c.D, dict.fromkeys("azo", width)), "x"),
        ("a", function(nn.sigmoid), "a_in"),
        ("z", tanh(), "z_in"),
        ("u", rest, "a z"),
        ("h", function(variant("scan"), "a x", **options), "a u"),
        ("o", function(nn.sigmoid), "o_in"),
        ("gated", multiply(), "h o"),
        ("out", linear(width, c.D, std=c.out_scale * width**-0.5), "gated"),
    ).named("scan")


SCANS: Mapping[str, Callable[..., Layer]] = {"lru": lru, "s4d": s4d, "scan": scan}


# parts


def complex_of(given: str, parameters: Mapping[str, Init] = {}) -> Layer:
    """re + i im"""
    return formula(lambda re, im: re + 1j * im, lambda dy, re, im: [_real(dy), _imag(dy)], given, parameters)


def parts() -> Layer:
    """The real parts, then the imaginary parts of z (..., N)."""

    def join(z: Any) -> Any:
        return compat.array_namespace(z).concat([_real(z), _imag(z)], axis=-1)

    return formula(join, lambda dy, z: [dy[..., : z.shape[-1]] + 1j * dy[..., z.shape[-1] :]], "z")


def _real(z: Any) -> Any:
    return compat.array_namespace(z).real(z)


def _imag(z: Any) -> Any:
    return compat.array_namespace(z).imag(z)


def _glu(c: Sizes, width: int | None = None, skip: bool = True) -> list[Step]:
    """gelu, then a linear unit with a gate, of `read`, to which D x is added."""
    width = c.D if width is None else width
    steps: list[Step] = []
    if skip:
        steps = [("skip", multiply("x", {"D": init.normal(c.D, std=1.0)}), "x"), ("sum", add(), "read skip")]
    return [
        *steps,
        ("act", function(nn.gelu), "sum" if skip else "read"),
        ("glu: value gate_in", linears(width, {"value": c.D, "gate": c.D}), "act"),
        ("gate", function(nn.sigmoid), "gate_in"),
        ("y", multiply(), "value gate"),
    ]
