"""The specification of a variant: equation, arrays, change of variables, format of its state, options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Generic, Protocol, TypeVar

from .core import Core
from .matrix_state import core as matrix_state
from .matrix_state.types import Decay, Erase, EraseKey, Readout, ReadState
from .runtime.arrays import Array, Library
from .runtime.pools import StateRows
from .runtime.shapes import Sequence, Sizes, flatten, lead

CoreInputs = TypeVar("CoreInputs")  # Inputs in most variants; a read-out may have inputs of its own
Names = Items[str]
Gradients = dict[str, Array]  # by public name


FIXED = ("spec", "library", "options", "axes", "sizes", "batch", "plan", "rows")  # of a Call: its signature's
STATES = ("given_state", "state", "initial")


class Call(SimpleNamespace):
    """A checked call: its arrays by public name (None: not given), in time-first layout, and what was found of them."""

    spec: VariantSpec
    library: Library
    options: dict[str, Any]
    axes: Mapping[str, str]  # of the arrays, time first
    sizes: Sizes
    batch: tuple[int, ...]  # the batch axes
    plan: Any  # the core's, with the fields of CallPlan
    given_state: Any  # the caller's
    state: Any  # the same, with a row for each sequence: what a change of variables reads
    initial: Any  # the core's
    rows: StateRows | None  # of given_state, if it is a pool or some sequences begin without a state
    recorder: Any  # Recorder of kernels, for NumPy and CuPy arrays
    name = property(attrgetter("spec.name"))  # of the public function
    xp = property(attrgetter("plan.xp"))
    dtype = property(attrgetter("plan.dtype"))
    sequences = property(attrgetter("plan.sequences"))

    @property
    def kernels(self) -> bool:
        """Whether CUDA kernels may compute it."""
        return self.options["backend"] in (None, "cuda")

    @property
    def is_ragged(self) -> bool:
        return "sequences" in self.sizes

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading axes of states: those of the batch, or the sequences of a ragged batch."""
        return lead(self.sizes)

    @property
    def state_parts(self) -> dict[str, Any]:
        """The arrays of the caller's state by name; none without a state."""
        return {} if self.given_state is None else flatten("state", self.given_state)

    def changed(self, **attributes: Any) -> Call:
        """A copy with other attributes."""
        return Call(**vars(self) | attributes) if attributes else self

    def without_arrays(self) -> Call:
        """The call for other arrays of its signature."""
        fixed = {n: getattr(self, n) for n in FIXED} | {"options": self.options | {"state": None}}
        return Call(**fixed, **dict.fromkeys((*self.spec.arrays, *STATES, "recorder")))


@dataclass(frozen=True)
class ArgSpec:
    """One array of a variant: its axes, with "|" between alternatives, and a description.

    reinterprets: the array whose meaning it changes, if any (with A_log, g is a raw projection, not a log decay).
    limits: its least and largest sensible value (`la.check`), unless one of the options or arrays `raw_with` is given.
    is_complex: its numbers may be complex. The output, and then the state, is complex if anything is.
    """

    axes: str
    description: str
    optional: bool = False
    reinterprets: str | None = None
    limits: tuple[float, float] | None = None
    raw_with: tuple[str, ...] = ()
    is_complex: bool = False


@dataclass(frozen=True)
class ChangeOfVariables(Generic[CoreInputs]):
    """The maps between the arrays of a variant and the inputs of the core, each with its transpose.

    to_core_vjp(c, d) maps the gradients d of the core's inputs to gradients of the variant's arrays.
    from_core_vjp(c, out, dout) returns (gradient of the core's output, gradients by name), dout in the caller's dtype;
    names that are not arrays of the variant become attributes of the c of to_core_vjp.
    query, key, value: the arrays that the core's q, k and v come from; None for a variant without one.
    gate: the array without which the log decays are constants that need no gradient.
    erase_key: the kind of the erase vectors r, if there are any.
    complement_keys: the core's k is 1 - e^g. A backend may add the gradient through k to that of g: then d.k is None.
    linear: whether outputs are linear in the values.
    by_tokens: whether inputs of the core or their gradients are new arrays, made token by token: a large call whose
    numbers are computed in a wider dtype is computed some tokens at a time (call/parts.py).
    keeps_out: whether from_core_vjp reads the output of the core, which a part of the tokens keeps then.
    by_heads: whether a large call is computed some heads at a time (call/head_parts.py): of several rows a token, of
    arrays with fewer, or of numbers that are computed in a wider dtype.
    """

    to_core: Callable[[Call], CoreInputs]
    to_core_vjp: Callable[[Call, CoreInputs], Gradients]
    from_core: Callable[[Call, Array], Array] | None = None
    from_core_vjp: Callable[[Call, Array, Array], tuple[Array, Gradients]] | None = None
    query: str | None = "q"
    key: str | None = "k"
    value: str = "v"
    gate: str | None = None
    erase_key: EraseKey = EraseKey.OWN
    complement_keys: bool = False
    linear: bool = True
    by_tokens: bool = False
    keeps_out: bool = False
    by_heads: bool = False


