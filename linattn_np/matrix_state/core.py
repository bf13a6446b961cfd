"""The matrix-state core: chooses a backend for a call and runs its forward and backward.

Features that a backend does not implement are handled by PREPROCESSING: steps that change inputs and plan, each with
its transpose for the gradients.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any, NamedTuple

import array_api_compat as compat

from ..runtime import backend as backends
from ..runtime.arrays import Array, is_cupy
from ..runtime.backend import Backend, LazyModule
from . import policy
from .preprocess import PREPROCESSING, Step
from .types import Inputs, Plan, Saved

ARRAY, CPU, CUDA_MODULE = (LazyModule(f"{__package__}.{name}") for name in ("array.chunks", "cpu.loops", "cuda.calls"))
DEFINITION = LazyModule(f"{__package__}.definition")


class Call(NamedTuple):
    """The inputs and the plan of one call to the core."""

    x: Inputs
    plan: Plan


def _reference_unsupported(call: Call) -> str | None:
    if call.plan.chunk_size == "parallel":
        return "the definition goes token by token; chunk_size='parallel' needs tiles"
    return None


def _chunks_unsupported(call: Call) -> str | None:
    return None


def _numba_unsupported(call: Call) -> str | None:
    x, plan = call
    if not compat.is_numpy_namespace(plan.xp):
        return "it takes NumPy arrays"
    if plan.dtype not in (plan.xp.float32, plan.xp.float64):
        return "it computes in float32 and float64"
    C = plan.chunk_size
    if isinstance(C, str) or (C is not None and C > policy.LONGEST_CPU_CHUNK):
        return f"it has the recurrent form, and chunks of up to {policy.LONGEST_CPU_CHUNK}"
    if any(y is not None and y.shape[-2] > x.v.shape[-2] for y in (x.k, x.g, x.r, x.beta, x.a, x.b)):
        return "it does not cover fewer value heads than keys or gates"
    return None if _has_compiler() else "llvmlite, the compiler of its loops, is not installed"


@functools.cache
def _has_compiler() -> bool:
    return find_spec("llvmlite") is not None


def _cuda_unsupported(call: Call) -> str | None:
    if not is_cupy(call.plan.xp):
        return "the arrays are not CuPy arrays"
    return CUDA_MODULE.unsupported_reason(call)


def _recurrent(call: Call) -> tuple[str, int | None]:
    return "recurrent form", None


REFERENCE = Backend("reference", DEFINITION, _reference_unsupported, _recurrent)
CHUNKS = Backend("chunks", ARRAY, _chunks_unsupported, lambda call: ARRAY.form(call), forced=policy.in_chunks)
NUMBA = Backend("numba", CPU, _numba_unsupported, lambda call: CPU.form(call), lambda call: CPU.HANDLES,
                describe=lambda call: CPU.describe(call))
CUDA = Backend("cuda", CUDA_MODULE, _cuda_unsupported, lambda call: CUDA_MODULE.form(call),
               lambda call: CUDA_MODULE.handles(call), describe=lambda call: CUDA_MODULE.describe(call))


def candidates(plan: Plan) -> list[Backend]:
    """All backends, in order of preference. chunk_size=1 and short sequences prefer the recurrent form."""
    few = all(policy.is_short(plan, s.stop - s.start) for s in plan.sequences)
    slow = [REFERENCE, CHUNKS] if few or plan.chunk_size == 1 else [CHUNKS, REFERENCE]
    return [CUDA, NUMBA, *slow]


def choose(fn: str, x: Inputs, plan: Plan, wanted: str | None) -> Backend:
    """The backend of a call.   Raises ValueError if `wanted` does not support it."""
    return backends.choose(fn, wanted, candidates(plan), Call(x, plan))


def explain_choice(fn: str, x: Inputs, plan: Plan, wanted: str | None) -> backends.Choice:
    """The choice of `choose`, with reasons."""
    return backends.explain_choice(fn, wanted, candidates(plan), Call(x, plan))


def form(fn: str, x: Any, memory: Inputs, plan: Plan, wanted: str | None) -> tuple[str, int | None]:
    """(form, tokens of a chunk or None) of one memory of a call."""
    call = Call(memory, plan)
    return choose(fn, memory, plan, wanted).form(call)


class Residuals(NamedTuple):
    """Residuals of a forward pass: the backend, the preprocessing steps before it, and the arrays that they saved."""

    backend: Backend
    steps: tuple[Step, ...]
    saved: Any


def forward(
    fn: str, x: Inputs, plan: Plan, state: Array | None, wanted: str | None
) -> tuple[Array | None, Array, Residuals]:
    """(out, final state, residuals).   The final state is `state` itself if the backend has overwritten it."""
    backend = choose(fn, x, plan, wanted)
    if wanted is not None and backend.forced is not None:
        plan = backend.forced(plan)
    steps = preprocessing(backend, x, plan)
    run = backend.module.forward
    for step in reversed(steps):
        run = functools.partial(step.forward, run, backend.module)
    out, end, saved = run(x, plan, state)
    return out, end, Residuals(backend, steps, saved)


def preprocessing(backend: Backend, x: Inputs, plan: Plan) -> tuple[Step, ...]:
    """The preprocessing steps of a call."""
    needed = [step for step in PREPROCESSING if step.applies(x, plan)]
    handled = backend.handles(Call(x, plan)) if needed else ()
    return tuple(step for step in needed if step.name not in handled)


def backward(residuals: Residuals, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input, and of the initial state."""
    run = residuals.backend.module.backward
    for step in reversed(residuals.steps):
        run = functools.partial(step.backward, run)
    return run(residuals.saved, dout, dstate)


def reads_out(residuals: Residuals) -> bool:
    """Whether backward reads the output."""
    return False


def reads_end(residuals: Residuals) -> bool:
    """Whether backward reads the final state."""
    return any(step.name == "late_queries" for step in residuals.steps)


def residuals_of(fn: str, x: Inputs, plan: Plan, state: Array | None, wanted: str | None) -> Residuals:
    """The residuals of a forward whose outputs are not used: backends that recompute need only the inputs."""
    backend = choose(fn, x, plan, wanted)
    if "recompute" in backend.handles(Call(x, plan)) and not preprocessing(backend, x, plan):
        return Residuals(backend, (), Saved(x, plan, state, None))
    return forward(fn, x, plan, state, wanted)[2]


def record(x: Inputs, plan: Plan, state: Array | None, residuals: Residuals, arrays: list[Array]) -> Any:
    """The recorded plan of a call, for arrays of the same shapes, strides and dtypes as `arrays`; None if unsupported.

    plan(arrays, state, pointers) returns (out, final state), or None if the call must be computed in full.
    """
    backend = residuals.backend
    if residuals.steps or "record" not in backend.handles(Call(x, plan)):
        return None
    return backend.module.record(x, plan, state, arrays)
