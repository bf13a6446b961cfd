"""A kernel written as instructions: Python runs once, and what it does with whole numbers and rows is emitted.

Numba types and lowers nothing of it, which is most of what a compilation costs. A `Stage` is an `Emit` with whole
numbers that know arithmetic, loops and branches as `with` blocks, and routines: functions of the kernel's own that are
emitted once, however many call them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types

from .numba_tiles import I32, I64, Emit


class Int:
    """A whole number, or a truth, of the kernel: what is done with it is emitted."""

    def __init__(self, b: ir.IRBuilder, value: ir.Value):
        self.b, self.value = b, value

    def _with(self, instruction: Callable[..., ir.Value], other: Any) -> Int:
        return Int(self.b, instruction(self.value, whole(other)))

    def _compare(self, sign: str, other: Any) -> Int:
        return Int(self.b, self.b.icmp_signed(sign, self.value, whole(other)))

    def __add__(self, other: Any) -> Int:
        return self._with(self.b.add, other)

    def __sub__(self, other: Any) -> Int:
        return self._with(self.b.sub, other)

    def __mul__(self, other: Any) -> Int:
        return self._with(self.b.mul, other)

    def __floordiv__(self, other: Any) -> Int:
        return self._with(self.b.sdiv, other)  # of numbers >= 0

    def __mod__(self, other: Any) -> Int:
        return self._with(self.b.srem, other)

    def __and__(self, other: Any) -> Int:
        return self._with(self.b.and_, other)

    def __or__(self, other: Any) -> Int:
        return self._with(self.b.or_, other)

    def __invert__(self) -> Int:
        return Int(self.b, self.b.not_(self.value))

    def __lt__(self, other: Any) -> Int:
        return self._compare("<", other)

    def __ge__(self, other: Any) -> Int:
        return self._compare(">=", other)

    def __eq__(self, other: Any) -> Int:  # type: ignore[override]
        return self._compare("==", other)

    def __ne__(self, other: Any) -> Int:  # type: ignore[override]
        return self._compare("!=", other)

    __hash__ = None  # type: ignore[assignment]


def whole(x: Any) -> ir.Value:
    """A number of Python's, or of the kernel, as an operand."""
    return x.value if isinstance(x, Int) else ir.Constant(I64, x)


class Stage(Emit):
    """Instructions, loops, branches and routines for one element type."""

    def __init__(self, builder: ir.IRBuilder, number: types.Type):
        super().__init__(builder, number)
        self.number_type = number

    def int(self, x: Any) -> Int:
        return x if isinstance(x, Int) else Int(self.b, whole(x) if isinstance(x, int) else x)

    def choose(self, condition: Int, x: Any, y: Any) -> Int:
        """x if condition else y, both being computed."""
        return Int(self.b, self.b.select(condition.value, whole(x), whole(y)))

    def least(self, x: Any, y: Any) -> Int:
        return self.choose(self.int(x) < y, x, y)

    def field(self, table: Int, i: Any) -> Int:
        """Entry i of a table of whole numbers at an address."""
        return Int(self.b, self.b.load(self.b.inttoptr((self.int(i) * 8 + table).value, I64.as_pointer())))

    def put_field(self, x: Int, table: Int, i: Any) -> None:
        self.b.store(x.value, self.b.inttoptr((self.int(i) * 8 + table).value, I64.as_pointer()))

    @contextmanager
    def each(self, begin: Any, end: Any, step: int = 1) -> Iterator[Int]:
        """j = begin, begin + step, ... below end; as it stands, neither unrolled nor put into vectors."""
        b, first, last = self.b, whole(begin), whole(end)
        before, inside, done = b.block, b.append_basic_block("each"), b.append_basic_block("each.done")
        b.cbranch(b.icmp_signed("<", first, last), inside, done)
        b.position_at_end(inside)
        j = b.phi(I64)
        j.add_incoming(first, before)
        yield Int(b, j)
        after = b.add(j, ir.Constant(I64, step))
        j.add_incoming(after, b.block)
        again = b.cbranch(b.icmp_signed("<", after, last), inside, done)
        words = [["llvm.loop.unroll.disable"], ["llvm.loop.vectorize.width", ir.Constant(I32, 1)]]
        again.set_metadata("llvm.loop", b.module.add_metadata([b.module.add_metadata(w) for w in words]))
        b.position_at_end(done)

    @contextmanager
    def when(self, condition: Int) -> Iterator[None]:
        """Only if the condition holds."""
        with self.b.if_then(condition.value):
            yield

    def routine(self, name: str, body: Callable[..., None], *arguments: Any, number: ir.Value | None = None) -> None:
        """body(stage, *arguments) as a function of its own; `number`, an element, goes last."""
        kinds = [I64] * len(arguments) + ([self.F] if number is not None else [])
        name = f"linattn.{name}.{self.bits}"
        fn = self.b.module.globals.get(name)
        if fn is None:
            fn = ir.Function(self.b.module, ir.FunctionType(ir.VoidType(), kinds), name)
            fn.linkage = "internal"
            fn.attributes.add("noinline")
            inside = Stage(ir.IRBuilder(fn.append_basic_block("entry")), self.number_type)
            given = [inside.int(x) for x in fn.args[: len(arguments)]]
            body(inside, *given, *fn.args[len(arguments) :])
            inside.b.ret_void()
        self.b.call(fn, [whole(x) for x in arguments] + ([number] if number is not None else []))

    # elements and vectors of them at addresses

    def get(self, at: Int) -> ir.Value:
        return self.number(at.value)

    def put(self, x: ir.Value, at: Int) -> None:
        self.b.store(x, self.b.inttoptr(at.value, self.F.as_pointer())).align = self.size

    def vector(self, at: Int) -> ir.Value:
        return self.load(at.value, None)

    def put_vector(self, x: ir.Value, at: Int) -> None:
        self.store(x, at.value, None)
