"""The loss of bytes of a text."""

from __future__ import annotations

import numpy as np

import linattn_np as la

from ...series import help_text
from .task import Batch, Task

BYTES = 256


def task(path: str | None = None, T: int = 64) -> Task:
    """Windows of a file, or of Python's help; the last tenth is for the test."""
    whole = la.train.Tokens([np.frombuffer(help_text().encode(), np.uint8)] if path is None else
                            la.train.Tokens.open([path]).parts)  # fmt: skip
    data, held_out = whole.split(0.9)
    if len(held_out) <= T:
        raise ValueError(f"{path} has {len(whole)} bytes, expected {10 * T + 10} or more")
    return Task("text", BYTES, lambda rng, B: windows(data, rng, B, T),
                {f"{T} bytes": lambda rng, B: windows(held_out, rng, B, T)}, None, T)  # fmt: skip


def windows(data: la.train.Tokens, rng: np.random.Generator, B: int, T: int) -> Batch:
    each = np.stack([data[i : i + T + 1] for i in rng.integers(len(data) - T, size=B).tolist()])
    return each[:, :-1], each[:, 1:]
