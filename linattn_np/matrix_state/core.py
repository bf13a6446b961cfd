"""The matrix-state core: chooses a backend for a call and runs its forward and backward.

This module is the core of the protocol `linattn_np/core.py:Core`; what states are is in states.py.

The choice is a pure function of library, dtype, shape and options. A feature of a call that the backend does not
implement is handled by a step of preprocess.py, which changes inputs and plan and has a transpose for the gradients.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from ..core import Computed, Explained, register, register_states
from ..ops.host import has_compiler
from ..runtime.arrays import Array, is_cupy, is_numpy
from ..runtime.shapes import Sequence as Tokens
from ..runtime.shapes import Sizes
from ..runtime.values import check_word
from . import operations, policy
from .array import pairs
from .growth import growth as growth
from .preprocess import OF_INPUTS, PREPROCESSING
from .states import STATE_AXES as STATE_AXES
from .states import STATE_COUNTS as STATE_COUNTS
from .states import STATE_LIMITS as STATE_LIMITS
from .states import draw_state as draw_state
from .states import end_shape as end_shape
from .states import read as read
from .states import readable as readable
from .types import (
    BoundedState,
    Erase,
    Inputs,
    LevelState,
    Mamba3State,
    NormalisedState,
    Plan,
    PreconditionedState,
    ReadState,
    Saved,
    SlotState,
    SolvedState,
    has_raw_gate,
)
from .types import StabilisedState as StabilisedState

BACKENDS: tuple[str, ...] = ("reference", "chunks", "numba", "cuda")
TAKES_POOLS = True


class Backend(NamedTuple):
    """A backend of the core: a module with `forward(x, plan, state)` and `backward(residuals, dout, dstate)`.

    load: imports and returns the module. It may have further functions of a call (x, plan): those that the methods
        name, and one for each capability that is a function.
    unsupported_reason: why a call is not supported; None if it is.
    note: why it is not the default for a call that it supports.
    forced: the plan of a call whose option `backend` names this one.
    """

    name: str
    load: Callable[[], Any]
    unsupported_reason: Callable[[Inputs, Plan], str | None]
    note: str = "covers the call too"
    forced: Callable[[Plan], Plan] | None = None

    def form(self, x: Inputs, plan: Plan) -> tuple[str, int | None]:
        """(form, tokens of a chunk or None) of a call."""
        return self._said("form", x, plan, ("recurrent form", None))

    def handles(self, x: Inputs, plan: Plan) -> frozenset[str]:
        """The capabilities for a call: preprocessing steps that the backend implements, and functions of its module."""
        return self._said("handles", x, plan, frozenset(("wide_keys", "states_at")))

    def describe(self, x: Inputs, plan: Plan) -> str:
        """The algorithm of a call, in words."""
        return self._said("describe", x, plan, "")

    def gradients_by_array_calls(self, x: Inputs, plan: Plan) -> str:
        """Why the backward of a call makes array calls; "" where it does not."""
        return self._said("gradients_by_array_calls", x, plan, "")

    def _said(self, name: str, x: Inputs, plan: Plan, default: Any) -> Any:
        """A function of the module at a call; `default` without the function."""
        function = getattr(self.load(), name, None)
        return default if function is None else function(x, plan)


def _loads(name: str) -> Callable[[], Any]:
    return functools.partial(import_module, f"{__package__}.{name}")


def _reference_unsupported(x: Inputs, plan: Plan) -> str | None:
    if plan.chunk_size == "parallel":
        return "the definition goes token by token; chunk_size='parallel' needs tiles"
    return None


def _numba_unsupported(x: Inputs, plan: Plan) -> str | None:
    if not is_numpy(plan.xp):
        return "it takes NumPy arrays"
    if plan.dtype not in (plan.xp.float32, plan.xp.float64):
        return "it computes in float32 and float64"
    C = plan.chunk_size
    if isinstance(C, str) or (C is not None and C > policy.LONGEST_CPU_CHUNK):
        return f"it has the recurrent form, and chunks of up to {policy.LONGEST_CPU_CHUNK}"
    if any(y is not None and y.shape[-2] > x.v.shape[-2] for y in (x.k, x.g, x.r, x.beta, x.a, x.b)):
        return "it does not cover fewer value heads than keys or gates"
    return None if has_compiler() else "Numba, the compiler of its loops, is not installed"


def _cuda_unsupported(x: Inputs, plan: Plan) -> str | None:
    if not is_cupy(plan.xp):
        return "the arrays are not CuPy arrays"
    return CUDA.load().unsupported_reason(x, plan)


REFERENCE = Backend("reference", _loads("definition"), _reference_unsupported)
CHUNKS = Backend("chunks", _loads("array.chunks"), lambda x, plan: None, forced=policy.in_chunks)
NUMBA = Backend("numba", _loads("cpu.loops"), _numba_unsupported)
CUDA = Backend("cuda", _loads("cuda.calls"), _cuda_unsupported)


def candidates(plan: Plan) -> Iterator[Backend]:
    """All backends, in order of preference. chunk_size=1 and short sequences prefer the recurrent form."""
    yield from (CUDA, NUMBA)
    few = plan.chunk_size == 1 or all(policy.is_short(plan, s.stop - s.start) for s in plan.sequences)
    yield from (REFERENCE, CHUNKS) if few else (CHUNKS, REFERENCE)


def choose(fn: str, x: Inputs, plan: Plan, wanted: str | None, among: Iterable[Backend] | None = None) -> Backend:
    """The backend `wanted`, else the first that supports the call; among: in order of preference, all by default.

    Raises ValueError for an unknown name, or with the reason if the wanted backend does not support the call.
    """
    among = candidates(plan) if among is None else among
    if wanted is None:
        return next(b for b in among if b.unsupported_reason(x, plan) is None)  # CHUNKS supports every call
    check_word(fn, "backend", wanted, BACKENDS)
    found = next(b for b in among if b.name == wanted)
    if (reason := found.unsupported_reason(x, plan)) is not None:
        raise ValueError(f"{fn}: backend {wanted!r} does not cover this call: {reason}")
    return found


def reasons_against(chosen: Backend, x: Inputs, plan: Plan, among: Iterable[Backend] | None = None) -> dict[str, str]:
    """Why a call does not take each other backend."""
    among = candidates(plan) if among is None else among
    reasons = {b.name: b.unsupported_reason(x, plan) or b.note for b in among}
    return {name: reasons[name] for name in BACKENDS if name in reasons and name != chosen.name}


def reason_for(wanted: str | None) -> str:
    """Why a call takes its backend."""
    return "requested" if wanted else "the default path"


def form(fn: str, x: Inputs, plan: Plan, wanted: str | None) -> tuple[str, int | None]:
    """(form, tokens of a chunk or None) of a call."""
    if not plan.causal and not plan.returns_state and all(pairs.chosen(x, plan)):
        return "parallel form", None
    return choose(fn, x, plan, wanted).form(x, plan)


def explain(fn: str, x: Inputs, plan: Plan, wanted: str | None) -> Explained:
    """Backend, form and operations of a call."""
    return explain_memories(fn, [x], plan, wanted)


def explain_memories(
    fn: str,
    memories: Sequence[Inputs],
    plan: Plan,
    wanted: str | None,
    words: str = "",
    forms: Sequence[tuple[str, int | None]] = (),
) -> Explained:
    """Backend and operations of a call with several memories, that of values last.

    words: what a read-out adds to the reason. forms: of the memories, if it is not their backend that says them.
    """
    backend = choose(fn, memories[-1], plan, wanted)
    others = reasons_against(backend, memories[-1], plan)
    said = list(dict.fromkeys(backend.describe(memory, plan) for memory in reversed(memories)))
    if plan.beta_sigmoid:
        loaded = "strengths" in backend.handles(memories[-1], plan)
        said.append(f"beta is the sigmoid of the array given, computed {'as it is loaded' if loaded else 'first'}")
    reason = "; ".join(filter(None, (reason_for(wanted), *said, operations.orders(memories[-1], plan), words)))
    forms = forms or [form(fn, memory, plan, wanted) for memory in memories]
    counts = [operations.operations_of(memory, plan, how, C or 0)
              for memory, (how, C) in zip(memories, forms, strict=True)]  # fmt: skip
    total, each = (sum(one) for one in zip(*counts, strict=True))
    arrays = next(filter(None, (backend.gradients_by_array_calls(memory, plan) for memory in memories)), "")
    return Explained(backend.name, reason, others, *forms[-1], float(total), float(each), arrays)


NO_SUMMARY = ""


def transfers(spec: Any) -> str:
    """Log decays where nothing mixes the rows of a state, else a matrix; "late": and the last token, written again."""
    if spec.state.first_weight is not None:
        return "late"
    decays = spec.state.log_decays is not None or (spec.erase is Erase.NONE and not spec.state.rotates)
    return "decays" if decays else "matrix"


def plan(fields: dict[str, Any], spec: Any, options: Mapping[str, Any], sizes: Sizes) -> Plan:
    """The plan of a call: what every call has, what the variant says of reads and micro-steps, and options."""
    steps, sequences, axis = 1, fields["sequences"], spec.micro_steps
    if axis:
        steps = sizes[axis]  # rows of the core a token
        sequences = tuple(Tokens(s.row, steps * s.start, steps * s.stop) for s in sequences)
    reads = spec.erase_reads if spec.erase is Erase.DELTA else ReadState.DECAYED  # of r_t alone
    queries = spec.change.query and spec.arrays[spec.change.query].axes.split()  # each step may have its own
    own = {"query_reads": spec.query_reads, "erase_reads": reads,
           "l2norm": options.get("qk_l2norm", False), "l2norm_eps": options.get("l2norm_eps", 0.0),
           "beta_sigmoid": float(options.get("beta_sigmoid", False) + options.get("allow_neg_eigval", False)),
           "lower_bound": options.get("lower_bound"),
           "gate_lower_bound": options.get("gate_lower_bound"), "sequences": sequences,
           "micro_steps": 1 if queries and axis in queries else steps,
           "chunk_states": options.get("chunk_states"), "erase_key": spec.change.erase_key,
           "complement_keys": spec.change.complement_keys}  # fmt: skip
    if fields["states_at"] is not None:
        own["states_at"] = tuple(steps * n for n in fields["states_at"])
    return Plan(**fields | own)


Residuals = tuple[Any, tuple[str, ...], Any]  # the module of the backend, names in PREPROCESSING, what both have saved


def path_of(fn: str, x: Inputs, plan: Plan, wanted: str | None) -> tuple[Backend, tuple[str, ...], Plan]:
    """(backend, names of the preprocessing steps before it, its plan) of a call."""
    backend = choose(fn, x, plan, wanted)
    if wanted is not None and backend.forced is not None:
        plan = backend.forced(plan)
    return backend, preprocessing(backend, x, plan), plan


def preprocessing(backend: Backend, x: Inputs, plan: Plan) -> tuple[str, ...]:
    """The names of the preprocessing steps of a call: for the features that it has and the backend does not handle."""
    has = {"gates": has_raw_gate(x, plan),
           "l2norm": plan.l2norm, "strengths": plan.beta_sigmoid > 0, "micro_steps": plan.micro_steps > 1,
           "pools": plan.pool_rows is not None, "rotation": x.theta is not None,
           "rotations": x.rotation is not None, "own_writes": x.own is not None,
           "all_pairs": not plan.causal and any(pairs.chosen(x, plan)),
           "late_queries": not plan.causal and x.q is not None,
           "first_position": plan.states_at is not None and plan.states_at[:1] in ((), (0,)),
           "wide_keys": x.k.shape[-1] > policy.WIDEST_CUDA and x.a is None and x.beta is None}  # fmt: skip
    if not any(has.values()):
        return ()
    handled = backend.handles(x, plan)
    return tuple(name for name in PREPROCESSING if has[name] and name not in handled)


def gives_states(fn: str, x: Inputs, plan: Plan, wanted: str | None) -> bool:
    """Whether the backend of a call takes plan.states_at."""
    backend, _, plan = path_of(fn, x, plan, wanted)
    return "states_at" in backend.handles(x, plan)


def asks_for_state(fn: str, x: Inputs, plan: Plan, wanted: str | None) -> bool:
    """Whether the backend asks plan.neighbours for the initial state, and no step before it changes states."""
    backend, steps, plan = path_of(fn, x, plan, wanted)
    return "neighbours" in backend.handles(x, plan) and OF_INPUTS.keys() >= {*steps}


def forward(fn: str, x: Inputs, plan: Plan, state: Array | None, wanted: str | None) -> Computed:
    """(out, final state, residuals).   The final state is `state` itself if the backend has overwritten it."""
    return _forward(*path_of(fn, x, plan, wanted), x, state)


def _forward(
    backend: Backend, steps: tuple[str, ...], plan: Plan, x: Inputs, state: Array | None
) -> tuple[Array | None, Array, Residuals]:
    """forward on a known path."""
    module = backend.load()
    run = module.forward
    for name in reversed(steps):
        run = functools.partial(PREPROCESSING[name][0], run, module)
    out, end, saved = run(x, plan, state)
    return out, end, (module, steps, saved)


def backward(residuals: Residuals, dout: Array | None, dstate: Any, within: Any = None) -> tuple[Inputs, Array]:
    """Gradients of every input, and of the initial state; within(run, saved, dout, dstate) runs the backend's."""
    module, steps, saved = residuals
    run = module.backward
    if within is not None:
        run = functools.partial(within, run)
    for name in reversed(steps):
        run = functools.partial(PREPROCESSING[name][1], run)
    return run(saved, dout, dstate)


def reads_out(residuals: Residuals) -> bool:
    """Whether backward reads the output."""
    return False


def reads_end(residuals: Residuals) -> bool:
    """Whether backward reads the final state."""
    return "late_queries" in residuals[1]


def residuals_of(fn: str, x: Inputs, plan: Plan, state: Array | None, wanted: str | None) -> Residuals:
    """The residuals of a forward whose outputs are not used; recomputing backends need inputs only, and segments."""
    backend, steps, plan = path_of(fn, x, plan, wanted)
    if not steps and plan.states_at is None and "recompute" in backend.handles(x, plan):
        return backend.load(), steps, Saved(x, plan, state, None)
    return _forward(backend, steps, plan, x, state)[2]


register(sys.modules[__name__], Inputs)
register_states(sys.modules[__name__], None, NormalisedState, StabilisedState, Mamba3State, PreconditionedState,
                SolvedState)  # fmt: skip
register_states(sys.modules[__name__], SlotState, BoundedState, LevelState)
