"""The delta rule as CUDA kernels on CuPy arrays: erase DELTA, decay NONE or SCALAR.

Kernels with warpgroup products, for compute capability 90, bfloat16, K and V up to 128; delta_portable.py has the
kernels for all other calls. Forward: the intra-chunk WY factors of all chunks in parallel (delta_block.cu), then the
scan over chunks (delta_chain.cu). Backward: a reverse scan for dv and the state gradients (delta_reverse.cu), then a
forward scan for the other gradients (delta_grads.cu). Where batch and heads leave multiprocessors idle, sequences are
cut into segments. A segment maps the state by a transfer matrix and an offset (delta_adds.cu); from these a small
kernel computes the initial state of each segment, and in backward its final gradient (delta_segments.cu).
docs/internals/chain.md has the equations.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ...ops.cuda.arguments import NO_ROWS, address, rows_of
from ...runtime.arrays import Array, cast, sum_to
from ...runtime.cuda import launch
from ...runtime.cuda.tensor_map import BYTES as MAP
from ...runtime.cuda.tensor_map import moves, takes, tensor_map
from .. import policy
from ..types import Decay, Inputs, Plan, ReadState, Saved
from . import arguments, delta_portable, delta_portable_plan, operands
from . import delta_plan as cuts
from .arguments import NO_STATES, States, gate_of
from .shared_memory import DELTA_ENDS, DELTA_STATE, TRANSFER, delta_checkpoint

WHOLE, ADD = range(2)  # modes of the reverse scan
NO_ARRAYS = dict.fromkeys(("q", "k", "v", "dout", "dv", "dq", "dk"), bytes(MAP)) | dict.fromkeys(
    ("checkpoints", "ends", "begins", "added", "transfers", "dg", "dbeta"), 0)  # fmt: skip


def unsupported_reason(call: Any) -> str | None:
    """Why the kernels do not support a call with erase DELTA; None if they do."""
    x, plan = call.x, call.plan
    if not plan.xp.__name__.endswith("cupy"):
        return "the arrays are not CuPy arrays"
    if x.decay is Decay.VECTOR:
        return "the kernels of the delta rule cover decay NONE and SCALAR so far"
    if not plan.erases_key and (plan.erase_reads is ReadState.DECAYED or x.r.shape[-2] != x.k.shape[-2]):
        return "the kernels of the delta rule read with the key itself, or before the decay with as many heads as keys"
    if x.q is None or not plan.causal or plan.query_reads is not ReadState.UPDATED:
        return "the kernels write and read in one pass, each token after its own write; this call does not"
    if plan.dtype == plan.xp.float64:
        return "float64 is computed by the chunk form in CuPy"
    if plan.chunk_size not in (None, policy.GROUP_CHUNK):
        return f"chunk_size={plan.chunk_size!r}: the kernels choose their own chunks"
    if (why := operands.unsupported_reason(x)) or _wgmma(x, plan):
        return why
    K, V, separate = x.k.shape[-1], x.v.shape[-1], not plan.erases_key
    element = operands.common_element(x.q, x.k, x.v, x.r)
    return delta_portable_plan.too_large(element, K, V, launch.shared_limit(), separate)


def how(call: Any) -> str:
    """The kernels of a supported call, in words."""
    wgmma = _wgmma(call.x, call.plan)
    return "chains of chunks by warpgroup products (wgmma)" if wgmma else "portable chains of chunks (mma.sync)"


def gives_states(call: Any) -> bool:
    """Whether the kernels store states at the positions of a call, and add their gradients."""
    return _wgmma(*call) and operands.gives_states(call.plan)


def divides(x: Inputs, plan: Plan) -> bool:
    """Whether the kernels of a call divide q and k by their L2 norms."""
    return _wgmma(x, plan)


def skips(x: Inputs, plan: Plan) -> bool:
    """Whether the kernels of a call compute outputs for the last micro-step of a token only."""
    return _wgmma(x, plan) and cuts.skips(plan.micro_steps, x.k.shape[-1], x.v.shape[-1])


def _wgmma(x: Inputs, plan: Plan) -> bool:
    if not plan.erases_key or plan.erase_reads is not ReadState.DECAYED:
        return False
    return cuts.takes(operands.common_element(x.q, x.k, x.v, x.r), x.k.shape[-1], x.v.shape[-1], launch.capability())


@dataclass(slots=True)
class Batch(operands.ChunkSizes):
    """Sizes of a call and the partition of its sequences."""

    decay: bool
    unit: bool  # q and k are divided by their L2 norm
    eps: float  # added to the squared norm
    steps: int  # micro-steps of a token; the last one reads


class Residuals(NamedTuple):
    """What forward stores: factors of every chunk; initial state and transfer matrix of every segment."""

    checkpoints: Array | None
    begins: Array | None
    transfers: Array | None


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved)."""
    if not _wgmma(x, plan):
        return delta_portable.forward(x, plan, state)
    xp, batch = plan.xp, _batch(x, plan)
    launch.prepare(tuple(
        (cuts.KERNELS[name].file, cuts.constants(name, batch.K, batch.V, batch.decay, reverse, batch.unit, batch.steps,
                                                 operands.build_at(plan)))
        for name, reverse in cuts.names(batch.segments, plan.gradients)
    ), launch.capability())  # fmt: skip
    arrays = _arrays(xp, x)
    out = xp.empty((*batch.lead, batch.T // batch.steps, batch.heads, batch.V), dtype=x.v.dtype)
    end = xp.empty((batch.N, batch.H, batch.K, batch.V), dtype=xp.float32)
    start = operands.states_at(operands.as_state(xp, state, batch), batch, batch.group)
    checkpoints = _checkpoints(xp, batch, arrays)
    begins, transfers = _begins(xp, batch, arrays, checkpoints, start)
    at = operands.empty_positions(xp, plan, batch)
    last = operands.with_positions(xp, operands.states_at(end, batch, batch.group), at, plan, batch)
    _launch(
        "chain",
        batch,
        batch.N * batch.heads * batch.segments,
        arrays,
        out=out,
        checkpoints=checkpoints,
        begins=begins,
        start=start,
        end=last,
        scale=plan.scale,
    )
    transfers = transfers if plan.gradients else None
    checkpoints = checkpoints if plan.gradients and policy.saves_factors(checkpoints.nbytes) else None
    return out, operands.public_ends(end, at, batch), Saved(x, plan, state, Residuals(checkpoints, begins, transfers))


def backward(saved: Saved, dout: Array | None, dstate: Any) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state; d.k includes the gradient of k as erase vector."""
    x, plan, state, residuals = saved
    if isinstance(residuals, delta_portable.Residuals) or (residuals is None and not _wgmma(x, plan)):
        return delta_portable.backward(saved, dout, dstate)
    residuals = residuals or Residuals(None, None, None)
    xp, batch = plan.xp, _batch(x, plan)
    arrays, heads = _arrays(xp, x), batch.heads
    tokens = (*batch.lead, batch.T // batch.steps, heads)
    _add_gradients(xp, batch, arrays, dout, x.v.dtype)
    dg = xp.empty(tokens, dtype=xp.float32) if batch.decay else None
    dbeta = xp.empty((*batch.lead, batch.T, heads), dtype=xp.float32)
    first = xp.empty((batch.N, heads, batch.K, batch.V), dtype=xp.float32)
    checkpoints = _checkpoints(xp, batch, arrays) if residuals.checkpoints is None else residuals.checkpoints
    ends = xp.empty((batch.slots * heads, DELTA_ENDS), dtype=xp.int8)
    dend, dat = operands.split_gradients(xp, dstate, batch)
    last = operands.states_at(operands.one_head_each(xp, operands.as_state(xp, dend, batch), batch), batch)
    last = operands.with_positions(xp, last, dat, plan, batch)
    chain = {
        "checkpoints": checkpoints,
        "ends": ends,
        "out": arrays["dv"],
        "other": arrays["v"],
        "start": last,
        "end": operands.states_at(first, batch),
        "scale": plan.scale,
    }
    if batch.segments == 1:
        _launch("reverse", batch, batch.N * heads, arrays, **chain, which=WHOLE)
    else:
        _reverse_segments(xp, batch, arrays, chain, residuals.transfers)
    start = operands.states_at(operands.as_state(xp, state, batch), batch, batch.group)
    _launch(
        "grads",
        batch,
        batch.N * heads * batch.segments,
        arrays,
        checkpoints=checkpoints,
        ends=ends,
        out=arrays["dq"],
        other=arrays["dk"],
        begins=residuals.begins,
        start=start,
        dg=dg,
        dbeta=dbeta,
        scale=plan.scale,
    )
    grads = {n: operands.head_sums(xp, arrays["d" + n], getattr(x, n).shape) for n in ("q", "k", "v")}
    for name, d in (("g", dg), ("beta", dbeta)):
        if d is not None:
            y = getattr(x, name)
            grads[name] = sum_to(xp, operands.sum_shared_heads(xp, d[..., None], (*batch.lead, *y.shape[-3:])), y.shape)
    return Inputs(**{n: grads.get(n) for n in Inputs._fields}), operands.public_state_gradient(xp, first, batch)


def _batch(x: Inputs, plan: Plan) -> Batch:
    sizes = operands.sizes_of(x, plan)
    _, T, heads, _, _, _, N, offsets, tokens = sizes
    longest = -(-tokens // policy.GROUP_CHUNK)
    # the chunks of sequence n begin at slot first // GROUP_CHUNK + n
    slots = N * longest if offsets is None else T // policy.GROUP_CHUNK + N
    each = -(-longest // cuts.segments(N * heads, longest, launch.multiprocessors()))
    return Batch(
        *sizes,
        longest,
        slots,
        -(-longest // each),
        each,
        x.g is not None,
        plan.l2norm,
        plan.l2norm_eps,
        plan.micro_steps,
    )


def _row_array(y: Array) -> Array:
    """(B, T, heads, width) in a layout that the copy engine supports: the array itself if possible."""
    y = y if y.ndim == 4 else y.reshape(prod(y.shape[:-3]), *y.shape[-3:])
    return y if takes(y) else y.copy()


def _arrays(xp: Any, x: Inputs) -> dict[str, Array | None]:
    """q, k, v and the gates in float32."""
    gates = {n: None if y is None else cast(xp, y, xp.float32) for n, y in (("g", x.g), ("beta", x.beta))}
    return {"q": _row_array(x.q), "k": _row_array(x.k), "v": _row_array(x.v)} | gates


def _add_gradients(xp: Any, batch: Batch, arrays: dict[str, Array | None], dout: Array | None, dtype: Any) -> None:
    """dout, and dq, dk, dv to be written."""
    tokens = batch.T // batch.steps
    if dout is None:
        dout = xp.zeros((*batch.lead, tokens, batch.heads, batch.V), dtype=dtype)
    arrays["dout"] = _row_array(cast(xp, dout, dtype))
    for name, T, width in (("dq", tokens, batch.K), ("dk", batch.T, batch.K), ("dv", batch.T, batch.V)):
        arrays[name] = xp.empty((prod(batch.lead), T, batch.heads, width), dtype=dtype)


def _checkpoints(xp: Any, batch: Batch, arrays: dict[str, Array | None]) -> Array:
    """The state-independent factors of every chunk."""
    checkpoints = xp.empty((batch.slots * batch.heads, delta_checkpoint(batch.unit)), dtype=xp.int8)
    _launch(
        "block",
        batch,
        batch.N * batch.heads * batch.chunks_longest,
        arrays,
        checkpoints=checkpoints,
        chunks=batch.chunks_longest,
    )
    return checkpoints


def _begins(
    xp: Any, batch: Batch, arrays: dict[str, Array | None], checkpoints: Array, start: States
) -> tuple[Array | None, Array | None]:
    """(initial state of each segment, transfer matrices of segments)."""
    if batch.segments == 1:
        return None, None
    slots, inner = batch.N * batch.heads, batch.segments - 1
    added = xp.empty((slots * inner, DELTA_STATE), dtype=xp.float32)
    transfers = xp.empty((slots * inner, TRANSFER), dtype=xp.int8)
    begins = xp.empty((slots * batch.segments, DELTA_STATE), dtype=xp.float32)
    _launch(
        "adds", batch, slots * inner * 4, arrays, checkpoints=checkpoints, start=start, added=added, transfers=transfers
    )
    _launch("segments", batch, slots * 8, arrays, added=added, transfers=transfers, begins=begins)
    return begins, transfers


def _reverse_segments(
    xp: Any, batch: Batch, arrays: dict[str, Array | None], chain: dict[str, Any], transfers: Array | None
) -> None:
    """The reverse scan of sequences in segments."""
    slots, inner = batch.N * batch.heads, batch.segments - 1
    added = xp.empty((slots * inner, DELTA_STATE), dtype=xp.float32)
    begins = xp.empty((slots * batch.segments, DELTA_STATE), dtype=xp.float32)
    _launch("reverse", batch, slots * inner, arrays, **chain, added=added, which=ADD)
    _launch("segments", batch, slots * 8, arrays, reverse=True, added=added, transfers=transfers, begins=begins)
    _launch("reverse", batch, slots * batch.segments, arrays, **chain, begins=begins)


def _launch(
    name: str,
    batch: Batch,
    grid: int,
    arrays: dict[str, Any],
    *,
    reverse: bool = False,
    start: States = NO_STATES,
    end: States = NO_STATES,
    **more: Any,
) -> None:
    """Launch one kernel. more: out, other (arrays of rows), which, scale, chunks; arrays by the names of NO_ARRAYS."""
    how, maps, heads = cuts.KERNELS[name], cuts.MAPS[name], batch.heads
    which, scale, chunks = more.pop("which", WHOLE), more.pop("scale", 1.0), more.pop("chunks", batch.chunks)
    rows, at = {n: more.pop(n, None) for n in ("out", "other")}, end if name == "chain" else start
    fields = {**NO_ARRAYS, **_shared_fields(batch, arrays)}
    for n in maps:
        fields[n] = _map(arrays, n, batch.steps)
    for n, y in more.items():
        fields[n] = address(y)
    fields |= {
        "out": _token_rows(rows["out"], heads, batch.steps if name in cuts.STEPPED else 1),
        "other": _token_rows(rows["other"], heads, 1), "start": start.values(), "end": end.values(),
        "segments": batch.segments, "chunks": chunks, "start_group": start.group, "end_group": end.group,
        "which": which, "scale": scale, "eps": batch.eps, **at.fields_of_positions(),
    }  # fmt: skip
    packed = arguments.DELTA.packed(fields)
    named = None
    if moves():
        whole = (*rows.values(), start.array, end.array, *more.values(), *at.arrays_of_positions())
        named = (*(arrays[n] for n in (*maps, "g", "beta")), batch.offsets, *whole)
    constants = cuts.constants(name, batch.K, batch.V, batch.decay, reverse, batch.unit, batch.steps, at.build_at)
    launch.launch(how.file, how.entry, constants, grid, how.threads, dict(constants)["LA_SHARED"], packed, named)


def _token_rows(y: Array | None, heads: int, steps: int) -> tuple[int, ...]:
    """The ROWS struct of an array with one row per token of `steps` micro-steps."""
    if y is None:
        return NO_ROWS
    data, by_batch, by_token, by_head, group = rows_of(y, heads)
    return data, by_batch, by_token // steps, by_head, group


def _shared_fields(batch: Batch, arrays: dict[str, Any]) -> dict[str, Any]:
    """Fields that all launches of a call share, computed once."""
    if "fields" not in arrays:
        heads = batch.heads
        arrays["fields"] = {
            "g": gate_of(arrays["g"], heads), "beta": gate_of(arrays["beta"], heads),
            "offsets": address(batch.offsets), "slots": batch.slots, "T": batch.T, "heads": heads,
            **{f"group_{n}": heads // arrays[n].shape[-2] for n in ("q", "k", "v")},
        }  # fmt: skip
    return arrays["fields"]


def _map(arrays: dict[str, Any], name: str, steps: int) -> bytes:
    """The tensor map of an array, encoded once per call."""
    key = f"map of {name}"
    if key not in arrays:
        arrays[key] = tensor_map(arrays[name], steps if name in cuts.A_TOKEN else 1)
    return arrays[key]
