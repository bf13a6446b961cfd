"""Types of the matrix-state core: kinds of decay, erase and read-out, states, inputs, plan, residuals."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol

from ..ops.map_steps import Steps
from ..runtime.arrays import Array, Namespace
from ..runtime.pools import StateRows
from ..runtime.shapes import Sequence


class Decay(Enum):
    """The decay of the state: S <- diag(e^g) S."""

    NONE = "no decay: S_{t-1}"
    SCALAR = "one log decay per token and head: e^{g_t} S_{t-1}"
    VECTOR = "one log decay per key channel: diag(e^{g_t}) S_{t-1}"


class Erase(Enum):
    """What a token erases from the state before it writes."""

    NONE = "nothing"
    DELTA = "the value predicted by r_t: S~ + k_t^T beta_t (v_t - r_t S)"
    FREE = "any rank-one map: S~ + b_t^T (a_t S_{t-1})"


class EraseKey(Enum):
    """What the erase vectors r_t of erase DELTA are; with l2norm, k_t is normalised and r_t with it."""

    OWN = "separate vectors, which l2norm does not change"
    KEY = "the keys: r_t = k_t"
    PRODUCT = "the keys times another array: r_t = b_t * k_t, and b_t * k_t / |k_t| with l2norm"


class Readout(Enum):
    """The output as a function of q_t and the state."""

    LINEAR = "out_t = scale q_t S_t"
    NORMALISED = "out_t = q_t S_t / q_t z_t, or over max(|q_t n_t|, 1)"
    SLOTS = "out_t = softmax(scale q_t W_t) S_t"
    LEVELS = "out_t = sum_l lam_t[l] q_t S_t[l]"
    SOLVED = "out_t = x_t S_t, x_t (Z_t + diag(ridge_t)) = q_t"
    SOFTMAX = "out_t = sum_j softmax_j(scale q_t . k_j + decay from j to t) v_j: the softmax core's"


class ReadState(Enum):
    """Which state a reader at token t reads; `strict` excludes the token's own write."""

    UPDATED = "S_t"
    DECAYED = "diag(e^{g_t}) S_{t-1}"
    PREVIOUS = "S_{t-1}"

    @property
    def strict(self) -> bool:
        return self is not ReadState.UPDATED


class NormalisedState(NamedTuple):
    """State of a NORMALISED read-out: S (..., H, K, V) and z (..., H, K), the sum of the keys."""

    S: Any
    z: Any


class StabilisedState(NamedTuple):
    """State of mlstm: it represents e^m S (..., H, K, V) and e^m n (..., H, K); m (..., H) keeps S and n in range."""

    S: Any
    n: Any
    m: Any


class Mamba3State(NamedTuple):
    """State of mamba3: S (..., H, K, V), and key k (..., H, K) and value v (..., H, V) of the last token.

    S and k are in the frame of the last token. The next token writes k and v once more. Of mamba3_mimo k and v are the
    keys (..., H, R, K) and values (..., H, R, V) of its R rows.
    """

    S: Any
    k: Any
    v: Any


class PreconditionedState(NamedTuple):
    """State of a preconditioned delta rule: S (..., H, K, V), and A (..., H, K), the sum of squared keys."""

    S: Any
    A: Any


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


class LevelState(NamedTuple):
    """State of log-linear attention: a matrix for each level, and the number of tokens so far.

    S (..., H, levels, K, V): S[..., l - 1, :, :] has the tokens of level l, bit_length(position xor token) = l, and
    nothing where bit l - 1 of the position is 0. position (...): whole numbers.
    """

    S: Any
    position: Any


PARTS = {  # axes of the parts of a state
    "S": "H K V",
    "z": "H K",
    "n": "H K",
    "m": "H",
    "Z": "H K K",
    "A": "H K",
    "W": "H K M",
    "N": "H M",
    "k": "H K",
    "v": "H V",
}


