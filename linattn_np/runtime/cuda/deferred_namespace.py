"""The functions of an array namespace on deferred arrays (deferred.py)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import DEFERRED
from .deferred import Array, Deferred, Node, Pending, Unsupported, given

WIDTH = 32  # threads that share a sum
FEW, MANY = 64, 1 << 13  # functions of numbers that are computed again rather than stored: for one number, and for a
# sum by one thread: as long as a launch or two
MAPS = {  # functions of numbers, with the results' dtype if it is not the inputs'
    "add": None, "subtract": None, "multiply": None, "divide": None, "maximum": None, "minimum": None, "pow": None,
    "negative": None, "abs": None, "sign": None, "exp": None, "expm1": None, "log": None, "log1p": None, "sqrt": None,
    "sin": None, "cos": None, "tanh": None, "greater": bool, "greater_equal": bool, "less": bool, "less_equal": bool,
    "equal": bool, "not_equal": bool, "isnan": bool, "isinf": bool, "isfinite": bool,
    "logical_and": bool, "logical_or": bool, "logical_not": bool,
}  # fmt: skip
OF_FLOATS = ("divide", "exp", "expm1", "log", "log1p", "sqrt", "sin", "cos", "tanh")
ALIASES = {"bitwise_and": "logical_and", "bitwise_or": "logical_or", "bitwise_invert": "logical_not", "absolute": "abs",
           "power": "pow", "true_divide": "divide"}  # fmt: skip


class Functions:
    """Functions of numbers, and new arrays."""

    library: Any
    device: Any
    broadcast_to: Any

    def map(self, name: str, *inputs: Any) -> Deferred:
        """A function of numbers; Python's numbers take the dtype of the arrays."""
        kinds = [x.dtype for x in inputs if isinstance(x, Deferred)]
        if name == "pow" and isinstance(inputs[1], int | float):
            return self._power(*inputs)
        dtype = functools.reduce(np.result_type, kinds)
        if name in OF_FLOATS and dtype.kind in "bi":
            raise Unsupported(f"{name} of whole numbers")
        if dtype.kind in "bi" and any(isinstance(x, float) for x in inputs):
            raise Unsupported("mixed dtypes")
        each = [self._of(x, dtype) for x in inputs]
        return self._map(name, each, MAPS[name] or dtype)

    def _map(self, name: str, inputs: Sequence[Deferred], dtype: Any) -> Deferred:
        shape = np.broadcast_shapes(*(x.shape for x in inputs))
        return Deferred(self, Node("map", shape, dtype, [self.broadcast_to(x, shape) for x in inputs], name))

    def _power(self, x: Deferred, n: float) -> Deferred:
        if n == 2:
            return self.map("multiply", x, x)
        if n == 0.5:
            return self.map("sqrt", x)
        return self._map("pow", [x, self._of(n, x.dtype)], x.dtype)

    def _of(self, x: Any, dtype: np.dtype) -> Deferred:
        if isinstance(x, Deferred):
            return self.astype(x, dtype)
        if isinstance(x, int | float | np.number | np.bool):
            return Deferred(self, Node("number", (), dtype, value=x))
        raise Unsupported(f"a {type(x).__qualname__} beside arrays")

    def astype(self, x: Deferred, dtype: Any, copy: bool = False) -> Deferred:
        return x if x.dtype == dtype else Deferred(self, Node("map", x.shape, dtype, [x], "cast"))

    def copy(self, x: Deferred) -> Deferred:
        return Deferred(self, Node("map", x.shape, x.dtype, [x], "copy"))

    def where(self, condition: Deferred, x: Any, y: Any) -> Deferred:
        dtype = functools.reduce(np.result_type, [z.dtype for z in (x, y) if hasattr(z, "dtype")])
        return self._map("where", [condition, self._of(x, dtype), self._of(y, dtype)], dtype)

    def square(self, x: Deferred) -> Deferred:
        return self.map("multiply", x, x)

    def clip(self, x: Deferred, low: Any = None, high: Any = None) -> Deferred:
        x = x if low is None else self.map("maximum", x, low)
        return x if high is None else self.map("minimum", x, high)

    # new arrays

    def full(self, shape: Any, value: Any, dtype: Any = None, device: Any = None) -> Deferred:
        one = self._of(value, np.dtype(np.float64 if dtype is None else dtype))
        return self.broadcast_to(one, (shape,) if isinstance(shape, int) else tuple(shape))

    def zeros(self, shape: Any, dtype: Any = None, device: Any = None) -> Deferred:
        return self.full(shape, 0, dtype)

    def ones(self, shape: Any, dtype: Any = None, device: Any = None) -> Deferred:
        return self.full(shape, 1, dtype)

    def full_like(self, x: Deferred, value: Any, dtype: Any = None) -> Deferred:
        return self.full(x.shape, value, dtype or x.dtype)

    def zeros_like(self, x: Deferred, dtype: Any = None) -> Deferred:
        return self.full(x.shape, 0, dtype or x.dtype)

    def ones_like(self, x: Deferred, dtype: Any = None) -> Deferred:
        return self.full(x.shape, 1, dtype or x.dtype)

    def asarray(self, x: Any, dtype: Any = None, device: Any = None, copy: Any = None) -> Deferred:
        """An array of numbers on the host becomes a constant array on the device."""
        if isinstance(x, Deferred):
            x = x if dtype is None else self.astype(x, dtype)
            return self.copy(x) if copy else x
        if isinstance(x, int | float):
            return self._of(x, np.dtype(np.float64 if dtype is None else dtype))
        table = np.ascontiguousarray(x, dtype)
        from .constants import once

        key = "deferred", table.dtype.str, table.shape, table.tobytes()
        library = self.library
        return given(self, once(library, key, self.device, lambda: library.asarray(table, copy=True)))

    def arange(self, *limits: int, dtype: Any = None, device: Any = None) -> Deferred:
        return self.asarray(np.arange(*limits, dtype=dtype or np.int64))


