"""The pieces of linattn_np.nn under test: arrays and options of small calls, beside their definitions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from tests.naive import pieces as naive

B, T, H, D, W = 2, 11, 3, 6, 4
PARAMETERS = ("weight", "bias", "mix", "A_log")  # arrays without axes of the batch
CUTS = [0, 3, 3, 4, 9, 11]


class Case(NamedTuple):
    """One call: floating arrays by name, options, and integer arrays, which have no gradient."""

    name: str
    label: str
    arrays: dict[str, np.ndarray]
    options: Mapping[str, Any] = MappingProxyType({})
    whole: Mapping[str, np.ndarray] = MappingProxyType({})

    @property
    def fn(self) -> Any:
        return getattr(la.nn, self.name)

    def expected(self, **changed: Any) -> Any:
        """The result by the definition."""
        given = {n: np.asarray(x, np.float64) for n, x in (self.arrays | changed).items()}
        found = getattr(naive, self.name)(**given, **self.whole, **self.options)
        return found if not isinstance(found, tuple) or self.options.get("return_state") else found[0]

    def __call__(self, changed: Mapping[str, Any] = {}, **more: Any) -> Any:
        return self.fn(**(self.arrays | dict(self.whole) | dict(changed)), **self.options, **more)

    def vjp(self, changed: Mapping[str, Any] = {}, **more: Any) -> Any:
        return la.vjp(self.fn, **(self.arrays | dict(self.whole) | dict(changed)), **self.options, **more)


def normal(*shape: int) -> np.ndarray:
    return np.asarray(np.random.default_rng(sum(shape) + len(shape)).standard_normal(shape))


def elementwise() -> list[Case]:
    x = normal(B, T, D)
    each = [Case(n, "", {"x": 2 * x}) for n in ("sigmoid", "silu", "softplus", "log_sigmoid", "squared_relu", "gelu")]
    return [*each, Case("gelu", "tanh", {"x": 2 * x}, {"approximate": "tanh"}),
            Case("swiglu", "", {"x": x, "gate": normal(T, D, B).reshape(B, T, D)})]  # fmt: skip


def rows() -> list[Case]:
    x, weight, bias, gate = normal(B, T, H, D), normal(D), normal(D + 1)[:D], normal(H, B, T, D).reshape(B, T, H, D)
    both = {"weight": weight, "bias": bias}
    cases = [Case("l2_norm", "", {"x": x}), Case("softmax", "", {"x": 3 * x}), Case("rms_norm", "plain", {"x": x})]
    cases += [Case(n, "affine", {"x": x, **both}) for n in ("rms_norm", "layer_norm")]
    cases += [Case("layer_norm", "heads", {"x": x, "weight": normal(H, D), "bias": normal(D, H).T}),
              Case("rms_norm", "bias", {"x": x, "bias": bias}, {"eps": 1e-3}),
              Case("group_norm", "", {"x": x, **both}, {"groups": 3}),
              Case("group_norm", "roots", {"x": x, "weight": weight}, {"groups": 2, "centred": False})]  # fmt: skip
    gated = [{}, {"eps": 1e-3, "activation": "sigmoid"}, {"gate_first": True}, {"gate_first": True, "group": 3}]
    cases += [Case("gated_norm", str(n), {"x": x, "gate": gate, "weight": weight}, how) for n, how in enumerate(gated)]
    return [*cases, Case("gated_norm", "no weight", {"x": x, "gate": gate}, {"activation": "sigmoid", "group": 2})]


def mixing() -> list[Case]:
    x, row, weight, bias = normal(B, T, D), normal(1, T, D), normal(D, W), normal(D)
    state, ragged = normal(B, W + 1, D), normal(len(CUTS) - 1, W - 1, D)
    ends = {"return_state": True}
    return [
        Case("short_conv", "plain", {"x": x, "weight": weight}),
        Case("short_conv", "width 1", {"x": x, "weight": normal(D, 1), "bias": bias}, {"activation": "silu"}),
        Case("short_conv", "width 8", {"x": x, "weight": normal(D, 8)}, {"activation": "silu", **ends}),
        Case("short_conv", "all", {"x": x, "weight": weight, "bias": bias, "state": state},
             {"activation": "silu", "residual": True, **ends}),
        Case("short_conv", "ragged", {"x": row, "weight": weight, "bias": bias, "state": ragged},
             {"activation": "swish", "cu_seqlens": CUTS, **ends}),
        Case("short_conv", "ragged, no state", {"x": row, "weight": weight}, {"cu_seqlens": CUTS, **ends}),
        Case("short_conv", "long", {"x": normal(1, 1100, 70), "weight": normal(70, 3)}, {"activation": "silu"}),
        Case("token_shift", "plain", {"x": x}, ends),
        Case("token_shift", "mix", {"x": x, "mix": bias, "state": state}, ends),
        Case("token_shift", "ragged", {"x": row, "mix": bias, "state": ragged}, {"cu_seqlens": CUTS, **ends}),
    ]  # fmt: skip


def positions() -> list[Case]:
    x, row, K = normal(B, T, H, D), normal(1, T, H, D), D
    return [
        Case("rotary", "", {"x": x}),
        Case("rotary", "partial", {"x": x}, {"dims": 4, "interleaved": True, "offset": 7, "base": 100.0}),
        Case("rotary", "ragged", {"x": row}, {"cu_seqlens": CUTS, "interleaved": True}),
        Case("rotary", "angles", {"x": x, "angle": normal(B, T, H, K // 2)}, {"interleaved": True}),
        Case("rotary", "sums", {"x": row, "angle": normal(1, T, 2)}, {"cumulative": True, "cu_seqlens": CUTS}),
        Case("xpos", "", {"x": x}, {"scale_base": 8.0}),
        Case("xpos", "keys", {"x": x}, {"inverse": True, "dims": 4, "interleaved": True, "offset": -5}),
    ]


def gates() -> list[Case]:
    a, bias = normal(B, T, H), normal(H)
    of_channels = {"a": normal(B, T, H, D), "A_log": normal(H, 1), "bias": normal(H, D)}
    return [
        Case("log_decay", "softplus", {"a": a, "A_log": normal(H + 1)[:H], "bias": bias}),
        Case("log_decay", "channels", of_channels),
        Case("log_decay", "bounded", of_channels, {"formula": "bounded", "bound": -3.0}),
        Case("log_decay", "log_sigmoid", {"a": a}, {"formula": "log_sigmoid", "divisor": 16.0}),
        Case("log_decay", "lower_bound", {"a": a, "bias": bias}, {"formula": "lower_bound", "bound": 0.3}),
        Case("log_decay", "exp", {"a": a, "A_log": bias}, {"formula": "exp"}),
    ]


def ends() -> list[Case]:
    x, weight, bias = normal(B, T, D), normal(D, H), normal(H)
    rng = np.random.default_rng(0)
    labels, few = rng.integers(0, D, (B, T)), rng.integers(0, H, (B, T))
    labels[0, 2:5], few[0], few[1, 3] = -100, 7, 7
    of = {"labels": labels}
    return [
        Case("linear", "", {"x": x, "weight": weight}),
        Case("linear", "bias", {"x": x, "weight": weight, "bias": bias}),
        Case("embedding", "", {"weight": normal(H, D)}, {}, {"ids": few % H}),
        Case("cross_entropy", "", {"x": x}, {}, of),
        Case("cross_entropy", "all", {"x": 3 * x}, {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "sum"}, of),
        Case("cross_entropy", "hidden", {"x": x, "weight": weight, "bias": bias}, {"ignore_index": 7}, {"labels": few}),
        Case("cross_entropy", "each", {"x": x, "weight": normal(D, D)}, {"reduction": "none"}, of),
        Case("dropout", "", {"x": x}, {"rng": 5, "p": 0.4}),
    ]


CASES = [*elementwise(), *rows(), *mixing(), *positions(), *gates(), *ends()]
SMALL = [case for case in CASES if case.label != "long"]
