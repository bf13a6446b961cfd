"""The delta rule with one decay a token and key channel, as CUDA kernels on CuPy arrays: erase DELTA, decay VECTOR.

For what vector.py covers: compute capability 90, bfloat16, K and V up to 128. What a chunk can know before it sees a
state, all chunks at once (vector/vector_inverse.cu), then the chain of the chunks (vector_chain.cu), which flags
sequences and heads where a block of 16 tokens decays by more than 80 nats; both then run again for those, with exact
products. Gradients are computed by array calls, from the inputs alone.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ...runtime.arrays import Array
from ...runtime.cuda import launch
from ..array import chunks as array_calls
from ..types import Decay, Erase, Inputs, Plan, ReadState, Saved
from . import vector, vector_backward
from . import vector_plan as cuts
from .operands import as_state, public_state, states_at
from .shared_memory import SQUARE


def unsupported_reason(call: Any) -> str | None:
    """Why the kernels do not cover a call with a vector decay and an erase DELTA; None where they do."""
    x, plan = call.x, call.plan
    if x.erase is not Erase.DELTA or x.decay is not Decay.VECTOR:
        return "the kernels are of the delta rule with a decay of the key channels"
    if x.r is not x.k or plan.erase_reads is not ReadState.DECAYED:
        return "the delta rule's kernels with a vector decay read with the key itself, after the decay"
    if plan.query_reads is not ReadState.UPDATED:
        return "the delta rule's kernels read each token after its own write"
    return vector.unsupported_arrays(x, plan)


def how(call: Any) -> str:
    """The kernels of a call that is covered, in words."""
    return "chains of chunks by warpgroup products (wgmma), exact where a block of 16 tokens decays by over 80 nats"


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved)."""
    xp, batch, arrays = plan.xp, vector.batch_of(x, plan, cut=False), vector.arrays_of(plan.xp, x)
    launch.prepare(tuple((cuts.KERNELS[name].file, cuts.constants(name, batch.kind, exact))
                         for exact in (False, True) for name in ("inverse", "chain")), launch.capability())  # fmt: skip
    out = xp.empty((*batch.lead, batch.T, batch.heads, batch.V), dtype=x.v.dtype)
    end = xp.empty((batch.N, batch.H, batch.K, batch.V), dtype=xp.float32)
    start = states_at(as_state(xp, state, batch), batch, batch.group)
    slots = batch.N * batch.heads
    flags = xp.empty(slots, dtype=xp.int32)
    inverses = xp.empty((batch.slots * batch.heads, SQUARE), dtype=xp.int8)
    arrays["out"] = out if out.ndim == 4 else out.reshape(prod(batch.lead), *out.shape[-3:])
    for exact in (False, True):
        vector.launch_one("inverse", batch, slots * (cuts.PIECES if exact else batch.chunks), arrays, exact=exact,
                          flags=flags, inverses=inverses)
        vector.launch_one("chain", batch, slots, arrays, exact=exact, start=start,
                          end=states_at(end, batch, batch.group), flags=flags, inverses=inverses, scale=plan.scale)
    return out, public_state(end, batch), Saved(x, plan, state, None)


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state: by kernels from residuals, without them by array calls."""
    x, plan, state, residuals = saved
    if residuals is not None:
        return vector_backward.backward(saved, dout, dstate)
    return array_calls.backward(array_calls.forward(x, plan, state)[2], dout, dstate)
