"""Vectors in registers as values. Code that uses them is Python: compiled, or run on NumPy arrays.

zeros, load = registers(L)       of L vectors
x = load(row(A, i), j)           numbers j, j + 1, ... of a row, all of which exist
store(fma(f, x, 2 * x + y), row(out, i), j)
y = load_part(row(A, i), j)      one vector, 0 behind the end of the row; store_part writes up to the end
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numba import types
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import lower_builtin, models, register_model

from . import vectors
from .vectors import BYTES, Array, Builder, Value, broadcast, constant, converted, emitted, vector_of

NARROW, WIDE = 4, 8  # vectors of a block; 8 sums hide the latency of an addition
LINE = 64  # bytes of a cache line


class Lanes(types.Type):
    """The type of `count` numbers in registers."""

    def __init__(self, dtype: Any, count: int):
        self.dtype, self.count = dtype, count
        super().__init__(f"Lanes({dtype}, {count})")


@register_model(Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes):
        super().__init__(manager, kind, vector_of(kind.dtype, kind.count))


def registers(L: float) -> tuple[Any, Any]:
    """(zeros, load) of L vectors: zeros(x) in the dtype of an array, load(x, j)."""
    kind = lambda x, *_: Lanes(x.dtype, int(L * BYTES * 8) // x.dtype.bitwidth)  # noqa: E731
    vector = lambda x: vector_of(x.dtype, int(L * x.vector.count))  # noqa: E731

    @emitted(lambda x: np.zeros(int(L * BYTES) // x.itemsize, x.dtype), kind)
    def zeros(b: Builder, x: Array) -> Value:
        return constant(vector(x), None)

    @emitted(lambda x, j: x[j : j + int(L * BYTES) // x.itemsize].copy(), kind)
    def load(b: Builder, x: Array, j: Value) -> Value:
        return b.load(b.inttoptr(x.at(j), vector(x).as_pointer()), align=x.size)

    return zeros, load


def _store(v: np.ndarray, x: np.ndarray, j: int) -> None:
    x[j : j + len(v)] = v


@emitted(_store)
def store(b: Builder, v: Value, x: Array, j: Value) -> None:
    """x_j, x_{j + 1}, ... = v, all of which exist."""
    b.store(v, b.inttoptr(x.at(j), v.type.as_pointer()), align=x.size)


@emitted(lambda x, j: np.pad(y := x[j : j + BYTES // x.itemsize], (0, BYTES // x.itemsize - len(y))),
         lambda x, j: Lanes(x.dtype, BYTES * 8 // x.dtype.bitwidth))  # fmt: skip
def load_part(b: Builder, x: Array, j: Value) -> Value:
    """One vector from x_j on, 0 behind the end."""
    return x.load(x.at(j), 0, x.masks(x.shape[0], j, 1)[0])


def _store_part(v: np.ndarray, x: np.ndarray, j: int) -> None:
    x[j : j + len(v)] = v[: len(x) - j]


@emitted(_store_part)
def store_part(b: Builder, v: Value, x: Array, j: Value) -> None:
    """x_j, x_{j + 1}, ... = v, up to the end."""
    x.store(v, x.at(j), 0, x.masks(x.shape[0], j, 1)[0])


@emitted(_store)
def store_past_caches(b: Builder, v: Value, x: Array, j: Value) -> None:
    """`store` of one vector at an aligned address."""
    vectors.store_once(b, v, x.at(j))


@emitted(lambda v: v.sum(dtype=v.dtype), lambda v: v.dtype)
def total(b: Builder, v: Value) -> Value:
    """The sum of one vector's numbers, in pairs."""
    return vectors.total(b, v)


def _one_vector(v: Any) -> int:
    return BYTES * 8 // v.dtype.bitwidth


@emitted(lambda v: v.reshape(-1, BYTES // v.itemsize).sum(0), lambda v: Lanes(v.dtype, _one_vector(v)))
def folded(b: Builder, v: Value) -> Value:
    """The sum of the vectors of v, lane by lane, the first half and the second, and so on."""
    while v.type.count * (8 if v.type.element == vectors.F64 else 4) > BYTES:
        half = v.type.count // 2
        v = b.fadd(*(b.shuffle_vector(v, v, vectors.lanes(range(n, n + half))) for n in (0, half)))
    return v


@emitted(lambda x, y, z: np.where(x > 0, y, z), lambda x, y, z: x)
def where_positive(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """y where x > 0, else z, also for NaN."""
    x, y, z = _alike(b, (x, y, z))
    return b.select(b.fcmp_ordered(">", x, vectors.in_every_lane(x.type, 0.0)), y, z)


@emitted(lambda x, low: np.where(x < low, x.dtype.type(low), x), lambda x, low: x)
def at_least(b: Builder, x: Value, low: Value) -> Value:
    """x, and `low` where x is less; NaN stays."""
    x, low = _alike(b, (x, low))
    return b.select(b.fcmp_ordered("<", x, low), low, x)


@emitted(lambda v: v.astype(np.float64), lambda v: Lanes(types.float64, v.count))
def wide(b: Builder, v: Value) -> Value:
    """The same numbers in float64."""
    return converted(b, v, vector_of(types.float64, v.type.count))


def _lanes_of(*kinds: Any) -> Any:
    """The type of an operation: numbers stand for vectors of them."""
    return next((x for x in kinds if isinstance(x, Lanes)), kinds[0])


def _alike(b: Builder, values: Any) -> list[Value]:
    """Operands of one type: a scalar is copied to every lane."""
    kind = next((x.type for x in values if hasattr(x.type, "element")), values[0].type)
    return [x if x.type == kind else broadcast(b, converted(b, x, kind.element), kind) for x in values]


@emitted(lambda x, y, z: x * y + z, _lanes_of)
def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """x y + z, rounded once."""
    return vectors.fma(b, *_alike(b, (x, y, z)))


@emitted(lambda x, y: x * y, _lanes_of)
def times(b: Builder, x: Value, y: Value) -> Value:
    """x y, rounded: no part of a fused multiply-add."""
    return vectors.product(b, *_alike(b, (x, y)))


class _Operation(AbstractTemplate):
    def generic(self, given: Any, _: Any) -> Any:
        found = _lanes_of(*given)
        return found(*given) if isinstance(found, Lanes) else None


for operation, name in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"),
                        (operator.truediv, "fdiv")):  # fmt: skip
    infer_global(operation)(type("_" + name, (_Operation,), {}))
    for operands in ((Lanes, Lanes), (types.Float, Lanes), (Lanes, types.Float)):
        lower_builtin(operation, *operands)(
            lambda _, b, signature, given, name=name: getattr(b, name)(*_alike(b, given)))  # fmt: skip


class _Negation(AbstractTemplate):
    def generic(self, given: Any, _: Any) -> Any:
        return given[0](*given) if isinstance(given[0], Lanes) else None


infer_global(operator.neg)(type("_fneg", (_Negation,), {}))
lower_builtin(operator.neg, Lanes)(lambda _, b, signature, given: b.fneg(given[0]))
