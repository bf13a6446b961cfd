"""Deferred arrays (deferred.py) as one CUDA kernel: its source, and the launch.

Each array wanted has its elements computed from those of the arrays in memory that they depend on; nothing else is
stored. A warp computes a row, the sums of a row with a fixed order of its lanes. The bits of an element depend on the
functions and on its own operands, not on how many rows there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any

import numpy as np

from ..arrays import dtype_name
from . import constants, launch, record, sources
from .deferred import Deferred, Node, Pending, given
from .deferred_namespace import Namespace
from .fusion_code import NAMES, SHORT, Block, Heads, Index, NotOwn, NotUniform, Writer

Array = Any
Wanted = Sequence[tuple[Deferred, Any]]  # (array, where it is written, or None for a new one)
WARPS = 4  # of a block
LEAST_ROW = 16  # elements of a row that is worth a warp
MOST_OF_HEAD = 1 << 14  # elements of an array that the block of one head computes
HEAD = "const ArrayCallsArguments& a, const u32 n, const u32 head, const u32 warp, const u32 lane"


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
    line = _store(writer, n, what, at, coords)
    if how == "single":
        root.lines.append(f"if (lane == 0) {line}")
    else:
        guard = f"if ({at} < {size}u) " if how == "flat" and size < warps * last else ""
        body = [*inner.lines, guard + line]
        root.lines += [f"for (u32 {d} = lane; {d} < {last}u; {d} += LA_WIDTH) {{", *(f"    {y}" for y in body), "}"]
    return root.lines, warps


def _store(writer: Writer, n: int, what: tuple[Deferred, Array], at: Index, coords: Sequence[Index]) -> str:
    """The line that stores an element; at: its place in a dense array."""
    x, to = what
    value, kind, place = writer.read(x, coords), dtype_name(x), at
    store = f"store_{SHORT[kind]}" if kind in SHORT else f"store_as<{NAMES[kind]}>"
    if to is not None and not to.flags.c_contiguous:
        place = Index()
        for c, stride in zip(coords, to.strides, strict=True):
            place = place.plus(c, stride // x.dtype.itemsize)
    return f"{store}(a.out{n}, {place}, {value});"


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
        "// Array calls: each output's elements from the inputs'.", *_declared(len(arrays), len(wanted)),
        "#ifndef LA_HOST",
        f'extern "C" __global__ void __launch_bounds__({32 * WARPS}) '
        "array_calls(const __grid_constant__ ArrayCallsArguments a) {",
        f"    const u32 lane = threadIdx.x % 32, warp = blockIdx.x * {WARPS}u + threadIdx.x / 32;", "#else",
        'extern "C" void array_calls(const ArrayCallsArguments& a, u32 warp) {', "    const u32 lane = 0;", "#endif",
        *(f"    {line}" for line in body), "}", "",
    ])  # fmt: skip
    return text, warps, arrays


def _declared(inputs: int, outputs: int) -> list[str]:
    """The struct of pointers."""
    fields = [*(f"const void* in{n};" for n in range(inputs)), *(f"void* out{n};" for n in range(outputs))]
    return ['#include "step/array_calls.cuh"', f"struct ArrayCallsArguments {{ {' '.join(fields)} }};"]


class HeadCalls:
    """Array calls of the head that a block of another kernel has, before and after its own work."""

    def __init__(self, heads: Heads):
        self.heads, self.nodes = heads, list[Node]()
        self.outputs, self.before, self.after = list[Array](), list[str](), list[str]()

    def add_inputs(self, wanted: Wanted) -> None:
        """What the kernel reads: (array (..., heads, width), where it is written)."""
        self.before += self._lines(wanted, True)
        self.outputs += [to for _, to in wanted]

    def add_results(self, wanted: Wanted) -> None:
        """What is made of its results; every one written somewhere. An array that is read is overwritten last."""
        read = {id(y) for y in arrays_read([x for x, _ in wanted])}
        lines = self._lines([(x, None if id(to) in read else to) for x, to in wanted], False)
        through = _through(wanted, read)
        self.outputs += [y for _, y in through]
        if copies := _copies(wanted, through):
            lines += ["LA_SYNC();", *self._lines(copies, False)]
            self.outputs += [to for _, to in copies]
        self.after += lines

    def _lines(self, wanted: Wanted, is_input: bool) -> list[str]:
        nodes, lines = list(self.nodes), list[str]()
        for n, what in enumerate(wanted):
            lines += self._output(len(self.outputs) + n, what, nodes, is_input)
        self.nodes = nodes
        return lines

    def _output(self, n: int, what: tuple[Deferred, Array], nodes: list[Node], is_input: bool) -> list[str]:
        """The code of the rows of one array; n: its number."""
        for last in (what[0].shape[-1] if what[0].shape else 1, 1):
            writer = Writer(nodes, self.heads)
            first, size = _part_of_inputs(writer, what[0]) if is_input else _part_of_results(writer, what[0])
            last = last if size % last == 0 else 1
            try:
                body = _head_rows(writer, n, what, first, (size // last, last))
            except NotUniform:
                continue
            nodes[:] = writer.arrays
            begin = f"for (u32 m = warp; m < {size // last}u; m += LA_WARPS) {{"
            return [f"if (warp == {n} % LA_WARPS) {{" if size == last else begin, *(f"    {x}" for x in body), "}"]
        raise AssertionError("a row of one element is uniform")

    def source(self, kernel: str) -> str:
        """The source of a kernel with these calls."""
        return "\n".join([
            "// Array calls of a head before and after the work of a block.",
            *_declared(len(self.nodes), len(self.outputs)),
            f"LA_DEVICE void calls_before({HEAD}) {{", *(f"    {x}" for x in self.before), "}",
            f"LA_DEVICE void calls_after({HEAD}) {{", *(f"    {x}" for x in self.after), "}",
            "#ifndef LA_HOST", "#define LA_CALLS", f'#include "{kernel}"', "#else",
            'extern "C" void before(const ArrayCallsArguments& a, u32 n, u32 head) { calls_before(a, n, head, 0, 0); }',
            'extern "C" void after(const ArrayCallsArguments& a, u32 n, u32 head) { calls_after(a, n, head, 0, 0); }',
            "#endif", "",
        ])  # fmt: skip

    def launch(self, kernel: str, call: Any) -> None:
        """Launch the kernel of a call (matrix_state/cuda/step.py) with the array calls."""
        arrays = [*(node.value for node in self.nodes), *self.outputs]
        packed = call.packed + np.array([y.data.ptr for y in arrays], np.uint64).tobytes()
        file = _file(self.source(kernel), "step_calls")
        launch.launch(file, "step", call.constants, call.blocks, call.threads, 0, packed, (*call.arrays, *arrays))


def _part_of_inputs(writer: Writer, x: Deferred) -> tuple[Index, int]:
    """(the first element of the rows of a head, how many): x (..., 1, heads, width), of one head for several or all."""
    N, H = writer.heads.N, writer.heads.H  # type: ignore[union-attr]
    lead, heads, width = prod(x.shape[:-3]), x.shape[-2], x.shape[-1]
    if (x.ndim > 2 and x.shape[-3] != 1) or lead not in (1, N) or H % heads or width > MOST_OF_HEAD:
        raise NotOwn
    head = Index(0, {"head": 1}) if heads == H > 1 else writer.variable(writer.root, heads, f"head / {H // heads}u")
    return Index().plus(head, width).plus(Index(0, {"n": 1 if lead == N > 1 else 0}), heads * width), width


def _part_of_results(writer: Writer, x: Deferred) -> tuple[Index, int]:
    """The same of x (sequences, heads, ...), without axes of one element."""
    N, H = writer.heads.N, writer.heads.H  # type: ignore[union-attr]
    sizes, first = [n for n in x.shape if n > 1], [n for n in (N, H) if n > 1]
    size = x.size // (N * H)
    if sizes[: len(first)] != first or size > MOST_OF_HEAD:
        raise NotOwn
    terms = {"n": H * size if N > 1 else 0, "head": size if H > 1 else 0}
    return Index(0, terms), size


def _head_rows(
    writer: Writer, n: int, what: tuple[Deferred, Array], first: Index, sizes: tuple[int, int]
) -> list[str]:
    """The code of a row m of a head, or of an element; sizes: rows, and elements of one."""
    count, last = sizes
    rows = Block(writer.root)
    if count > 1:
        writer.where["m"], writer.sizes["m"] = rows, count
        first = first.plus(Index(0, {"m": 1}), last)
    inner = Block(rows, lanes=True, of_output=True) if last > 1 else rows
    d = writer.variable(inner, last)
    at = first.plus(d)
    line = _store(writer, n, what, at, writer.digits(at, what[0].shape))
    if last == 1:
        return [*writer.root.lines, *rows.lines, f"if (lane == 0) {line}"]
    body = [f"    {x}" for x in (*inner.lines, line)]
    each = [f"for (u32 {d} = lane; {d} < {last}u; {d} += LA_WIDTH) {{", *body, "}"]
    return [*writer.root.lines, *rows.lines, *each]


def materialise(wanted: Sequence[Deferred], into: Sequence[Array | None] = ()) -> list[Array]:
    """The arrays wanted; those that are not in memory by the kernel that they wait for, or by one launch.

    into: of each, the array that the elements are written to, or None for a new one.
    """
    into = [*into] or [None] * len(wanted)
    last = settle(wanted)
    missing = [(x, to) for x, to in zip(wanted, into, strict=True) if x.real is None or to is not None]
    missing = list({id(x): (x, to) for x, to in missing}.values())
    if stages := _stages([x for x, _ in missing]):
        if last is not None:
            last.finish([])
        compute_stages(stages)
        return materialise(wanted, into)
    new = [(x, x.xp.library.empty(x.shape, dtype=x.dtype) if to is None else to) for x, to in missing]
    if (last is None or not last.finish(new)) and new:
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


def compute_stages(stages: list[list[Deferred]]) -> None:
    """Compute arrays, a launch for each list."""
    for wanted in stages:
        new = [(x, x.xp.library.empty(x.shape, dtype=x.dtype)) for x in wanted]
        _launch(new)
        for x, y in new:
            x.hold(y)


def store(values: Sequence[Deferred]) -> None:
    """Compute what must be in memory before these arrays are."""
    compute_stages(_stages(values))


def _launch(wanted: Wanted) -> None:
    """Compute arrays by one launch, or by two if one is read that is overwritten: another warp may read it."""
    through = _through(wanted, {id(y) for y in arrays_read([x for x, _ in wanted])})
    text, warps, nodes = source(through)
    arrays = [*(node.value for node in nodes), *(y for _, y in through)]
    packed = np.array([y.data.ptr for y in arrays], np.uint64).tobytes()
    launch.launch(_file(text), "array_calls", (), -(-warps // WARPS), 32 * WARPS, 0, packed, tuple(arrays))
    if later := _copies(wanted, through):
        _launch(later)


def _through(wanted: Wanted, read: set[int]) -> Wanted:
    """(array, where it is computed): new memory for those that replace an array that is read, by id."""
    return [(x, x.xp.library.empty(x.shape, dtype=x.dtype) if id(to) in read else to) for x, to in wanted]


def _copies(wanted: Wanted, through: Wanted) -> Wanted:
    """(what was computed elsewhere, where it belongs)."""
    return [(given(x.xp, y), to) for (x, to), (_, y) in zip(wanted, through, strict=True) if y is not to]


def arrays_read(values: Sequence[Deferred]) -> list[Array]:
    """The arrays in memory that deferred arrays depend on."""
    found, pending, seen = list[Array](), [x.node for x in values], set[int]()
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.kind == "array":
            found.append(node.value)
        pending += [x.node for x in node.inputs]
    return found


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


def _file(text: str, folder: str = "array_calls") -> str:
    """The name under which the compiler finds a source."""
    name = f"{folder}/{hashlib.sha256(text.encode()).hexdigest()[:32]}.cu"
    sources.register(name, text)
    return name


def constant(xp: Namespace, key: Hashable, where: Any, make: Callable[[], Deferred]) -> Deferred:
    """make(), computed once per device (constants.py)."""

    def computed() -> Array:
        with record.Recorder():  # no launch of the calls that use it
            return materialise([make()])[0]

    return given(xp, constants.once(xp.library, ("deferred", key), where, computed))
