"""The kernel of a few tokens on deferred arrays: launched when its results are needed, with the array calls around it.

Where a block can have all columns of a head, it computes the arrays that the kernel reads, and those that are made of
its results, so that one launch serves. What is too large for that, or is of several heads, has launches of its own.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ....runtime.arrays import Array, cast, dtype_name
from ....runtime.cuda.deferred import Deferred, Node
from ....runtime.cuda.deferred_namespace import Namespace
from ....runtime.cuda.elements import ELEMENTS
from ....runtime.cuda.fusion import materialise, store
from ....runtime.cuda.fusion_code import Heads, NotOwn
from ....runtime.cuda.head_calls import HeadCalls
from ...preprocess import cuts, part
from ...types import Decay, Erase, Inputs, Plan, ReadState
from ..operands import element_of
from ..token import launch as step
from ..token.plan import STEP

VECTORS = ("q", "k", "v", "r", "a", "b")  # of one dtype


def by_tokens(x: Inputs, plan: Plan, state: Any) -> tuple[Deferred, Any, Any]:
    """(out, final state, saved)."""
    if _has_sums(x, plan, state):
        return _with_sums(x, plan, state)
    if len(blocks := cuts(x)) > 1:
        return _in_blocks(x, plan, state, blocks)
    one = PendingStep(plan, x, state)
    xp = plan.xp
    xp.pending.append(one)
    if one.is_mine:
        xp.overwritten.append(state.real)
    return Deferred(xp, one.out), Deferred(xp, one.end), one.token


def _in_blocks(x: Inputs, plan: Plan, state: Any, blocks: list[slice]) -> tuple[Deferred, Any, Any]:
    """Keys wider than the kernel: a launch for each block of channels, which writes its rows of one state.

    Outputs are added in float32, in the order of the blocks.
    """
    xp, (*lead, _, H, V) = plan.xp, x.v.shape
    token = Token(*as_rows(xp, x, state), plan)
    is_same = state is not None and token.state is state
    end: Array | None = state.real if plan.overwrite and is_same else None
    is_mine = end is not None
    if end is None:
        end = xp.library.empty((*lead, H, x.k.shape[-1], V), dtype=np.float32)
    steps = [
        PendingStep(
            plan._replace(overwrite=is_mine),
            part(x, c),
            None if state is None else state[..., c, :],
            None if is_mine else end[..., c, :],
            np.float32,
        )
        for c in blocks
    ]
    xp.pending += steps
    if is_mine:
        xp.overwritten.append(state.node.value)
    rows = Node("concat", end.shape, end.dtype, [Deferred(xp, one.end) for one in steps], end.ndim - 2)
    outs = [Deferred(xp, one.out) for one in steps]
    return functools.reduce(functools.partial(xp.map, "add"), outs), Deferred(xp, rows, real=end), token


def _has_sums(x: Inputs, plan: Plan, state: Any) -> bool:
    """Whether the last column of the values, and of the state, is an array of its own: the sum of weights."""
    if plan.query_reads is not ReadState.UPDATED or x.erase is not Erase.NONE:
        return False
    if x.v.shape[-3] != 1 or x.q.shape[-2] > x.v.shape[-2] or any(y is not None for y in (x.gv, x.u, plan.pool_rows)):
        return False
    return _ends_with_sums(x.v if state is None else state)


def _ends_with_sums(y: Deferred) -> bool:
    joined = y.node.kind == "concat" and y.node.value == y.ndim - 1 and y.is_whole
    return joined and [part.shape[-1] for part in y.node.inputs] == [y.shape[-1] - 1, 1]


def _with_sums(x: Inputs, plan: Plan, state: Any) -> tuple[Deferred, Any, Any]:
    """The sums by array calls, so that rows of the state lie as the kernel reads them best.

    z_t = e^{g_t} z_{t-1} + w_t k_t        w_t the last column of v_t, scale <q_t, z_t> that of the output
    """
    xp, f32, H = plan.xp, np.float32, x.v.shape[-2]
    whole = Token(*as_rows(xp, x, state), plan)
    v, w, (S, z) = x.v[..., :-1], x.v[..., -1:], (None, None) if state is None else state.node.inputs
    out, end, _ = by_tokens(x._replace(v=v), plan, S)
    q, k = (xp.astype(xp.repeat(y, H // y.shape[-2], axis=-2) if y.shape[-2] < H else y, f32) for y in (x.q, x.k))
    last = k * xp.astype(w, f32)
    if z is not None:
        before = xp.astype(z, f32)[..., 0][..., None, :, :]
        last = last + (before if x.decay is Decay.NONE else xp.exp(xp.astype(x.g, f32)) * before)
    sums = xp.sum(q * last, axis=-1, keepdims=True) * plan.scale
    end = xp.concat([end, xp.astype(last[..., 0, :, :, None], end.dtype)], axis=-1)
    return xp.concat([xp.astype(out, f32), sums], axis=-1), end, whole


class Token(NamedTuple):
    """What a backward needs of a call: deferred arrays."""

    inputs: Inputs
    state: Deferred | None
    plan: Plan


class PendingStep:
    """A call of the kernel."""

    def __init__(self, plan: Plan, x: Inputs, state: Deferred | None, into: Array | None = None, wide: Any = None):
        """x, state: deferred. into: memory for the final state. wide: the dtype of the output, if not that of v."""
        self.xp, self.plan = plan.xp, plan._replace(xp=plan.xp.library)
        self.token = Token(*as_rows(plan.xp, x, state), plan)
        x, self.state, _ = self.token
        self.given = {name: y for name, y in x._asdict().items() if y is not None}
        q, k, v = self.given["q"], self.given["k"], self.given["v"]
        lead, (T, H, V) = v.shape[:-3], v.shape[-3:]
        more = [] if self.state is None or self.state.real is not None else [self.state]
        read = [*self.given.values(), *more]
        self.out = Node("pending", (*lead, T, max(H, q.shape[-2]), V), wide or v.dtype, read)
        self.is_mine = plan.overwrite and state is not None and state is self.state and state.real is not None
        shape, dtype = ((*lead, H, k.shape[-1], V), np.float32)
        if plan.overwrite and self.state is not None:
            shape, dtype = self.state.shape, self.state.dtype
        own = state.real if self.is_mine else None  # type: ignore[union-attr]
        self.end = Node("pending", shape, dtype, self.out.inputs, own)
        for node in (self.out, self.end, *(y.node for y in self.out.inputs)):
            node.work, node.fixed = 1, 0  # in memory when the kernel has been launched
        is_one = T == 1 and q.shape[-2] <= H and plan.pool_rows is None
        self.sizes = (prod(lead), H) if is_one and not any(s.row is not None for s in plan.sequences) else None
        self.calls: HeadCalls | None = None
        self._into, self._wide = into, wide

    def begin(self, stored: Any) -> None:
        """Allocate the results; what the kernel reads becomes its own array calls, or is computed."""
        library = self.xp.library
        start = None if self.state is None else materialise([self.state])[0]
        missing = list({id(y): y for y in self.given.values() if y.real is None}.values())
        made = {id(y): library.empty(y.shape, dtype=y.dtype) for y in missing}
        found = {name: made.get(id(y), y.real) for name, y in self.given.items()}
        x = Inputs(**dict.fromkeys(Inputs._fields) | found)
        self.call = step.prepared(x, self.plan, start, stored or self._wide, self._into)
        self.of_heads = None if self.sizes is None else step.of_heads(self.call, *self.sizes)
        into = [(y, made[id(y)]) for y in missing]
        store(missing)
        if self.of_heads is not None:
            self.calls = HeadCalls(Heads(self.sizes[0], self.sizes[1], {}))  # type: ignore[index]
            self.calls.owns([*(array for array, _ in self.xp.assigned), *self.xp.overwritten])
            try:
                self.calls.add_inputs(into)
            except NotOwn:
                self.calls = self.of_heads = None
        if self.calls is None and into:
            materialise([y for y, _ in into], [array for _, array in into])
        for y, array in into:
            y.hold(array)
        self.out.become(self.call.out)
        self.end.become(self.call.end)

    def finish(self, wanted: Any) -> bool:
        """Launch the kernel; whether what is wanted has been computed by it."""
        calls, done = self.calls, not wanted
        if calls is not None and wanted:
            calls.owns([self.call.out, self.call.end])
            try:
                calls.add_results(wanted)
                done = True
            except NotOwn:
                done = False
        if calls is None or not calls.outputs:
            step.launched(self.call)
        else:
            calls.launch_with(STEP, self.of_heads)
        return done


def as_rows(xp: Namespace, x: Inputs, state: Deferred | None) -> tuple[Inputs, Deferred | None]:
    """The arrays of a call as the kernels take them, deferred: vectors of one dtype, rows without gaps."""
    element, each = element_of(x), dict[str, Deferred]()
    for name, y in x._asdict().items():
        if y is not None:
            each[name] = each["k"] if y is x.k and name == "r" else _rows(xp, y, element if name in VECTORS else None)
    found = Inputs(**dict.fromkeys(Inputs._fields) | each)
    return found, None if state is None else _rows(xp, state, None)


def _rows(xp: Namespace, y: Deferred, element: str | None) -> Deferred:
    """y in a dtype, or in one that the kernels read, with contiguous rows."""
    if element is not None:
        y = cast(xp, y, y.dtype if dtype_name(y) == element else xp.float32)
    elif dtype_name(y) not in ELEMENTS:
        y = cast(xp, y, xp.float32)
    if y.real is not None and y.shape[-1] > 1 and y.real.strides[-1] != y.dtype.itemsize:
        return xp.copy(y)
    return y
