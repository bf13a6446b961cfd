"""Stick-breaking attention by products of warps on CuPy arrays (readouts/stick_breaking.py has the equations).

A block of threads goes from a block of queries to older keys until the stick is used up. Backward stores checkpoints at
the tiles of every block of queries: the rest of the stick and the sums of the shares, of as many heads at a time as
memory allows.
"""

from __future__ import annotations

from typing import Any

from ...ops.cuda.arguments import address, rows_of
from ...runtime.arrays import Array, cast
from ...runtime.cuda import launch
from .. import policy
from ..types import Inputs, SoftmaxPlan
from . import arguments, calls, portable
from .portable import ARRAYS, POINTERS, PortableCall
from .portable_plan import passes
from .stick_plan import KERNELS, block_rows, constants


def unsupported_reason(x: Any, plan: SoftmaxPlan) -> str | None:
    """Why the kernels do not support a call; None if they do."""
    if plan.has_state:
        return "stick-breaking attention with a cache is computed by array calls"
    return portable.unsupported_reason(Inputs(*x[:3]), plan._replace(strict=False))


def differentiates(x: Inputs) -> bool:
    """Whether kernels compute the gradients of a call: the checkpoints of longer sequences do not fit."""
    return x.v.shape[-3] <= policy.LONGEST_STICK


def forward(plan: SoftmaxPlan, x: Inputs) -> Array:
    """out (..., T, heads, V)."""
    xp, call = plan.xp, portable.call_of(plan, x, None)
    out = xp.empty((*call.batch.lead, call.batch.T, call.batch.heads, call.kind.V), dtype=call.x.v.dtype)
    if call.longs:
        _launch("forward", call, portable.fields_of(plan, call, out), None, None, (0, _pairs(call)))
    return out


def backward(plan: SoftmaxPlan, x: Inputs, dout: Array) -> tuple[Inputs, None]:
    """(gradients of the inputs, of no cache)."""
    xp, call = plan.xp, portable.call_of(plan, x, None, cast(plan.xp, dout, x.v.dtype))
    batch, kind = call.batch, call.kind
    shapes = {"dq": (batch.T, batch.heads, kind.K), "dk": (batch.Tk, batch.heads // batch.shared, kind.K),
              "dv": (batch.Tk, batch.heads // batch.shared, kind.V)}  # fmt: skip
    fields = portable.fields_of(plan, call, None) | {"dout": call.cotangents[0]}
    fields |= {n: xp.empty((batch.rows, *shape), dtype=call.x.v.dtype) for n, shape in shapes.items()}
    rows = block_rows("keys", kind, launch.shared_limit())
    tiles = -(-call.longs // rows)
    each = 8 * tiles * tiles * rows  # bytes of a head's checkpoints
    pairs = min(max(policy.STICK_BYTES // max(each, 1) // batch.shared, 1) * batch.shared, _pairs(call))
    marks = xp.empty((pairs, tiles, tiles * rows, 2), dtype=xp.float32)
    ends = xp.empty((pairs, tiles), dtype=xp.int32)
    for first in range(0, _pairs(call) if call.longs else 0, max(pairs, 1)):
        some = first, min(pairs, _pairs(call) - first)
        _launch("queries", call, fields, marks, ends, some)
        for done in passes(kind):
            _launch("keys", call, fields, marks, ends, some, done)
    found = {n: calls.of_shape(xp, fields[f"d{n}"], getattr(x, n).shape) for n in "qkv"}
    return Inputs(**found), None


def _pairs(call: PortableCall) -> int:
    return call.batch.sequences * call.batch.heads


def _launch(
    name: str,
    call: PortableCall,
    fields: dict[str, Any],
    marks: Array,
    ends: Array,
    some: tuple[int, int],
    done: int = 0,
) -> None:
    """One of the kernels for some sequences and heads: (the first, their number)."""
    kernel, limit, heads = KERNELS[name], launch.shared_limit(), call.batch.heads
    built, rows = constants(name, call.kind, limit, done), block_rows(name, call.kind, limit)
    tiles = -(-call.longs // rows)
    given = {n: rows_of(fields[n], heads) for n in ARRAYS} | {n: address(fields[n]) for n in POINTERS}
    given |= {n: rows_of(fields[n]) for n in ("dk", "dv")}  # whose heads are groups
    packed = arguments.STICK.pack(of=arguments.PORTABLE.flat(fields | given), marks=address(marks), ends=address(ends),
                                  first=some[0], pairs=some[1], tiles=tiles)  # fmt: skip
    named = (*(fields[n] for n in (*ARRAYS, *POINTERS)), marks, ends)
    blocks = tiles * (some[1] // call.batch.shared if name == "keys" else some[1])
    threads, shared = kernel.threads * rows // 16, dict(built)["LA_SHARED"]
    launch.launch(kernel.file, kernel.entry, built, blocks, threads, shared, packed, named)
