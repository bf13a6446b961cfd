"""Gradients of erase FREE, as CUDA kernels on CuPy arrays.

The factors of all chunks again; the chain from the last chunk to the first, for dv, the gradient of the state after
every chunk and the gradient dw of what each token read (free/free_chain.cu); then dq, dk, dg, da, db of all
chunks at once (free_grads.cu), without quotients in the chunks that decay too far for them (free_exact_grads.cu).
docs/internals/free_rank_one.md has the equations.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ....ops.cuda.arguments import address, rows_of
from ....ops.sums import sum_to
from ....runtime.arrays import Array, cast
from ....runtime.cuda import launch
from ....runtime.cuda.tensor_map import moves
from ...types import Inputs, Saved
from .. import arguments
from ..operands import as_state, one_head_each, public_state_gradient, states_at, sum_shared_heads
from ..vector import launch as launches
from . import plan as cuts
from .launch import (
    BACKWARD,
    KERNELS_OF_BACKWARD,
    FreeBatch,
    arrays_of,
    batch_of,
    factors_of,
    launch_one,
    prepare,
    residual_sizes,
)
from .plan import CHAIN, EXACT_GRADS, GRADS

READ = ("q", "k", "g", "a", "b")


def backward(saved: Saved, dout: Array | None, dstate: Any) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state; saved: with the residuals of the forward."""
    x, plan, _, residuals = saved
    xp, batch = plan.xp, batch_of(x, plan)
    prepare(batch, KERNELS_OF_BACKWARD)
    arrays = arrays_of(xp, x)
    _add_gradients(xp, batch, arrays, x, dout)
    first = xp.empty((batch.N, batch.heads, batch.K, batch.V), dtype=xp.float32)
    last = states_at(one_head_each(xp, as_state(xp, dstate, batch), batch), batch)
    of_chain = {n: xp.empty((batch.stored, size), dtype=xp.int8) for n, size in residual_sizes(batch).items()}
    reverse = {n: arrays[n] for n in READ} | {"v": arrays["dout"], "out": arrays["dv"]}
    launch_one(CHAIN, batch, batch.N * batch.heads, reverse, BACKWARD, start=last, end=states_at(first, batch),
                     **of_chain, **factors_of(xp, batch, arrays, plan.scale, BACKWARD))  # fmt: skip
    given = {"states": residuals["states"], "ends": of_chain["states"], "corrections": residuals["corrections"],
             "grad_corrections": of_chain["corrections"],
             "flags": xp.empty(batch.N * batch.heads * batch.chunks, dtype=xp.int32)}  # fmt: skip
    for name in (GRADS, EXACT_GRADS):
        _gradients(name, batch, arrays, plan.scale, given)
    return _grads(xp, batch, x, arrays), public_state_gradient(xp, first, batch)


def _add_gradients(xp: Any, batch: FreeBatch, arrays: dict[str, Any], x: Inputs, dout: Array | None) -> None:
    """dout, and the gradients to be written; none of log decays that are not there."""
    tokens, dtype = (prod(batch.lead), batch.T, batch.heads), x.v.dtype
    if dout is None:
        dout = xp.zeros((*tokens, batch.V), dtype=dtype)
    arrays["dout"] = launches.row_array(cast(xp, dout, dtype))
    kinds = dict.fromkeys(("dq", "dk", "dv", "da", "db"), dtype) | {"dg": arrays["g"].dtype}
    if x.g is None:
        arrays["dg"] = None
        del kinds["dg"]
    for name, kind in kinds.items():
        arrays[name] = xp.empty((*tokens, batch.V if name == "dv" else batch.K), dtype=kind)


def _gradients(name: str, batch: FreeBatch, arrays: dict[str, Any], scale: float, given: dict[str, Array]) -> None:
    """dq, dk, dg, da, db of all chunks, or of those that the first kernel has flagged."""
    heads, items = batch.heads, given["flags"].size
    maps, written = (*READ, "v", "dout"), tuple(f"d{n}" for n in READ)
    fields: dict[str, Any] = {n: launches.map_of(arrays, n) for n in maps} | {n: address(y) for n, y in given.items()}
    fields |= {f"rows_{n}": rows_of(arrays[n], heads) for n in READ} | {n: rows_of(arrays[n], heads) for n in written}
    fields |= {
        "offsets": address(batch.offsets), "slots": batch.slots, "T": batch.T, "heads": heads, "chunks": batch.chunks,
        "items": items, "scale": scale, **{f"group_{n}": heads // arrays[n].shape[-2] for n in (*READ, "v")},
    }  # fmt: skip
    named = None
    if moves():
        named = (*(arrays[n] for n in (*maps, *written)), batch.offsets, *given.values())
    grid = min(items, launch.multiprocessors()) if name == EXACT_GRADS else items
    cuts.kernel(name, batch.kind).launch(grid, arguments.FREE_GRADS.packed(fields), named)


def _grads(xp: Any, batch: FreeBatch, x: Inputs, arrays: dict[str, Any]) -> Inputs:
    """Summed over the heads that share an input, in its shape."""
    found = {}
    for name in (*READ, "v"):
        y, d = getattr(x, name), arrays[f"d{name}"]
        if y is not None:
            d = d.reshape(*batch.lead, batch.T, batch.heads, -1)
            found[name] = sum_to(xp, sum_shared_heads(xp, d, (*batch.lead, *y.shape[-3:])), y.shape)
    return Inputs(**{n: found.get(n) for n in Inputs._fields})
