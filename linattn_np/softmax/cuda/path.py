"""PaTH attention as CUDA kernels on CuPy arrays: bfloat16 on compute capability 90, forward.

    z_ij = scale (q_i k_j^T - E_i X_j) in a block of 128 tokens,   scale q_i R_{I-1} ... R_{J+1} k~_j^T of two blocks

`factors` makes X, the keys at the end of their block and D = (I - R)^T of each block, `groups` the same of 8, 64, ...
blocks, so that a query is mapped at most 7 times for every factor of 8 in the length, and `forward` is that of
softmax attention on these keys. cuda_src/path/place.cuh has what is stored. Gradients are array calls.
"""

from __future__ import annotations

from math import log
from typing import Any

from ...ops.cuda.arguments import address
from ...runtime.arrays import Array, cast, dtype_name
from ...runtime.cuda import launch
from ...runtime.cuda.tensor_map import moves, tensor_map
from .. import heads, sequences
from ..array import tiles
from ..types import Inputs, Plan, Ungated
from . import arguments, calls, path_plan
from .calls import Batch, Saved, row_array
from .path_plan import KERNELS, RADIX, Sizes


def unsupported_reason(x: Inputs, plan: Plan) -> str | None:
    """Why the kernels do not support a call; None if they do."""
    if plan.window is not None:
        return "windows of PaTH are computed by array calls"
    if {dtype_name(y) for y in (x.q, x.k, x.v, x.w)} - {"bfloat16"}:
        return "the kernels of PaTH take q, k, v and w in bfloat16"
    return calls.unsupported_reason(Inputs(*x)._replace(w=None, beta=None), plan)


def forward(plan: Plan, x: Inputs, state: None = None) -> tuple[Array, Saved]:
    """(out (..., T, heads, V), log2 of the sums of the exponentials)."""
    x = x._replace(g=None) if isinstance(x, Ungated) else x
    xp, batch = plan.xp, calls.batch_of(plan, x)
    names = (*(n for n in KERNELS if n != "groups" or batch.blocks > RADIX),)
    launch.prepare(tuple((KERNELS[n].file, path_plan.constants(n, batch.kind)) for n in names), launch.capability())
    arrays = {n: row_array(xp, y) for n, y in (("q", x.q), ("k", x.k), ("v", x.v), ("w", x.w))}
    H, slots = x.k.shape[-2], batch.sequences * batch.blocks
    if batch.offsets is not None:
        slots = batch.T // path_plan.BLOCK + batch.sequences
    sizes = path_plan.sizes(batch.kind, H, slots, batch.blocks)
    out = xp.empty((*batch.lead, batch.T, batch.heads, batch.kind.V), dtype=x.v.dtype)
    logs = xp.empty((batch.rows, batch.heads, batch.T), dtype=xp.float32)
    sums = calls.decays(plan, batch, x.g)
    arrays |= {n: xp.empty(getattr(sizes, n), dtype=xp.int8) for n in ("factors", "keys", "maps")}
    arrays |= {"beta": xp.ascontiguousarray(cast(xp, x.beta, xp.float32)), "out": out, "logs": logs, "sums": sums}
    _launch("factors", plan, batch, sizes, arrays)
    for level in range(1, sizes.levels):
        _launch("groups", plan, batch._replace(blocks=(batch.blocks - 1) // RADIX**level), sizes, arrays, level)
    _launch("forward", plan, batch, sizes, arrays)
    return out[..., : x.v.shape[-1]], Saved(logs, sums)


def backward(plan: Plan, x: Inputs, out: Array, saved: Saved, dout: Array) -> Inputs:
    """Gradients of the inputs, by array calls."""
    lead, G, each = x.v.shape[:-3], heads.groups(x), list[Any]()
    logs = log(2) * saved.logs.reshape(*lead, G, -1, saved.logs.shape[-1], 1)
    for s in plan.sequences:
        each.append(logs[..., s.start : s.stop, :] if s.stop > s.start else None)
    return sequences.backward(tiles, plan, x, None, (out, each), dout)[0]


def _launch(name: str, plan: Plan, batch: Batch, sizes: Sizes, arrays: dict[str, Any], level: int = 0) -> None:
    """One kernel, for every block of a head of queries, or of keys."""
    of = {n: arrays[n] for n in ("q", "k", "v", "out", "logs", "sums")}
    own = batch.heads if name == "forward" else sizes.key_heads
    fields = {
        "of": arguments.ATTENTION.flat(calls.fields_of(plan, batch, own, of)),
        "w": tensor_map(arrays["w"]), "key_heads": sizes.key_heads, "slots": sizes.slots,
        "each": 0 if batch.offsets is not None else sizes.slots // batch.sequences,
        "levels": sizes.levels, "level": level,
    } | {n: address(arrays[n]) for n in ("beta", "factors", "keys", "maps")}  # fmt: skip
    kernel, constants = KERNELS[name], path_plan.constants(name, batch.kind)
    named = (*arrays.values(), batch.offsets) if moves() else None
    launch.launch(kernel.file, kernel.entry, constants, batch.sequences * own * batch.blocks, kernel.threads,
                  dict(constants)["LA_SHARED"], arguments.PATH.packed(fields), named)  # fmt: skip
