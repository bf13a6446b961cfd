"""A decay a token and key channel in chunks of 16 tokens, as CUDA kernels on CuPy arrays, for every dtype and device.

Erase NONE and DELTA where the kernels of warpgroup products (vector.py, vector_delta.py) do not run: float16, float32,
other compute capabilities, other widths up to 256. One kernel has outputs and states (vector_portable/values.cu), by
value columns. Gradients: the same kernel from the last chunk to the first has dv, and two passes by key channels dq,
then dk and dg (vector_portable/channels.cu). With the delta rule all of them read e = v - k S~ of every token.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from ....core import StatesAt
from ....ops.cuda.arguments import NO_ROWS, address, rows_of
from ....runtime.arrays import Array, cast, dtype_name, sum_of_groups
from ....runtime.cuda import launch
from ... import policy
from ...types import Decay, Erase, Inputs, Plan, ReadState, Saved
from .. import arguments, operands
from ..recurrence.gradients import dense_rows, shaped
from ..step import element_of
from . import plan as cuts

ROWS = ("q", "k", "v", "g", "beta", "out", "dout", "dq", "dk", "dv", "dg", "error", "du")
POINTERS = ("u", "start", "end", "marks", "dots", "dr", "dbeta", "parts")
Arrays = dict[str, Any]


def unsupported_reason(call: Any) -> str | None:
    """Why the kernels do not cover the forward of a call; None where they do."""
    x, plan = call.x, call.plan
    if not policy.PORTABLE_CHUNKS:
        return "portable chunks are off: LINATTN_CUDA_VECTOR_CHUNKS is 0 in the environment"
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


def backward_unsupported_reason(saved: Saved) -> str | None:
    """Why the kernels do not cover the gradients of a call; None where they do."""
    too_large = (_too_large(saved.x, saved.plan, n, True) for n in ("values", "channels"))
    return unsupported_reason(saved) or next(filter(None, too_large), None)


def _too_large(x: Inputs, plan: Plan, name: str, backward: bool = False) -> str | None:
    K, V, element = x.k.shape[-1], x.v.shape[-1], element_of(x)
    kind = cuts.PortableKind(K, V, element, "float32", 16, x.erase is Erase.DELTA)
    found = (cuts.launch_of(name, kind, launch.shared_limit(), back) for back in (False, True)[: 1 + backward])
    if max(K, V) <= policy.WIDEST_CUDA and None not in found:
        return None
    return f"keys are {K} and values {V} wide in {element}, more than a block of the kernels holds"


def how(call: Any) -> str:
    """The kernels of a call that is covered, in words."""
    return f"chunks of {cuts.CHUNK} tokens by tensor cores (mma.sync), their pairs exact"


def gives_states(call: Any) -> bool:
    """Whether forward stores states at positions."""
    return False


@dataclass(slots=True)
class Batch:
    """A call as the kernels see it. made: arrays by the names of the struct."""

    kind: cuts.PortableKind
    made: Arrays
    lead: tuple[int, ...]
    shape: tuple[int, ...]  # of states
    sizes: tuple[int, ...]  # sequences, T, heads
    longest: int
    scale: float
    offsets: Array | None

    def empty(self, xp: Any, width: int, dtype: Any) -> Array:
        """A dense array (batch, T, heads, width)."""
        return xp.empty((prod(self.lead), *self.sizes[1:], width), dtype=dtype)


def batch_of(x: Inputs, plan: Plan, dout: Array | None = None) -> Batch:
    """Arrays of one element type with contiguous rows, and the sizes of a call."""
    xp, element, (*lead, T, heads, V), K = plan.xp, element_of(x), x.v.shape, x.k.shape[-1]
    dtype = xp.float32 if element == "float32" else x.v.dtype
    given = {"q": x.q, "k": x.k, "v": x.v} | ({} if dout is None else {"dout": dout})
    made: Arrays = {n: dense_rows(xp, cast(xp, y, dtype)) for n, y in given.items()}
    g = x.g if dtype_name(x.g) in (element, "float32") else cast(xp, x.g, xp.float32)
    made["g"] = dense_rows(xp, xp.broadcast_to(g, (*x.v.shape[:-2], *g.shape[-2:])))
    before = plan.query_reads is not ReadState.UPDATED
    kind = cuts.PortableKind(K, V, element, dtype_name(made["g"]), _alignment(made, K, V), x.erase is Erase.DELTA,
                             before, x.u is not None)  # fmt: skip
    made["beta"] = None if x.beta is None else dense_rows(xp, cast(xp, x.beta, xp.float32))
    made["u"] = None if x.u is None else xp.ascontiguousarray(cast(xp, x.u, xp.float32))
    ragged, ends = plan.is_ragged, [s.stop for s in plan.sequences]
    N = len(ends) if ragged else prod(lead)
    offsets = xp.asarray([0, *ends], dtype=xp.int64) if ragged else None
    shape = (N, heads, K, V) if ragged else (*lead, heads, K, V)
    longest = max(s.stop - s.start for s in plan.sequences)
    return Batch(kind, made, tuple(lead), shape, (N, T, heads), longest, plan.scale, offsets)


def _alignment(made: Arrays, K: int, V: int) -> int:
    """The largest of 16, 8, 4, 2 bytes that divides the address and the length of every row."""
    common = 16
    for n, y in made.items():
        width = V if n in ("v", "dout") else K
        strides = (s for s, n in zip(y.strides[:-1], y.shape[:-1], strict=True) if n > 1)
        common = gcd(common, width * y.itemsize, y.data.ptr, *strides)
    return common


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved)."""
    xp, batch = plan.xp, batch_of(x, plan)
    batch.made["out"] = batch.empty(xp, batch.kind.V, batch.made["v"].dtype)
    end = xp.empty(batch.shape, dtype=xp.float32)
    if batch.kind.erase and plan.gradients and policy.saves_factors(4 * prod(x.v.shape)):
        batch.made["error"] = batch.empty(xp, batch.kind.V, xp.float32)
    _launch("values", batch, start=_dense(xp, state), end=end)
    saved = Saved(x, plan, state, batch.made.get("error"))
    return cast(xp, batch.made["out"].reshape(x.v.shape), x.v.dtype), end, saved


