"""Gradients of a vector decay without an erase term, as CUDA kernels on CuPy arrays.

From the states before the chunks and P, which the forward stores or which are made again: the chain of the chunks in
reverse for dv and G, the gradient of the state after every chunk (vector_reverse.cu), in segments where batch and heads
leave multiprocessors idle; then dq, dk, dg (and du) of all chunks at once (vector_grads.cu), in chunks that decay too
far for scaled products by a second build of the same source. docs/vector_backward.md has the equations.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ...ops.cuda.arguments import address, rows_of
from ...runtime.arrays import Array, cast, sum_to
from ...runtime.cuda import launch
from ...runtime.cuda.tensor_map import moves
from ..types import Inputs, Saved
from . import arguments, vector
from . import vector_backward_plan as cuts
from .arguments import NO_STATES, States
from .operands import as_state, one_head_each, public_state_gradient, states_at, sum_shared_heads
from .shared_memory import DELTA_END
from .vector_plan import STATE, WIDEST

Arrays = dict[str, Any]


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state."""
    x, plan, state, residuals = saved
    if residuals is None:
        residuals = vector.forward(x, plan, state, keep=True)[2].starts
    xp, batch = plan.xp, vector.batch_of(x, plan)
    _prepare(batch)
    arrays = vector.arrays_of(xp, x)
    _add_gradients(xp, batch, arrays, dout, x.v.dtype)
    ends = xp.empty((batch.slots * batch.heads, DELTA_END), dtype=xp.int8)
    first = xp.empty((batch.N, batch.heads, batch.K, batch.V), dtype=xp.float32)
    last = states_at(one_head_each(xp, as_state(xp, dstate, batch), batch), batch)
    begins = _begins(xp, batch, arrays, last, plan.scale)
    _reverse(batch, arrays, segments=batch.segments, start=last, end=states_at(first, batch), scale=plan.scale,
             grams=residuals.grams, ends=ends, begins=begins)
    du = None if x.u is None else xp.zeros((batch.heads, batch.slots, batch.K), dtype=xp.float32)
    flags = xp.empty(_items(batch), dtype=xp.int32)
    for exact in (False, True):
        _gradients(batch, arrays, exact, plan.scale, states=residuals.states, ends=ends, flags=flags, du=du)
    return _grads(xp, batch, x, arrays, du), public_state_gradient(xp, first, batch)


def _prepare(batch: vector.Batch) -> None:
    wanted = [(cuts.GRADS.file, cuts.grads_constants(batch.kind, exact)) for exact in (False, True)]
    wanted += [(cuts.REVERSE.file, cuts.reverse_constants(batch.kind, adds))
               for adds in (False, True)[: 1 + (batch.segments > 1)]]  # fmt: skip
    launch.prepare(tuple(wanted), launch.capability())


def _add_gradients(xp: Any, batch: vector.Batch, arrays: Arrays, dout: Array | None, dtype: Any) -> None:
    """dout, and dq, dk, dv, dg to be written."""
    tokens = (prod(batch.lead), batch.T, batch.heads)
    if dout is None:
        dout = xp.zeros((*tokens, batch.V), dtype=dtype)
    arrays["dout"] = vector.row_array(cast(xp, dout, dtype))
    gate = arrays["g"].dtype
    for name, width, kind in (("dq", batch.K, dtype), ("dk", batch.K, dtype), ("dv", batch.V, dtype), ("dg", batch.K, gate)):
        arrays[name] = xp.empty((*tokens, width), dtype=kind)


def _begins(xp: Any, batch: vector.Batch, arrays: Arrays, last: States, scale: float) -> Array | None:
    """G after every segment but the last."""
    if batch.segments == 1:
        return None
    slots, inner = batch.N * batch.heads, batch.segments - 1
    added = xp.empty((slots * inner, STATE), dtype=xp.float32)
    sums = xp.empty((slots * inner, WIDEST), dtype=xp.float32)
    begins = xp.empty((slots * batch.segments, STATE), dtype=xp.float32)
    _reverse(batch, arrays, segments=batch.segments, scale=scale, added=added, sums=sums)
    vector.sum_segments(batch, arrays, reverse=True, start=last, added=added, decays=sums, begins=begins)
    return begins


