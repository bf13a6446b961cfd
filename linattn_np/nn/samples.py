"""Small random arrays and options of every piece, for `linattn doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .declaration import ANY, PIECES, WHOLE

SIZES: dict[str, Any] = {"...": (2, 3), "T": 9, "H": 3, "D": 6, "K": 4, "V": 5, "M": 5, "W": 4, "P": 1, "S": 3}
CHECKED = {("rotary", "angle"): "... T P", ("log_decay", "bias"): "H", ("log_decay", "A_log"): "H"}  # by the body
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {  # of pieces with several forms
    "short_conv": ({}, {"activation": "silu", "residual": True, "return_state": True}),
    "token_shift": ({"return_state": True},),
    "rotary": ({}, {"interleaved": True}, {"cumulative": True}),
    "xpos": ({}, {"inverse": True}),
    "group_norm": ({"groups": 3}, {"groups": 2, "centred": False}),
    "gated_norm": ({}, {"gate_first": True, "activation": "sigmoid", "group": 3}),
    "log_decay": (
        {},
        {"formula": "bounded"},
        {"formula": "exp"},
        {"formula": "log_sigmoid", "divisor": 16.0},
        {"formula": "lower_bound", "bound": 0.3},
    ),
    "gelu": ({}, {"approximate": "tanh"}),
    "cross_entropy": ({}, {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "none"}),
    "dropout": ({"rng": 3},),
}


def options_of(name: str) -> tuple[dict[str, Any], ...]:
    """The options of the samples of a piece."""
    return OPTIONS.get(name, ({},))


def sample(name: str, rng: np.random.Generator, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Random float64 arrays of a call by name, the optional ones too where the options allow them."""
    drawn: dict[str, np.ndarray] = {}
    for array, axes in PIECES[name].axes.items():
        if (array == "A_log" and options.get("formula") in ("log_sigmoid", "lower_bound")) or (
            array == "angle" and "cumulative" not in options
        ):
            continue
        own = CHECKED.get((name, array), "D" if axes == ANY else axes.removeprefix(WHOLE))
        letters = ("... " * (array == "state") + own.removesuffix("?")).split()
        shape = tuple(m for n in letters for m in (SIZES["..."] if n == "..." else (SIZES[n],)))
        drawn[array] = rng.integers(0, SIZES["V"], shape) if axes.startswith(WHOLE) else rng.standard_normal(shape)
    return drawn
