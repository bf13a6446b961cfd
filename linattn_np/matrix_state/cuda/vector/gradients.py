"""Gradients of a vector decay, without an erase term or with the delta rule, as CUDA kernels on CuPy arrays.

From what the forward stores or backward recomputes (states before the chunks and P, with the delta rule A and the new
values): the chain of the chunks in reverse for dv and G, the gradient of the state after every chunk
(vector_reverse.cu), in segments where batch and heads leave multiprocessors idle; then dq, dk, dg (and du) of all
chunks at once (vector_grads.cu), in chunks that decay too far for scaled products by a second build of the same source;
with the delta rule dbeta of what both leave (vector_strengths.cu). docs/internals/vector_backward.md has the equations.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ....core import StatesAt
from ....ops.cuda.arguments import address, rows_of
from ....ops.sums import sum_to
from ....runtime.arrays import Array, cast, dtype_name
from ....runtime.cuda import launch
from ....runtime.cuda.tensor_map import BYTES as MAP
from ....runtime.cuda.tensor_map import moves
from ... import policy
from ...types import Inputs, Plan, Saved
from .. import arguments
from .. import neighbours as between
from ..arguments import NO_STATES, States, gate_of
from ..delta import plan as delta_plan
from ..operands import (
    as_state,
    build_at,
    one_head_each,
    public_state_gradient,
    split_gradients,
    states_at,
    sum_shared_heads,
    with_positions,
)
from ..shared_memory import BONUS_CHANNELS, vector_ends
from . import neighbours
from . import plan as cuts
from .launch import (
    VectorBatch,
    arrays_of,
    batch_of,
    map_of,
    multiply_transfers,
    row_array,
    sum_segments,
    transfer_constants,
)
from .plan import STATE, WIDEST

Arrays = dict[str, Any]


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state."""
    x, plan, _, residuals = saved
    erase = x.beta is not None
    xp, batch = plan.xp, batch_of(x, plan)
    at = isinstance(dstate, StatesAt) and dstate.at is not None
    few = plan.neighbours is None and batch.segments < policy.REVERSE_SEGMENTS
    if at or (erase and few):  # what segments add is computed without positions
        batch = batch_of(x, plan, cut=False)
    prepare(batch, erase, build_at(plan) if at else 0)
    arrays = arrays_of(xp, x)
    _add_gradients(xp, batch, arrays, dout, x.v.dtype)
    ends = xp.empty((batch.slots * batch.heads, vector_ends(erase)), dtype=xp.int8)
    first = xp.empty((batch.N, batch.heads, batch.K, batch.V), dtype=xp.float32)
    dend, dat = split_gradients(xp, dstate, batch)
    inverses, new_values = residuals.get("inverses"), residuals.get("new_values")
    chain = {"grams": residuals["grams"], "inverses": inverses}
    if plan.neighbours is None:
        last = states_at(one_head_each(xp, as_state(xp, dend, batch), batch), batch)
        last = with_positions(xp, last, dat, plan, batch)
        begins = _begins(xp, batch, arrays, last, plan.scale, chain, residuals.get("transfers"))
    else:
        begins, dend = _left(xp, plan, batch, arrays, chain, residuals.get("transfers"))
        last = states_at(dend, batch)
    _reverse(
        batch, arrays, scale=plan.scale, start=last, end=states_at(first, batch), ends=ends, begins=begins, **chain
    )
    outputs = _outputs(xp, batch, x)
    flags = xp.empty(_items(batch), dtype=xp.int32)
    for exact in (False, True):
        _gradients(
            batch,
            arrays,
            exact,
            plan.scale,
            states=residuals["states"],
            ends=ends,
            new_values=new_values,
            flags=flags,
            du=outputs.get("du_parts"),
            erase_dots=outputs.get("erase_dots"),
        )
    if erase:
        _strengths(xp, batch, x, ends, outputs)
    if x.u is not None:
        _bonus(xp, batch, outputs)
    return _grads(xp, batch, x, arrays, outputs), public_state_gradient(xp, first, batch)


