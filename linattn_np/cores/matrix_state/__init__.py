"""Matrix state: S (K, V) fades, is erased, is written to, is read. Chooses a backend and calls it."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any, NamedTuple

import array_api_compat as compat

from ...ground import backend as backends
from ...ground.namespace import Array, cast
from ...ground.rows import take_rows
from . import chunks, cuda_calls, cuda_plan, cuda_step, recurrence, steps, units, wide_keys
from .inputs import Inputs, Plan, Saved
from .read import read_fwd, read_vjp

COMPILED_CHUNK = 32  # tokens of a chunk of the compiled loops where the caller leaves it open
LONGEST_CHUNK = 128  # tokens that they hold at once


class Call(NamedTuple):
    """What a backend is asked to cover."""

    x: Inputs
    plan: Plan


def _reference_refuses(call: Call) -> str | None:
    if call.plan.chunk_size == "parallel":
        return "the definition goes token by token; chunk_size='parallel' asks for tiles"
    return None


def _chunks_refuses(call: Call) -> str | None:
    return None


def _numba_refuses(call: Call) -> str | None:
    x, plan = call
    if not compat.is_numpy_namespace(plan.xp):
        return "it takes NumPy arrays"
    if plan.dtype not in (plan.xp.float32, plan.xp.float64):
        return "it computes in float32 and float64"
    C = plan.chunk_size
    if isinstance(C, str) or (C is not None and C > LONGEST_CHUNK):
        return f"it has the recurrent form, and chunks of up to {LONGEST_CHUNK}"
    if any(y is not None and y.shape[-2] > x.v.shape[-2] for y in (x.k, x.g, x.r, x.beta, x.a, x.b)):
        return "it does not cover fewer value heads than keys or gates"
    return None if _has_compiler() else "llvmlite, the compiler of its loops, is not installed"


@functools.cache
def _has_compiler() -> bool:
    return find_spec("llvmlite") is not None


REFERENCE = backends.Backend("reference", recurrence, _reference_refuses)
CHUNKS = backends.Backend("chunks", chunks, _chunks_refuses)
NUMBA = backends.Backend("numba", backends.Later(f"{__name__}.numba_loops"), _numba_refuses)
WIDE_CUDA = wide_keys.Split(cuda_calls, cuda_plan.WIDEST)
CUDA = backends.Backend("cuda", WIDE_CUDA, WIDE_CUDA.refuses, how=WIDE_CUDA.how)


def choose(fn: str, x: Inputs, plan: Plan, wanted: str | None) -> backends.Choice:
    """The backend of a call. chunk_size=1 asks for the recurrent form; a few tokens take it by themselves."""
    short = all(chunks.is_short(plan, s.stop - s.start) for s in plan.sequences)
    slow = [REFERENCE, CHUNKS] if short or plan.chunk_size == 1 else [CHUNKS, REFERENCE]
    return backends.choose(fn, wanted, [CUDA, NUMBA, *slow], Call(x, plan))


class Kept(NamedTuple):
    """What backward needs: the backend, what it saved, and the final state where all queries read it.

    given: the inputs before q and k were divided by their length, where the backend does not do that itself.
    """

    module: Any
    saved: Saved
    q: Array | None = None
    state: Array | None = None
    given: Inputs | None = None


def forward(
    fn: str, x: Inputs, plan: Plan, state: Array | None, wanted: str | None
) -> tuple[Array | None, Array, Kept]:
    """(out, final state, kept).   The final state is `state` itself where the backend has overwritten it."""
    module = choose(fn, x, plan, wanted).backend.module
    if wanted == "chunks" and plan.chunk_size is None:  # asked for, however few the tokens
        plan = plan._replace(chunk_size=chunks.preferred_chunk(plan))
    given = None
    if plan.unit and module not in (WIDE_CUDA, NUMBA.module):
        given, x = x, units.forward(x, plan)
    apart = plan.steps > 1 and module is not WIDE_CUDA
    if apart:
        x = steps.forward(x, plan)
    one_step = module is WIDE_CUDA and plan.causal and cuda_step.takes(plan) and len(WIDE_CUDA.cuts(x)) == 1
    if plan.rows is not None and not one_step:
        batch = x.v.shape[:-3] if plan.sequences[0].row is None else plan.rows.shape
        state, plan = take_rows(plan.xp, state, plan.rows, batch), plan._replace(rows=None)
    if plan.causal or x.q is None:
        out, end, saved = module.forward(x, plan, state)
        return steps.of_last(plan, out) if apart else out, end, Kept(module, saved, given=given)
    _, end, saved = module.forward(x._replace(q=None), plan, state)
    out = cast(plan.xp, read_fwd(plan, x.q, end), x.v.dtype)
    return out, end, Kept(module, saved, x.q, end, given)


def keep(fn: str, x: Inputs, plan: Plan, state: Array | None, wanted: str | None) -> Kept:
    """What a forward pass keeps, for a backward of outputs that nobody asks for: compiled loops keep their inputs."""
    module = choose(fn, x, plan, wanted).backend.module
    if module is NUMBA.module:
        return Kept(module, Saved(x, plan, state, None))
    return forward(fn, x, plan, state, wanted)[2]


def again(x: Inputs, plan: Plan, state: Array | None, kept: Kept, given: list[Array]) -> Any:
    """A call that has been made, for other arrays of the same shapes, strides and dtypes as `given`; None if not so.

    It takes what `given` holds and a state, and gives (out, final state), or None where it must be done in full.
    """
    return kept.module.again(x, plan, state, given) if kept.module is NUMBA.module and _is_plain(plan) else None


def _is_plain(plan: Plan) -> bool:
    """Whether the inputs go to a backend as they are."""
    return not plan.unit and plan.steps == 1


def backward(kept: Kept, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input, and of the initial state."""
    plan, dq = kept.saved.plan, None
    apart = plan.steps > 1 and kept.module is not WIDE_CUDA
    if apart:
        dout = None if dout is None else steps.at_last(plan, cast(plan.xp, dout, plan.dtype))
    if kept.q is not None:
        if dout is None:
            dq = plan.xp.zeros_like(cast(plan.xp, kept.q, plan.dtype))
        else:
            dq, dread = read_vjp(plan, kept.q, kept.state, dout)
            dstate = dread if dstate is None else dstate + dread
            dout = None
    grads, dstate0 = kept.module.backward(kept.saved, dout, dstate)
    if kept.q is not None:
        grads = grads._replace(q=dq)
    if apart:
        grads = steps.backward(grads, plan)
    return (grads if kept.given is None else units.backward(kept.given, plan, grads)), dstate0
