"""Deferred arrays (deferred.py) as one CUDA kernel: its source, and the launch.

Each array wanted has its elements computed from those of the arrays in memory that they depend on; nothing else is
stored. A warp computes a row, the sums of a row with a fixed order of its lanes. The bits of an element depend on the
functions and on its own operands, not on how many rows there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from ..arrays import dtype_name
from . import constants, launch, record, sources
from .deferred import Deferred, Node, given
from .deferred_namespace import Namespace

Array = Any
WARPS = 4  # of a block
LEAST_ROW = 16  # elements of a row that is worth a warp
NAMES = {"float32": "float", "float64": "double", "bool": "bool", "int64": "i64", "int32": "int", "bfloat16": "float",
         "float16": "float"}  # fmt: skip
BINARY = {"greater": ">", "greater_equal": ">=", "less": "<", "less_equal": "<=", "equal": "==", "not_equal": "!=",
          "logical_and": "&&", "logical_or": "||"}  # fmt: skip
CALLS = {"add": "f_add", "subtract": "f_sub", "multiply": "f_mul", "divide": "f_div", "maximum": "f_max",
         "minimum": "f_min", "pow": "f_pow", "negative": "f_neg"}  # fmt: skip
REDUCED = {"sum": ("f_add", "0"), "max": ("f_max", "-LA_INF"), "min": ("f_min", "LA_INF")}


class NotUniform(Exception):
    """A row's sum would differ from lane to lane."""


class Index:
    """An affine function of variables: const + sum of coefficient times variable."""

    __slots__ = ("const", "terms")

    def __init__(self, const: int = 0, terms: dict[str, int] | None = None):
        self.const, self.terms = const, {n: c for n, c in sorted((terms or {}).items()) if c}

    def plus(self, other: Index, times: int = 1) -> Index:
        """self + times other."""
        terms = dict(self.terms)
        for name, c in other.terms.items():
            terms[name] = terms.get(name, 0) + times * c
        return Index(self.const + times * other.const, terms)

    def __str__(self) -> str:
        parts = [name if c == 1 else f"{c}u * {name}" for name, c in self.terms.items()]
        return " + ".join(parts + ([f"{self.const}u"] if self.const or not parts else []))


class Block:
    """Lines of one scope. is_lane: lanes have different values of its variables; of_output: those of a row."""

    def __init__(self, parent: Block | None = None, lanes: bool = False, of_output: bool = False):
        self.parent, self.lines, self.known = parent, list[str](), dict[Any, str]()
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.is_lane: bool = lanes or (parent is not None and parent.is_lane)
        self.of_output: bool = of_output or (parent is not None and parent.of_output)


