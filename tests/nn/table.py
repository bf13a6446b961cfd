"""The pieces of linattn_np.nn under test: arrays and options of small calls, beside their definitions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from tests.naive import pieces as naive

B, T, H, D, W = 2, 11, 3, 6, 4
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
    return np.random.default_rng(sum(shape) + len(shape)).standard_normal(shape)


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


CASES = [*elementwise(), *rows(), *mixing()]
SMALL = [case for case in CASES if case.label != "long"]
