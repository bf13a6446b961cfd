"""Tracing: which NumPy functions a change of variables calls on the arrays of a call, and on which memory.

    trace = Trace(arrays)
    x = to_core(trace.arrays)         computes as usual; trace.calls lists what was computed

A traced array is a view of the caller's; views of it are traced, and each function of numbers is appended to the
list: arithmetic, sums and maxima, running ones too, `where`, copies, casts. Anything else raises Untraceable, as does
a number that leaves an array (`float(x)`, `if x:`). An array that is made of no traced one is a constant.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

LONGEST = 1 << 22  # bytes of what the calls compute: larger calls gain nothing
MOST_STEPS = 64  # array calls that one is written as
RESERVED = 128  # bytes at the beginning, for arguments of a call
ALIGNED = 64
CONSTANTS = (np.zeros_like, np.ones_like, np.full_like)
REDUCTIONS = {np.sum: np.add, np.max: np.maximum, np.min: np.minimum}


FIXED = ("xp", "dtype", "sizes", "options", "name", "sequences", "axes", "kernels")  # of Variables, beside the arrays


class Untraceable(Exception):
    """What is computed cannot be listed."""


class Call(NamedTuple):
    """One array call: out = function(*arrays), element by element.

    function: a ufunc, "where" or "cast"; of a reduction out has steps of 0 along the last axis.
    """

    function: Any
    arrays: tuple[np.ndarray, ...]  # of one shape; the last one is the output
    is_reduction: bool = False


class Kernel(NamedTuple):
    """A call of a compiled kernel on arrays: its table with places for their addresses."""

    function: int  # its address; 0: not compiled
    table: np.ndarray
    places: tuple[int, ...]  # entries of the table, one for each array
    arrays: tuple[np.ndarray, ...]  # the last one is the output
    tasks: int
    own: tuple[int, ...] = ()  # entries of what lies behind the copy of the table that a call makes
    bytes: int = 0  # of that copy and what lies behind it
    owner: Any = None  # of what the table tells of
    memory: Any = None  # of the trace, for the copy


class Traced(np.ndarray):
    """A view of an array whose use is traced.

    The reference to its trace is weak: the trace holds views of it, and such a circle would never be freed, because
    the garbage collector does not see what a view is a view of.
    """

    _trace: Callable[[], Trace | None] = staticmethod(lambda: None)

    @property
    def trace(self) -> Any:
        """The trace, while whoever records holds it."""
        return self._trace()

    def __array_finalize__(self, other: Any) -> None:
        self._trace = getattr(other, "_trace", self._trace)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **more: Any) -> Any:
        trace = _trace_of(inputs)
        if method in ("reduce", "accumulate") and out is None:
            try:
                return getattr(trace, method)(ufunc, *inputs, **more)
            except Untraceable:  # NumPy never frees the arguments of a reduction that raises here: its result raises
                Trace.listed += 1
                return np.asarray(getattr(ufunc, method)(*map(plain, inputs), **more)).view(Traced)
        if method != "__call__" or out is not None or more or ufunc.nout != 1 or ufunc.signature is not None:
            raise Untraceable(f"{ufunc.__name__}.{method}")
        return trace.call(ufunc, inputs)

    def __array_function__(self, function: Any, kinds: Any, given: Any, named: Any) -> Any:
        trace = _trace_of((*given, *named.values()))
        if function is np.where and len(given) == 3:
            return trace.where(*given)
        if function in REDUCTIONS:
            return trace.reduce(REDUCTIONS[function], *given, **named if len(given) > 1 else {"axis": None} | named)
        if function is np.concatenate:
            return trace.concatenate(*given, **named)
        if function in (np.stack, np.roll):
            return getattr(trace, function.__name__)(*given, **named)
        if function in (np.repeat, np.astype):
            return trace.repeat(*given, **named) if function is np.repeat else given[0].astype(*given[1:], **named)
        found = function(*map(plain, given), **{name: plain(x) for name, x in named.items()})
        if function in CONSTANTS:
            found.flags.writeable = False  # numbers that are written to it would be of this call
            is_one = found.size and all(np.ndim(y) == 0 for y in given[1:])
            return np.broadcast_to(found[(0,) * found.ndim], found.shape) if is_one else found
        if function is np.reshape and not trace.has(found):
            return trace.reshape(*given, **named)
        return trace.view(found)

    def astype(self, dtype: Any, *more: Any, **named: Any) -> Any:
        """A traced cast."""
        return _trace_of((self,)).cast(self, np.dtype(dtype))

    def _leaves(self, *more: Any, **named: Any) -> Any:
        raise Untraceable("a number leaves a traced array")

    __float__ = __int__ = __bool__ = __index__ = item = tolist = tobytes = __setitem__ = __iadd__ = _leaves
    __imul__ = __isub__ = __itruediv__ = _leaves


def plain(x: Any) -> Any:
    """x without traces, also in lists and tuples."""
    if isinstance(x, list | tuple):
        return type(x)(map(plain, x)) if type(x) in (list, tuple) else x
    return x.view(np.ndarray) if isinstance(x, Traced) else x


def _trace_of(inputs: Sequence[Any]) -> Trace:
    for x in inputs:
        if isinstance(x, list | tuple):
            x = next((y for y in x if isinstance(y, Traced)), None)
        if isinstance(x, Traced) and x.trace is not None:
            return x.trace
    raise Untraceable("no trace")


class Trace:
    """The calls on the arrays of one public call, and the memory of all that they computed."""

    listed = 0  # calls of all traces

    def __init__(self, arrays: Sequence[np.ndarray]):
        """arrays: given at each call, in this order."""
        self.given = list(arrays)
        self.beside: list[np.ndarray] = []  # computed by other means
        self.end: np.ndarray | None = None  # likewise: the core's final state, which the calls may overwrite
        self.calls: list[Call | Kernel] = []
        self.memory = np.empty(LONGEST // 8).view(np.uint8)  # of the outputs
        self.bytes = RESERVED
        self.arrays = [self._traced(y) for y in arrays]

    def _traced(self, y: np.ndarray) -> Any:
        found = y.view(Traced)
        found._trace = weakref.ref(self)
        return found

    def has(self, y: np.ndarray) -> bool:
        """Whether y lies in memory of a given array or of an output."""
        own = () if self.end is None else (self.end,)
        return any(contains(x, y) for x in (*self.given, self.memory, *self.beside, *own))

    def added(self, y: np.ndarray) -> Any:
        """An array that something else computes from the outputs so far."""
        self.beside.append(y)
        return self._traced(y)

    def ended(self, y: np.ndarray) -> Any:
        """A final state, computed from the outputs so far, that is of no use but to the calls that follow."""
        self.end = y
        return self._traced(y)

    def owns(self, y: np.ndarray) -> bool:
        """Whether y is the whole final state that may be overwritten."""
        end = self.end
        return end is not None and contains(y, end) and (y.shape, y.strides, y.dtype) == (
            end.shape, end.strides, end.dtype)  # fmt: skip

    @property
    def is_used(self) -> bool:
        """Whether there are outputs, or calls, which need memory."""
        return bool(self.calls) or self.bytes > RESERVED

    def view(self, y: Any) -> Any:
        """What a function returned that only makes views."""
        if not isinstance(y, np.ndarray) or not self.has(y):
            raise Untraceable("a result that is no view")
        return self._traced(y)

    def new(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Memory for an output."""
        begin, dtype = self.bytes, np.dtype(dtype)
        self.bytes = begin + prod(shape) * dtype.itemsize
        self.bytes += -self.bytes % ALIGNED
        if 0 in shape or self.bytes > LONGEST:
            raise Untraceable("an empty array, or a large one")
        return np.ndarray(shape, dtype, self.memory, begin)

    def _append(self, function: Any, inputs: Sequence[Any], out: np.ndarray, is_reduction: bool = False) -> None:
        for x in inputs:
            if isinstance(x, Traced) and not self.has(x):
                raise Untraceable("memory of unknown origin")
        Trace.listed += 1
        shape = inputs[0].shape if is_reduction else out.shape
        arrays = (np.broadcast_to(plain(x), shape) for x in inputs)
        self.calls.append(Call(function, (*arrays, np.broadcast_to(out, shape) if is_reduction else out), is_reduction))

    def call(self, ufunc: Any, inputs: Sequence[Any]) -> Any:
        """A function of numbers; Python's numbers take the dtype of the arrays."""
        kinds = [x.dtype if isinstance(x, np.ndarray | np.generic) else type(x) for x in inputs]
        dtypes = ufunc.resolve_dtypes((*kinds, None))
        given = [x if isinstance(x, np.ndarray) else np.asarray(x, d) for x, d in zip(inputs, dtypes, strict=False)]
        given = [x if x.dtype == d else self.cast(x, d) for x, d in zip(given, dtypes, strict=False)]
        out = self.new(np.broadcast_shapes(*(x.shape for x in given)), dtypes[-1])
        with np.errstate(all="ignore"):
            ufunc(*map(plain, given), out=out)
        self._append(ufunc, given, out)
        return self._traced(out)

    def reduce(self, ufunc: Any, x: Any, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: bool = False,
               **more: Any) -> Any:  # fmt: skip
        """A sum or an extreme of some axes: of the last one by its inner loop, of others step by step."""
        axes = tuple(range(x.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        axes = tuple(sorted(n % x.ndim for n in axes))
        if more or out is not None or dtype not in (None, x.dtype) or not axes:
            raise Untraceable(f"a reduction over {axis}")
        if axes == (x.ndim - 1,):
            return self._reduce_last(ufunc, x, keepdims)
        if axes[-1] == x.ndim - 1 and len(axes) == x.ndim - axes[0] and x.flags.c_contiguous:
            last = self._traced(plain(x).reshape(*x.shape[: axes[0]], -1))
            found = self._reduce_last(ufunc, last, False)
            return np.expand_dims(found, axes) if keepdims else found
        first = np.moveaxis(x, axes, tuple(range(len(axes))))
        steps = [first[(*index, ...)] for index in product(*map(range, first.shape[: len(axes)]))]
        if not 0 < len(steps) <= MOST_STEPS:
            raise Untraceable("a long reduction")
        found = self.call(np.add, (steps[0], 0.0)) if ufunc is np.add else self.cast(steps[0], x.dtype)
        for step in steps[1:]:
            found = self.call(ufunc, (found, step))
        return np.expand_dims(found, axes) if keepdims else found

    def _reduce_last(self, ufunc: Any, x: Any, keepdims: bool) -> Any:
        found = self.new((*x.shape[:-1], 1), x.dtype)
        with np.errstate(all="ignore"):
            ufunc.reduce(plain(x), axis=-1, keepdims=True, out=found)
        self._append(ufunc, (x,), found, is_reduction=True)
        return self._traced(found if keepdims else found[..., 0])

    def accumulate(self, ufunc: Any, x: Any, axis: int = 0, **more: Any) -> Any:
        """Running results along an axis."""
        steps = np.moveaxis(x, axis, 0)
        if more or not 0 < len(steps) <= MOST_STEPS:
            raise Untraceable("a long accumulation")
        found = [self.cast(steps[0, ...], x.dtype)]
        for n in range(1, len(steps)):
            found.append(self.call(ufunc, (found[-1], steps[n, ...])))
        return self.stack(found, axis)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """x where the condition holds, else y."""
        values = plain(np.where(plain(condition), plain(x), plain(y)))
        out = self.new(values.shape, values.dtype)
        out[...] = values
        given = [condition, *(z if isinstance(z, np.ndarray) else np.asarray(z, out.dtype) for z in (x, y))]
        if any(z.dtype != out.dtype for z in given[1:]) or condition.dtype != bool:
            raise Untraceable("mixed dtypes")
        self._append("where", given, out)
        return self._traced(out)

    def cast(self, x: Any, dtype: np.dtype) -> Any:
        """x in another dtype, or a copy."""
        out = self.new(x.shape, dtype)
        self._into(x, out)
        return self._traced(out)

    def dense(self, x: Any, dtype: np.dtype) -> Any:
        """x in a dtype, in C order."""
        return x if x.dtype == dtype and x.flags.c_contiguous else self.cast(x, dtype)

    def kernel(self, call: Kernel) -> Any:
        """The output of a compiled kernel, which has been computed if it is of use here."""
        known = all(self.has(y) for y in call.arrays if isinstance(y, Traced)) and self.has(call.arrays[-1])
        if not call.function or not known:
            raise Untraceable("a kernel that is not compiled")
        Trace.listed += 1
        memory = self.new((max(call.bytes, call.table.nbytes) + ALIGNED,), np.uint8)
        self.calls.append(call._replace(arrays=tuple(map(plain, call.arrays)), memory=memory))
        return self._traced(call.arrays[-1])

    def _into(self, x: Any, out: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            out[...] = plain(x)
        self._append("cast", (x,), out)

    def into(self, x: Any, out: Any) -> Any:
        """A copy of x in `out`, whose numbers no other call reads any more."""
        self._into(x, plain(out))
        return out

    def reshape(self, x: Any, shape: Any, *more: Any, **named: Any) -> Any:
        """A copy in another shape."""
        out = self.new(x.shape, x.dtype)
        self._into(x, out)
        return self._traced(out.reshape(shape))

    def concatenate(self, parts: Any, axis: int = 0, **named: Any) -> Any:
        """Copies beside each other."""
        whole = np.concatenate([plain(x) for x in parts], axis=axis, **named)
        out, first = self.new(whole.shape, whole.dtype), 0
        axis %= out.ndim
        for x in parts:
            place = out[(slice(None),) * axis + (slice(first, first + x.shape[axis]),)]
            first += x.shape[axis]
            if x.shape[axis]:
                self._into(x, place)
        return self._traced(out)

    def stack(self, parts: Any, axis: int = 0, **named: Any) -> Any:
        """Copies beside each other on a new axis."""
        return self.concatenate([np.expand_dims(x, axis) for x in parts], axis, **named)

    def roll(self, x: Any, shift: int, axis: int | None = None) -> Any:
        """Copies beside each other, the last `shift` entries of an axis first."""
        if axis is None or not isinstance(shift, int):
            raise Untraceable("a roll of several axes")
        moved, n = np.moveaxis(x, axis, -1), x.shape[axis]
        cut = n - shift % n
        return np.moveaxis(self.concatenate([moved[..., cut:], moved[..., :cut]], axis=-1), -1, axis)

    def repeat(self, x: Any, count: int, axis: int) -> Any:
        """Each entry of an axis `count` times."""
        axis %= x.ndim
        shape = x.shape
        out = self.new((*shape[: axis + 1], count, *shape[axis + 1 :]), x.dtype)
        self._into(np.broadcast_to(np.expand_dims(plain(x), axis + 1), out.shape), out)
        return self._traced(out.reshape(*shape[:axis], shape[axis] * count, *shape[axis + 1 :]))


def traced_variables(c: Any, names: Sequence[str], *more: np.ndarray) -> tuple[Trace, Any]:
    """A trace of the arrays of a call's Variables, and of `more`, and a copy of c with traced arrays."""
    trace = Trace([*(getattr(c, n) for n in names), *more])
    own = {n: x for n, x in vars(c).items() if n in FIXED or n in c.axes}  # not what was computed from them
    return trace, type(c)(**own | dict(zip(names, trace.arrays, strict=False)))


def of_output(function: Callable[[Any], Any]) -> Callable[[Any, Any], tuple[Any, Any]]:
    """The `then` of a recorded call that changes its output, if there is one, and not its final state."""
    return lambda out, end: (None if out is None else function(out), end)


def contains(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether y lies in the memory between the first and the last byte of x."""
    (low, high), (first, last) = extent(x), extent(y)
    return low <= first and last <= high


def extent(y: np.ndarray) -> tuple[int, int]:
    """Addresses of the first byte and of the one after the last."""
    at = y.__array_interface__["data"][0]
    reach = [stride * (size - 1) for stride, size in zip(y.strides, y.shape, strict=True)]
    return at + sum(r for r in reach if r < 0), at + sum(r for r in reach if r > 0) + y.itemsize


def traced(x: Any) -> Trace | None:
    """The trace of an array, if it has one."""
    return x.trace if isinstance(x, Traced) else None
