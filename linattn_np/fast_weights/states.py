"""States of learners: what the weights have learnt so far.

A part named like an initial array W is W_t less the initial one, so that a state of zeros is the beginning.
<name>_start is the same of the weights at which the mini-batch began, <name>_momentum the momentum. mu is the sum of
the momentum's rates in the mini-batch, length the number of tokens so far.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class LinearState(NamedTuple):
    """Of a linear model with a bias: W (..., H, K, V), b (..., H, V)."""

    W: Any
    b: Any
    W_start: Any
    b_start: Any
    length: Any


class MLPState(NamedTuple):
    """Of an MLP: W1 (..., H, K, M), b1 (..., H, M), W2 (..., H, M, V), b2 (..., H, V)."""

    W1: Any
    b1: Any
    W2: Any
    b2: Any
    W1_start: Any
    b1_start: Any
    W2_start: Any
    b2_start: Any
    length: Any


class LinearMomentum(NamedTuple):
    """Of a linear model W (..., H, K, V) and its momentum."""

    W: Any
    W_start: Any
    W_momentum: Any
    length: Any


class MomentumState(NamedTuple):
    """Of the momentum delta rule: the state S and the momentum M, (..., H, K, V)."""

    S: Any
    M: Any


class MLPMomentum(NamedTuple):
    """Of an MLP W1 (..., H, K, M), W2 (..., H, M, V), and its momentum."""

    W1: Any
    W2: Any
    W1_start: Any
    W2_start: Any
    W1_momentum: Any
    W2_momentum: Any
    length: Any


class SwiGLUMomentum(NamedTuple):
    """Of a SwiGLU A, B (..., H, K, M), W (..., H, M, V), its momentum, and the sum of mu (..., H) in the mini-batch."""

    A: Any
    B: Any
    W: Any
    A_start: Any
    B_start: Any
    W_start: Any
    A_momentum: Any
    B_momentum: Any
    W_momentum: Any
    mu: Any
    length: Any


class WindowState(NamedTuple):
    """Of an MLP W1 (..., H, K, M), W2 (..., H, M, V), its momentum, and the last C tokens: keys, values and shares."""

    W1: Any
    W2: Any
    W1_start: Any
    W2_start: Any
    W1_momentum: Any
    W2_momentum: Any
    k_past: Any  # (..., H, C, K)
    v_past: Any  # (..., H, C, V)
    share_past: Any  # (..., H, C)
    length: Any


AXES = {"b": "H V", "W1": "H K M", "b1": "H M", "W2": "H M V", "b2": "H V", "A": "H K M", "B": "H K M",
        "k": "H C K", "v": "H C V", "share": "H C"}  # fmt: skip


def axes_of(kind: type[Any]) -> dict[str, str]:
    """The axes of each part."""
    matrix = "H M V" if "A" in kind._fields else "H K V"
    own = AXES | {"W": matrix, "mu": "H", "length": ""}
    return {part: own[part.split("_")[0]] for part in kind._fields}
