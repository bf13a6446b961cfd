"""A small language for machine code: numbers, addresses, vectors, loops and routines, written as LLVM code.

What Numba compiles from Python is typed and optimised function by function, for seconds; what is written down here is
optimised once. A body reads like a loop in Python: `with e.each(m) as i: ...`, and `+`, `*`, `<` of values
write the instruction. Rows of matrices have room for whole vectors: what lies beyond their end is computed, not used.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir


@functools.cache
def vectors() -> str:
    """"avx512", "avx2", "neon" or "plain": which registers there are taken to be. LINATTN_NP_VECTORS forces one."""
    wanted = os.environ.get("LINATTN_NP_VECTORS")
    if wanted is not None:
        if wanted not in ("avx512", "avx2", "neon", "plain"):
            raise ValueError(f"LINATTN_NP_VECTORS is {wanted!r}, expected 'avx512', 'avx2', 'neon' or 'plain'")
        return wanted
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "neon"
    has = llvm.get_host_cpu_features()
    if has.get("avx512f") and has.get("avx512dq") and has.get("avx512vl"):
        return "avx512"
    return "avx2" if has.get("avx2") and has.get("fma") else "plain"


# (bytes in a vector, rows R and vectors L of a tile): 16 accumulators of 32 registers, or 8 of 16
BYTES, ROWS, LANES = {"avx512": (64, 8, 2), "avx2": (32, 4, 2), "neon": (16, 8, 2), "plain": (16, 4, 2)}[vectors()]
I64, I32, I16, I1 = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(1)
SINGLE, DOUBLE = ir.FloatType(), ir.DoubleType()


class Value:
    """A value of the code that is being written: a whole number, a truth, a number or a vector."""

    __slots__ = ("e", "v")

    def __init__(self, e: Emit, v: ir.Value):
        self.e, self.v = e, v

    def _two(self, other: Any, whole: str, real: str) -> Value:
        b, y = self.e.b, self.e.like(self, other).v
        return Value(self.e, getattr(b, whole if isinstance(self.v.type, ir.IntType) else real)(self.v, y))

    def __add__(self, y: Any) -> Value:
        return self._two(y, "add", "fadd")

    def __sub__(self, y: Any) -> Value:
        return self._two(y, "sub", "fsub")

    def __mul__(self, y: Any) -> Value:
        return self._two(y, "mul", "fmul")

    def __floordiv__(self, y: Any) -> Value:
        return self._two(y, "sdiv", "fdiv")

    def __mod__(self, y: Any) -> Value:
        return self._two(y, "srem", "frem")

    def __and__(self, y: Any) -> Value:
        return self._two(y, "and_", "and_")

    def __or__(self, y: Any) -> Value:
        return self._two(y, "or_", "or_")

    def __invert__(self) -> Value:
        return Value(self.e, self.e.b.not_(self.v))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Value:
        b = self.e.b
        return Value(self.e, b.neg(self.v) if isinstance(self.v.type, ir.IntType) else b.fneg(self.v))

    def compare(self, how: str, y: Any) -> Value:
        """A truth, or a vector of them."""
        y = self.e.like(self, y).v
        whole = isinstance(self.v.type, ir.IntType)
        return Value(self.e, (self.e.b.icmp_signed if whole else self.e.b.fcmp_ordered)(how, self.v, y))

    def __lt__(self, y: Any) -> Value:
        return self.compare("<", y)

    def __le__(self, y: Any) -> Value:
        return self.compare("<=", y)

    def __gt__(self, y: Any) -> Value:
        return self.compare(">", y)

    def equals(self, y: Any) -> Value:
        """Whether both are the same number."""
        return self.compare("==", y)


class Mat(NamedTuple):
    """Where a matrix lies: address of element (0, 0), and the numbers of elements to the next row and column."""

    at: Any
    row: Any
    col: Any

    def turned(self) -> Mat:
        """Its transpose."""
        return Mat(self.at, self.col, self.row)


class Rows(NamedTuple):
    """A factor for each row: address of the first, and the numbers of elements to the next (0: the same for all)."""

    at: Any
    step: Any


class Variable:
    """A value that changes."""

    def __init__(self, e: Emit, first: Value):
        with e.b.goto_entry_block():
            self.at = e.b.alloca(first.v.type)
        self.e = e
        self.set(first)

    def get(self) -> Value:
        """What it is now."""
        return Value(self.e, self.e.b.load(self.at))

    def set(self, x: Value) -> None:
        """What it is from now on."""
        self.e.b.store(x.v, self.at)


class Emit:
    """Instructions for one element type, written at the end of a builder's block."""

    def __init__(self, builder: ir.IRBuilder, bits: int):
        self.b, self.bits = builder, bits
        self.size = self.bits // 8
        self.F = SINGLE if self.bits == 32 else DOUBLE
        self.W = BYTES // self.size
        self.V = ir.VectorType(self.F, self.W)

    def wide(self) -> Emit:
        """The same lanes in float64."""
        e = Emit(self.b, 64)
        e.W, e.V = self.W, ir.VectorType(e.F, self.W)
        return e

    # whole numbers

    def whole(self, i: int) -> Value:
        """A constant."""
        return Value(self, ir.Constant(I64, i))

    def like(self, x: Value, y: Any) -> Value:
        """y as a value of the type of x."""
        if isinstance(y, Value):
            return y
        constant = [y] * x.v.type.count if isinstance(x.v.type, ir.VectorType) else y
        return Value(self, ir.Constant(x.v.type, constant))

    def least(self, x: Value, y: Any) -> Value:
        """The smaller of two whole numbers."""
        return self.select(x < y, x, y)

    def select(self, truth: Value, x: Any, y: Any) -> Value:
        """x where true, else y."""
        x = x if isinstance(x, Value) else self.like(y, x)
        return Value(self, self.b.select(truth.v, x.v, self.like(x, y).v))

    # numbers and vectors

    def zero(self) -> Value:
        """A vector of zeros."""
        return Value(self, ir.Constant(self.V, [0.0] * self.W))

    def number(self, x: float) -> Value:
        """A constant."""
        return Value(self, ir.Constant(self.F, float(x)))

    def fma(self, a: Value, x: Value, y: Value) -> Value:
        """a x + y, rounded once."""
        kind = a.v.type
        name = f"llvm.fma.v{self.W}f{self.bits}" if isinstance(kind, ir.VectorType) else f"llvm.fma.f{self.bits}"
        return Value(self, self.b.call(self.function(name, kind, [kind] * 3), [a.v, x.v, y.v]))

    def spread(self, x: Value) -> Value:
        """A number in every lane."""
        none = ir.Constant(ir.VectorType(x.v.type, self.W), ir.Undefined)
        one = self.b.insert_element(none, x.v, ir.Constant(I32, 0))
        return Value(self, self.b.shuffle_vector(one, none, ir.Constant(ir.VectorType(I32, self.W), [0] * self.W)))

    def sum(self, x: Value) -> Value:
        """The sum of the lanes, in pairs."""
        name = f"llvm.vector.reduce.fadd.v{self.W}f{self.bits}"
        add = self.function(name, self.F, [self.F, self.V])
        return Value(self, self.b.call(add, [ir.Constant(self.F, 0.0), x.v], fastmath=("reassoc",)))

    def below(self, n: Value, first: int = 0) -> Value:
        """The lanes whose column first + lane is < n."""
        lanes = ir.Constant(ir.VectorType(I32, self.W), [first + w for w in range(self.W)])
        return Value(self, self.b.icmp_signed("<", lanes, self.spread(Value(self, self.b.trunc(n.v, I32))).v))

    def function(self, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Function:
        """A function of LLVM, or of this module, by name."""
        known = self.b.module.globals.get(name)
        return known or ir.Function(self.b.module, ir.FunctionType(result, arguments), name)

    # memory

    def address(self, X: Mat, i: Any = 0, j: Any = 0) -> Value:
        """Of X_ij, columns of stride 1."""
        return X.at + (X.row * i + j) * self.size

    def pointer(self, address: Value, kind: ir.Type) -> ir.Value:
        """An address as LLVM wants it."""
        return self.b.inttoptr(address.v, kind.as_pointer())

    def get(self, address: Value, kind: ir.Type | None = None) -> Value:
        """The number at an address."""
        kind = kind or self.F
        x = self.b.load(self.pointer(address, kind))
        x.align = kind.width // 8 if isinstance(kind, ir.IntType) else {SINGLE: 4, DOUBLE: 8}[kind]
        return Value(self, x)

    def put(self, x: Value, address: Value) -> None:
        """A number to an address."""
        size = x.v.type.width // 8 if isinstance(x.v.type, ir.IntType) else {SINGLE: 4, DOUBLE: 8}[x.v.type]
        self.b.store(x.v, self.pointer(address, x.v.type)).align = size

    def load(self, address: Value, mask: Value | None = None) -> Value:
        """The vector at an address."""
        p = self.pointer(address, self.V)
        if mask is None:
            x = self.b.load(p)
            x.align = self.size
            return Value(self, x)
        name = f"llvm.masked.load.v{self.W}f{self.bits}.p0"
        load = self.function(name, self.V, [p.type, I32, mask.v.type, self.V])
        return Value(self, self.b.call(load, [p, ir.Constant(I32, self.size), mask.v, self.zero().v]))

    def store(self, x: Value, address: Value, mask: Value | None = None) -> None:
        """A vector to an address."""
        p = self.pointer(address, self.V)
        if mask is None:
            self.b.store(x.v, p).align = self.size
            return
        name = f"llvm.masked.store.v{self.W}f{self.bits}.p0"
        store = self.function(name, ir.VoidType(), [self.V, p.type, I32, mask.v.type])
        self.b.call(store, [x.v, p, ir.Constant(I32, self.size), mask.v])

    # what is done when

    def variable(self, first: Value) -> Variable:
        """A value that changes."""
        return Variable(self, first)

    @contextlib.contextmanager
    def each(self, stop: Any, start: Any = 0, step: Any = 1, down: bool = False) -> Iterator[Value]:
        """i = start, start + step, ... below stop; from the last to the first if down (steps of 1)."""
        zero, b = self.whole(0), self.b
        start, stop, step = (x if isinstance(x, Value) else self.like(zero, x) for x in (start, stop, step))
        i = self.variable(start)
        test, body, done = (b.append_basic_block(name) for name in ("each", "do", "done"))
        b.branch(test)
        b.position_at_end(test)
        now = i.get()
        b.cbranch((now < stop).v, body, done)
        b.position_at_end(body)
        yield start + stop - 1 - now if down else now
        i.set(now + step)
        b.branch(test)
        b.position_at_end(done)

    @contextlib.contextmanager
    def when(self, truth: Value) -> Iterator[None]:
        """What follows, if true."""
        b = self.b
        body, done = b.append_basic_block("when"), b.append_basic_block("over")
        b.cbranch(truth.v, body, done)
        b.position_at_end(body)
        yield
        b.branch(done)
        b.position_at_end(done)

    def choose(self, *cases: tuple[Value, Callable[[], None]], otherwise: Callable[[], None] | None = None) -> None:
        """The first case that is true."""
        b, done = self.b, self.b.append_basic_block("chosen")
        for truth, body in cases:
            this, rest = b.append_basic_block("case"), b.append_basic_block("next")
            b.cbranch(truth.v, this, rest)
            b.position_at_end(this)
            body()
            b.branch(done)
            b.position_at_end(rest)
        if otherwise is not None:
            otherwise()
        b.branch(done)
        b.position_at_end(done)

    def lanes(self, n: Any) -> Any:
        """j = 0, W, 2 W, ... below n."""
        return self.each(n, step=self.W)

    def across(self, n: Value, body: Callable[[Value, Value | None], None]) -> None:
        """body(j, mask) for j = 0, W, 2 W, ... below n; no mask for whole vectors where masks are dear."""
        if BYTES == 64:
            with self.lanes(n) as j:
                body(j, self.below(n - j))
            return
        whole = n // self.W * self.W
        with self.lanes(whole) as j:
            body(j, None)
        with self.when(whole < n):
            body(whole, self.below(n - whole))


KINDS = {"Mat": (Mat, 3), "Rows": (Rows, 2), "Value": (None, 1)}


def routine(body: Callable[..., None]) -> Callable[..., None]:
    """A function of the module that is being written, written when it is first called; arguments by their hints."""
    kinds = [KINDS[p.annotation] for p in list(inspect.signature(body).parameters.values())[1:]]

    @functools.wraps(body)
    def call(e: Emit, *given: Any) -> None:
        name = f"linattn_np.{body.__name__}.f{e.bits}"
        function = e.b.module.globals.get(name) or define(e, name)
        flat = itertools.chain.from_iterable(x if isinstance(x, tuple) else [x] for x in given)
        e.b.call(function, [x.v if isinstance(x, Value) else ir.Constant(I64, int(x)) for x in flat])

    def define(e: Emit, name: str) -> ir.Function:
        count = sum(n for _, n in kinds)
        function = ir.Function(e.b.module, ir.FunctionType(ir.VoidType(), [I64] * count), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        function.attributes.add("nounwind")
        inner = Emit(ir.IRBuilder(function.append_basic_block("entry")), e.bits)
        values = [Value(inner, x) for x in function.args]
        arguments, at = [], 0
        for make, n in kinds:
            arguments.append(make(*values[at : at + n]) if make else values[at])
            at += n
        body(inner, *arguments)
        inner.b.ret_void()
        return function

    return call
