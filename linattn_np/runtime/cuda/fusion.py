"""Deferred arrays (deferred.py) as one CUDA kernel: its source, and the launch.

Each array wanted has its elements computed from those of the arrays in memory that they depend on; nothing else is
stored. A warp computes a row, the sums of a row with a fixed order of its lanes. The bits of an element depend on the
functions and on its own operands, not on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from ..arrays import dtype_name
from . import constants, launch, record
from .deferred import Deferred, Node, Pending, given
from .deferred_namespace import Namespace
from .fusion_code import SHORT, Block, Heads, Index, NotOwn, NotUniform, Writer
from .head_calls import MOST_ALONE, HeadCalls, Wanted, arrays_read, copies, declared, file_of, store_line, through

Array = Any
WARPS = 4  # of a block
LEAST_ROW = 16  # elements of a row that is worth a warp


def _rows(n: int, x: Deferred, first: int, arrays: list[Node], to: Array | None) -> tuple[list[str], int]:
    """(the code of one output, its warps); first: the warps before it. to: where it is written, if that is given."""
    for how in ("lanes" if x.shape and x.shape[-1] >= LEAST_ROW else "flat", "single"):
        writer = Writer(arrays)
        try:
            lines, warps = _output(writer, n, (x, to), first, how)
        except NotUniform:
            continue
        arrays[:] = writer.arrays
        return lines, warps
    raise AssertionError("a row of one element is uniform")


def _output(writer: Writer, n: int, what: tuple[Deferred, Array], first: int, how: str) -> tuple[list[str], int]:
    """how: a warp computes a row, 32 elements one each, or one element."""
    x, root = what[0], writer.root
    size = x.size
    last = x.shape[-1] if how == "lanes" else 32 if how == "flat" else 1
    warps, inner = -(-size // last), root
    row = writer.variable(root, warps, f"warp - {first}u")
    if how == "single":
        at = row
    else:
        inner = Block(root, lanes=True, of_output=True)
        d = writer.variable(inner, last)
        at = Index().plus(row, last).plus(d)
    if how == "flat" and size < warps * last:
        coords = writer.digits(writer.variable(inner, size, f"min({at}, {size - 1}u)"), x.shape)
    else:
        coords = writer.digits(at, x.shape)
    line = store_line(writer, n, what, at, coords)
    if how == "single":
        root.lines.append(f"if (lane == 0) {line}")
    else:
        guard = f"if ({at} < {size}u) " if how == "flat" and size < warps * last else ""
        body = [*inner.lines, guard + line]
        root.lines += [f"for (u32 {d} = lane; {d} < {last}u; {d} += LA_WIDTH) {{", *(f"    {y}" for y in body), "}"]
    return root.lines, warps


def source(wanted: Wanted) -> tuple[str, int, list[Node]]:
    """(the source, its warps, the nodes whose arrays it reads); wanted: as for `materialise`."""
    arrays: list[Node] = []
    body, warps = [], 0
    for n, (x, to) in enumerate(wanted):
        lines, own = _rows(n, x, warps, arrays, to)
        condition = f"if (warp < {warps + own}u) {{"
        body += [condition, *(f"    {line}" for line in lines), "    return;", "}"]
        warps += own
    text = "\n".join([
        "// Array calls: each output's elements from the inputs'.", *declared(len(arrays), len(wanted)),
        "#ifndef LA_HOST",
        f'extern "C" __global__ void __launch_bounds__({32 * WARPS}) '
        "array_calls(const __grid_constant__ ArrayCallsArguments a) {",
        f"    const u32 lane = threadIdx.x % 32, warp = blockIdx.x * {WARPS}u + threadIdx.x / 32;", "#else",
        'extern "C" void array_calls(const ArrayCallsArguments& a, u32 warp) {', "    const u32 lane = 0;", "#endif",
        *(f"    {line}" for line in body), "}", "",
    ])  # fmt: skip
    return text, warps, arrays


def materialise(wanted: Sequence[Deferred], into: Sequence[Array | None] = ()) -> list[Array]:
    """The arrays wanted; those that are not in memory by the kernel that they wait for, or by one launch.

    into: of each, the array that the elements are written to, or None for a new one.
    """
    into = [*into] or [None] * len(wanted)
    last = settle(wanted)
    missing = [(x, to) for x, to in zip(wanted, into, strict=True) if x.real is None or to is not None]
    missing = list({id(x): (x, to) for x, to in missing}.values())
    calls = None
    if stages := _stages([x for x, _ in missing]):
        if last is not None:
            last.finish([])
        last, calls = None, compute_stages(stages)
        missing = [(x, to) for x, to in missing if x.real is None or to is not None]
    new = [(x, x.xp.library.empty(x.shape, dtype=x.dtype) if to is None else to) for x, to in missing]
    if calls is not None:
        _add(calls, new, is_stage=False).launch()
    elif (last is None or not last.finish(new)) and new:
        _launch(new)
    computed: dict[int, Array] = {}
    for (x, to), (_, y) in zip(missing, new, strict=True):
        computed[id(x)] = y
        if to is None:
            x.hold(y)
    return [computed.get(id(x), x.real) for x in wanted]


def _stages(values: Sequence[Deferred]) -> list[list[Deferred]]:
    """The nodes that are computed before these arrays: each list needs those before it."""
    found, depths = list[list[Deferred]](), dict[Node, int]()

    def depth(x: Deferred) -> int:
        """How many launches are needed before an array can be read."""
        node = x.node
        if node not in depths:
            below = max((depth(y) for y in node.inputs), default=0) if node.kind not in ("array", "pending") else 0
            if node.stored and node.kind != "array":
                if below == len(found):
                    found.append([])
                found[below].append(Deferred(x.xp, node))
                below += 1
            depths[node] = below
        return depths[node]

    for x in values:
        depth(x)
    return found


def compute_stages(stages: list[list[Deferred]]) -> HeadCalls | None:
    """Compute arrays, each list by a launch; or by blocks of a head each, whose last stages are yet to be launched."""
    heads = stages[0][0].xp.heads
    calls = None if heads is None else HeadCalls(Heads(heads[0], heads[1], {}), MOST_ALONE)
    for wanted in stages:
        new = [(x, x.xp.library.empty(x.shape, dtype=x.dtype)) for x in wanted]
        if calls is None:
            _launch(new)
        else:
            calls = _add(calls, new)
        for x, y in new:
            x.hold(y)
    return calls


def _add(calls: HeadCalls, wanted: Wanted, is_stage: bool = True) -> HeadCalls:
    """Compute arrays by the blocks of heads, or by a launch after them; the calls that later arrays are added to."""
    try:
        (calls.add_stage if is_stage else calls.add_results)(wanted)
    except NotOwn:
        calls.launch()
        _launch(wanted)
        return HeadCalls(Heads(calls.heads.N, calls.heads.H, {}), MOST_ALONE)
    return calls


def store(values: Sequence[Deferred]) -> None:
    """Compute what must be in memory before these arrays are."""
    if (stages := _stages(values)) and (calls := compute_stages(stages)) is not None:
        calls.launch()


def _launch(wanted: Wanted) -> None:
    """Compute arrays by one launch, or by two if one is read that is overwritten: another warp may read it."""
    moved = through(wanted, {id(y) for y in arrays_read([x for x, _ in wanted])})
    text, warps, nodes = source(moved)
    arrays = [*(node.value for node in nodes), *(y for _, y in moved)]
    packed = np.array([y.data.ptr for y in arrays], np.uint64).tobytes()
    launch.launch(file_of(text), "array_calls", (), -(-warps // WARPS), 32 * WARPS, 0, packed, tuple(arrays))
    if later := copies(wanted, moved):
        _launch(later)


def settle(wanted: Sequence[Deferred]) -> Pending | None:
    """Launch pending kernels that the arrays depend on, in order; the last one is returned, for `finish`.

    An output that is only rounded is rounded by them.
    """
    if not wanted or not (xp := wanted[0].xp).pending:
        return None
    readers, last = _readers(wanted), None
    for one in [p for p in xp.pending if p.out in readers or p.end in readers]:
        xp.pending.remove(one)
        if last is not None:
            last.finish([])
        last, casts = one, readers.get(one.out) or [None]
        dtypes = {None if y is None or y.value != "cast" or y.shape != one.out.shape else y.dtype for y in casts}
        narrow = dtypes.pop() if len(dtypes) == 1 else None
        if narrow is None or dtype_name(np.empty(0, narrow)) not in SHORT:
            one.begin(None)
            continue
        one.begin(narrow)
        for y in casts:
            if y is not None:
                y.become(one.out.value)
        rounded = given(xp, one.out.value)
        one.out.kind, one.out.value, one.out.inputs = "map", "cast", (rounded,)
    for x in wanted:
        if x.real is None and x.node.kind == "array" and x.size == x.node.memory.size and x.view.flags.c_contiguous:
            x.real = x.node.value.reshape(x.shape)
    return last


def _readers(wanted: Sequence[Deferred]) -> dict[Node, list[Node | None]]:
    """For each node that arrays depend on the nodes that read it; None is a reader of views, and of arrays wanted."""
    found: dict[Node, list[Node | None]] = {}
    pending: list[tuple[Deferred, Node | None]] = [(x, None) for x in wanted]
    while pending:
        x, reader = pending.pop()
        known = x.node in found
        found.setdefault(x.node, []).append(reader if x.is_whole else None)
        if not known:
            pending += [(y, x.node) for y in x.node.inputs]
    return found


def constant(xp: Namespace, key: Hashable, where: Any, make: Callable[[], Deferred]) -> Deferred:
    """make(), computed once per device (constants.py)."""

    def computed() -> Array:
        with record.Recorder():  # no launch of the calls that use it
            return materialise([make()])[0]

    return given(xp, constants.once(xp.library, ("deferred", key), where, computed))
