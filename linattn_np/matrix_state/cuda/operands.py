"""Arrays of a call in the layout of the chunk kernels: sizes, token rows, states, sums over shared heads."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np

from ...core import StatesAt
from ...ops.sums import sum_of_groups, sum_to
from ...runtime.arrays import Array, cast, dtype_name
from ...runtime.constants import constant_array
from ...runtime.cuda import launch
from ...runtime.cuda.elements import BYTES, ELEMENTS
from ...runtime.recorder import refuse
from ...runtime.shapes import prefixes
from .. import policy
from ..types import Inputs, Plan
from . import arguments
from .arguments import Positions, States

HEAD_SUMS = "scan/head_sums.cu"


@dataclass(slots=True)
class Sizes:
    """Sizes of a call."""

    lead: tuple[int, ...]
    T: int
    heads: int  # of the outputs
    H: int  # of the values and the state
    K: int
    V: int
    N: int  # sequences
    offsets: Array | None  # of a ragged batch, on the device
    longest: int  # tokens of the longest sequence

    @property
    def tokens(self) -> int:
        return prod(self.lead) * self.T

    @property
    def group(self) -> int:
        """Heads of the outputs that share a state."""
        return self.heads // self.H


@dataclass(slots=True)
class ChunkSizes(Sizes):
    """Sizes, and the partition of sequences into chunks and segments."""

    chunks_longest: int  # chunks of the longest sequence
    slots: int  # chunks of a head, over the whole batch
    segments: int
    chunks: int  # of a segment


def sizes_of(x: Inputs, plan: Plan) -> tuple[tuple[int, ...], int, int, int, int, int, int, Array | None, int]:
    """The fields of Sizes."""
    xp, sequences, lead, (T, H, V) = plan.xp, plan.sequences, tuple(x.v.shape[:-3]), x.v.shape[-3:]
    ragged = sequences[0].row is not None
    N = len(sequences) if ragged else prod(lead)
    offsets = xp.asarray([0, *(s.stop for s in sequences)], dtype=xp.int64) if ragged else None
    longest = max(s.stop - s.start for s in sequences)
    return lead, T, max(x.q.shape[-2], H), H, x.k.shape[-1], V, N, offsets, longest


def unsupported_reason(x: Inputs) -> str | None:
    """Why no chunk kernel supports these arrays on the current device; None if one may."""
    if 0 in (*x.v.shape, *x.k.shape, *x.q.shape):
        return "there is nothing to compute"
    if x.k.shape[-2] > x.v.shape[-2]:
        return "there are more key heads than value heads"
    if x.v.device.id != launch.current_device():
        return f"the arrays are on device {x.v.device.id}, the current one is {launch.current_device()}"
    return launch.unusable()


def common_element(*arrays: Array) -> str:
    """The element type of the computation: bfloat16 or float16 if all arrays are, else float32."""
    names = {dtype_name(y) for y in arrays}
    return names.pop() if len(names) == 1 and names <= set(ELEMENTS) else "float32"


def as_rows(xp: Any, *arrays: Array) -> list[Array]:
    """Arrays (B, T, heads, width) in the element type of the computation, with contiguous rows."""
    dtype = xp.float32 if common_element(*arrays) == "float32" else arrays[0].dtype
    arrays = tuple(cast(xp, y, dtype) for y in arrays)
    fine = [y.shape[-1] == 1 or y.strides[-1] == y.itemsize for y in arrays]
    arrays = tuple(y if ok else xp.ascontiguousarray(y) for y, ok in zip(arrays, fine, strict=True))
    return [y if y.ndim == 4 else y.reshape(prod(y.shape[:-3]), *y.shape[-3:]) for y in arrays]


def alignment(arrays: tuple[Array, ...], K: int, V: int) -> int:
    """The largest of 16, 8, 4, 2 bytes that divides the address and the length of every row of inputs and outputs."""
    size = arrays[0].itemsize
    common = gcd(16, K * size, V * size)
    for y in arrays:
        common = gcd(common, y.data.ptr, *(s for s, n in zip(y.strides[:-1], y.shape[:-1], strict=True) if n > 1))
    return common


def states_at(array: Array | None, batch: Sizes, group: int = 1) -> States:
    """Layout of contiguous states (N, H, K, V), each shared by `group` heads."""
    return States(array, batch.K * batch.V, 1, batch.V, group=group)


def gives_states(plan: Plan) -> bool:
    """Whether the positions of a call are at the ends of chunks of GROUP_CHUNK tokens."""
    return ends_chunks(plan, policy.GROUP_CHUNK)


def states_handled(plan: Plan) -> frozenset[str]:
    """The preprocessing step of states at positions, if kernels of such chunks include it."""
    return frozenset({"states_at"} if gives_states(plan) else ())


def neighbours_handled(plan: Plan) -> frozenset[str]:
    """Ranks before and after the tokens, if there are no sequences of several lengths and no positions."""
    return frozenset(() if plan.is_ragged or plan.states_at is not None else {"neighbours"})


def ends_chunks(plan: Plan, length: int) -> bool:
    """Whether the positions are so many tokens, or a multiple of them, into their sequences, or at an end of one."""
    own = zip(prefixes(plan.sequences, plan.states_at or ()), plan.states_at or (), strict=True)
    ends = {s.stop for s in plan.sequences}
    return all(p in ends or (p - prefix.start) % length == 0 for prefix, p in own)


def build_at(plan: Plan) -> int:
    """The constant LA_AT of the kernels of a call: 0 without positions, 1, or 2 of a ragged batch."""
    return 0 if plan.states_at is None else 1 + plan.is_ragged


def with_positions(xp: Any, states: States, at: Array | None, plan: Plan, batch: Sizes, inside: int = 0) -> States:
    """`states` that a pass begins or ends with, with those at the positions that it goes by.

    inside: with those positions alone that lie inside a block of so many tokens.
    """
    positions = plan.states_at or ()
    if at is None or (inside and ends_chunks(plan, inside)):
        return states

    def table() -> Array:
        found, C, ends = np.full(batch.T, -1, np.int32), policy.GROUP_CHUNK, {s.stop for s in plan.sequences}
        for n, (_, start, stop) in enumerate(prefixes(plan.sequences, positions)):
            if not inside or ((stop - start) % inside and stop not in ends):
                found[start + (stop - start - 1) // C * C] = n
        return xp.asarray(found if plan.is_ragged else found[::C].copy())

    chunks = constant_array(xp, ("positions", plan.sequences, positions, inside), at.device, table)
    like = states_at(at, batch, batch.group)
    return states._replace(positions=Positions(like, chunks, len(positions), build_at(plan)))


def empty_positions(xp: Any, plan: Plan, batch: Sizes) -> Array | None:
    """An array (N, n, H, K, V) for the states at the positions of a call; a ragged batch is one row: (n, H, K, V)."""
    if plan.states_at is None:
        return None
    lead = () if batch.offsets is not None else (batch.N,)
    return xp.empty((*lead, len(plan.states_at), batch.H, batch.K, batch.V), dtype=xp.float32)


def public_ends(end: Array, at: Array | None, batch: Sizes) -> Any:
    """The caller's final state, or StatesAt."""
    if at is None:
        return public_state(end, batch)
    if batch.offsets is None and len(batch.lead) != 1:
        at = at.reshape(*batch.lead, *at.shape[1:])
    return StatesAt(public_state(end, batch), at)


