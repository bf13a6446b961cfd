"""Linear attention with one decay a token and key channel, as CUDA kernels on CuPy arrays: erase NONE, decay VECTOR.

Compute capability 90, bfloat16, K and V up to 128, log decays in bfloat16 or float32. The scan (vector/vector_scan.cu)
runs twice: products that divide by decays of up to 80 nats in 16 tokens, and, in the sequences and heads where a block
decays by more, which the first flags, exact ones. Equally long sequences and heads that are more than multiprocessors
are cut into equal shares, whose blocks hand states over (vector/parts.cuh). Where batch and heads leave multiprocessors
idle, sequences are cut into segments: the offset of each (vector_adds.cu) and its decay, from which a small
kernel makes the state that each begins with, between other ranks as neighbours.py says. Gradients: gradients.py.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ....runtime.arrays import Array, dtype_name
from ....runtime.config import config
from ....runtime.cuda import launch
from ... import policy
from ...types import Decay, Erase, Inputs, Plan, ReadState, Saved
from .. import operands
from ..arguments import States
from ..operands import as_state, empty_positions, public_ends, states_at, with_positions
from ..shared_memory import VECTOR_HANDED, vector_gram, vector_state
from . import gradients as vector_backward
from . import neighbours
from . import plan as cuts
from .launch import GATES, PLAIN, VectorBatch, arrays_of, batch_of, begin_compiling, launch_one, sum_segments


def unsupported_reason(x: Inputs, plan: Plan, widths: tuple[int, int] | None = None) -> str | None:
    """Why the kernels do not cover a call with a vector decay and no erase, K and V as given; None where they do."""
    if x.erase is not Erase.NONE or x.decay is not Decay.VECTOR or x.gv is not None:
        return "the chunk kernels of a vector decay cover decays of the key channels, without an erase term"
    return unsupported_arrays(x, plan, widths)


unsupported_gradients = unsupported_reason


def unsupported_arrays(x: Inputs, plan: Plan, widths: tuple[int, int] | None = None) -> str | None:
    """Why no kernel of a vector decay takes these arrays, of the widths K and V given; None where they may."""
    if not plan.xp.__name__.endswith("cupy"):
        return "the arrays are not CuPy arrays"
    if x.q is None or not plan.causal:
        return "the kernels write and read in one pass; this call does not read along the way"
    if plan.dtype == plan.xp.float64:
        return "float64 is computed by the chunk form in CuPy"
    if plan.chunk_size not in (None, cuts.CHUNK):
        return f"chunk_size={plan.chunk_size!r}: the kernels choose their own chunks"
    if why := operands.unsupported_reason(x):
        return why
    if x.g.shape[-2] > x.v.shape[-2]:
        return "there are more heads of decays than of values"
    element, (K, V) = _element(x, plan.computed), widths or (x.k.shape[-1], x.v.shape[-1])
    if element != "bfloat16" or not cuts.takes(element, K, V, launch.capability()):
        return ("the chunk kernels of a vector decay take bfloat16 on compute capability 90, keys and values in "
                f"multiples of {cuts.ALIGN} up to {cuts.WIDEST}")  # fmt: skip
    return None


def how(x: Inputs, plan: Plan) -> str:
    """The kernels of a call that is covered, in words."""
    if is_bounded(plan):
        return "a scan of chunks by warpgroup products (wgmma), one reference each, exact where one loses over 64 nats"
    return "a scan of chunks by warpgroup products (wgmma), exact where a block of 16 tokens decays by over 80 nats"


def handles(x: Inputs, plan: Plan) -> frozenset[str]:
    """The preprocessing steps that the kernels include."""
    return operands.states_handled(plan) | operands.neighbours_handled(plan)


def is_bounded(plan: Plan) -> bool:
    """Whether one reference serves a chunk, as its gates are declared and queries read each token's own write."""
    bound = plan.gate_lower_bound
    small = bound is not None and -bound * cuts.CHUNK <= policy.BOUNDED_NATS
    return small and plan.query_reads is ReadState.UPDATED


