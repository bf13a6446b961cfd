"""Drafts of the next tokens, by look-up: what followed the last tokens of a sequence where they were before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

import linattn_np as la
from linattn_np.layers import Layer

from .pool import leaves

N = 3  # tokens that are looked up
BEFORE = 37  # tokens before those that are tried out


class Past:
    """The tokens of a sequence, and where each N of them were last."""

    def __init__(self, tokens: Iterable[int]):
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # the place after N tokens
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """The next token."""
        if len(self._tokens) >= N:
            self._after[tuple(self._tokens[-N:])] = len(self._tokens)
        self._tokens.append(token)

    def draft(self, most: int) -> list[int]:
        """At most so many tokens that may come next; none if the last N tokens are new."""
        at = self._after.get(tuple(self._tokens[-N:]))
        return [] if at is None else self._tokens[at : at + max(most, 0)]


def check(logits: Layer, params: dict[str, Any], most: int) -> None:
    """Raises ValueError unless calls of 2 to `most` + 1 tokens have the bits of single tokens, outputs and states.

    Else an answer would depend on its drafts. Tried out on random tokens, after some that fill the state.
    """
    before, ids = np.split(np.random.default_rng(0).integers(0, 2, (1, BEFORE + most + 1)), [BEFORE], axis=1)
    state = begin = logits(params, before, return_state=True).state
    outs = []
    for n in range(most + 1):
        one = la.step(logits, params, ids[:, n], state=state, return_state=True)
        state = one.state
        outs.append(one.out)
        several = logits(params, ids[:, : n + 1], state=begin, return_state=True)
        if not (_same(several.out[0], np.concatenate(outs)) and all(map(_same, leaves(several.state), leaves(state)))):
            raise ValueError(f"{n + 1} tokens in one call have other bits than single ones, expected no drafts")


def _same(a: Any, b: Any) -> bool:
    return np.array_equal(a, b, equal_nan=True)