def query_gradients(saved: Saved, dout: Array, dtype: Any) -> Array:
    """dq alone, in bfloat16 or float32: scale dout_t S_t^T, of a forward without an erase term and its residuals.

    The kernel computes dk and dg too, of a gradient of the state that is not one; they are not used.
    """
    x, plan, _, residuals = saved
    xp, batch = plan.xp, batch_of(x, plan)
    arrays = arrays_of(xp, x)
    _add_gradients(xp, batch, arrays, dout, x.v.dtype, of_queries=dtype)
    dq: Array = arrays["dq"]
    flags = xp.empty(_items(batch), dtype=xp.int32)
    states = residuals["states"]
    builds = [cuts.grads_constants(batch.kind, False, exact, dtype_name(dq)) for exact in (False, True)]
    launch.prepare(tuple((cuts.GRADS.file, constants) for constants in builds), launch.capability())
    for exact in (False, True):
        _gradients(
            batch,
            arrays,
            exact,
            plan.scale,
            states=states,
            ends=states,
            new_values=None,
            flags=flags,
            du=None,
            erase_dots=None,
        )
    return dq.reshape(*batch.lead, batch.T, batch.heads, batch.K)


def prepare(batch: VectorBatch, erase: bool, at: int = 0) -> None:
    """Begin to compile; a forward does so too where a backward follows."""
    kind = batch.kind
    wanted = [(cuts.GRADS.file, cuts.grads_constants(kind, erase, exact)) for exact in (False, True)]
    wanted += [(cuts.REVERSE.file, cuts.reverse_constants(kind, erase, adds, 0 if adds else at))
               for adds in (False, True)[: 1 + (batch.segments > 1)]]  # fmt: skip
    if erase and batch.segments > 1:
        wanted += [(delta_plan.SEGMENTS, transfer_constants(batch, True))]
    wanted += [(cuts.STRENGTHS.file, cuts.small_constants(kind, True))] if erase else []
    wanted += [(cuts.BONUS.file, cuts.small_constants(kind, False))] if kind.bonus else []
    launch.prepare(tuple(wanted), launch.capability())


def _add_gradients(
    xp: Any, batch: VectorBatch, arrays: Arrays, dout: Array | None, dtype: Any, of_queries: Any = None
) -> None:
    """dout, and dq, dk, dv, dg to be written; no dk where dg has the gradients through the keys.

    of_queries: the dtype of dq where no dv is wanted.
    """
    tokens = (prod(batch.lead), batch.T, batch.heads)
    if dout is None:
        dout = xp.zeros((*tokens, batch.V), dtype=dtype)
    arrays["dout"] = row_array(cast(xp, dout, dtype))
    kinds = {"dq": dtype, "dv": dtype} if of_queries is None else {"dq": of_queries}
    kinds |= {"dg": arrays["g"].dtype} | ({} if batch.kind.complement else {"dk": dtype})
    arrays["dk"] = None
    for name, kind in kinds.items():
        arrays[name] = xp.empty((*tokens, batch.V if name == "dv" else batch.K), dtype=kind)


def _outputs(xp: Any, batch: VectorBatch, x: Inputs) -> Arrays:
    """What else the gradients write: du of every chunk; r.k of every token and half of the channels."""
    outputs = {}
    if x.u is not None:
        outputs["du_parts"] = xp.empty((batch.heads * batch.slots, batch.K), dtype=xp.float32)
    if x.beta is not None:
        outputs["erase_dots"] = xp.empty((cuts.halves(batch.K), batch.heads, batch.tokens), dtype=xp.float32)
    return outputs


