"""Types of the softmax core: inputs, plan, caches, residuals."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..runtime.arrays import Array, Namespace
from ..runtime.pools import StateRows
from ..runtime.shapes import Sequence


class KeyValueCache(NamedTuple):
    """State of softmax attention: the last L tokens, token p in slot p mod L.

    k: (..., L, Hk, K). v: (..., L, H, V). length: (...), the number of tokens so far, integers of 64 bits in an array;
    the states of earlier versions had floats, which are taken if they are whole numbers.
    """

    k: Any
    v: Any
    length: Any


class GatedCache(NamedTuple):
    """KeyValueCache of attention with gates; b (..., L, Hq) is the log decay of each token since it was written."""

    k: Any
    v: Any
    b: Any
    length: Any


class HouseholderCache(NamedTuple):
    """KeyValueCache of keys that are multiplied by P of their token; P (..., Hk, K, K) is that of the last one."""

    k: Any
    v: Any
    P: Any
    length: Any


class Inputs(NamedTuple):
    """Arrays of a call, or their gradients; tokens before heads."""

    q: Array  # (..., Tq, Hq, K), None: nothing is read
    k: Array  # (..., T, Hk, K)
    v: Array  # (..., T, H, V)
    g: Array = None  # (..., T, Hq) log decay of the token
    sinks: Array = None  # (Hq,) logit of a further key, whose value is 0
    w: Array = None  # (..., T, Hk, K) directions of the position maps I - beta w^T w (path/)
    beta: Array = None  # (..., T, Hk) their strengths
    bias: Array = None  # (..., Tq, Hq, T) added to the logits (readouts/biased.py)


class Ungated(Inputs):
    """Inputs whose log decays are 0: they are there for a cache alone."""

    __slots__ = ()


class DeltaInputs(NamedTuple):
    """Arrays of a call of deltaformer, or their gradients; tokens before heads."""

    q: Array  # (..., Tq, Hq, K), None: nothing is read
    k: Array  # (..., T, Hk, K)
    v: Array  # (..., T, H, V)
    beta: Array  # (..., T, H)
    w: Array = None  # (..., T, Hk, K), None: k
    g: Array = None  # (..., T, H) log decay of the token


class StickInputs(NamedTuple):
    """Arrays of a call of stick_breaking_attention, or their gradients; tokens before heads."""

    q: Array  # (..., T, Hq, K), None: nothing is read
    k: Array  # (..., T, Hk, K)
    v: Array  # (..., T, H, V)


class HouseholderInputs(NamedTuple):
    """Arrays of a call of householder_positions, or their gradients; tokens before heads."""

    q: Array  # (..., T, Hq, K), None: nothing is read
    k: Array  # (..., T, Hk, K)
    v: Array  # (..., T, H, V)
    w: Array  # (..., T, Hk, K)
    beta: Array  # (..., T, Hk)


class SoftmaxPlan(NamedTuple):
    """How a call is computed: the fields of `linattn_np/core.py:CallPlan`, and window and normalize."""

    xp: Namespace
    dtype: Any
    scale: float
    causal: bool = True
    chunk_size: int | str | None = None
    sequences: tuple[Sequence, ...] = ()
    gradients: bool = False
    gate_gradient: bool = True
    precision: str | None = None
    overwrite: bool = False
    pool_rows: StateRows | None = None
    states_at: tuple[int, ...] | None = None
    returns_state: bool = True
    has_state: bool = False
    window: int | None = None  # a query reads its own token and the window - 1 before it; None: all
    normalize: bool = True  # False: out is the numerator
    strict: bool = False  # a query reads the tokens before its own
    slots: int = 0  # of the initial cache
    lse: bool = False  # out has one channel more, log(e^{sink} + sum_j e^{z_ij}) (lse.py)
    polynomial: tuple[float, float, float] | None = None  # CUDA: weights are c_0 + c_1 z + c_2 z^2, not exponentials
    eps: float = 0.0  # of a polynomial: added to the sum of weights

    @property
    def is_ragged(self) -> bool:
        """Whether states have a row per sequence instead of batch axes."""
        return not self.sequences or self.sequences[0].row is not None


class SoftmaxResiduals(NamedTuple):
    """Residuals of a forward pass."""

    x: Inputs
    plan: SoftmaxPlan
    backend: Any
    state: Any
    out: Array
    logs: Any  # saved by the backend: log sums of the exponentials


class Parts(NamedTuple):
    """One sequence with heads before tokens, (..., G, R, T, D): H = G groups of R heads.

    An array with fewer heads has R = 1 and is broadcast over its group. The past has the L slots of the cache.
    """

    q: Array  # (..., G, Rq, Tq, K), times the scale
    k: Array  # (..., G, Rk, T, K)
    v: Array  # (..., G, Rv, T, V)
    g: Array  # (..., G, Rq, T), None without gates
    sinks: Array  # (G, Rq, 1, 1)
    past: Past | None
    w: Array = None  # (..., G, Rk, T, K), None without position maps
    beta: Array = None  # (..., G, Rk, T)
    bias: Array = None  # (..., G, Rq, Tq, T)


class Past(NamedTuple):
    """What a sequence has of the cache."""

    k: Array  # (..., G, Rk, L, K)
    v: Array  # (..., G, Rv, L, V)
    b: Array  # (..., G, Rq, L), None without gates
    age: Array  # (..., 1, 1, 1, L) tokens since; less than 0: the slot is empty