def _reverse(
    batch: vector.Batch, arrays: Arrays, *, segments: int, scale: float, start: States = NO_STATES,
    end: States = NO_STATES, **given: Array | None,
) -> None:
    """The reverse chain; with `added`, what segments add. given: grams, ends, begins, added, sums."""
    adds, heads = given.get("added") is not None, batch.heads
    maps = ("q", "dout") if adds else ("q", "k", "dout", "dv")
    fields = {n: address(given.get(n)) for n in ("grams", "ends", "begins", "added", "sums")}
    fields |= {n: vector.map_of(arrays, n) for n in ("q", "k", "dout", "dv")}
    fields |= {
        "g": rows_of(arrays["g"], heads), "out": rows_of(arrays["dv"], heads), "offsets": address(batch.offsets),
        "start": start.values(), "end": end.values(), "start_group": start.group, "slots": batch.slots, "T": batch.T,
        "heads": heads, "segments": segments, "chunks": batch.chunks, "scale": scale,
        **{f"group_{n}": heads // arrays[n].shape[-2] for n in ("q", "k")},
    }  # fmt: skip
    named = None
    if moves():
        named = (*(arrays[n] for n in ("q", "k", "g", "dout", "dv")), batch.offsets, start.array, end.array, *given.values())
    constants = cuts.reverse_constants(batch.kind, adds)
    launch.launch(cuts.REVERSE.file, cuts.REVERSE.entry, constants, batch.N * heads * segments, cuts.REVERSE.threads,
                  dict(constants)["LA_SHARED"], arguments.VECTOR_REVERSE.packed(fields), named)


def _items(batch: vector.Batch) -> int:
    """What one block of the gradients computes at a time: half of the channels of a chunk."""
    return batch.N * batch.chunks_longest * batch.heads * cuts.halves(batch.K)


def _gradients(batch: vector.Batch, arrays: Arrays, exact: bool, scale: float, **given: Array | None) -> None:
    """dq, dk, dg. exact: of what the other build has flagged. given: states, ends, flags, du."""
    heads, names = batch.heads, ("q", "k", "g", "dq", "dk", "dg")
    u = arrays["u"]
    fields = {n: rows_of(arrays[n], heads) for n in names} | {n: vector.map_of(arrays, n) for n in ("v", "dout")}
    fields |= {n: address(y) for n, y in given.items()}
    fields |= {
        "offsets": address(batch.offsets), "u": address(u), "new_values": 0, "erase_dots": 0, "slots": batch.slots,
        "tokens": batch.tokens, "items": _items(batch), "T": batch.T, "heads": heads, "chunks": batch.chunks_longest,
        "group_v": heads // arrays["v"].shape[-2], "group_u": 1 if u is None else heads // u.shape[0], "scale": scale,
    }  # fmt: skip
    named = None
    if moves():
        named = (*(arrays[n] for n in (*names, "v", "dout", "u")), batch.offsets, *given.values())
    constants = cuts.grads_constants(batch.kind, exact)
    grid = min(_items(batch), cuts.EXACT_BLOCKS * launch.multiprocessors()) if exact else _items(batch)
    launch.launch(cuts.GRADS.file, cuts.GRADS.entry, constants, grid, cuts.GRADS.threads,
                  dict(constants)["LA_SHARED"], arguments.VECTOR_GRADS.packed(fields), named)


def _grads(xp: Any, batch: vector.Batch, x: Inputs, arrays: Arrays, du: Array | None) -> Inputs:
    """Summed over the heads that share an input, in its shape."""
    found = {}
    for name in ("q", "k", "v", "g"):
        y, d = getattr(x, name), arrays["d" + name].reshape(*batch.lead, batch.T, batch.heads, -1)
        found[name] = sum_to(xp, sum_shared_heads(xp, d, (*batch.lead, *y.shape[-3:])), y.shape)
    if du is not None:
        each = xp.sum(du, axis=1)
        found["u"] = xp.sum(each.reshape(*x.u.shape[:-1], -1, batch.K), axis=-2)
    return Inputs(**{n: found.get(n) for n in Inputs._fields})
