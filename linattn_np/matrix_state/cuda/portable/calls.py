"""A decay a token and key channel in chunks of 16 tokens, as CUDA kernels on CuPy arrays, for every dtype and device.

Erase NONE and DELTA where the kernels of warpgroup products (matrix_state/cuda/vector) do not run: float16, float32,
other compute capabilities, other widths up to 256. One kernel has arrays and states (portable/values.cu), by
value columns. Gradients: the same kernel from the last chunk to the first has dv, and two passes by key channels dq,
then dk and dg (portable/channels.cu). With the delta rule all of them read e = v - k S~ of every token.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ....core import StatesAt
from ....ops.sums import sum_of_groups
from ....runtime.arrays import Array, cast
from ....runtime.cuda import launch
from ... import policy
from ...types import Decay, Erase, Inputs, Plan, ReadState, Saved
from .. import operands
from ..operands import element_of, shaped
from . import plan as cuts
from . import segments
from .launch import Arrays, PortableBatch, batch_of, dense, enqueue, run


def unsupported_reason(x: Inputs, plan: Plan) -> str | None:
    """Why the kernels do not cover the forward of a call; None where they do."""
    if not policy.PORTABLE_CHUNKS:
        return "portable chunks are off"
    if x.decay is not Decay.VECTOR or x.gv is not None or x.erase is Erase.FREE:
        return "the kernels are of decays of the key channels, without an erase term or with the delta rule"
    if x.erase is Erase.DELTA and not (plan.erases_key and plan.erase_reads is ReadState.DECAYED):
        return "the delta rule's kernels with a vector decay read with the key itself, after the decay"
    if x.erase is Erase.DELTA and plan.query_reads is not ReadState.UPDATED:
        return "the delta rule's kernels read each token after its own write"
    if not plan.xp.__name__.endswith("cupy"):
        return "the arrays are not CuPy arrays"
    if x.q is None or not plan.causal:
        return "the kernels write and read in one pass; this call does not read along the way"
    if plan.dtype == plan.xp.float64 or plan.chunk_size is not None:
        return "the kernels have float32 and 16 bits, and choose their own chunks"
    if why := operands.unsupported_reason(x):
        return why
    if max(y.shape[-2] for y in (x.q, x.k, x.g)) > x.v.shape[-2]:
        return "there are more heads of queries, keys or decays than of values"
    return _too_large(x, plan, "values")


def unsupported_gradients(x: Inputs, plan: Plan) -> str | None:
    """Why the kernels do not cover the gradients of a call; None where they do."""
    if policy.is_short_cuda(plan):
        return "gradients of a few tokens are those of the definition"
    too_large = (_too_large(x, plan, n, True) for n in ("values", "channels"))
    return unsupported_reason(x, plan) or next(filter(None, too_large), None)


def _too_large(x: Inputs, plan: Plan, name: str, backward: bool = False) -> str | None:
    K, V, element = x.k.shape[-1], x.v.shape[-1], element_of(x)
    kind = cuts.PortableKind(K, V, element, "float32", 16, x.erase is Erase.DELTA, long=True)
    found = (cuts.launch_of(name, kind, launch.shared_limit(), back) for back in (False, True)[: 1 + backward])
    if max(K, V) <= policy.WIDEST_CUDA and None not in found:
        return None
    return f"keys are {K} and values {V} wide in {element}, more than a block of the kernels holds"


def how(x: Inputs, plan: Plan) -> str:
    """The kernels of a call that is covered, in words."""
    return f"chunks of {cuts.CHUNK} tokens by tensor cores (mma.sync), their pairs exact"


def handles(x: Inputs, plan: Plan) -> frozenset[str]:
    """The preprocessing steps that the kernels include."""
    return frozenset()


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved): with the delta rule e of every token; of segments states and their transfers."""
    xp, batch = plan.xp, batch_of(x, plan)
    shape, start = batch.shape, dense(xp, state)
    batch, M, starts = _in_segments(xp, batch, start)
    arrays = batch.arrays
    arrays["out"] = batch.empty(xp, batch.kind.V, arrays["v"].dtype)
    if batch.kind.erase and plan.gradients and policy.saves_factors(4 * prod(x.v.shape)):
        arrays["error"] = batch.empty(xp, batch.kind.V, xp.float32)
    end = xp.empty(batch.shape, dtype=xp.float32)
    run("values", batch, start=start if starts is None else starts, end=end)
    end = end if starts is None else segments.outer(batch, end, True).reshape(shape)
    saved = Saved(
        x, plan, state, {"error": arrays.get("error"), "starts": starts, "transfers": M} if plan.gradients else None
    )
    return cast(xp, arrays["out"].reshape(x.v.shape), x.v.dtype), end, saved


