"""The protocol of a core: the code that computes a recurrence, forward and backward.

A core is an object, or a module, with the functions of `Core`. A spec names its core (`VariantSpec.core`). The type of
the type that a change of variables returns names the computation: the core itself, or one of its read-outs
(`register`). One token is a forward of T = 1 with a state: a core finds its own short way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from .runtime.arrays import Array, Namespace
from .runtime.pools import StateRows
from .runtime.shapes import Sequence, Sizes


class CallPlan(NamedTuple):
    """How a call is computed, as far as it is the same for every core. A core's own plan has these fields too."""

    xp: Namespace
    dtype: Any  # dtype of states and of every accumulation
    scale: float
    causal: bool = True  # False: every query reads the final state
    chunk_size: int | str | None = None  # 1 recurrent, "parallel", C, or None to choose
    sequences: tuple[Sequence, ...] = ()
    gradients: bool = False  # a backward follows
    gate_gradient: bool = True  # the gradients of log decays are used; False lets a core skip them
    precision: str | None = None  # "tf32": products of float32 may round their factors to tf32
    overwrite: bool = False  # the final state may overwrite the initial one
    pool_rows: StateRows | None = None  # of the state pool; None: `state` has one state per sequence
    states_at: tuple[int, ...] | None = None  # increasing numbers of tokens after which states are returned (StatesAt)
    returns_state: bool = True  # the final state is returned
    has_state: bool = False  # an initial state is given


class StatesAt(NamedTuple):
    """What takes the place of the final state, and of its gradient, in a call with plan.states_at.

    end: the final state. at: the states at the positions, (..., n, H, K, V), or (n, H, K, V) of a ragged batch. Of a
    gradient either may be None. A position at the end of a sequence belongs to it, 0 to the first one.
    """

    end: Any
    at: Any


class Explained(NamedTuple):
    """How a core would compute a call; operations: of the products of the forward pass."""

    backend: str
    reason: str
    others: dict[str, str]  # each other backend, and why it is not used
    form: str
    chunk_size: int | None
    operations: float
    operations_per_token: float  # per state
    gradients: str = ""  # why the backward makes array calls where the forward does not; "" for others


GROWTH_SLACK = 1e-3  # of a factor: lengths of 16-bit rows are rounded


class Growth(NamedTuple):
    """A step that multiplies `what` by `factor` along one direction: the array to look at, and a sentence about it.

    is_error: no such call is meant.
    """

    array: str
    message: str
    factor: float
    is_error: bool
    what: str = "the state"


Computed = tuple[Any, Any, Any]  # (out or None, final state or StatesAt, residuals)


class Computation(Protocol):
    """Forward, backward and what replay and `explain` ask. fn: the public name; wanted: the option `backend`."""

    def forward(self, fn: str, x: Any, plan: Any, state: Any, wanted: str | None, /) -> Computed:
        """(out, final state, residuals).   out is (..., T, heads, V), or None without queries that read.

        state: None for zeros. The final state may be `state` itself, overwritten, if plan.overwrite. With
        plan.states_at, which is only set where `gives_states`, it is a StatesAt.
        """
        ...

    def backward(self, residuals: Any, dout: Any, dstate: Any, /) -> tuple[Any, Any]:
        """(gradients of the inputs in their type, gradient of the initial state), in plan.dtype.

        dout and dstate: one may be None. May be called any number of times.
        """
        ...

    def gives_states(self, fn: str, x: Any, plan: Any, wanted: str | None, /) -> bool:
        """Whether forward and backward take plan.states_at; else the call is computed in pieces."""
        return False

    def reads_out(self, residuals: Any, /) -> bool:
        """Whether backward reads the output: the caller of vjp then gets a copy."""
        return False

    def reads_end(self, residuals: Any, /) -> bool:
        """Whether backward reads the final state."""
        return False

    def explain(self, fn: str, x: Any, plan: Any, wanted: str | None, /) -> Explained:
        """How `forward` would compute this call.   Raises ValueError where forward would refuse `wanted`."""
        ...


