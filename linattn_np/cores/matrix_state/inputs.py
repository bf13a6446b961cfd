"""The only signature that travels between floors: what the matrix-state core takes and gives."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...ground.chunk_table import Sequence
from ...ground.namespace import Array, Namespace
from ...pieces.map_steps import Steps
from ..kinds import Decay, Erase, Row


class Inputs(NamedTuple):
    """Arrays (..., T, heads, width), or their gradients; None where the variant has none.

    Heads may be grouped: any array may have fewer heads than the widest, when they divide it.
    """

    q: Array  # (..., T, Hq, K)  queries; None: write without reading
    k: Array  # (..., T, Hk, K)  write vectors
    v: Array  # (..., T, H, V)   values
    g: Array = None  # (..., T, H, 1 or K)  log decay; without batch or with T of stride 0 where constant
    gv: Array = None  # (..., T, H, V)   log decay on the value axis (erase NONE only)
    r: Array = None  # (..., T, Hk, K)  erase DELTA: read vectors
    beta: Array = None  # (..., T, H, 1)   erase DELTA: write strength
    a: Array = None  # (..., T, Hk, K)  erase FREE: reads S_{t-1}
    b: Array = None  # (..., T, Hk, K)  erase FREE: writes the correction
    u: Array = None  # (H, K)  bonus on the token's own write, with queries that read BEFORE

    @property
    def decay(self) -> Decay:
        if self.g is None:
            return Decay.NONE
        return Decay.SCALAR if self.g.shape[-1] == 1 else Decay.VECTOR

    @property
    def erase(self) -> Erase:
        if self.a is not None:
            return Erase.FREE
        return Erase.NONE if self.beta is None else Erase.DELTA


def both(d: Array, more: Array | None) -> Array:
    """The gradient of an array that stands in two places; None where a backend has summed it into the first."""
    return d if more is None else d + more


class Average(NamedTuple):
    """A division by the sum of weights: the state has a column more, the sum of the keys."""

    eps: float
    sums: Array  # (..., T, heads, 1)  which it fills
    out: Array = None  # (..., T, heads, V)  what came of it: a backward asks for both


class Plan(NamedTuple):
    """How a call is computed: everything that is not an array."""

    xp: Namespace
    dtype: Any  # dtype of states and of every accumulation
    scale: float
    query_row: Row = Row.AFTER  # which state q_t reads: AFTER or BEFORE the write
    erase_row: Row = Row.DECAYED  # which state r_t reads (DELTA): DECAYED or BEFORE
    causal: bool = True  # False: every query reads the final state
    chunk_size: int | str | None = None  # 1 recurrent, "parallel", C, or None to choose
    sequences: tuple[Sequence, ...] = ()
    gradients: bool = False  # a backward follows: what it needs may be compiled beside the forward
    watched: bool = False  # what such a forward launches is written down, as that of any other is
    gate_gradient: bool = True  # somebody wants the gradient of g and gv; False lets a backend leave it out
    precision: str | None = None  # "tf32": products of float32 may round their factors to it
    overwrite: bool = False  # the final state may take the place of the initial one
    unit: bool = False  # q and k are divided by their length first
    steps: int = 1  # of a token: v and its like have a row a step, q, g and out one a token (steps.py)
    features: Steps | None = None  # the feature map that q and k go through where they are read
    average: Average | None = None  # outputs are divided by the sum of their weights
    rows: Array = None  # (N,) the states of a pool that the sequences begin with; None: `state` has one a sequence


class Saved(NamedTuple):
    """What a forward pass keeps for its backward."""

    x: Inputs
    plan: Plan
    state: Array  # S_0
    starts: Any  # what the backend keeps besides
