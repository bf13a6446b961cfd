"""A call as the portable chunks of a vector decay see it: its arrays, its sizes, the launches of its kernels."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from ....ops.cuda.arguments import NO_ROWS, address, rows_of
from ....runtime.arrays import Array, cast, dtype_name
from ....runtime.cuda import launch
from ....runtime.cuda.launch import Kernel
from ... import policy
from ...types import Erase, Inputs, Plan, ReadState
from .. import arguments
from ..operands import dense_rows, element_of
from . import plan as cuts

ROWS = ("q", "k", "v", "g", "beta", "out", "dout", "dq", "dk", "dv", "dg", "gv", "error", "du")
POINTERS = ("u", "start", "end", "marks", "dots", "dr", "dbeta", "parts")
Arrays = dict[str, Any]


@dataclass(slots=True)
class PortableBatch:
    """A call as the kernels see it. arrays: by the names of the struct."""

    kind: cuts.PortableKind
    arrays: Arrays
    lead: tuple[int, ...]
    shape: tuple[int, ...]  # of states
    sizes: tuple[int, ...]  # sequences, T, heads
    longest: int
    scale: float
    offsets: Array | None

    def empty(self, xp: Any, width: int, dtype: Any) -> Array:
        """A dense array (batch, T, heads, width)."""
        return xp.empty((prod(self.lead), *self.sizes[1:], width), dtype=dtype)


def batch_of(x: Inputs, plan: Plan, dout: Array | None = None) -> PortableBatch:
    """Arrays of one element type with contiguous rows, and the sizes of a call."""
    xp, element, (*lead, T, heads, V), K = plan.xp, element_of(x), x.v.shape, x.k.shape[-1]
    dtype = xp.float32 if element == "float32" else x.v.dtype
    given = {"q": x.q, "k": x.k, "v": x.v} | ({} if dout is None else {"dout": dout})
    arrays: Arrays = {n: dense_rows(xp, cast(xp, y, dtype)) for n, y in given.items()}
    gates = {n: y for n, y in (("g", x.g), ("gv", x.gv)) if y is not None}
    names = {dtype_name(y) for y in gates.values()}
    for n, y in gates.items():  # of one dtype
        g = y if names in ({element}, {"float32"}) else cast(xp, y, xp.float32)
        arrays[n] = dense_rows(xp, xp.broadcast_to(g, (*x.v.shape[:-2], *g.shape[-2:])))
    before, longest = plan.query_reads is not ReadState.UPDATED, max(s.stop - s.start for s in plan.sequences)
    kind = cuts.PortableKind(K, V, element, dtype_name(arrays["g"]), _alignment(arrays, K, V), x.erase is Erase.DELTA,
                             before, x.u is not None,
                             element == "float32" or longest > policy.FLOAT32_RECURRENCE,
                             x.gv is not None)  # fmt: skip
    arrays["beta"] = None if x.beta is None else dense_rows(xp, cast(xp, x.beta, xp.float32))
    arrays["u"] = None if x.u is None else xp.ascontiguousarray(cast(xp, x.u, xp.float32))
    ragged, ends = plan.is_ragged, [s.stop for s in plan.sequences]
    N = len(ends) if ragged else prod(lead)
    offsets = xp.asarray([0, *ends], dtype=xp.int64) if ragged else None
    shape = (N, heads, K, V) if ragged else (*lead, heads, K, V)
    return PortableBatch(kind, arrays, tuple(lead), shape, (N, T, heads), longest, plan.scale, offsets)


def _alignment(arrays: Arrays, K: int, V: int) -> int:
    """The largest of 16, 8, 4, 2 bytes that divides the address and the length of every row."""
    common = 16
    for n, y in arrays.items():
        width = V if n in ("v", "dout", "gv") else K
        strides = (s for s, n in zip(y.strides[:-1], y.shape[:-1], strict=True) if n > 1)
        common = gcd(common, width * y.itemsize, y.data.ptr, *strides)
    return common


def dense(xp: Any, state: Array | None) -> Array | None:
    return None if state is None else xp.ascontiguousarray(cast(xp, state, xp.float32))


def run(name: str, batch: PortableBatch, back: bool = False, **given: Array | None) -> None:
    """One kernel. given: arrays by the names of the struct."""
    (N, _, heads), found = batch.sizes, cuts.launch_of(name, batch.kind, launch.shared_limit(), back)
    if found is None:
        raise RuntimeError(f"a block of {name} does not fit the device")
    enqueue(batch, found, N * heads * found.parts, given)


def enqueue(batch: PortableBatch, kernel: Kernel, blocks: int, given: Arrays, tokens: int = 0) -> None:
    """The launch of a kernel. tokens: of all sequences."""
    arrays, (_, T, heads) = batch.arrays, batch.sizes
    given = {"u": arrays["u"], **given}
    fields: Arrays = {n: NO_ROWS if arrays.get(n) is None else rows_of(arrays[n], heads) for n in ROWS}
    fields |= {n: address(given.get(n)) for n in POINTERS} | {"offsets": address(batch.offsets)}
    given_marks = given.get("marks")
    marks = 0 if given_marks is None else given_marks.shape[1]
    fields |= {"T": T, "heads": heads, "scale": batch.scale, "marks_of_sequence": marks, "tokens": tokens,
               "group_u": 1 if arrays["u"] is None else heads // arrays["u"].shape[0]}  # fmt: skip
    held = (*(arrays.get(n) for n in ROWS), *given.values(), batch.offsets)
    named = tuple(y for y in held if y is not None)
    kernel.launch(blocks, arguments.VECTOR_PORTABLE.packed(fields), named)
