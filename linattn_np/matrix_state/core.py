"""The matrix-state core: chooses a backend for a call and runs its forward and backward.

This module is the core of the protocol `linattn_np/core.py:Core`; what states are is in states.py.

The choice is a pure function of library, dtype, shape and options. A feature of a call that the backend does not
implement is handled by a step of preprocess.py, which changes inputs and plan and has a transpose for the gradients.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from ..core import CallPlan, Computed, Explained, register, register_states
from ..ops.host import has_compiler
from ..runtime.arrays import Array, is_cupy, is_numpy
from ..runtime.shapes import Sequence as Tokens
from ..runtime.shapes import Sizes
from ..runtime.values import check_word
from . import operations, policy
from .array import pairs
from .growth import growth as growth
from .preprocess import PREPROCESSING, PreprocessingStep
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
    ReadState,
    Saved,
    SlotState,
    SolvedState,
    has_raw_gate,
)
from .types import StabilisedState as StabilisedState

BACKENDS: tuple[str, ...] = ("reference", "chunks", "numba", "cuda")
TAKES_POOLS = True


class Call(NamedTuple):
    """The inputs and the plan of one call to the core."""

    x: Inputs
    plan: Plan


def any_width(call: Call) -> frozenset[str]:
    """The capabilities of a backend that implements no preprocessing itself but supports keys of any width."""
    return frozenset(("wide_keys", "states_at"))


class Backend(NamedTuple):
    """A backend of the core: its module and its properties.

    load: imports and returns its module, with `forward(x, plan, state)` and `backward(residuals, dout, dstate)`, and
        one function for each capability that is a function.
    unsupported_reason: why a call is not supported; None if it is.
    handles: the capabilities for a call: preprocessing steps that the backend implements, and functions of its module.
    note: why it is not the default for a call that it supports.
    describe: the algorithm that the backend uses for a call.
    form: (form, tokens of a chunk or None) of a call.
    forced: the plan of a call whose option `backend` names this one.
    gradients: why the backward of a call makes array calls; "" where it does not.
    """

    name: str
    load: Callable[[], Any]
    unsupported_reason: Callable[[Any], str | None]
    form: Callable[[Any], tuple[str, int | None]]
    handles: Callable[[Any], frozenset[str]] = any_width
    note: str = "covers the call too"
    describe: Callable[[Any], str] | None = None
    forced: Callable[[Any], Any] | None = None
    gradients: Callable[[Any], str] = lambda call: ""


def _loads(name: str) -> Callable[[], Any]:
    def load() -> Any:
        return import_module(f"{__package__}.{name}")

    return load


DEFINITION, ARRAY = _loads("definition"), _loads("array.chunks")
CPU, CUDA_MODULE = _loads("cpu.loops"), _loads("cuda.calls")


def _reference_unsupported(call: Call) -> str | None:
    if call.plan.chunk_size == "parallel":
        return "the definition goes token by token; chunk_size='parallel' needs tiles"
    return None


def _numba_unsupported(call: Call) -> str | None:
    x, plan = call
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


def _cuda_unsupported(call: Call) -> str | None:
    if not is_cupy(call.plan.xp):
        return "the arrays are not CuPy arrays"
    return CUDA_MODULE().unsupported_reason(call)


def _recurrent(call: Call) -> tuple[str, int | None]:
    return "recurrent form", None


REFERENCE = Backend("reference", DEFINITION, _reference_unsupported, _recurrent)
CHUNKS = Backend("chunks", ARRAY, lambda call: None, lambda call: ARRAY().form(call), forced=policy.in_chunks)
NUMBA = Backend(
    "numba",
    CPU,
    _numba_unsupported,
    lambda call: CPU().form(call),
    lambda call: CPU().handles(call),
    describe=lambda call: CPU().describe(call),
)
CUDA = Backend(
    "cuda",
    CUDA_MODULE,
    _cuda_unsupported,
    lambda call: CUDA_MODULE().form(call),
    lambda call: CUDA_MODULE().handles(call),
    describe=lambda call: CUDA_MODULE().describe(call),
    gradients=lambda call: CUDA_MODULE().gradients_by_array_calls(call),
)


def candidates(plan: Plan) -> list[Backend]:
    """All backends, in order of preference. chunk_size=1 and short sequences prefer the recurrent form."""
    few = all(policy.is_short(plan, s.stop - s.start) for s in plan.sequences)
    slow = [REFERENCE, CHUNKS] if few or plan.chunk_size == 1 else [CHUNKS, REFERENCE]
    return [CUDA, NUMBA, *slow]


def choose(fn: str, x: Inputs, plan: Plan, wanted: str | None, among: Sequence[Backend] | None = None) -> Backend:
    """The backend `wanted`, else the first that supports the call; among: in order of preference, all by default.

    Raises ValueError for an unknown name, or with the reason if the wanted backend does not support the call.
    """
    among = candidates(plan) if among is None else among
    if wanted is None:
        call = Call(x, plan)
        return next(b for b in among if b.unsupported_reason(call) is None)  # CHUNKS supports every call
    check_word(fn, "backend", wanted, BACKENDS)
    found = next(b for b in among if b.name == wanted)
    if (reason := found.unsupported_reason(Call(x, plan))) is not None:
        raise ValueError(f"{fn}: backend {wanted!r} does not cover this call: {reason}")
    return found


def reasons_against(chosen: Backend, call: Call, among: Sequence[Backend] | None = None) -> dict[str, str]:
    """Why a call does not take each other backend."""
    among = candidates(call.plan) if among is None else among
    reasons = {b.name: b.unsupported_reason(call) or b.note for b in among}
    return {name: reasons[name] for name in BACKENDS if name in reasons and name != chosen.name}


def reason_for(wanted: str | None) -> str:
    """Why a call takes its backend."""
    return "requested" if wanted else "the default path"


def form(fn: str, x: Inputs, plan: Plan, wanted: str | None) -> tuple[str, int | None]:
    """(form, tokens of a chunk or None) of a call."""
    if not plan.causal and not plan.returns_state and all(pairs.chosen(x, plan)):
        return "parallel form", None
    return choose(fn, x, plan, wanted).form(Call(x, plan))


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
    backend, said = choose(fn, memories[-1], plan, wanted), list[str]()
    describe, others = backend.describe, reasons_against(backend, Call(memories[-1], plan))
    if describe is not None:
        said = list(dict.fromkeys(describe(Call(memory, plan)) for memory in reversed(memories)))
    if plan.beta_sigmoid:
        loaded = "strengths" in backend.handles(Call(memories[-1], plan))
        said.append(f"beta is the sigmoid of the array given, computed {'as it is loaded' if loaded else 'first'}")
    reason = "; ".join(filter(None, (reason_for(wanted), *said, operations.orders(memories[-1], plan), words)))
    forms = forms or [form(fn, memory, plan, wanted) for memory in memories]
    counts = [operations.operations_of(memory, plan, how, C or 0)
              for memory, (how, C) in zip(memories, forms, strict=True)]  # fmt: skip
    total, each = (sum(one) for one in zip(*counts, strict=True))
    arrays = next(filter(None, (backend.gradients(Call(memory, plan)) for memory in memories)), "")
    return Explained(backend.name, reason, others, *forms[-1], float(total), float(each), arrays)


def transfers(spec: Any) -> str:
    """Log decays where nothing mixes the rows of a state, else a matrix."""
    decays = spec.state.log_decays is not None or (spec.erase is Erase.NONE and not spec.state.rotates)
    return "decays" if decays else "matrix"


def plan(plan: CallPlan, spec: Any, options: Mapping[str, Any], sizes: Sizes) -> Plan:
    """The plan of a call: what every call has, what the variant says of reads and micro-steps, and options."""
    steps, sequences = 1, plan.sequences
    if spec.micro_steps:
        steps = sizes.n
        sequences = tuple(Tokens(s.row, steps * s.start, steps * s.stop) for s in sequences)
    reads = spec.erase_reads if spec.erase is Erase.DELTA else ReadState.DECAYED  # of r_t alone
    own = {"query_reads": spec.query_reads, "erase_reads": reads,
           "l2norm": options.get("qk_l2norm", False), "l2norm_eps": options.get("l2norm_eps", 0.0),
           "beta_sigmoid": float(options.get("beta_sigmoid", False) + options.get("allow_neg_eigval", False)),
           "lower_bound": options.get("lower_bound"),
        "gate_lower_bound": options.get("gate_lower_bound"), "micro_steps": steps, "sequences": sequences,
           "chunk_states": options.get("chunk_states"), "erase_key": spec.change.erase_key,
           "complement_keys": spec.change.complement_keys}  # fmt: skip
    if plan.states_at is not None:
        own["states_at"] = tuple(steps * n for n in plan.states_at)
    return Plan(**plan._asdict() | own)


class Path(NamedTuple):
    """How a call is computed: the backend, the preprocessing steps before it, the plan.

    saved: what backend and steps have saved; with it the path is the residuals of a forward.
    """

    backend: Backend
    steps: tuple[PreprocessingStep, ...]
    plan: Plan
    saved: Any = None


def path_of(fn: str, x: Inputs, plan: Plan, wanted: str | None) -> Path:
    """The path of a call."""
    backend = choose(fn, x, plan, wanted)
    if wanted is not None and backend.forced is not None:
        plan = backend.forced(plan)
    return Path(backend, preprocessing(backend, x, plan), plan)


def preprocessing(backend: Backend, x: Inputs, plan: Plan) -> tuple[PreprocessingStep, ...]:
    """The preprocessing steps of a call: for the features that it has and the backend does not handle."""
    has = {"gates": has_raw_gate(x, plan),
           "l2norm": plan.l2norm, "strengths": plan.beta_sigmoid > 0, "micro_steps": plan.micro_steps > 1,
           "pools": plan.pool_rows is not None, "rotation": x.theta is not None,
           "all_pairs": not plan.causal and any(pairs.chosen(x, plan)),
           "late_queries": not plan.causal and x.q is not None,
           "first_position": plan.states_at is not None and plan.states_at[:1] in ((), (0,)),
           "wide_keys": x.k.shape[-1] > policy.WIDEST_CUDA and x.a is None and x.beta is None}  # fmt: skip
    if not any(has.values()):
        return ()
    handled = backend.handles(Call(x, plan))
    return tuple(step for step in PREPROCESSING if has[step.name] and step.name not in handled)


def gives_states(fn: str, x: Inputs, plan: Plan, wanted: str | None) -> bool:
    """Whether the backend of a call takes plan.states_at."""
    path = path_of(fn, x, plan, wanted)
    return "states_at" in path.backend.handles(Call(x, path.plan))


def forward(fn: str, x: Inputs, plan: Plan, state: Array | None, wanted: str | None) -> Computed:
    """(out, final state, residuals).   The final state is `state` itself if the backend has overwritten it."""
    return forward_along(path_of(fn, x, plan, wanted), x, state)


def forward_along(path: Path, x: Inputs, state: Array | None) -> tuple[Array | None, Array, Path]:
    """forward on a known path."""
    module = path.backend.load()
    run = module.forward
    for step in reversed(path.steps):
        run = functools.partial(step.forward, run, module)
    out, end, saved = run(x, path.plan, state)
    return out, end, path._replace(saved=saved)


def backward(residuals: Path, dout: Array | None, dstate: Any, within: Any = None) -> tuple[Inputs, Array]:
    """Gradients of every input, and of the initial state; within(run, saved, dout, dstate) runs the backend's."""
    run = residuals.backend.load().backward
    if within is not None:
        run = functools.partial(within, run)
    for step in reversed(residuals.steps):
        run = functools.partial(step.backward, run)
    return run(residuals.saved, dout, dstate)


def reads_out(residuals: Path) -> bool:
    """Whether backward reads the output."""
    return False


def reads_end(residuals: Path) -> bool:
    """Whether backward reads the final state."""
    return any(step.name == "late_queries" for step in residuals.steps)


def residuals_of(fn: str, x: Inputs, plan: Plan, state: Array | None, wanted: str | None) -> Path:
    """The residuals of a forward whose outputs are not used; recomputing backends need inputs only, and segments."""
    path = path_of(fn, x, plan, wanted)
    if not path.steps and plan.states_at is None and "recompute" in path.backend.handles(Call(x, path.plan)):
        return path._replace(saved=Saved(x, path.plan, state, None))
    return forward_along(path, x, state)[2]


register(sys.modules[__name__], Inputs)
register_states(sys.modules[__name__], None, NormalisedState, StabilisedState, Mamba3State, SolvedState)
register_states(sys.modules[__name__], SlotState, BoundedState, LevelState)