def _begins(
    xp: Any, batch: VectorBatch, arrays: Arrays, last: States, scale: float, chain: Arrays, transfers: Array | None
) -> Array | None:
    """G after every segment but the last. chain: grams and inverses. transfers: matrices of a delta rule."""
    if batch.segments == 1:
        return None
    slots, inner = batch.N * batch.heads, batch.segments - 1
    added = xp.empty((slots * inner, STATE), dtype=xp.float32)
    begins = xp.empty((slots * batch.segments, STATE), dtype=xp.float32)
    if transfers is not None:
        _reverse(batch, arrays, scale=scale, start=last, added=added, **chain)
        multiply_transfers(batch, True, added=added, transfers=transfers, begins=begins)
        return begins
    sums = xp.empty((slots * inner, WIDEST), dtype=xp.float32)
    _reverse(batch, arrays, scale=scale, added=added, sums=sums)
    sum_segments(batch, arrays, reverse=True, start=last, added=added, decays=sums, begins=begins)
    return begins


def _left(
    xp: Any, plan: Plan, batch: VectorBatch, arrays: Arrays, chain: Arrays, transfers: Array | None
) -> tuple[Array, Array | None]:
    """(G after every segment, after the last one) between other ranks."""
    if transfers is not None:
        added = between.empty_offsets(xp, batch)
        _reverse(batch, arrays, scale=plan.scale, every=True, added=added, **chain)
        return between.left(xp, plan, batch, added, transfers)
    added, sums = neighbours.empty(xp, batch)
    _reverse(batch, arrays, scale=plan.scale, every=True, added=added, sums=sums)
    return neighbours.left(xp, plan, batch, arrays, added, sums)


