"""The CUDA code of elements of deferred arrays (deferred.py): from which elements in memory each is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import dtype_name
from .deferred import Deferred, Node

Array = Any
NAMES = {"float32": "float", "float64": "double", "bool": "bool", "int64": "i64", "int32": "int", "bfloat16": "float",
         "float16": "float"}  # fmt: skip
BINARY = {"greater": ">", "greater_equal": ">=", "less": "<", "less_equal": "<=", "equal": "==", "not_equal": "!=",
          "logical_and": "&&", "logical_or": "||"}  # fmt: skip
CALLS = {"add": "f_add", "subtract": "f_sub", "multiply": "f_mul", "divide": "f_div", "maximum": "f_max",
         "minimum": "f_min", "pow": "f_pow", "negative": "f_neg"}  # fmt: skip
REDUCED = {"sum": ("f_add", "0"), "max": ("f_max", "-LA_INF"), "min": ("f_min", "LA_INF")}


class NotUniform(Exception):
    """A row's sum would differ from lane to lane."""


class NotOwn(Exception):
    """An element that another block computes, or writes, is read."""


class Heads(NamedTuple):
    """The numbers that blocks of one head each have: sequence n of N, head of H.

    own: of arrays that blocks write, by id, the elements from a sequence to the next and from a head to the next.
    """

    N: int
    H: int
    own: dict[int, tuple[int, int]]


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
    """The code of one output of a kernel; heads: if a block computes those of one head."""

    def __init__(self, arrays: Sequence[Node] = (), heads: Heads | None = None) -> None:
        self.arrays: list[Node] = list(arrays)
        self.root = Block()
        self.heads = heads
        self.where: dict[str, Block] = {}  # variables
        self.sizes: dict[str, int] = {}
        self.count = 0
        if heads is not None:
            self.where = {"n": self.root, "head": self.root}
            self.sizes = {"n": heads.N, "head": heads.H}

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
            x = Index(x.const // n, {name: c // n for name, c in x.terms.items() if c % n == 0})
            if (size := self.largest(low) + 1) > n:
                block, text = self.scope(low), str(low)
                low = self.variable(block, n, f"({text}) % {n}u")
                x = x.plus(self.variable(block, -(-size // n), f"({text}) / {n}u"))
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
            self._check_own(node, at)
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

    def _check_own(self, node: Node, at: Index) -> None:
        """Raises NotOwn for an element that another block writes."""
        if self.heads is None or (steps := self.heads.own.get(id(node.value))) is None:
            return
        rest = dict(at.terms)
        for name, step in zip(("n", "head"), steps, strict=True):
            if self.sizes[name] > 1 and rest.pop(name, 0) != step:
                raise NotOwn
        least = min((step for name, step in zip(("n", "head"), steps, strict=True) if self.sizes[name] > 1), default=0)
        if least and not 0 <= self.largest(Index(at.const, rest)) < least:
            raise NotOwn

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