def split_gradients(xp: Any, dstate: Any, batch: Sizes) -> tuple[Array | None, Array | None]:
    """(gradient of the final state, contiguous float32 ones of those at positions); None if not given."""
    if not isinstance(dstate, StatesAt):
        return dstate, None
    if dstate.at is None:
        return dstate.end, None
    return dstate.end, xp.ascontiguousarray(cast(xp, dstate.at, xp.float32))


def as_state(xp: Any, state: Array | None, batch: Sizes) -> Array | None:
    """A public state as contiguous float32 (N, H, K, V)."""
    if state is None:
        return None
    return xp.ascontiguousarray(cast(xp, state, xp.float32)).reshape(batch.N, batch.H, batch.K, batch.V)


def one_head_each(xp: Any, state: Array | None, batch: Sizes) -> Array | None:
    """(N, H, K, V) as (N, heads, K, V): the first head of each group has the state, the others zeros."""
    if state is None or batch.group == 1:
        return state
    wide = xp.zeros((batch.N, batch.H, batch.group, batch.K, batch.V), dtype=state.dtype)
    wide[:, :, 0, :, :] = state
    refuse("an array call writes states of groups")
    return xp.reshape(wide, (batch.N, batch.heads, batch.K, batch.V))


def public_state(state: Array, batch: Sizes) -> Array:
    """(N, H, K, V) as the caller's (..., H, K, V); a ragged batch keeps N."""
    return state if batch.offsets is not None or len(batch.lead) == 1 else state.reshape(*batch.lead, *state.shape[1:])