def _reverse(
    batch: VectorBatch,
    arrays: Arrays,
    *,
    scale: float,
    start: States = NO_STATES,
    end: States = NO_STATES,
    every: bool = False,
    **given: Array | None,
) -> None:
    """The reverse chain; with `added`, what segments add, `every` one or all but the first.

    given: grams, inverses, ends, begins, added, sums.
    """
    adds, erase, heads = given.get("added") is not None, given.get("inverses") is not None, batch.heads
    names = ("grams", "inverses", "ends", "begins", "added", "sums")
    maps = ("q", "dout") if adds and not erase else ("q", "k", "dout", "dv", *(("v",) if erase else ()))
    fields = dict.fromkeys(("q", "k", "v", "dout", "dv"), bytes(MAP)) | {n: map_of(arrays, n) for n in maps}
    fields |= {n: address(given.get(n)) for n in names} | {
        "g": rows_of(arrays["g"], heads), "out": rows_of(arrays["dv"], heads), "offsets": address(batch.offsets),
        "start": start.values(), "end": end.values(), "start_group": start.group, "slots": batch.slots, "T": batch.T,
        "heads": heads, "segments": batch.segments, "chunks": batch.chunks, "every": int(every), "scale": scale,
        **{f"group_{n}": heads // arrays[n].shape[-2] for n in ("q", "k", "v")}, **start.fields_of_positions(),
    }  # fmt: skip
    named = None
    if moves():
        named = (*(arrays[n] for n in {*maps, "g", "dv"}), batch.offsets, start.array, end.array, *given.values(),
                 *start.arrays_of_positions())  # fmt: skip
    constants = cuts.reverse_constants(batch.kind, erase, adds, start.build_at)
    grid = batch.N * heads * batch.segments
    cuts.REVERSE.built(constants).launch(grid, arguments.VECTOR_REVERSE.packed(fields), named)


def _items(batch: VectorBatch) -> int:
    """What one block of the gradients computes at a time: half of the channels of a chunk."""
    return batch.N * batch.chunks_longest * batch.heads * cuts.halves(batch.K)


def _gradients(batch: VectorBatch, arrays: Arrays, exact: bool, scale: float, **given: Array | None) -> None:
    """dq, dk, dg. exact: of what the other build flagged. given: states, ends, new_values, flags, du, erase_dots."""
    heads, names, erase = batch.heads, ("q", "k", "g", "dq", "dk", "dg"), given["new_values"] is not None
    u, values = arrays["u"], "dv" if erase else "v"
    fields: dict[str, Any] = {n: rows_of(arrays[n], heads) for n in names}
    fields |= {n: address(y) for n, y in given.items()}
    fields |= {
        "v": map_of(arrays, values), "dout": map_of(arrays, "dout"), "offsets": address(batch.offsets),
        "u": address(u), "slots": batch.slots, "tokens": batch.tokens, "items": _items(batch), "T": batch.T,
        "heads": heads, "chunks": batch.chunks_longest, "group_v": heads // arrays[values].shape[-2],
        "group_u": 1 if u is None else heads // u.shape[0], "scale": scale,
    }  # fmt: skip
    named = None
    if moves():
        named = (*(arrays[n] for n in (*names, values, "dout", "u")), batch.offsets, *given.values())
    constants = cuts.grads_constants(batch.kind, erase, exact, dtype_name(arrays["dq"]))
    grid = min(_items(batch), policy.EXACT_GRADIENT_BLOCKS * launch.multiprocessors()) if exact else _items(batch)
    cuts.GRADS.built(constants).launch(grid, arguments.VECTOR_GRADS.packed(fields), named)


def _strengths(xp: Any, batch: VectorBatch, x: Inputs, ends: Array, outputs: Arrays) -> None:
    """dbeta, of what the other kernels have left."""
    beta = cast(xp, x.beta, xp.float32)
    outputs["dbeta"] = xp.empty((*batch.lead, batch.T, batch.heads, 1), dtype=xp.float32)
    items = batch.N * batch.chunks_longest * batch.heads
    packed = arguments.VECTOR_STRENGTHS.pack(
        ends=address(ends), erase_dots=address(outputs["erase_dots"]), beta=gate_of(beta, batch.heads),
        dbeta=address(outputs["dbeta"]), offsets=address(batch.offsets), slots=batch.slots, tokens=batch.tokens,
        items=items, T=batch.T, heads=batch.heads, chunks=batch.chunks_longest)  # fmt: skip
    cuts.STRENGTHS.built(cuts.small_constants(batch.kind, True)).launch(
        -(-items // 4), packed, (ends, outputs["erase_dots"], beta, outputs["dbeta"], batch.offsets)
    )


def _bonus(xp: Any, batch: VectorBatch, outputs: Arrays) -> None:
    """du of every head."""
    outputs["du"] = xp.empty((batch.heads, batch.K), dtype=xp.float32)
    packed = arguments.VECTOR_BONUS.pack(
        parts=address(outputs["du_parts"]), du=address(outputs["du"]), offsets=address(batch.offsets),
        slots=batch.slots, T=batch.T, heads=batch.heads, sequences=batch.N)  # fmt: skip
    kernel = cuts.BONUS.built(cuts.small_constants(batch.kind, False))
    kernel.launch(
        batch.heads * -(-batch.K // BONUS_CHANNELS), packed, (outputs["du_parts"], outputs["du"], batch.offsets)
    )


def _grads(xp: Any, batch: VectorBatch, x: Inputs, arrays: Arrays, outputs: Arrays) -> Inputs:
    """Summed over the heads that share an input, in its shape."""
    found = {}
    for name in ("q", "k", "v", "g", "beta"):
        y, d = getattr(x, name), outputs.get("dbeta") if name == "beta" else arrays["d" + name]
        if y is not None and d is not None:
            d = d.reshape(*batch.lead, batch.T, batch.heads, -1)
            found[name] = sum_to(xp, sum_shared_heads(xp, d, (*batch.lead, *y.shape[-3:])), y.shape)
    if "du" in outputs:
        du = outputs["du"]
        same = batch.heads == x.u.shape[-2]
        found["u"] = du.reshape(x.u.shape) if same else xp.sum(du.reshape(*x.u.shape[:-1], -1, batch.K), axis=-2)
    return Inputs(**{n: found.get(n) for n in Inputs._fields})