@dataclass(frozen=True)
class StateFormat:
    """The public state of a variant, and its conversion to the state of the core where they differ.

    parts: the named tuple of a state with several arrays; None: one array. option: the option that must be true for it.
    pack(c, state) returns the core's state, unpack(c, S) the public one; each is the other's transpose if linear. Else
    unpack_vjp(c, S, dstate) returns (dS of the core, gradients by name, "state" for a direct dependence on the initial
    state; other names become attributes of the c of to_core_vjp) and pack_vjp(c, dS, other) the gradient of the public
    state, other being that "state", or None. Such a state depends on tokens too: unpack_at(c, S, prefixes) and
    unpack_at_vjp(c, S, dstates, prefixes) are the same functions of states at positions, (..., n, H, K, V) or ragged
    (n, H, K, V), each after the tokens of its prefix.
    plain: for which options pack only checks, so that a pool of states needs no copy.
    wide: the state may have a shape other than (H, K, V).
    unit: parts that are matrices, which are the identity before the first token; the others are zero.
    axes: by part ("state" for one array), if they differ from the core's.
    is_complex: its numbers may be complex.
    rotates: whether rows of an earlier state are mixed with each other though nothing is erased (`la.summary`).
    stacks: whether a span of tokens is a matrix of all parts of a state below one another (`la.summary`).
    no_summary: why spans of tokens have no summary (`la.summary`), if the core's have; "": they have one.
    first_weight: (f, f_vjp), where a token writes the previous one once more: f(c) returns the weight of that write by
    the first token of each sequence, (..., H) or (N, H), 0 without tokens; f_vjp(c, d) the gradients by name.
    log_decays: (f, f_vjp), where the core's g is not what the state decays by: f(c) returns the tokens' log decays
    (..., T, H, width), or None; f_vjp(c, d) the gradients by name.
    """

    parts: type[Any] | None = None
    option: str | None = None
    pack: Callable[[Call, Any], Any] | None = None
    unpack: Callable[[Call, Any], Any] | None = None
    unpack_vjp: Callable[[Call, Any, Any], tuple[Any, Gradients]] | None = None
    pack_vjp: Callable[[Call, Any, Any], Any] | None = None
    unpack_at: Callable[[Call, Any, list[Sequence]], Any] | None = None
    unpack_at_vjp: Callable[[Call, Any, Any, list[Sequence]], tuple[Any, Gradients]] | None = None
    plain: Callable[[Mapping[str, Any]], bool] | None = None
    wide: bool = False
    unit: frozenset[str] = frozenset()
    axes: Mapping[str, str] | None = None
    is_complex: bool = False
    rotates: bool = False
    stacks: bool = False
    no_summary: str = ""
    first_weight: tuple[Callable[[Call], Array], Callable[[Call, Array], Gradients]] | None = None
    log_decays: tuple[Callable[[Call], Any], Callable[[Call, Array], Gradients]] | None = None

    def type_of(self, options: Mapping[str, Any]) -> type[Any] | None:
        """The named tuple of the state of a call with these options; None: one array."""
        return self.parts if self.option is None or options.get(self.option) else None