def backward(saved: Saved, dout: Array | None, dstate: Any) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state."""
    x, plan, state, error = saved
    xp = plan.xp
    if isinstance(dstate, StatesAt):
        dstate = dstate.end
    batch = batch_of(x, plan, xp.zeros(x.v.shape, dtype=x.v.dtype) if dout is None else dout)
    made, K, V = batch.made, batch.kind.K, batch.kind.V
    start, last = _dense(xp, state), _dense(xp, dstate)
    kept: Arrays = {}
    if batch.kind.erase:
        made["error"] = error
        if error is None:
            made["error"] = batch.empty(xp, V, xp.float32)
            _launch("values", batch, start=start)
        made["du"] = batch.empty(xp, V, xp.float32)
        kept = {"dr": batch.empty(xp, K, xp.float32), "dbeta": batch.empty(xp, 1, xp.float32)}
    for n in ("q", "k", "v", "g"):
        made[f"d{n}"] = batch.empty(xp, made[n].shape[-1], made[n].dtype)
    first = xp.empty(batch.shape, dtype=xp.float32)
    marks = -(-(batch.longest + batch.kind.before) // cuts.MARK)
    slots = batch.sizes[0] * batch.sizes[2]
    kept |= {"marks": xp.empty((slots, marks, K, V), dtype=xp.float32), "dots": batch.empty(xp, K, xp.float32)}
    _launch("values", batch, True, start=last, end=first)
    _launch("channels", batch, start=start, **kept)
    _launch("channels", batch, True, start=last, **kept)
    du = _add_bonus(xp, batch) if batch.kind.bonus else None
    made["dbeta"] = kept.get("dbeta")
    grads = {n: shaped(xp, made[f"d{n}"].reshape(*x.v.shape[:-1], -1), getattr(x, n))
             for n in ("q", "k", "v", "g", "beta") if made[f"d{n}"] is not None}  # fmt: skip
    if du is not None:
        grads["u"] = sum_of_groups(xp, du, x.u.shape[-2])
    return Inputs(**dict.fromkeys(Inputs._fields) | grads), first


def _dense(xp: Any, state: Array | None) -> Array | None:
    return None if state is None else xp.ascontiguousarray(cast(xp, state, xp.float32))


def _launch(name: str, batch: Batch, back: bool = False, **given: Array | None) -> None:
    """One kernel. given: arrays by the names of the struct."""
    (N, _, heads), found = batch.sizes, cuts.launch_of(name, batch.kind, launch.shared_limit(), back)
    if found is None:
        raise RuntimeError(f"a block of {name} does not fit the device")
    _enqueue(batch, found.kernel, found.constants, N * heads * found.parts, found.shared, given)


def _add_bonus(xp: Any, batch: Batch) -> Array:
    """The gradient of the bonus (heads, K); dq and dk get what they have of it."""
    (_, T, heads), K, kind = batch.sizes, batch.kind.K, batch.kind
    tokens = prod(batch.lead) * T
    blocks = -(-tokens // cuts.BONUS_TOKENS)
    parts = xp.empty((blocks, heads, K), dtype=xp.float32)
    _enqueue(batch, cuts.BONUS, cuts.bonus_constants(kind), blocks * heads, 0, {"parts": parts}, tokens)
    return xp.sum(parts, axis=0)


def _enqueue(batch: Batch, kernel: cuts.Kernel, constants: Any, blocks: int, shared: int, given: Arrays,
             tokens: int = 0) -> None:  # fmt: skip
    made, (_, T, heads) = batch.made, batch.sizes
    given = {"u": made["u"], **given}
    fields: Arrays = {n: NO_ROWS if made.get(n) is None else rows_of(made[n], heads) for n in ROWS}
    fields |= {n: address(given.get(n)) for n in POINTERS} | {"offsets": address(batch.offsets)}
    kept = given.get("marks")
    marks = 0 if kept is None else kept.shape[1]
    fields |= {"T": T, "heads": heads, "scale": batch.scale, "marks_of_sequence": marks, "tokens": tokens,
               "group_u": 1 if made["u"] is None else heads // made["u"].shape[0]}  # fmt: skip
    arrays = (*(made.get(n) for n in ROWS), *given.values(), batch.offsets)
    named = tuple(y for y in arrays if y is not None)
    launch.launch(kernel.file, kernel.entry, constants, blocks, kernel.threads, shared,
                  arguments.VECTOR_PORTABLE.packed(fields), named)
