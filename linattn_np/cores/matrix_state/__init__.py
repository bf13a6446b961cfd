"""Matrix state: S (K, V) fades, is erased, is written to, is read. Chooses a backend and calls it."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any, NamedTuple

import array_api_compat as compat

from ...ground import backend as backends
from ...ground.namespace import Array, cast
from ..kinds import Erase
from . import chunks, cuda_kernels, recurrence
from .inputs import Inputs, Plan, Saved
from .read import read_fwd, read_vjp

COMPILED_CHUNK = 32  # tokens of a chunk of the compiled loops where the caller leaves it open
ASK = "covers the call too, on request: its first call compiles for seconds"
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
    if C == "parallel" or (C is not None and not 1 < C <= LONGEST_CHUNK):
        return f"it has the chunk form only, in chunks of 2 to {LONGEST_CHUNK}"
    if x.gv is not None:
        return "it does not cover a decay on the value axis"
    if x.u is not None and x.erase is not Erase.NONE:
        return "it does not cover a bonus with an erase"
    if any(y is not None and y.shape[-2] > x.v.shape[-2] for y in (x.k, x.g, x.r, x.beta, x.a, x.b)):
        return "it does not cover fewer value heads than keys or gates"
    return None if _has_numba() else "Numba is not installed"


@functools.cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


REFERENCE = backends.Backend("reference", recurrence, _reference_refuses)
CHUNKS = backends.Backend("chunks", chunks, _chunks_refuses)
NUMBA = backends.Backend("numba", backends.Later(f"{__name__}.numba_loops"), _numba_refuses, ASK)
CUDA = backends.Backend("cuda", cuda_kernels, cuda_kernels.refuses)


def choose(fn: str, x: Inputs, plan: Plan, wanted: str | None) -> backends.Choice:
    """The backend of a call. chunk_size=1 asks for the recurrent form; a few tokens take it by themselves."""
    recurrent = plan.chunk_size == 1 or all(chunks.is_short(plan, s.stop - s.start) for s in plan.sequences)
    order = [REFERENCE, CHUNKS] if recurrent else [CHUNKS, REFERENCE]
    return backends.choose(fn, wanted, [CUDA, *order, NUMBA], Call(x, plan))


class Kept(NamedTuple):
    """What backward needs: the backend, what it saved, and the final state where all queries read it."""

    module: Any
    saved: Saved
    q: Array | None = None
    state: Array | None = None


def forward(
    fn: str, x: Inputs, plan: Plan, state: Array | None, wanted: str | None
) -> tuple[Array | None, Array, Kept]:
    """(out, final state, kept)."""
    module = choose(fn, x, plan, wanted).backend.module
    if wanted == "chunks" and plan.chunk_size is None:  # asked for, however few the tokens
        plan = plan._replace(chunk_size=chunks.preferred_chunk(plan))
    if plan.causal or x.q is None:
        out, end, saved = module.forward(x, plan, state)
        return out, end, Kept(module, saved)
    _, end, saved = module.forward(x._replace(q=None), plan, state)
    out = cast(plan.xp, read_fwd(plan, x.q, end), x.v.dtype)
    return out, end, Kept(module, saved, x.q, end)


def backward(kept: Kept, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input, and of the initial state."""
    plan, dq = kept.saved.plan, None
    if kept.q is not None:
        if dout is None:
            dq = plan.xp.zeros_like(cast(plan.xp, kept.q, plan.dtype))
        else:
            dq, dread = read_vjp(plan, kept.q, kept.state, dout)
            dstate = dread if dstate is None else dstate + dread
            dout = None
    grads, dstate0 = kept.module.backward(kept.saved, dout, dstate)
    return (grads if kept.q is None else grads._replace(q=dq)), dstate0