class Views:
    """Views, and copies."""

    astype: Any

    # views

    def broadcast_to(self, x: Deferred, shape: Any) -> Deferred:
        return x if x.shape == tuple(shape) else x.viewed(lambda xp, y: xp.broadcast_to(y, tuple(shape)))

    def reshape(self, x: Deferred, shape: Any, copy: Any = None) -> Deferred:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return x if x.shape == shape else x.viewed(lambda xp, y: xp.reshape(y, shape))

    def expand_dims(self, x: Deferred, axis: int = 0) -> Deferred:
        return x.viewed(lambda xp, y: xp.expand_dims(y, axis=axis))

    def squeeze(self, x: Deferred, axis: Any = None) -> Deferred:
        return x.viewed(lambda xp, y: xp.squeeze(y, axis=axis))

    def permute_dims(self, x: Deferred, axes: Any) -> Deferred:
        return x.viewed(lambda xp, y: xp.permute_dims(y, axes))

    def swapaxes(self, x: Deferred, a: int, b: int) -> Deferred:
        return x.swapaxes(a, b)

    def moveaxis(self, x: Deferred, source: Any, destination: Any) -> Deferred:
        return x.viewed(lambda xp, y: xp.moveaxis(y, source, destination))

    def matrix_transpose(self, x: Deferred) -> Deferred:
        return x.mT

    def ascontiguousarray(self, x: Deferred) -> Deferred:
        return x

    # copies

    def concat(self, parts: Sequence[Deferred], axis: int = 0) -> Deferred:
        parts = list(parts)
        dtype = functools.reduce(np.result_type, [x.dtype for x in parts])
        axis %= parts[0].ndim
        parts = [self.astype(x, dtype) for x in parts if x.shape[axis]]
        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].shape)
        shape[axis] = sum(x.shape[axis] for x in parts)
        return Deferred(self, Node("concat", tuple(shape), dtype, parts, axis))

    concatenate = concat

    def stack(self, parts: Sequence[Deferred], axis: int = 0) -> Deferred:
        return self.concat([self.expand_dims(x, axis) for x in parts], axis)

    def repeat(self, x: Deferred, count: int, axis: int = 0) -> Deferred:
        axis %= x.ndim
        shape = x.shape
        wide = self.broadcast_to(self.expand_dims(x, axis + 1), (*shape[: axis + 1], count, *shape[axis + 1 :]))
        return self.reshape(wide, (*shape[:axis], shape[axis] * count, *shape[axis + 1 :]))

    def roll(self, x: Deferred, shift: int, axis: int) -> Deferred:
        shift %= x.shape[axis]
        first = (slice(None),) * (axis % x.ndim)
        return self.concat([x[(*first, slice(x.shape[axis] - shift, None))],
                            x[(*first, slice(0, x.shape[axis] - shift))]], axis)  # fmt: skip

    def take(self, x: Deferred, indices: Deferred, axis: int) -> Deferred:
        """The elements of the last axis at constant places."""
        if indices.ndim != 1 or axis % x.ndim != x.ndim - 1 or indices.dtype.kind != "i":
            raise Unsupported("take")
        shape = (*x.shape[:-1], indices.shape[0])
        return Deferred(self, Node("map", shape, x.dtype, [x, self.broadcast_to(indices, shape)], "take"))