@dataclass(frozen=True)
class VariantSpec:
    """A variant: its core, its recurrence as a case of the core's, its arrays, and their change of variables.

    decay, erase, readout, query_reads, erase_reads and micro_steps are the matrix-state core's; others ignore them.
    options: its own, with their defaults; check_options(fn, options) raises TypeError or ValueError for their values.
    rules: arrays that may be given as the name of a rule -> (option that receives the name, default).
    paper: the source; "" for a variant that is not published. called: its title, if not the name as words.
    Raises ValueError if the change of variables names a query, key or value that is no array of the variant.
    """

    is_shared = True
    name: str
    sentence: str
    equation: str
    paper: str
    arrays: Mapping[str, ArgSpec]
    change: ChangeOfVariables[Any]
    core: Core = matrix_state
    decay: Decay = Decay.NONE
    erase: Erase = Erase.NONE
    readout: Readout = Readout.LINEAR
    query_reads: ReadState = ReadState.UPDATED
    erase_reads: ReadState = ReadState.DECAYED
    scaled: bool = True  # scale=None means K**-0.5, else 1
    shares_states: bool = True  # queries may have more heads than values, in groups that read one state
    micro_steps: str = ""  # the letter of an axis after T: micro-steps, which the core treats as tokens
    state: StateFormat = StateFormat()
    options: Mapping[str, Any] = field(default_factory=dict)
    check_options: Callable[[str, dict[str, Any]], None] | None = None
    rules: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    called: str = ""

    def __post_init__(self) -> None:
        for role in ("query", "key", "value"):
            if (name := getattr(self.change, role)) not in (None, *self.arrays):
                arrays = ", ".join(self.arrays)
                raise ValueError(f"{self.name}: the {role} of its change is {name!r}, expected one of {arrays}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copied and pickled as the spec of its public function, of which a process has one."""
        function = vars(self).get("function")
        return super().__reduce_ex__(protocol) if function is None else (attrgetter("spec"), (function,))

    @property
    def title(self) -> str:
        """The name in tables and pictures: "Gated delta rule"."""
        return self.called or self.name.replace("_", " ").capitalize()

    @functools.cached_property
    def counts(self) -> frozenset[str]:
        """The parts of a state that are whole numbers: "state.length"."""
        parts = () if self.state.parts is None else self.state.parts._fields
        return frozenset(f"state.{n}" for n in self.core.STATE_COUNTS if n in parts)

    @functools.cached_property
    def complex_arrays(self) -> frozenset[str]:
        """The arrays whose numbers may be complex."""
        return frozenset(n for n, arg in self.arrays.items() if arg.is_complex)

    @functools.cached_property
    def row_axes(self) -> int:
        """How many axes the output of one token has: 2 for "T H V", 1 for "T D"."""
        return len([n for n in self.arrays[self.change.value].axes.split() if n not in ("T", self.micro_steps)])

    @property
    def transfers(self) -> str | None:
        """How a span of tokens acts on an earlier state (`Core.transfers`, or "stacked"); None: it has no summary."""
        if self.state.stacks:
            return "stacked"
        return None if self.no_summary else self.core.transfers(self)

    @property
    def no_summary(self) -> str:
        """Why spans of tokens have no summary; "": they have one."""
        return "" if self.state.stacks else self.state.no_summary or self.core.NO_SUMMARY

    @property
    def composes(self) -> bool:
        """Whether spans of tokens have a summary."""
        return self.transfers is not None

    @property
    def grows(self) -> bool:
        """Whether a state has an axis of slots, one for each token."""
        return any("L" in axes.split() for axes in (self.state.axes or self.core.STATE_AXES).values())


class VariantFunction(Protocol):
    """A public function, with the attributes that `call.dispatch.public` adds."""

    __name__: str
    spec: VariantSpec
    samples: Samples

    def __call__(self, *arrays: Any, **options: Any) -> Any: ...


# for tests, benchmarks and `linattn doctor`

DISTRIBUTIONS = {"g": "log decay", "gv": "log decay", "beta": "strength"}  # of the others "normal" (sampling.py)


@dataclass(frozen=True)
class Samples:
    """Random calls of a variant: the distribution of each array that is not drawn as usual, and sets of options.

    complex: the arrays, and "state", whose numbers are complex.
    """

    distributions: Mapping[str, str] = field(default_factory=dict)
    options: tuple[Mapping[str, Any], ...] = ({},)
    complex: frozenset[str] = frozenset()

    def distribution(self, name: str) -> str:
        """How an array is drawn: a key of sampling.DRAWS."""
        return self.distributions.get(name) or DISTRIBUTIONS.get(name, "normal")