class Core(Computation, Protocol):
    """A core: its computation, its states and its plan. Classes that inherit from this one get the defaults.

    BACKENDS: values of the option `backend`. STATE_AXES: axes of each part of a state, "state" being a state of one
    array. STATE_LIMITS: least and largest sensible values of parts that have them (`la.check`). STATE_COUNTS: the parts
    that are whole numbers, of 64 bits and without a gradient. TAKES_POOLS: whether
    plan.pool_rows may be set; without, rows are gathered before the call.
    """

    BACKENDS: tuple[str, ...]
    STATE_AXES: Mapping[str, str]
    STATE_LIMITS: Mapping[str, tuple[float, float]] = MappingProxyType({})
    STATE_COUNTS: tuple[str, ...] = ()
    TAKES_POOLS: bool = False

    def plan(self, fields: dict[str, Any], spec: Any, options: Mapping[str, Any], sizes: Sizes, /) -> Any:
        """The core's plan, from the fields that every call has, the core's own fields of the spec, and options."""
        return CallPlan(**fields)

    NO_SUMMARY: str = ""  # why no span of tokens has a summary (`la.summary`)

    def transfers(self, spec: Any, /) -> str | None:
        """How a span of tokens acts on an earlier state (`la.summary`).

        "decays": by its log decays. "factors": each number by its own. "matrix": along the key axis, as on values 0.
        "late": so too, after the last token before the span is written once more.
        """
        return None

    def end_shape(self, plan: Any, state: Any, part: str, shape: tuple[int, ...], /) -> tuple[int, ...]:
        """The shape of a part of one sequence's final state; `shape` is that after a call without tokens."""
        return shape

    def readable(self, state: Any, /) -> Any:
        """A state for `la.read`, in its own type.   Raises TypeError if queries cannot read it by itself."""
        raise TypeError(f"read: state is a {type(state).__qualname__}, expected one that queries read")

    def read(self, plan: CallPlan, q: Array, state: Any, /) -> tuple[Array, Callable[[Array], tuple[Array, Any]]]:
        """(out, dout -> (dq, dstate)) of queries of a readable state, in plan.dtype."""
        raise TypeError(f"read: state is a {type(state).__qualname__}, which this core does not read")

    def growth(self, x: Any, plan: Any, /) -> Growth | None:
        """The step of these inputs that grows the state most, if one does: what `la.check` says."""
        return None

    def draw_state(self, rng: Any, kind: type[Any] | None, shapes: Mapping[str, tuple[int, ...]], /) -> Any:
        """A random float64 state for tests: `kind` of arrays with these shapes, by part; one array if it is None."""
        parts = [rng.standard_normal(shape) for shape in shapes.values()]
        return parts[0] if kind is None else kind(*parts)


def join_parts(parts: tuple[Any, ...]) -> Any:
    """Final states of several memories as the final state of all: a tuple, or a StatesAt of tuples."""
    return StatesAt(*zip(*parts, strict=True)) if isinstance(parts[0], StatesAt) else parts


def split_parts(dstate: Any, count: int) -> tuple[Any, ...]:
    """The transpose of join_parts for gradients; None for those that are not given."""
    if not isinstance(dstate, StatesAt):
        return (None,) * count if dstate is None else dstate
    end, at = ((None,) * count if d is None else d for d in dstate)
    return tuple(StatesAt(*each) for each in zip(end, at, strict=True))


STATES: dict[type[Any] | None, Core] = {}  # by the type of a state; None: one array, and plain tuples


def register(computation: Computation, *inputs: type[Any]) -> None:
    """Calls whose change of variables returns one of these types, which get the attribute, are computed by it."""
    for kind in inputs:
        kind.computation = computation


def register_states(core: Core, *kinds: type[Any] | None) -> None:
    """States of these types belong to `core`."""
    STATES.update(dict.fromkeys(kinds, core))
