"""Helpers for the instructions of a register tile: arrays inside an intrinsic, vectors and masks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

Builder, Value = ir.IRBuilder, ir.Value  # of llvmlite: emits instructions; the result of one
I64, I32, F64 = ir.IntType(64), ir.IntType(32), ir.DoubleType()


@functools.cache
def vectors() -> str:
    """ "avx512", "avx2", "neon" or "plain": the registers of this processor. LINATTN_VECTORS forces one."""
    wanted = os.environ.get("LINATTN_VECTORS")
    if wanted is not None:
        if wanted not in ("avx512", "avx2", "neon", "plain"):
            raise ValueError(f"LINATTN_VECTORS is {wanted!r}, expected 'avx512', 'avx2', 'neon' or 'plain'")
        return wanted
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "neon"
    has = binding.get_host_cpu_features()
    if has.get("avx512f") and has.get("avx512dq") and has.get("avx512vl"):
        return "avx512"
    return "avx2" if has.get("avx2") and has.get("fma") else "plain"


# (bytes of a vector, rows R and vectors L of a tile): 16 accumulators of 32 registers, or 8 of 16
BYTES, ROWS, LANES = {"avx512": (64, 8, 2), "avx2": (32, 4, 2), "neon": (16, 8, 2), "plain": (16, 4, 2)}[vectors()]


@functools.cache
def lane(dtype: Any) -> int:
    """Numbers of a vector."""
    return BYTES // np.dtype(dtype).itemsize


def emitted(python: Callable[..., Any], returns: Any = types.void) -> Callable[..., Any]:
    """Decorates a function (builder, *arguments) -> value that emits the instructions of an intrinsic.

    Arrays come as `Array`, tuples as lists; an array is returned as the numbers that `make_array` takes.   python: what
    it does, where nothing is compiled.   returns: its type, or a function of its arguments' types.
    """

    def decorated(written: Callable[..., Any]) -> Any:
        if config.DISABLE_JIT:
            return python

        def typed(context: Any, *given: Any) -> Any:
            kinds = [_settled(kind) for kind in given]
            returned = returns if isinstance(returns, types.Type) else returns(*kinds)

            def write(context: Any, b: Builder, signature: Any, values: Any) -> Any:
                results = written(b, *[_operand(context, b, *x) for x in zip(signature.args, values, strict=True)])
                if isinstance(returned, types.Array):
                    return make_array(b, context.get_value_type(returned), returned, *results)
                return context.get_dummy_value() if returned == types.void else results

            return returned(*kinds), write

        return as_intrinsic(typed, written, inspect.signature(python))

    return decorated


def as_intrinsic(typed: Callable[..., Any], like: Callable[..., Any], signature: inspect.Signature) -> Any:
    """An intrinsic with the arguments of a signature and the name of another function."""
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    plain = [p.replace(annotation=empty) for p in signature.parameters.values()]
    typed.__signature__ = inspect.Signature([inspect.Parameter("context", kind), *plain])  # type: ignore[attr-defined]
    typed.__name__, typed.__doc__ = like.__name__, like.__doc__
    return intrinsic(typed)


def _settled(kind: Any) -> Any:
    """The type that an argument is cast to: whole numbers with a sign have 64 bits."""
    if isinstance(kind, types.BaseTuple):
        return types.BaseTuple.from_types([_settled(part) for part in kind])
    return types.int64 if isinstance(kind, types.Integer) and kind.signed else types.unliteral(kind)


def _operand(context: Any, b: Builder, kind: Any, value: Value) -> Any:
    if isinstance(kind, types.BaseTuple):
        return [_operand(context, b, part, b.extract_value(value, n)) for n, part in enumerate(kind)]
    return Array(context, b, kind, value) if isinstance(kind, types.Array) else value


class Array:
    """An array inside an intrinsic; an empty one is not `given`."""

    def __init__(self, context: Any, b: Builder, kind: Any, value: Value):
        self.b, self.dtype, self.number = b, kind.dtype, context.get_value_type(kind.dtype)
        self.size = kind.dtype.bitwidth // 8
        self.vector = ir.VectorType(self.number, BYTES // self.size)
        part = lambda *at: b.extract_value(value, at)  # noqa: E731
        self.shape, self.steps = [part(5, n) for n in range(kind.ndim)], [part(6, n) for n in range(kind.ndim)]
        self.start, self.given = b.ptrtoint(part(4), I64), b.icmp_signed("!=", self.shape[0], I64(0))

    def at(self, i: Any, j: Any = None) -> Value:
        """Address of element i, or of i, j."""
        at = self.b.add(self.start, self.b.mul(i, self.steps[0]))
        return at if j is None else self.b.add(at, self.b.mul(j, I64(self.size)))

    def inside(self, i: Value, count: int) -> list[Value]:
        """Rows i, i + 1, ...; rows past the end are replaced by the last row."""
        last = self.b.sub(self.shape[0], I64(1))
        rows = [self.b.add(i, I64(r)) for r in range(count)]
        return [self.b.select(self.b.icmp_signed("<", r, last), r, last) for r in rows]

    def rows(self, rows: list[Value], j: Any = None) -> list[Value]:
        """Addresses of the elements in column j of these rows."""
        return [self.at(r, j) for r in rows]

    def get(self, at: Value) -> Value:
        """The number at an address."""
        return self.b.load(self.b.inttoptr(at, self.number.as_pointer()), align=self.size)

    def broadcast(self, at: Value) -> Value:
        """The number at an address in every lane."""
        return broadcast(self.b, self.get(at), self.vector)

    def masks(self, columns: Value, j: Value, count: int) -> list[Value]:
        """Lane masks of vectors starting at column j: lanes below `columns`."""
        b, W = self.b, self.vector.count
        left = broadcast(b, b.trunc(b.sub(columns, j), I32), ir.VectorType(I32, W))
        return [b.icmp_signed("<", lanes(range(n * W, n * W + W)), left) for n in range(count)]

    def load(self, at: Value, n: int = 0, mask: Any = None) -> Value:
        """Vector n from an address on."""
        b, vector = self.b, self.vector
        at = b.inttoptr(b.add(at, I64(n * BYTES)), vector.as_pointer())
        if mask is None:
            return b.load(at, align=self.size)
        name, kinds = f"llvm.masked.load.v{vector.count}f{self.size * 8}.p0", [at.type, I32, mask.type, vector]
        return b.call(known(b, name, vector, kinds), [at, I32(self.size), mask, self.zero()])

    def store(self, x: Value, at: Value, n: int = 0, mask: Any = None) -> None:
        """Vector n from an address on."""
        b = self.b
        at = b.inttoptr(b.add(at, I64(n * BYTES)), self.vector.as_pointer())
        if mask is None:
            b.store(x, at, align=self.size)
            return
        name, kinds = f"llvm.masked.store.v{x.type.count}f{self.size * 8}.p0", [x.type, at.type, I32, mask.type]
        b.call(known(b, name, ir.VoidType(), kinds), [x, at, I32(self.size), mask])

    def zero(self) -> Value:
        return self.every(0.0)

    def every(self, x: float) -> Value:
        """A constant in every lane."""
        return constant(self.vector, [x] * self.vector.count)

    def vectors(self, begin: Value, end: Value) -> Any:
        """Loop over the first lanes of whole vectors."""
        return loop(self.b, begin, end, self.vector.count)

    def sum(self, x: Value | None = None) -> Value:
        """A place for a vector of sums."""
        return cgutils.alloca_once_value(self.b, self.zero() if x is None else x)


def constant(kind: ir.Type, x: Any) -> Value:
    """A scalar or a vector constant; None: zero."""
    return ir.Constant(kind, x)


def in_every_lane(kind: ir.Type, x: float) -> Value:
    """A constant of a number's type, or in every lane of a vector's."""
    return constant(kind, [x] * kind.count if isinstance(kind, ir.VectorType) else x)


def whole_type(kind: ir.Type) -> ir.Type:
    """The whole numbers with the bits of a floating one, or of a vector's."""
    if isinstance(kind, ir.VectorType):
        return ir.VectorType(whole_type(kind.element), kind.count)
    return I64 if kind == F64 else I32