def _element(x: Inputs, computed: tuple[str, ...]) -> str:
    """bfloat16 if q and v are: keys made of float32 gates (hgrn2) are rounded like all factors of the products."""
    names = {dtype_name(y) for n, y in (("q", x.q), ("v", x.v)) if n not in computed or dtype_name(y) != "float32"}
    fits = names == {"bfloat16"} and dtype_name(x.k) in GATES
    return "bfloat16" if fits else "float32"


def forward(x: Inputs, plan: Plan, state: Array | None, keep: bool | None = None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved).

    keep: with residuals, by default for a backward, unless too large: the state before every chunk, P of every chunk,
    the first states of segments.
    """
    xp, batch, arrays = plan.xp, batch_of(x, plan), arrays_of(plan.xp, x)
    if keep is None:
        keep = keeps(plan, batch.slots * batch.heads * (vector_state(False) + vector_gram(False)))
    two_terms = keep or plan.gradients or config.training_bits
    redone = cuts.Build(True, keep, operands.build_at(plan), two_term_keys=two_terms)
    builds = [redone._replace(exact=False, bounded=is_bounded(plan)), redone]
    _prepare(batch, builds)
    if plan.gradients:
        vector_backward.prepare(batch, erase=False)
    out = xp.empty((*batch.lead, batch.T, batch.heads, batch.V), dtype=x.v.dtype)
    end = xp.empty((batch.N, batch.H, batch.K, batch.V), dtype=xp.float32)
    at = empty_positions(xp, plan, batch)
    start = states_at(as_state(xp, state, batch), batch, batch.group)
    last = with_positions(xp, states_at(end, batch, batch.group), at, plan, batch)
    traversals = batch.N * batch.heads * batch.segments
    blocks = cuts.scan_blocks(traversals, batch.segments, batch.kind.ragged, launch.multiprocessors())
    flags = xp.empty(2 * traversals, dtype=xp.int32)
    handed = xp.empty((blocks, VECTOR_HANDED), dtype=xp.int8) if blocks < traversals else None
    if plan.neighbours is None:
        begins = _begins(xp, batch, arrays, start)
    else:
        begins, state = neighbours.entered(xp, plan, batch, arrays)
        start = states_at(state, batch, batch.group)
    stored = batch.slots * batch.heads if keep else 0
    sizes = vector_state(False), vector_gram(False)
    states, grams = (xp.empty((stored, n), dtype=xp.int8) if keep else None for n in sizes)
    arrays["out"] = out if out.ndim == 4 else out.reshape(prod(batch.lead), *out.shape[-3:])
    for build in builds:
        launch_one(
            "scan",
            batch,
            traversals if build.exact else blocks,
            arrays,
            build,
            start=start,
            end=last,
            begins=begins,
            flags=flags,
            handed=handed,
            states=states,
            grams=grams,
            u=arrays["u"],
            scale=plan.scale,
        )
    residuals = {"states": states, "grams": grams, "begins": begins} if keep else None
    return out, public_ends(end, at, batch), Saved(x, plan, state, residuals)


def backward(saved: Saved, dout: Array | None, dstate: Any) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state."""
    if saved.starts is None:
        saved = forward(saved.x, saved.plan, saved.state, keep=True)[2]
    return vector_backward.backward(saved, dout, dstate)


def keeps(plan: Plan, size: int) -> bool:
    """Whether a forward stores `size` bytes of residuals."""
    return plan.gradients and policy.saves_factors(size)


def _begins(xp: Any, batch: VectorBatch, arrays: dict[str, Array | None], start: States) -> Array | None:
    """The state that each segment begins with."""
    if batch.segments == 1:
        return None
    slots, inner = batch.N * batch.heads, batch.segments - 1
    added = xp.empty((slots * inner, cuts.STATE), dtype=xp.float32)
    decays = xp.empty((slots * inner, cuts.WIDEST), dtype=xp.float32)
    begins = xp.empty((slots * batch.segments, cuts.STATE), dtype=xp.float32)
    launch_one("adds", batch, slots * inner, arrays, added=added, decays=decays)
    sum_segments(batch, arrays, start=start, added=added, decays=decays, begins=begins)
    return begins


def _prepare(batch: VectorBatch, builds: list[cuts.Build]) -> None:
    wanted = [("scan", build) for build in builds]
    wanted += [(name, PLAIN) for name in ("adds", "segments")] if batch.segments > 1 else []
    begin_compiling(batch, wanted)