class Writer:
    """The code of one kernel."""

    def __init__(self) -> None:
        self.arrays: list[Node] = []
        self.root = Block()
        self.where: dict[str, Block] = {}  # variables
        self.sizes: dict[str, int] = {}
        self.count = 0

    def name(self, letter: str) -> str:
        """A new name."""
        self.count += 1
        return f"{letter}{self.count}"

    def variable(self, block: Block, size: int, text: str | None = None) -> Index:
        """A new index variable, 0 .. size - 1; text: its definition."""
        if size == 1:
            return Index()
        if text is not None and (known := block.known.get(text)) is not None:
            return Index(0, {known: 1})
        name = self.name("i")
        self.where[name], self.sizes[name] = block, size
        if text is not None:
            block.lines.append(f"const u32 {name} = {text};")
            block.known[text] = name
        return Index(0, {name: 1})

    def scope(self, *indices: Index) -> Block:
        """The innermost scope of the variables of some indices."""
        blocks = [self.where[name] for index in indices for name in index.terms]
        return max(blocks, key=lambda block: block.depth, default=self.root)

    def largest(self, x: Index) -> int:
        """The largest value."""
        return x.const + sum(c * (self.sizes[name] - 1) for name, c in x.terms.items())

    def digits(self, x: Index, shape: Sequence[int]) -> list[Index]:
        """The coordinates of an element of an array in C order."""
        found: list[Index] = []
        for n in reversed(shape):
            low = Index(x.const % n, {name: c for name, c in x.terms.items() if c % n})
            if self.largest(low) < n:
                x = Index(x.const // n, {name: c // n for name, c in x.terms.items() if c % n == 0})
            else:
                block, size, text = self.scope(x), self.largest(x) + 1, str(x)
                low = self.variable(block, n, f"({text}) % {n}u")
                x = self.variable(block, -(-size // n), f"({text}) / {n}u")
            found.append(low)
        return found[::-1]

    def read(self, x: Deferred, coords: Sequence[Index]) -> str:
        """The element of a view."""
        offset, strides = x.place
        linear = Index(offset)
        for c, s in zip(coords, strides, strict=True):
            linear = linear.plus(c, s)
        return self.element(x.node, linear)

    def element(self, node: Node, at: Index) -> str:
        """The element of a node at a place, as the name of a value."""
        if node.kind == "number":
            return literal(node.value, node.dtype)
        block, key = self.scope(at), (id(node), str(at))
        if (known := block.known.get(key)) is not None:
            return known
        kind = dtype_name(node)
        if node.kind == "array":
            if node not in self.arrays:
                self.arrays.append(node)
            load = f"load_{short}" if (short := SHORT.get(kind)) else f"load_as<{NAMES[kind]}>"
            text = f"{load}(a.in{self.arrays.index(node)}, {at})"
        else:
            coords = self.digits(at, node.shape)
            text = getattr(self, f"_{node.kind if node.kind in ('map', 'concat') else 'reduce'}")(node, coords, block)
        name = self.name("v")
        block.lines.append(f"const {NAMES[kind]} {name} = {text};")
        block.known[key] = name
        return name

    def _map(self, node: Node, coords: list[Index], block: Block) -> str:
        if node.value == "take":
            x, indices = node.inputs
            found = self.variable(block, x.shape[-1], f"(u32)({self.read(indices, coords)})")
            return self.read(x, [*coords[:-1], found])
        values, kind = [self.read(x, coords) for x in node.inputs], dtype_name(node)
        own, name = NAMES[kind], node.value
        if name in ("copy", "cast"):
            text = values[0] if own == "bool" and dtype_name(node.inputs[0]) == "bool" else f"({own})({values[0]})"
            if own == "bool" and name == "cast":
                text = f"({values[0]} != 0)"
            return f"round_{SHORT[kind]}({text})" if kind in SHORT and name == "cast" else text
        if name == "where":
            return f"{values[0]} ? {values[1]} : {values[2]}"
        if name in BINARY:
            return f"{values[0]} {BINARY[name]} {values[1]}"
        if name == "logical_not":
            return f"!{values[0]}"
        text = f"{CALLS.get(name, f'f_{name}')}({', '.join(values)})"
        return f"round_{SHORT[kind]}({text})" if kind in SHORT else text

    def _concat(self, node: Node, coords: list[Index], block: Block) -> str:
        axis, begin, text, last = node.value, 0, "", ""
        at = coords[axis]
        low, high = at.const, self.largest(at)
        for x in node.inputs:
            n = x.shape[axis]
            end = begin + n
            if low < end and high >= begin:
                inside = begin <= low and high < end
                own = at.plus(Index(begin), -1)
                if not inside:  # other elements are computed too, at a place that exists
                    own = self.variable(block, n, f"min(max((int)({at}) - {begin}, 0), {n - 1})")
                last = self.read(x, [*coords[:axis], own, *coords[axis + 1 :]])
                text += f"{at} < {end}u ? {last} : " if high >= end else ""
            begin = end
        return text + last

    def _reduce(self, node: Node, coords: list[Index], block: Block) -> str:
        x, (function, first) = node.inputs[0], REDUCED[node.kind]
        n, own = x.shape[-1], NAMES[dtype_name(node)]
        alone = node.value or block.is_lane
        if block.of_output and not node.value:
            raise NotUniform
        body, total = Block(block, lanes=not alone), self.name("s")
        k = self.variable(body, n)
        value = self.read(x, [*coords, k])
        begin, step = ("0", "1") if alone else ("lane", "LA_WIDTH")
        block.lines += [f"{own} {total} = {first};", f"for (u32 {k} = {begin}; {k} < {n}u; {k} += {step}) {{"]
        block.lines += [f"    {line}" for line in (*body.lines, f"{total} = {function}({total}, {value});")] + ["}"]
        return total if alone else f"warp_{node.kind}({total})"


SHORT = {"bfloat16": "bf16", "float16": "f16"}


def literal(value: Any, dtype: np.dtype) -> str:
    """A number in C."""
    kind = NAMES[dtype_name(np.empty(0, dtype))]
    if kind == "bool":
        return "true" if value else "false"
    if kind in ("i64", "int"):
        return f"({kind}){int(value)}"
    x = float(np.dtype(np.float32 if kind == "float" else np.float64).type(value))
    if x != x or x in (np.inf, -np.inf):
        return f"({kind})({'LA_NAN' if x != x else 'LA_INF' if x > 0 else '-LA_INF'})"
    return f"{x.hex()}{'f' if kind == 'float' else ''}"


def _rows(n: int, x: Deferred, first: int, arrays: list[Node], to: Array | None) -> tuple[list[str], int]:
    """(the code of one output, its warps); first: the warps before it. to: where it is written, if that is given."""
    for how in ("lanes" if x.shape and x.shape[-1] >= LEAST_ROW else "flat", "single"):
        writer = Writer()
        writer.arrays = list(arrays)
        try:
            lines, warps = _output(writer, n, (x, to), first, how)
        except NotUniform:
            continue
        arrays[:] = writer.arrays
        return lines, warps
    raise AssertionError("a row of one element is uniform")


def _output(writer: Writer, n: int, what: tuple[Deferred, Array], first: int, how: str) -> tuple[list[str], int]:
    """how: a warp computes a row, 32 elements one each, or one element."""
    (x, to), root = what, writer.root
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
    value, kind = writer.read(x, coords), dtype_name(x)
    store = f"store_{SHORT[kind]}" if kind in SHORT else f"store_as<{NAMES[kind]}>"
    place = at
    if to is not None and not to.flags.c_contiguous:
        place = Index()
        for c, stride in zip(coords, to.strides, strict=True):
            place = place.plus(c, stride // x.dtype.itemsize)
    line = f"{store}(a.out{n}, {place}, {value});"
    if how == "single":
        root.lines.append(f"if (lane == 0) {line}")
    else:
        guard = f"if ({at} < {size}u) " if how == "flat" and size < warps * last else ""
        body = [*inner.lines, guard + line]
        root.lines += [f"for (u32 {d} = lane; {d} < {last}u; {d} += LA_WIDTH) {{", *(f"    {y}" for y in body), "}"]
    return root.lines, warps


def source(wanted: Sequence[tuple[Deferred, Array | None]]) -> tuple[str, int, list[Node]]:
    """(the source, its warps, the nodes whose arrays it reads); wanted: as for `materialise`."""
    arrays: list[Node] = []
    body, warps = [], 0
    for n, (x, to) in enumerate(wanted):
        lines, own = _rows(n, x, warps, arrays, to)
        condition = f"if (warp < {warps + own}u) {{"
        body += [condition, *(f"    {line}" for line in lines), "    return;", "}"]
        warps += own
    fields = [*(f"const void* in{n};" for n in range(len(arrays))), *(f"void* out{n};" for n in range(len(wanted)))]
    text = "\n".join([
        "// Array calls: each output's elements from the inputs'.", '#include "step/array_calls.cuh"',
        f"struct ArrayCallsArguments {{ {' '.join(fields)} }};", "#ifndef LA_HOST",
        f'extern "C" __global__ void __launch_bounds__({32 * WARPS}) '
        "array_calls(const __grid_constant__ ArrayCallsArguments a) {",
        f"    const u32 lane = threadIdx.x % 32, warp = blockIdx.x * {WARPS}u + threadIdx.x / 32;", "#else",
        'extern "C" void array_calls(const ArrayCallsArguments& a, u32 warp) {', "    const u32 lane = 0;", "#endif",
        *(f"    {line}" for line in body), "}", "",
    ])  # fmt: skip
    return text, warps, arrays


def materialise(wanted: Sequence[Deferred], into: Sequence[Array | None] = ()) -> list[Array]:
    """The arrays wanted, those that are not in memory by one launch.

    into: of each, the array that the elements are written to, or None for a new one.
    """
    into = [*into] or [None] * len(wanted)
    settle(wanted)
    missing = [(x, to) for x, to in zip(wanted, into, strict=True) if x.real is None or to is not None]
    missing = list({id(x): (x, to) for x, to in missing}.values())
    computed: dict[int, Array] = {}
    if missing:
        text, warps, nodes = source(missing)
        library = missing[0][0].xp.library
        made = [library.empty(x.shape, dtype=x.dtype) if to is None else to for x, to in missing]
        arrays = [*(node.value for node in nodes), *made]
        packed = np.array([y.data.ptr for y in arrays], np.uint64).tobytes()
        launch.launch(_file(text), "array_calls", (), -(-warps // WARPS), 32 * WARPS, 0, packed, tuple(arrays))
        for (x, to), y in zip(missing, made, strict=True):
            computed[id(x)] = y
            if x.xp.is_shared:
                x.real = y
                if _is_whole(x) and to is None and x.node.kind != "number":
                    x.node.become(y)
    return [computed.get(id(x), x.real) for x in wanted]


def settle(wanted: Sequence[Deferred]) -> None:
    """Launch pending kernels that the arrays depend on, in order. An output that is only rounded is rounded by them."""
    if not wanted or not (xp := wanted[0].xp).pending:
        return
    readers = _readers(wanted)
    for one in [p for p in xp.pending if p.out in readers or p.end in readers]:
        xp.pending.remove(one)
        casts = readers.get(one.out) or [None]
        dtypes = {None if y is None or y.value != "cast" or y.shape != one.out.shape else y.dtype for y in casts}
        narrow = dtypes.pop() if len(dtypes) == 1 else None
        if narrow is None or dtype_name(np.empty(0, narrow)) not in SHORT:
            one.launch(None)
            continue
        one.launch(narrow)
        for y in casts:
            if y is not None:
                y.become(one.out.value)
        rounded = given(xp, one.out.value)
        one.out.kind, one.out.value, one.out.inputs = "map", "cast", (rounded,)
    for x in wanted:
        if x.real is None and x.node.kind == "array" and x.size == x.node.memory.size and x.view.flags.c_contiguous:
            x.real = x.node.value.reshape(x.shape)


def _readers(wanted: Sequence[Deferred]) -> dict[Node, list[Node | None]]:
    """For each node that arrays depend on the nodes that read it; None is a reader of views, and of arrays wanted."""
    found: dict[Node, list[Node | None]] = {}
    pending: list[tuple[Deferred, Node | None]] = [(x, None) for x in wanted]
    while pending:
        x, reader = pending.pop()
        known = x.node in found
        found.setdefault(x.node, []).append(reader if _is_whole(x) else None)
        if not known:
            pending += [(y, x.node) for y in x.node.inputs]
    return found


def _is_whole(x: Deferred) -> bool:
    """Whether a view is its node."""
    return x.place[0] == 0 and x.node.shape == x.shape and x.view.flags.c_contiguous


def _file(text: str) -> str:
    """The name under which the compiler finds a source."""
    name = f"array_calls/{hashlib.sha256(text.encode()).hexdigest()[:32]}.cu"
    sources.register(name, text)
    return name



def constant(xp: Namespace, key: Hashable, where: Any, make: Callable[[], Deferred]) -> Deferred:
    """make(), computed once per device (constants.py)."""

    def computed() -> Array:
        with record.Recorder():  # no launch of the calls that use it
            return materialise([make()])[0]

    return given(xp, constants.once(xp.library, ("deferred", key), where, computed))
