"""The words of the family: how a state decays, how it is erased, when it is read."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple


class Decay(Enum):
    """What a token does to what is stored: S <- diag(e^g) S."""

    NONE = "S_t keeps S_{t-1}"
    SCALAR = "one log decay a token and head: e^{g_t} S_{t-1}"
    VECTOR = "one log decay a key channel: diag(e^{g_t}) S_{t-1}"


class Erase(Enum):
    """What a token takes out of the state before it writes."""

    NONE = "nothing"
    DELTA = "what its key recalls: S~ + k_t^T beta_t (v_t - r_t S)"
    FREE = "any rank-one map: S~ + b_t^T (a_t S_{t-1})"


class Readout(Enum):
    """What is made of q_t S_t."""

    LINEAR = "out_t = scale q_t S_t"
    NORMALISED = "out_t = q_t S_t / q_t z_t, or over max(|q_t n_t|, 1)"
    SLOTS = "out_t = softmax(scale q_t W_t) S_t"
    SOLVED = "out_t = x_t S_t, x_t (Z_t + diag(ridge_t)) = q_t"


class Row(Enum):
    """Which state a reader at token t sees; `strict` leaves the token's own write out."""

    AFTER = "S_t"
    DECAYED = "diag(e^{g_t}) S_{t-1}"
    BEFORE = "S_{t-1}"

    @property
    def strict(self) -> bool:
        return self is not Row.AFTER


class NormalisedState(NamedTuple):
    """State of a NORMALISED read-out: S (..., H, K, V) and z (..., H, K), the sum of the keys."""

    S: Any
    z: Any


class StabilisedState(NamedTuple):
    """State of mlstm: e^m S (..., H, K, V) and e^m n (..., H, K) are what is stored; m (..., H) keeps S and n small."""

    S: Any
    n: Any
    m: Any


class SolvedState(NamedTuple):
    """State of a SOLVED read-out: S (..., H, K, V) and Z (..., H, K, K), the sum of the keys' outer products."""

    S: Any
    Z: Any


class SlotState(NamedTuple):
    """State of a SLOTS read-out: S (..., H, M, V), the values of the slots, and W (..., H, K, M), their keys."""

    S: Any
    W: Any


class BoundedState(NamedTuple):
    """A SlotState whose slots are averages: N (..., H, M) is the sum of the weights so far."""

    S: Any
    W: Any
    N: Any


PARTS = {  # axes of the parts of a state
    "S": "H K V", "z": "H K", "n": "H K", "m": "H", "Z": "H K K", "W": "H K M", "N": "H M",
}
