"""Array calls of one head by one block of a kernel: around its own work, or by themselves, one after the other.

A block reads what it has written itself; what another block writes raises NotOwn, and is left to a launch of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ..arrays import dtype_name
from . import launch, sources
from .deferred import Deferred, Node, given
from .deferred_namespace import FEW
from .fusion_code import NAMES, SHORT, Block, Heads, Index, NotOwn, NotUniform, Writer

Array = Any
Wanted = Sequence[tuple[Deferred, Any]]  # (array, where it is written, or None for a new one)
MOST_OF_HEAD = 1 << 14  # elements of an array that the block of one head computes
MOST_ALONE = 1 << 15  # of array calls by themselves
WARPS = 16  # of a block of these
WIDTH = 32  # elements of a part of a row
HEAD = "const ArrayCallsArguments& a, const u32 n, const u32 head, const u32 warp, const u32 lane"


def store_line(writer: Writer, n: int, what: tuple[Deferred, Array], at: Index, coords: Sequence[Index]) -> str:
    """The line that stores an element; at: its place in a dense array."""
    x, to = what
    value, kind, place = writer.read(x, coords), dtype_name(x), at
    store = f"store_{SHORT[kind]}" if kind in SHORT else f"store_as<{NAMES[kind]}>"
    if to is not None and not to.flags.c_contiguous:
        place = Index()
        for c, stride in zip(coords, to.strides, strict=True):
            place = place.plus(c, stride // x.dtype.itemsize)
    return f"{store}(a.out{n}, {place}, {value});"


def declared(inputs: int, outputs: int) -> list[str]:
    """The struct of pointers."""
    fields = [*(f"const void* in{n};" for n in range(inputs)), *(f"void* out{n};" for n in range(outputs))]
    return ['#include "token/array_calls.cuh"', f"struct ArrayCallsArguments {{ {' '.join(fields)} }};"]


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


def through(wanted: Wanted, read: set[int]) -> Wanted:
    """(array, where it is computed): new memory for those that replace an array that is read, by id."""
    return [(x, x.xp.library.empty(x.shape, dtype=x.dtype) if id(to) in read else to) for x, to in wanted]


def copies(wanted: Wanted, through: Wanted) -> Wanted:
    """(what was computed elsewhere, where it belongs)."""
    return [(given(x.xp, y), to) for (x, to), (_, y) in zip(wanted, through, strict=True) if y is not to]


def file_of(text: str, folder: str = "array_calls") -> str:
    """The name under which the compiler finds a source."""
    name = f"{folder}/{hashlib.sha256(text.encode()).hexdigest()[:32]}.cu"
    sources.register(name, text)
    return name


class HeadCalls:
    """Array calls of the head that a block has: before and after the work of another kernel, or by themselves.

    most: elements of an array of a head that a block computes.
    """

    def __init__(self, heads: Heads, most: int = MOST_OF_HEAD):
        self.heads, self.nodes, self.most = heads, list[Node](), most
        self.outputs, self.before, self.after = list[Array](), list[str](), list[str]()
        self._rows = 0  # rows that the warps have got, in turn

    def owns(self, arrays: Sequence[Array]) -> None:
        """Arrays that each block writes its part of."""
        N, H, _ = self.heads
        for y in arrays:
            steps = [stride // y.dtype.itemsize for n, stride in zip(y.shape, y.strides, strict=True) if n > 1]
            first = iter(steps)
            at = [next(first, 0) if n > 1 else 0 for n in (N, H)]
            self.heads.own[id(y)] = at[0], at[1]

    def add_inputs(self, wanted: Wanted) -> None:
        """What the kernel reads: (array (..., heads, width), where it is written)."""
        self.before += self._lines(wanted, True)
        self.outputs += [to for _, to in wanted]

    def add_stage(self, wanted: Wanted) -> None:
        """What later array calls read: (array (sequences, heads, ...), where it is written)."""
        self.after += [*self._lines(wanted, False), "LA_SYNC();"]
        self.outputs += [to for _, to in wanted]
        self.owns([to for _, to in wanted])

    def add_results(self, wanted: Wanted) -> None:
        """What is made of its results; every one written somewhere. An array that is read is overwritten last."""
        read = {id(y) for y in arrays_read([x for x, _ in wanted])}
        lines = self._lines([(x, None if id(to) in read else to) for x, to in wanted], False)
        moved = through(wanted, read)
        self.outputs += [y for _, y in moved]
        if later := copies(wanted, moved):
            lines += ["LA_SYNC();", *self._lines(later, False)]
            self.outputs += [to for _, to in later]
        self.after += lines

    def _lines(self, wanted: Wanted, is_input: bool) -> list[str]:
        nodes, lines = list(self.nodes), list[str]()
        for n, what in enumerate(wanted):
            lines += self._output(len(self.outputs) + n, what, nodes, is_input)
        self.nodes = nodes
        return lines

    def _output(self, n: int, what: tuple[Deferred, Array], nodes: list[Node], is_input: bool) -> list[str]:
        """The code of the rows of one array; n: its number."""
        x = what[0]
        for last in (x.shape[-1] if x.shape else 1, 1):
            writer = Writer(nodes, self.heads)
            first, size = self._part_of_inputs(writer, x) if is_input else self._part_of_results(writer, x)
            last = last if size % last == 0 else 1
            if last == size and size % WIDTH == 0 and x.node.work > FEW:  # long sums: several warps have a row
                last = WIDTH
            try:
                once, each = _head_rows(writer, n, what, first, (size // last, last))
            except NotUniform:
                continue
            nodes[:] = writer.arrays
            turn, self._rows = self._rows, self._rows + size // last
            begin = f"if (const u32 first = (warp + {turn}u) % LA_WARPS; first < {size // last}u) {{"
            if size > last:
                each = [f"for (u32 m = first; m < {size // last}u; m += LA_WARPS) {{", *indented(each), "}"]
            return [begin, *indented([*once, *each]), "}"]
        raise AssertionError("a row of one element is uniform")

    def _part_of_inputs(self, writer: Writer, x: Deferred) -> tuple[Index, int]:
        """(the first element of the rows of a head, how many).

        x (..., 1, heads, width), of one head for several or all.
        """
        N, H, _ = self.heads
        lead, heads, width = prod(x.shape[:-3]), x.shape[-2], x.shape[-1]
        if (x.ndim > 2 and x.shape[-3] != 1) or lead not in (1, N) or H % heads or width > self.most:
            raise NotOwn
        head = Index(0, {"head": 1}) if heads == H > 1 else writer.variable(writer.root, heads, f"head / {H // heads}u")
        return Index().plus(head, width).plus(Index(0, {"n": 1 if lead == N > 1 else 0}), heads * width), width

    def _part_of_results(self, writer: Writer, x: Deferred) -> tuple[Index, int]:
        """The same of x (sequences, heads, ...), without axes of one element."""
        N, H, _ = self.heads
        sizes, first = [n for n in x.shape if n > 1], [n for n in (N, H) if n > 1]
        size = x.size // (N * H)
        if sizes[: len(first)] != first or size > self.most:
            raise NotOwn
        terms = {"n": H * size if N > 1 else 0, "head": size if H > 1 else 0}
        return Index(0, terms), size

    def _source(self, kernel: list[str]) -> str:
        """The source of a kernel with these calls; kernel: its lines."""
        return "\n".join([
            "// Array calls of a head, by its block.", *declared(len(self.nodes), len(self.outputs)),
            f"LA_DEVICE void calls_before({HEAD}) {{", *indented(self.before), "}",
            f"LA_DEVICE void calls_after({HEAD}) {{", *indented(self.after), "}",
            "#ifndef LA_HOST", *kernel, "#else",
            'extern "C" void before(const ArrayCallsArguments& a, u32 n, u32 head) { calls_before(a, n, head, 0, 0); }',
            'extern "C" void after(const ArrayCallsArguments& a, u32 n, u32 head) { calls_after(a, n, head, 0, 0); }',
            "#endif", "",
        ])  # fmt: skip

    def _arrays(self) -> tuple[list[Array], bytes]:
        """(the arrays that are read and written, the bytes of their pointers)."""
        arrays = [*(node.value for node in self.nodes), *self.outputs]
        return arrays, np.array([y.data.ptr for y in arrays], np.uint64).tobytes()

    def launch_with(self, kernel: str, call: Any) -> None:
        """Launch the kernel of a call (matrix_state/cuda/token/launch.py) with the array calls."""
        file = file_of(self._source(["#define LA_CALLS", f'#include "{kernel}"']), "step_calls")
        arrays, pointers = self._arrays()
        launch.launch(file, "step", call.constants, call.blocks, call.threads, 0, call.packed + pointers,
                      (*call.arrays, *arrays))  # fmt: skip

    def launch(self) -> None:
        """Launch the array calls, if there are any."""
        if not self.outputs:
            return
        N, H, _ = self.heads
        file = file_of(self._source([
            f'extern "C" __global__ void __launch_bounds__({32 * WARPS}) '
            "head_calls(const __grid_constant__ ArrayCallsArguments a) {",
            f"    calls_after(a, blockIdx.x / {H}u, blockIdx.x % {H}u, threadIdx.x / 32, threadIdx.x % 32);", "}",
        ]), "head_calls")  # fmt: skip
        arrays, pointers = self._arrays()
        launch.launch(file, "head_calls", (("LA_WARPS", WARPS),), N * H, 32 * WARPS, 0, pointers, tuple(arrays))


def _head_rows(
    writer: Writer, n: int, what: tuple[Deferred, Array], first: Index, sizes: tuple[int, int]
) -> tuple[list[str], list[str]]:
    """The code before the rows m of a head, or its elements, and that of one; sizes: rows, and elements of one."""
    count, last = sizes
    rows = Block(writer.root)
    if count > 1:
        writer.where["m"], writer.sizes["m"] = rows, count
        first = first.plus(Index(0, {"m": 1}), last)
    inner = Block(rows, lanes=True, of_output=True) if last > 1 else rows
    d = writer.variable(inner, last)
    at = first.plus(d)
    line = store_line(writer, n, what, at, writer.digits(at, what[0].shape))
    if last == 1:
        return writer.root.lines, [*rows.lines, f"if (lane == 0) {line}"]
    each = [f"for (u32 {d} = lane; {d} < {last}u; {d} += LA_WIDTH) {{", *indented([*inner.lines, line]), "}"]
    return writer.root.lines, [*rows.lines, *each]


def indented(lines: Sequence[str]) -> list[str]:
    """Lines of an inner scope."""
    return [f"    {line}" for line in lines]