def lanes(numbers: Iterable[int]) -> Value:
    """A whole number for each lane."""
    each = list(numbers)
    return ir.Constant(ir.VectorType(I32, len(each)), each)


def vector_of(dtype: Any, count: int) -> ir.Type:
    """The vector type of `count` numbers."""
    return ir.VectorType(ir.FloatType() if dtype == types.float32 else F64, count)


def converted(b: Builder, x: Value, kind: ir.Type) -> Value:
    """A floating scalar or vector, converted to another width."""
    if isinstance(x.type, ir.IntType):
        return b.sitofp(x, kind)
    is_wide = getattr(kind, "element", kind) == F64
    return x if x.type == kind else b.fpext(x, kind) if is_wide else b.fptrunc(x, kind)


def make_array(b: Builder, value: ir.Type, kind: Any, at: Value, shape: Any, steps: Any) -> Value:
    """An array at an address; no steps: contiguous."""
    size, array = I64(kind.dtype.bitwidth // 8), ir.Constant(value, None)
    array = b.insert_value(b.insert_value(array, size, 3), b.inttoptr(at, value.elements[4]), 4)
    for n, (x, step) in enumerate(zip(shape, steps or [size], strict=True)):
        array = b.insert_value(b.insert_value(array, x, (5, n)), step, (6, n))
    return array


def word(b: Builder, table: Value, n: Any, kind: ir.Type = I64) -> Value:
    """Pointer to word n of a table."""
    n = I64(8 * n) if isinstance(n, int) else b.mul(n, I64(8))
    return b.inttoptr(b.add(table, n), kind.as_pointer())


def prefetch(b: Builder, address: Value, cache: int = 2) -> None:
    """Prefetch the line at an address into the first or second cache; it need not exist."""
    kinds = [ir.PointerType(), I32, I32, I32]
    fn = known(b, "llvm.prefetch.p0", ir.VoidType(), kinds)
    b.call(fn, [b.inttoptr(address, kinds[0]), I32(0), I32(4 - cache), I32(1)])


def known(b: Builder, name: str, result: ir.Type, kinds: list[ir.Type]) -> ir.Function:
    """A function of LLVM."""
    return cgutils.get_or_insert_function(b.module, ir.FunctionType(result, kinds), name)


def indirect_call(b: Builder, function: Value, given: list[Value]) -> None:
    """A call of the C function at an address."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * len(given))
    b.call(b.inttoptr(function, kind.as_pointer()), given)


def broadcast(b: Builder, x: Value, vector: ir.VectorType) -> Value:
    """A number in every lane."""
    none = ir.Constant(vector, ir.Undefined)
    first = ir.Constant(ir.VectorType(I32, vector.count), None)
    return b.shuffle_vector(b.insert_element(none, x, I32(0)), none, first)


def joined(b: Builder, vectors: list[Value]) -> Value:
    """Vectors behind one another as one of as many registers; their number is a power of two."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [b.shuffle_vector(x, y, lanes(range(2 * x.type.count))) for x, y in pairs]
    return vectors[0]


def parts(b: Builder, x: Value, count: int) -> list[Value]:
    """The vectors that were joined."""
    n = x.type.count // count
    return [b.shuffle_vector(x, x, lanes(range(i * n, i * n + n))) for i in range(count)]


@contextlib.contextmanager
def loop(b: Builder, begin: Any, end: Value, step: int = 1) -> Iterator[Value]:
    """i = begin, begin + step, ... < end; backwards i > end."""
    first = I64(begin) if isinstance(begin, int) else begin
    with cgutils.for_range_slice(b, first, end, I64(step), I64, inc=step > 0) as (i, _):
        yield i


def store_once(b: Builder, x: Value, at: Value) -> None:
    """A vector to an aligned address, past the caches."""
    once = b.module.add_metadata([I32(1)])
    b.store(x, b.inttoptr(at, x.type.as_pointer()), align=BYTES).set_metadata("nontemporal", once)


def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """x y + z, rounded once; of numbers or of vectors."""
    lanes = f"v{x.type.count}" if isinstance(x.type, ir.VectorType) else ""
    bits = 32 if isinstance(getattr(x.type, "element", x.type), ir.FloatType) else 64
    return b.call(known(b, f"llvm.fma.{lanes}f{bits}", x.type, [x.type] * 3), [x, y, z])


def product(b: Builder, x: Value, y: Value) -> Value:
    """x y, rounded: not contracted to a fused multiply-add, which Numba's default flags allow."""
    return b.fmul(x, y, flags=("arcp",))


def total(b: Builder, x: Value) -> Value:
    """The sum of the lanes, in pairs."""
    W, bits = x.type.count, 32 if isinstance(x.type.element, ir.FloatType) else 64
    add = known(b, f"llvm.vector.reduce.fadd.v{W}f{bits}", x.type.element, [x.type.element, x.type])
    return b.call(add, [ir.Constant(x.type.element, 0.0), x], fastmath=("reassoc",))
