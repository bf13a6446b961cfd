"""Erase FREE with a decay of the key channels, or none, as CUDA kernels on CuPy arrays.

For what the kernels of a vector decay cover: compute capability 90, bfloat16, K and V up to 128. What a chunk of 64
tokens does to the state, all chunks at once (free/free_factors.cu), exact in the chunks that decay by more than
62 nats, which the first build flags; then the chain of the chunks (free_chain.cu).
docs/internals/free_rank_one.md has the equations.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ....runtime.arrays import Array
from ...types import Decay, Erase, Inputs, Plan, ReadState, Saved
from .. import operands
from ..operands import as_state, empty_positions, public_ends, states_at, with_positions
from ..vector import calls as vector
from . import gradients
from .launch import KERNELS_OF_BACKWARD, PLAIN, arrays_of, batch_of, factors_of, launch_one, prepare, residual_sizes
from .plan import CHAIN, FACTORS, Build


def unsupported_reason(x: Inputs, plan: Plan) -> str | None:
    """Why the kernels do not cover a call with erase FREE; None where they do."""
    if x.erase is not Erase.FREE or x.decay is Decay.SCALAR:
        return "the kernels are of a free rank-one term with a decay of the key channels, or none"
    if plan.query_reads is not ReadState.UPDATED:
        return "the kernels of a free rank-one term read each token after its own write"
    return vector.unsupported_arrays(x if x.g is not None else x._replace(g=x.k), plan)


unsupported_gradients = unsupported_reason


def how(x: Inputs, plan: Plan) -> str:
    """The kernels of a call that is covered, in words."""
    return "chains of chunks by warpgroup products (wgmma), exact where a chunk of 64 tokens decays by over 62 nats"


def handles(x: Inputs, plan: Plan) -> frozenset[str]:
    """The preprocessing steps that the kernels include: states at positions where no backward adds their gradients."""
    by_chunks = not (plan.gradients or plan.is_ragged)
    return operands.states_handled(plan) if by_chunks else frozenset()


def forward(x: Inputs, plan: Plan, state: Array | None, keep: bool | None = None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved).

    keep: with residuals, by default for a backward, unless too large: the state before every chunk, the corrections w.
    """
    xp, batch, arrays = plan.xp, batch_of(x, plan), arrays_of(plan.xp, x)
    sizes = residual_sizes(batch)
    if keep is None:
        keep = vector.keeps(plan, batch.stored * sum(sizes.values()))
    build = Build(keep=keep, at=plan.states_at is not None)
    prepare(batch, [(FACTORS, PLAIN), (FACTORS, PLAIN._replace(exact=True)), (CHAIN, build)])
    if plan.gradients:
        prepare(batch, KERNELS_OF_BACKWARD)
    out = xp.empty((*batch.lead, batch.T, batch.heads, batch.V), dtype=x.v.dtype)
    end = xp.empty((batch.N, batch.H, batch.K, batch.V), dtype=xp.float32)
    at = empty_positions(xp, plan, batch)
    start = states_at(as_state(xp, state, batch), batch, batch.group)
    last = with_positions(xp, states_at(end, batch, batch.group), at, plan, batch)
    arrays["out"] = out if out.ndim == 4 else out.reshape(prod(batch.lead), *out.shape[-3:])
    stored = {n: xp.empty((batch.stored, size), dtype=xp.int8) for n, size in sizes.items()} if keep else {}
    launch_one(CHAIN, batch, batch.N * batch.heads, arrays, build, start=start, end=last, **stored,
               **factors_of(xp, batch, arrays, plan.scale, PLAIN))  # fmt: skip
    return out, public_ends(end, at, batch), Saved(x, plan, state, stored or None)


def backward(saved: Saved, dout: Array | None, dstate: Any) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state."""
    if saved.starts is None:
        saved = forward(saved.x, saved.plan, saved.state, keep=True)[2]
    return gradients.backward(saved, dout, dstate)
