"""PaTH attention as CUDA kernels on CuPy arrays: bfloat16 on compute capability 90.

    z_ij = scale (q_i k_j^T - E_i X_j) in a block of 128 tokens,   scale q_i R_{I-1} ... R_{J+1} k~_j^T of two blocks

`factors` makes X, the keys at the end of their block and D = (I - R)^T of each block, `groups` the same of 8, 64, ...
blocks, so that a query is mapped at most 7 times for every factor of 8 in the length, and `forward` is
softmax attention on these keys. cuda_src/path/place.cuh has the layout of the stored arrays.

Backward recomputes them. `mapped` stores the queries as they meet each group, `queries` goes over the keys and gives
their gradients, `keys` over the queries; `diagonal` has the pairs of a block with itself. `map_grads` sums the
gradients of the maps, `groups_adjoint` distributes the gradients of groups to their parts, and `factors_adjoint` maps
the gradients of blocks to k, w and beta.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from ...ops.cuda.arguments import NO_ROWS, address, rows_of
from ...ops.sums import sum_to
from ...runtime.arrays import Array, cast, dtype_name
from ...runtime.cuda import launch
from ...runtime.cuda.tensor_map import moves, tensor_map
from ..types import Inputs, SoftmaxPlan, Ungated
from . import arguments, calls, path_plan
from .calls import SavedLogs, SoftmaxBatch, row_array
from .path_plan import BLOCK, KERNELS, RADIX, SMALLEST, PathSizes

FORWARD, GROUPED = ("factors", "groups", "forward"), ("groups", "groups_adjoint")  # GROUPED: of more than one group
BY_QUERIES = ("forward", "mapped", "queries", "keys", "diagonal")  # a block of threads for each head of queries
OF_ATTENTION = ("q", "k", "v", "dout", "out", "other", "logs", "sums", "dots", "rows", "near", "far", "crossing")
STORED = ("beta", "factors", "keys", "maps", "mapped", "dmapped", "dkeys", "dmaps", "parts", "chain", "bases", "dbeta")


def unsupported_reason(x: Inputs, plan: SoftmaxPlan) -> str | None:
    """Why the kernels do not support a call; None if they do."""
    if plan.window is not None:
        return "windows of PaTH are computed by array calls"
    if {dtype_name(y) for y in (x.q, x.k, x.v, x.w)} - {"bfloat16"}:
        return "the kernels of PaTH take q, k, v and w in bfloat16"
    return calls.unsupported_reason(Inputs(*x)._replace(w=None, beta=None), plan)


def forward(plan: SoftmaxPlan, x: Inputs, state: None = None) -> tuple[Array, SavedLogs]:
    """(out (..., T, heads, V), log2 of the sums of the exponentials)."""
    x = x._replace(g=None) if isinstance(x, Ungated) else x
    xp, batch = plan.xp, calls.batch_of(plan, x)
    _prepare(batch, tuple(KERNELS) if plan.gradients else FORWARD)
    arrays = {n: row_array(xp, y) for n, y in (("q", x.q), ("k", x.k), ("v", x.v), ("w", x.w))}
    out = xp.empty((*batch.lead, batch.T, batch.heads, batch.kind.V), dtype=x.v.dtype)
    logs = xp.empty((batch.rows, batch.heads, batch.T), dtype=xp.float32)
    sums = calls.decays(plan, batch, x.g)
    arrays |= {"beta": xp.ascontiguousarray(cast(xp, x.beta, xp.float32)), "out": out, "logs": logs, "sums": sums}
    sizes = _factors(plan, batch, x, arrays)
    _launch("forward", plan, batch, sizes, arrays)
    return out[..., : x.v.shape[-1]], SavedLogs(logs, sums)


def backward(plan: SoftmaxPlan, x: Inputs, out: Array, saved: SavedLogs, dout: Array) -> Inputs:
    """Gradients of the inputs."""
    whole, x = x, x._replace(g=None) if isinstance(x, Ungated) else x
    xp, batch = plan.xp, calls.batch_of(plan, x)
    _prepare(batch, tuple(KERNELS))
    given = (("q", x.q), ("k", x.k), ("v", x.v), ("w", x.w), ("dout", dout))
    arrays = {n: row_array(xp, cast(xp, y, x.v.dtype)) for n, y in given}
    beta = xp.ascontiguousarray(cast(xp, x.beta, xp.float32))
    arrays |= {"logs": saved.logs, "sums": saved.sums, "beta": beta, "least": SMALLEST}
    numbers = saved.logs.shape
    if plan.normalize:
        arrays["dots"] = xp.empty(numbers, dtype=xp.float32)
        calls.dots(batch, row_array(xp, cast(xp, out, x.v.dtype)), arrays["dout"], True, saved, dots=arrays["dots"])
    gates = {}
    if x.g is not None:
        gates = {n: xp.empty(numbers, dtype=xp.float32) for n in ("rows", "near", "far")}
        gates["crossing"] = xp.empty((batch.sequences * batch.heads, batch.blocks, batch.blocks), dtype=xp.float32)
    sizes = _factors(plan, batch, x, arrays, chain=True)
    _number_tiles(plan, batch, sizes, arrays)
    found = _of_pairs(plan, batch, sizes, arrays | gates)
    found |= _of_maps(plan, batch, sizes, arrays | {n: found.pop(n) for n in ("mapped", "dmapped", "dkeys", "parts")})
    dbeta = found.pop("beta").reshape(x.beta.shape)
    found = {n: calls.of_shape(xp, d, getattr(x, n).shape) for n, d in found.items()} | {"beta": dbeta}
    if x.g is not None:
        found["g"] = calls.gate_gradient(plan, batch, x.g, gates)
    elif whole.g is not None:
        found["g"] = whole.g  # zeros
    return Inputs(**{n: found.get(n) for n in Inputs._fields})


def _prepare(batch: SoftmaxBatch, names: tuple[str, ...]) -> None:
    """Start compiling."""
    names = (*(n for n in names if n not in GROUPED or batch.blocks > RADIX),)
    launch.prepare(tuple((KERNELS[n].file, path_plan.constants(n, batch.kind)) for n in names), launch.capability())


def _factors(
    plan: SoftmaxPlan, batch: SoftmaxBatch, x: Inputs, arrays: dict[str, Any], chain: bool = False
) -> PathSizes:
    """What is stored of the blocks and groups, added to the arrays."""
    xp, H, slots = plan.xp, x.k.shape[-2], batch.sequences * batch.blocks
    if batch.offsets is not None:
        slots = batch.T // BLOCK + batch.sequences
    sizes = path_plan.sizes(batch.kind, H, slots, batch.blocks)
    arrays |= {n: xp.empty(getattr(sizes, n), dtype=xp.int8) for n in ("factors", "keys", "maps")}
    if chain and sizes.levels > 1:
        arrays["chain"] = xp.empty(sizes.maps, dtype=xp.int8)
    _launch("factors", plan, batch, sizes, arrays)
    for level in range(1, sizes.levels):
        _launch("groups", plan, batch._replace(blocks=(batch.blocks - 1) // RADIX**level), sizes, arrays, level)
    return sizes


def _number_tiles(plan: SoftmaxPlan, batch: SoftmaxBatch, sizes: PathSizes, arrays: dict[str, Any]) -> None:
    """How many tiles of queries attend to earlier groups; the first tile of each sequence of a ragged batch."""
    arrays["tiles"] = batch.sequences * sizes.earlier_groups(batch.blocks)
    if batch.offsets is not None:
        each = (sizes.earlier_groups(-(-(s.stop - s.start) // BLOCK)) for s in plan.sequences)
        *first, arrays["tiles"] = accumulate(each, initial=0)
        arrays["bases"] = plan.xp.asarray(first, dtype=plan.xp.int64)


def _of_pairs(plan: SoftmaxPlan, batch: SoftmaxBatch, sizes: PathSizes, arrays: dict[str, Any]) -> dict[str, Array]:
    """dq and dv, and by heads of queries the gradients of keys at the end of groups and of factors of blocks."""
    xp, K, kind = plan.xp, batch.kind.K, arrays["q"].dtype
    tiles = arrays["tiles"]
    results = {n: xp.empty((batch.heads, tiles, sizes.tile // 2), dtype=kind) for n in ("mapped", "dmapped")}
    results["dkeys"] = xp.empty((sizes.levels, batch.heads, sizes.slots, sizes.tile // 2), dtype=kind)
    results["parts"] = xp.empty((1, batch.heads, sizes.slots, sizes.parts // 2), dtype=kind)
    dq = xp.empty((batch.rows, batch.T, batch.heads, K), dtype=kind)
    dv = xp.empty((batch.rows, batch.T, batch.heads, batch.kind.V), dtype=kind)
    arrays = arrays | results | {"out": dq, "other": dv}
    for name in ("mapped", "queries", "keys", "diagonal"):
        _launch(name, plan, batch, sizes, arrays)
    return results | {"q": dq, "v": dv}


def _of_maps(plan: SoftmaxPlan, batch: SoftmaxBatch, sizes: PathSizes, arrays: dict[str, Any]) -> dict[str, Array]:
    """dk, dw and dbeta."""
    xp, H, kind = plan.xp, sizes.key_heads, arrays["q"].dtype
    dk, dw = (xp.empty((batch.rows, batch.T, H, batch.kind.K), dtype=kind) for _ in range(2))
    dbeta = xp.empty((batch.rows, batch.T, H), dtype=xp.float32)
    arrays = arrays | {"dmaps": xp.empty(sizes.maps, dtype=xp.int8), "dk": dk, "dw": dw, "dbeta": dbeta}
    for level in range(sizes.levels):
        if blocks := batch.blocks // RADIX**level:
            _launch("map_grads", plan, batch._replace(blocks=blocks), sizes, arrays, level)
    arrays |= {n: _of_key_heads(xp, arrays[n], H) for n in ("dkeys", "parts")}
    for level in reversed(range(1, sizes.levels)):
        _launch("groups_adjoint", plan, batch._replace(blocks=(batch.blocks - 1) // RADIX**level), sizes, arrays, level)
    _launch("factors_adjoint", plan, batch, sizes, arrays)
    return {"k": dk, "w": dw, "beta": dbeta}


def _of_key_heads(xp: Any, y: Array, heads: int) -> Array:
    """(levels, heads, ...) summed over the heads that share keys."""
    if y.shape[1] == heads:
        return y
    levels, _, *rest = y.shape
    return sum_to(xp, y.reshape(levels, heads, -1, *rest), (levels, heads, 1, *rest)).reshape(levels, heads, *rest)


def _launch(
    name: str, plan: SoftmaxPlan, batch: SoftmaxBatch, sizes: PathSizes, arrays: dict[str, Any], level: int = 0
) -> None:
    """One kernel, for every block of a head of queries, or of keys."""
    of = {n: arrays[n] for n in OF_ATTENTION if arrays.get(n) is not None}
    own = batch.heads if name in BY_QUERIES else sizes.key_heads
    fields = {
        "of": arguments.ATTENTION.flat(calls.fields_of(plan, batch, own, of)),
        "w": tensor_map(arrays["w"]), "key_heads": sizes.key_heads, "slots": sizes.slots,
        "each": 0 if batch.offsets is not None else sizes.slots // batch.sequences,
        "levels": sizes.levels, "level": level, "tiles": arrays.get("tiles", 0),
        "least": arrays.get("least", 0.0),
    } | {n: address(arrays.get(n)) for n in STORED}  # fmt: skip
    fields |= {n: rows_of(arrays[n]) if n in arrays else NO_ROWS for n in ("dk", "dw")}
    kernel, constants = KERNELS[name], path_plan.constants(name, batch.kind)
    named = (*(y for n, y in arrays.items() if n not in ("tiles", "least")), batch.offsets) if moves() else None
    launch.launch(kernel.file, kernel.entry, constants, batch.sequences * own * batch.blocks, kernel.threads,
                  dict(constants)["LA_SHARED"], arguments.PATH.packed(fields), named)  # fmt: skip
