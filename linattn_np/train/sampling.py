"""Tokens drawn from a model, one after the other, with its states carried along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .. import nn
from ..call.step import step
from ..layers import Layer
from ..runtime.arrays import compat
from .flat import on_host


def generate(logits: Layer, params: dict[str, Any], prompt: Sequence[int], count: int, temperature: float = 1.0,
             seed: int = 0) -> Iterator[int]:  # fmt: skip
    """`count` tokens after a prompt, drawn from softmax(logits / temperature); temperature 0 takes the largest.

    Raises ValueError for an empty prompt and a negative temperature.
    """
    if not len(prompt):
        raise ValueError("generate: prompt is empty, expected one token or more")
    if temperature < 0:
        raise ValueError(f"generate: temperature is {temperature}, expected a number from 0")
    rng, xp = np.random.default_rng(seed), compat.array_namespace(*params.values())
    found, state = logits(params, xp.asarray(np.array([list(prompt)], np.int64)), return_state=True)
    last = found[:, -1]
    for n in range(count):
        token = draw(on_host(last)[0], temperature, rng)
        yield token
        if n + 1 < count:
            last, state = step(logits, params, xp.asarray(np.array([token])), state=state, return_state=True)


def draw(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """One token from logits (V,)."""
    x = logits.astype(np.float64)
    if not temperature:
        return int(np.argmax(x))
    p = nn.softmax(x / temperature)
    return int(rng.choice(len(p), p=p / p.sum()))