def public_state_gradient(xp: Any, dstate: Array, batch: Sizes) -> Array:
    """(N, heads, K, V) summed over the heads that share a state, as the caller's."""
    if batch.group > 1:
        each = (batch.N, batch.H, batch.group, batch.K, batch.V)
        dstate = sum_to(xp, xp.reshape(dstate, each), (batch.N, batch.H, 1, batch.K, batch.V))
        dstate = xp.reshape(dstate, (batch.N, batch.H, batch.K, batch.V))
    return public_state(dstate, batch)


def sum_shared_heads(xp: Any, d: Array, shape: tuple[int, ...]) -> Array:
    """Gradients (..., heads, D) summed over the heads that share one of `shape`'s."""
    if d.shape[-2] == shape[-2]:
        return d
    if dtype_name(d) == "bfloat16" and d.shape[-1] % 8 == 0:
        return head_sums(xp, d, shape)
    return sum_of_groups(xp, cast(xp, d, xp.float32), shape[-2])


def head_sums(xp: Any, d: Array, shape: tuple[int, ...]) -> Array:
    """The same for a contiguous bfloat16 array whose width is a multiple of 8, in its dtype."""
    group = d.shape[-2] // shape[-2]
    if group > 1:
        x, d = d, xp.empty(shape, dtype=d.dtype)
        packed = arguments.HEAD_SUMS.pack(
            x=x.data.ptr, y=d.data.ptr, pieces=d.nbytes // 16, group=group, row=d.shape[-1] // 8
        )
        launch.launch(HEAD_SUMS, "head_sums", (), -(-d.nbytes // 16 // 256), 256, 0, packed, (x, d))
    return d.reshape(shape)


def element_of(x: Inputs) -> str:
    """The element type of the vectors: bfloat16 or float16 if all arrays are, else float32."""
    names = {dtype_name(y) for y in (x.q, x.k, x.v, x.r, x.a, x.b) if y is not None}
    return names.pop() if len(names) == 1 and names <= set(ELEMENTS) else "float32"


def shaped(xp: Any, d: Array, like: Array) -> Array:
    """A gradient of the heads of the values, in the shape of its input."""
    if d.shape[-2] != like.shape[-2]:
        d = sum_of_groups(xp, cast(xp, d, xp.float32), like.shape[-2])
    return sum_to(xp, d, like.shape)


def dense_rows(xp: Any, y: Array) -> Array:
    """(B, T, heads, width) with contiguous rows."""
    y = y if y.ndim == 4 else y.reshape(prod(y.shape[:-3]), *y.shape[-3:])
    return y if y.shape[-1] == 1 or y.strides[-1] == y.itemsize else xp.ascontiguousarray(y)


def is_wide(y: Array) -> bool:
    """Whether every row begins at a multiple of four elements."""
    four = 4 * BYTES[dtype_name(y)]
    strides = (s for s, n in zip(y.strides[:-1], y.shape[:-1], strict=True) if n > 1)
    return y.data.ptr % four == 0 and all(s % four == 0 for s in strides)