def _in_segments(
    xp: Any, batch: PortableBatch, state: Array | None
) -> tuple[PortableBatch, Array | None, Array | None]:
    """(the call in segments if it is cut, their transfers, the states before them)."""
    pieces = segments.cut(xp, batch)
    if pieces is None:
        return batch, None, None
    pieces.arrays["out"] = batch.empty(xp, batch.kind.V, batch.arrays["v"].dtype)
    M = segments.transfers(xp, pieces)
    return pieces, M, segments.begins(xp, pieces, M, state)


def backward(saved: Saved, dout: Array | None, dstate: Any) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state."""
    x, plan, state, given = saved
    xp = plan.xp
    if isinstance(dstate, StatesAt):
        dstate = dstate.end
    batch = batch_of(x, plan, xp.zeros(x.v.shape, dtype=x.v.dtype) if dout is None else dout)
    shape, start, last = batch.shape, dense(xp, state), dense(xp, dstate)
    given = given or dict.fromkeys(("error", "starts", "transfers"))
    if given["starts"] is not None:
        pieces, M, starts = segments.cut(xp, batch), given["transfers"], given["starts"]
        batch = batch if pieces is None else pieces
    else:
        batch, M, starts = _in_segments(xp, batch, start)
    arrays, K, V = batch.arrays, batch.kind.K, batch.kind.V
    start = start if starts is None else starts
    stored: Arrays = {}
    if batch.kind.erase:
        arrays["error"], arrays["out"] = given["error"], None
        if arrays["error"] is None:
            arrays["error"] = batch.empty(xp, V, xp.float32)
            run("values", batch, start=start)
        arrays["du"] = batch.empty(xp, V, xp.float32)
        stored = {"dr": batch.empty(xp, K, xp.float32), "dbeta": batch.empty(xp, 1, xp.float32)}
    for n in ("q", "k", "v", "g"):
        arrays[f"d{n}"] = batch.empty(xp, arrays[n].shape[-1], arrays[n].dtype)
    last = last if M is None else segments.begins(xp, batch, M, last, True)
    first = xp.empty(batch.shape, dtype=xp.float32)
    marks = -(-(batch.longest + batch.kind.before) // cuts.MARK)
    slots = batch.sizes[0] * batch.sizes[2]
    stored |= {"marks": xp.empty((slots, marks, K, V), dtype=xp.float32), "dots": batch.empty(xp, K, xp.float32)}
    run("values", batch, True, start=last, end=first)
    run("channels", batch, start=start, **stored)
    run("channels", batch, True, start=last, **stored)
    arrays["dbeta"] = stored.get("dbeta")
    first = first if M is None else segments.outer(batch, first, False).reshape(shape)
    return _grads(xp, x, batch), first


def _grads(xp: Any, x: Inputs, batch: PortableBatch) -> Inputs:
    """Gradients in the shapes of their inputs."""
    du, arrays = _add_bonus(xp, batch) if batch.kind.bonus else None, batch.arrays
    grads = {n: shaped(xp, arrays[f"d{n}"].reshape(*x.v.shape[:-1], -1), getattr(x, n))
             for n in ("q", "k", "v", "g", "beta") if arrays[f"d{n}"] is not None}  # fmt: skip
    if du is not None:
        grads["u"] = sum_of_groups(xp, du, x.u.shape[-2])
    return Inputs(**dict.fromkeys(Inputs._fields) | grads)


def _add_bonus(xp: Any, batch: PortableBatch) -> Array:
    """The gradient of the bonus (heads, K); dq and dk get what they have of it."""
    (_, T, heads), K, kind = batch.sizes, batch.kind.K, batch.kind
    tokens = prod(batch.lead) * T
    blocks = -(-tokens // cuts.BONUS_TOKENS)
    parts = xp.empty((blocks, heads, K), dtype=xp.float32)
    enqueue(batch, cuts.BONUS.built(cuts.bonus_constants(kind)), blocks * heads, {"parts": parts}, tokens)
    return xp.sum(parts, axis=0)