class Reductions:
    """Sums and extremes of axes, and products of matrices."""

    map: Any
    moveaxis: Any
    squeeze: Any
    swapaxes: Any
    astype: Any

    def sum(self, x: Deferred, axis: Any = None, keepdims: Any = False, dtype: Any = None) -> Deferred:
        return self._reduce("sum", x if dtype is None else self.astype(x, dtype), axis, keepdims)

    def max(self, x: Deferred, axis: Any = None, keepdims: Any = False) -> Deferred:
        return self._reduce("max", x, axis, keepdims)

    def min(self, x: Deferred, axis: Any = None, keepdims: Any = False) -> Deferred:
        return self._reduce("min", x, axis, keepdims)

    def mean(self, x: Deferred, axis: Any = None, keepdims: Any = False) -> Deferred:
        found = self.sum(x, axis, keepdims)
        return self.map("divide", found, x.size // found.size)

    def _reduce(self, kind: str, x: Deferred, axis: Any, keepdims: Any, alone: Any = False) -> Deferred:
        """alone: each element by one thread."""
        axes = range(x.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        found = x
        for n in sorted(a % x.ndim for a in axes):
            last = self.moveaxis(found, n, -1)
            if last.shape[-1] > 1:
                if x.dtype.kind in "bi":
                    raise Unsupported("a reduction of whole numbers")
                self._store(last, alone)
                last = Deferred(self, Node(kind, last.shape[:-1], x.dtype, [last], alone))[..., None]
            found = self.moveaxis(last, -1, n)
        if keepdims:
            return found
        return self.squeeze(found, tuple(a % x.ndim for a in axes))

    def _store(self, x: Deferred, alone: Any) -> None:
        """What a reduction reads has its own reductions computed before if each element is a long sum itself."""
        threads = 1 if alone else WIDTH
        if x.node.work >= FEW and (x.node.work - x.node.fixed) * x.shape[-1] >= MANY * threads:
            for y in x.node.inputs:
                self._store_all(y.node)
            x.node.count_work()

    def _store_all(self, node: Node) -> None:
        """The reductions that a node is made of are stored."""
        if node.kind == "pending" or node.work <= 1:
            return
        for y in node.inputs:
            self._store_all(y.node)
        node.stored = node.stored or (node.kind in ("sum", "max", "min") and node.work > FEW)
        node.count_work()

    def matmul(self, x: Deferred, y: Deferred) -> Deferred:
        """Products of matrices, each element by one thread."""
        if min(x.ndim, y.ndim) < 2:
            raise Unsupported("a product with a vector")
        product = self.map("multiply", x[..., :, None, :], self.swapaxes(y, -1, -2)[..., None, :, :])
        return self._reduce("sum", product, -1, False, alone=True)

    def vecdot(self, x: Deferred, y: Deferred, axis: int = -1) -> Deferred:
        return self.sum(self.map("multiply", x, y), axis)


class Namespace(Views, Reductions, Functions):
    """The functions of an array namespace on deferred arrays.

    library: CuPy's namespace. assigned: (array, deferred) for each assignment to a whole array. pending: kernels that
    have not been launched. overwritten: arrays that those launches change. held: what has been
    computed, with what it was before. heads: (sequences, heads) of the call's values, if a block can have a head.
    """

    __name__ = DEFERRED
    __hash__ = None  # type: ignore[assignment]  # no cache keeps it, and with it the arrays of a call

    def __init__(self, library: Any, device: Any):
        self.library, self.device = library, device
        self.assigned: list[tuple[Array, Deferred]] = []
        self.pending: list[Pending] = []
        self.overwritten: list[Array] = []
        self.held: list[Any] = []
        self.heads: tuple[int, int] | None = None

    inf, nan, pi, newaxis = np.inf, np.nan, np.pi, None
    float16, float32, float64, int32, int64, bool = np.float16, np.float32, np.float64, np.int32, np.int64, np.bool
    finfo, iinfo = staticmethod(np.finfo), staticmethod(np.iinfo)

    def __getattr__(self, name: str) -> Any:
        if (own := ALIASES.get(name, name)) in MAPS:
            return functools.partial(self.map, own)
        raise Unsupported(f"the function {name}")