class Inputs(NamedTuple):
    """Arrays (..., T, heads, width), or their gradients; None for inputs that the variant does not have.

    Heads may be grouped: an array may have fewer heads than the widest one, if its number divides that one.
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
    u: Array = None  # (H, K)  bonus on the token's own write, with queries that read the PREVIOUS state
    A_log: Array = None  # (H,)  g is a raw projection, before its formula (ops/gate_formula.py)
    bias: Array = None  # (H, 1 or K)  added to the raw g
    theta: Array = None  # (P,)  the key channels (2 p, 2 p + 1) of the state rotate by -theta_p before each token
    # (..., T, H, 2 P), or (T, 1, 2 P) of all heads: cosines, then sines, of the angles by which channels (2 p, 2 p + 1)
    # of q and k are rotated first; its gradient (..., T, H or 1, P) is that of the angles
    rotation: Array = None
    weight: Array = None  # (..., T, H, 1)  erase NONE: factor of what a token writes, for all later tokens
    own: Array = None  # (..., T, H, 1)  the same for its own query; given with weight
    past_k: Array = None  # (..., H, 1, K)  with weight: past_k^T past_v is added to the initial state
    past_v: Array = None  # (..., H, 1, V)

    @property
    def of_tokens(self) -> tuple[Array, ...]:
        """The arrays with an axis of tokens: those before u."""
        return self[:9]

    def mapped(self, f: Callable[[Array], Array], u: Array | None) -> Inputs:
        """f of every array of tokens that is given, with another u and log decays that are computed."""
        rest = [None] * len(self[10:])
        return Inputs._make([*(None if y is None else f(y) for y in self.of_tokens), u, *rest])

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


WITHOUT_GATES = Inputs._fields[:10]  # inputs of kernels whose log decays are computed ahead: all up to u


def both(d: Array, more: Array | None) -> Array:
    """The gradient of an array that is used as two inputs; more is None if the backend has added it to d."""
    return d if more is None else d + more


class Average(NamedTuple):
    """A division by the sum of weights: the state has an extra column, the sum of the keys."""

    eps: float
    sums: Array  # (..., T, heads, 1)  the sums of weights, written by the forward
    out: Array = None  # (..., T, heads, V)  the quotients; backward reads both


class Neighbours(Protocol):
    """Other ranks that a sequence comes from and goes on to.

    Kernels that cut a sequence into segments sum these up first; here they ask for the state that enters them.
    """

    def state(self, transfer: Array | None, offset: Array) -> Array | None:
        """The state before the tokens of a call, None for zeros, from what they do to any state, as la.summary says."""
        ...

    def gradient(self, dstate: Array) -> Array | None:
        """The gradient of the state after them, None for zeros, from that of the one before if nothing follows."""
        ...


class Plan(NamedTuple):
    """How a call is computed: everything that is not an array.

    The fields of `linattn_np/core.py:CallPlan`, with their defaults, and the core's own: which states are read, l2norm,
    lower_bound, beta_sigmoid, gate_lower_bound, micro_steps, features, average, chunk_states and computed.
    """

    xp: Namespace
    dtype: Any  # dtype of states and of every accumulation
    scale: float
    query_reads: ReadState = ReadState.UPDATED  # which state q_t reads: UPDATED or PREVIOUS
    erase_reads: ReadState = ReadState.DECAYED  # which state r_t reads (DELTA): DECAYED or PREVIOUS
    causal: bool = True  # False: every query reads the final state
    chunk_size: int | str | None = None  # 1 recurrent, "parallel", C, or None to choose
    sequences: tuple[Sequence, ...] = ()
    gradients: bool = False  # a backward follows: its code may be compiled with the forward
    gate_gradient: bool = True  # the gradients of g and gv are used; False lets a backend skip them
    gate_lower_bound: float | None = None  # no g is below it, as the caller says
    precision: str | None = None  # "tf32": products of float32 may round their factors to tf32
    overwrite: bool = False  # the final state may overwrite the initial one
    l2norm: bool = False  # q and k are divided by their L2 norm first
    l2norm_eps: float = 0.0  # the norm is sqrt(|x|^2 + eps)
    lower_bound: float | None = None  # g is a raw projection of a decay that is above it
    beta_sigmoid: float = 0.0  # beta is this number times the sigmoid of the beta given; 0: beta is used as given
    micro_steps: int = 1  # per token: k, v and beta have a row per micro-step; q, g and out one per token
    features: Steps | None = None  # the feature map of q and k, applied when they are loaded
    average: Average | None = None  # outputs are divided by the sum of their weights
    pool_rows: StateRows | None = None  # of the state pool; None: `state` has one state per sequence
    chunk_states: str | None = None  # array calls: "loop" from chunk to chunk, "scan" composes transfers; None: choose
    returns_state: bool = True  # the final state is returned
    has_state: bool = False  # an initial state is given
    erase_key: EraseKey = EraseKey.OWN  # the kind of r (DELTA)
    complement_keys: bool = False  # k is 1 - e^g: a backend may return dg - e^g dk as dg, and None as dk
    computed: tuple[str, ...] = ()  # inputs that the call computed of others: kernels may round them to 16 bits
    states_at: tuple[int, ...] | None = None  # numbers of tokens after which states are returned (StatesAt)
    neighbours: Neighbours | None = None  # ranks that have the initial state, of kernels that handle "neighbours"

    @property
    def is_ragged(self) -> bool:
        """Whether states have a row per sequence instead of batch axes."""
        return not self.sequences or self.sequences[0].row is not None

    @property
    def erases_key(self) -> bool:
        """Whether the erase vectors are the keys themselves."""
        return self.erase_key is EraseKey.KEY

    def sums(self) -> list[Array]:
        """The array that the sums of weights are stored in, if there is one: each call has its own."""
        return [] if self.average is None or self.average.sums is None else [self.average.sums]


def has_raw_gate(x: Inputs, plan: Plan) -> bool:
    """Whether g is a raw projection, whose formula gives the log decays."""
    return x.A_log is not None or plan.lower_bound is not None


class Saved(NamedTuple):
    """Residuals of one backend's forward pass."""

    x: Inputs
    plan: Plan
    state: Array  # S_0
    starts: Any  # the backend's own: checkpoints, or arrays that backward does not recompute
