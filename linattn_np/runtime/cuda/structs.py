"""Argument structs of kernels, declared once: packed in Python, and generated as C++ headers.

A declaration `NAME = Struct("package/Name", ("q k v", ROWS), ("T heads", INT))` in package/cuda/arguments.py is
included by CUDA sources as "arguments/package/Name.cuh" (sources.py). The layout is that of C++; the header asserts it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

INT, U32, FLOAT, I64, U64, DOUBLE = "int", "u32", "float", "i64", "u64", "double"
INVERSE, TENSOR_MAP = "Inverse", "TensorMap"  # token/step.cu, tile/bulk.cuh
CODES = {INT: "i", U32: "I", FLOAT: "f", I64: "q", U64: "Q", DOUBLE: "d", INVERSE: "I", TENSOR_MAP: "128s"}  # of struct


def pointer(to: str) -> str:
    """The type of a pointer, packed as its address: pointer("const float")."""
    return f"{to}*"


def layout_of(kind: Any) -> tuple[str, str, int, int]:
    """(name, code, bytes, alignment) of a type: of a Struct, or of one value, by its name in C++."""
    if isinstance(kind, Struct):
        return kind.name, kind.code, kind.size, kind.align
    code = "Q" if kind.endswith("*") else CODES[kind]
    size = struct.calcsize(code)
    return kind, code, size, min(size, 64)


class Struct:
    """A struct of values, other structs and arrays of structs, in the layout that C++ gives it.

    fields: ("names of one type", type), or ("name", type, n) for an array of n. Padding is not declared.
    """

    def __init__(self, path: str, *fields: tuple[Any, ...]):
        self.path, self.name = path, path.rpartition("/")[2]
        self.fields = [(name, kind, *count) for names, kind, *count in fields for name in names.split()]
        self.offsets, self.code, at, self.align = {}, "", 0, 1
        for name, kind, *count in self.fields:
            (_, code, size, align), n = layout_of(kind), count[0] if count else 1
            padding = -at % align
            self.offsets[name] = at + padding
            self.code += "x" * padding + code * n
            at += padding + size * n
            self.align = max(self.align, align)
        self.size = at + -at % self.align
        self.code += "x" * (self.size - at)
        self._struct = struct.Struct("<" + self.code)
        self._runs = list(self._getters())

    def _getters(self) -> Iterator[Callable[[dict[str, Any]], Sequence[Any]]]:
        """Getters of the values of fields, in order: of a nested struct, of a run of values."""
        for nested, run in groupby(self.fields, lambda field: isinstance(field[1], Struct)):
            names = [name for name, *_ in run]
            if nested or len(names) == 1:
                yield from (itemgetter(n) if nested else lambda values, n=n: (values[n],) for n in names)
            else:
                yield itemgetter(*names)

    def pack(self, **values: Any) -> bytes:
        """The bytes of one struct; values by name, a nested struct as a sequence of all its values."""
        return self.packed(values)

    def packed(self, values: dict[str, Any]) -> bytes:
        """The bytes of one struct, from a dict."""
        return self._struct.pack(*self.flat(values))

    def flat(self, values: dict[str, Any]) -> list[Any]:
        """All values in order, as a struct around this one takes them."""
        if len(values) != len(self.fields):
            raise TypeError(f"{self.name}: {sorted(values.keys() ^ self.offsets.keys())} are given but not fields, "
                            "or fields but not given")  # fmt: skip
        flat: list[Any] = []
        for get in self._runs:
            flat += get(values)
        return flat

    def unpack(self, data: bytes) -> dict[str, Any]:
        """The values by name, nested structs as dicts, arrays as lists."""
        return self._named(iter(self._struct.unpack(data)))

    def _named(self, flat: Iterator[Any]) -> dict[str, Any]:
        values = {}
        for name, kind, *count in self.fields:
            each = [kind._named(flat) if isinstance(kind, Struct) else next(flat) for _ in range(*count or (1,))]
            values[name] = each if count else each[0]
        return values

    def header(self) -> str:
        """The C++ of the struct and of nested ones, with assertions that the compiler's layout is that of `pack`."""
        within = dict.fromkeys(kind.path for _, kind, *_ in self.fields if isinstance(kind, Struct))
        declared = (
            f"    {layout_of(kind)[0]} {name}{f'[{count[0]}]' if count else ''};" for name, kind, *count in self.fields
        )
        offsets = (
            f'static_assert(__builtin_offsetof({self.name}, {name}) == {at}, "{self.name}.{name}");'
            for name, at in self.offsets.items()
        )
        return "\n".join([
            "#pragma once", '#include "tile/types.cuh"', *(f'#include "arguments/{path}.cuh"' for path in within),
            f"struct {self.name} {{", *declared, "};",
            f'static_assert(sizeof({self.name}) == {self.size}, "{self.name}");',
            "#ifdef __has_builtin  // NVRTC 13.0 has no offsetof of its own",
            "#if __has_builtin(__builtin_offsetof)", *offsets, "#endif", "#endif", "",
        ])  # fmt: skip
