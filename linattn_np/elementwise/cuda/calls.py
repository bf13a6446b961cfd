"""The CUDA backend: calls on CuPy arrays as tiles, in one launch, behind one that clears the links of tiles."""

from __future__ import annotations

import functools
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from ...ops.cuda import formulas
from ...ops.cuda.arguments import address
from ...ops.cuda.sums import each_over_middle, over_middle
from ...runtime.arrays import Array, Namespace, as_computed, cast, complex_of, conjugate, is_complex, name_of
from ...runtime.constants import constant_array
from ...runtime.cuda import launch, record
from ..types import AVERAGE, FORMULAS, GatedInputs, Inputs, Plan, Residuals
from .arguments import CLEAR, NO_TOKENS, SCAN
from .plan import KINDS, OF_AVERAGES, SOURCE, Cut, Pass, aligned, average_cut, constants, cut_of, made_cut

THREADS = 256  # of a block that clears
LARGEST = 2**31

lasting = functools.partial(record.empty, is_counted=False)  # arrays that live as long as the call in any case


def unsupported_reason(x: Inputs | GatedInputs, plan: Plan) -> str | None:
    """Why the kernels do not compute a call; None if they do."""
    if any(name_of(y.dtype) not in KINDS for y in (x.arrays if isinstance(x, GatedInputs) else (x.x, x.gate))):
        return "they take floating-point and complex numbers"
    if 0 in (prod(x.x.shape[:-2]), x.x.shape[-1]):
        return "there is nothing to compute"
    if x.x.device.id != launch.current_device():
        return f"the arrays are on device {x.x.device.id}, the current one is {launch.current_device()}"
    return launch.unusable()


def described(plan: Plan, x: Inputs | GatedInputs) -> str:
    """The kernel of a call and its tiles, in words."""
    x = x._replace(a=x.gate, g=None) if isinstance(x, Inputs) else x  # of an array of logarithms as of factors
    call = Call(plan, x, None)
    cut = call.cut(False)
    return f"{call.source}, tiles of {cut.tokens} tokens and {cut.channels} channels"


def forward(plan: Plan, x: Inputs | GatedInputs, state: Any) -> tuple[Array, Array, Array | None]:
    """(out, the final states, the states before the tiles of a backward if one follows)."""
    call = Call(plan, x, state)
    stored = call.kind if call.is_complex else call.x.dtype
    out, end = lasting(tuple(x.x.shape), stored), lasting(call.state_shape, call.kind)
    marks, size = None, 0
    if plan.gradients:
        own = call.cut(True)
        marks, size = lasting((call.tiles(own), call.D), call.kind), own.tokens
    call.run(False, {"out": out, "start": call.state(state), "end": end, "marks": marks}, size)
    return out, end, marks


def backward(residuals: Residuals, dout: Array | None, dstate: Any) -> tuple[Any, Array]:
    """(gradients of the inputs, of the initial states)."""
    x, plan, _, state, marks = residuals
    call = Call(plan, x, state)
    xp, cut = plan.xp, call.cut(True)
    dx, begin = lasting(tuple(x.x.shape), call.x.dtype), lasting(call.state_shape, call.kind)
    if dout is None:
        dout = zeros_like(xp, x.x, call.kind if call.is_complex else None)
    own = {"dout": call.numbers(dout), "out": dx, "start": call.state(dstate), "end": begin, "marks": marks}
    if isinstance(x, GatedInputs):
        dy, dz = (None if y is None else lasting(tuple(y.shape), y.dtype) for y in (x.y, x.z))
        count = len(x.parameters)
        sums: Any = record.empty((count, call.tiles(cut), call.D), call.real) if count else None
        call.run(True, own | {"dgate": dy, "dwrite": dz, "sums": sums})
        of = [None if y is None else sums[n : n + 1] for n, y in enumerate(x.parameters)]
        found = tuple(None if y is None else y[0] for y in each_over_middle(of, [call.real] * count))
        return GatedInputs(x.formula, dx, dy, dz, found), begin
    shape = (call.tiles(cut), call.D) if x.is_constant else tuple(x.x.shape)
    dgate = lasting(shape, call.kind if x.is_constant else call.gate.dtype)
    call.run(True, own | {"dgate": dgate})
    if x.is_constant:
        parts = dgate.view(call.real) if call.is_complex else dgate
        dgate = over_middle(parts.reshape(1, *parts.shape))[0]
        dgate = dgate.view(call.kind) if call.is_complex else dgate
    if call.is_array_log:
        dgate = conjugate(xp, call.gate) * dgate
    return (Inputs(dx, dgate) if x.g is None else Inputs(dx, None, dgate)), begin


def zeros_like(xp: Namespace, x: Array, dtype: Any = None) -> Array:
    """One row (D,) of them for all tokens."""
    D, kind = x.shape[-1], x.dtype if dtype is None else dtype
    zeros = constant_array(xp, ("zeros", D, str(kind)), x.device, lambda: xp.zeros((D,), dtype=kind))
    return xp.broadcast_to(zeros, x.shape)


class Call:
    """The arrays of a call as the kernels take them, and its launches."""

    def __init__(self, plan: Plan, x: Inputs | GatedInputs, state: Any):
        xp = plan.xp
        self.plan, self.inputs = plan, x
        self.real, self.is_made = np.dtype(plan.dtype), isinstance(x, GatedInputs)
        self.is_average = isinstance(x, GatedInputs) and x.formula == AVERAGE
        self.source, self.entry = (OF_AVERAGES, "average") if self.is_average else (SOURCE, "scan")
        self.is_complex = x.is_complex if isinstance(x, GatedInputs) else any(
            y is not None and is_complex(y) for y in (*x, state))  # fmt: skip
        self.kind = np.dtype(complex_of(xp, plan.dtype)) if self.is_complex else self.real
        self.is_array_log = False
        if isinstance(x, GatedInputs):
            self.x, self.gate = x.x, x.y
        else:
            self.x, self.gate = self.numbers(x.x), self.numbers(x.gate)
            self.is_array_log = self.is_complex and x.g is not None  # exponentials of complex numbers by an array call
        if self.is_array_log:
            self.gate = xp.exp(self.gate)
        (*lead, self.T, self.D) = x.x.shape
        self.offsets = None
        if plan.sequences[0].row is not None:
            self.offsets = (0, *(s.stop for s in plan.sequences))
            lead = [len(plan.sequences)]
        self.N, self.state_shape = prod(lead), (*lead, self.D)
        self.longest = self.T if self.offsets is None else max(b - a for a, b in pairwise(self.offsets))
        # bytes of an element that is held
        self.size = self.kind.itemsize if self.is_made else max(self.x.itemsize, self.gate.itemsize)

    def numbers(self, y: Array) -> Array:
        """An array of tokens or of a gate: complex numbers if any of the call are."""
        return cast(self.plan.xp, y, self.kind) if self.is_complex else y

    def state(self, y: Any) -> Array | None:
        """Dense states in the dtype of the computation."""
        if y is None:
            return None
        y = as_computed(self.plan.xp, y, self.plan.dtype)
        return y if y.flags.c_contiguous and y.dtype == self.kind else cast(self.plan.xp, y, self.kind).copy()

    def cut(self, is_back: bool) -> Cut:
        """The cut of a pass."""
        if self.is_average:
            return average_cut(self.kind, self.longest, is_back)
        if self.is_made:
            return made_cut(self.kind, self.longest, is_back)
        return cut_of(self.size, self.longest, is_back)

    def tiles(self, cut: Cut) -> int:
        """Tiles of all sequences, of one block of channels."""
        if self.offsets is None:
            return self.N * cut.tiles(self.T)
        return sum(cut.tiles(b - a) for a, b in pairwise(self.offsets))

    def run(self, is_back: bool, own: dict[str, Any], marked: int = 0) -> None:
        """Launch a pass. own: its arrays by field. marked: tokens from one kept state to the next, 0: none is."""
        x = self.inputs
        D, given, rows, lying = self.D, dict[str, Any](), dict[str, tuple[int, int, int]](), []
        tokens = {"gate": self.gate, "x": self.x, "write": x.z if isinstance(x, GatedInputs) else None}
        for name, y in (tokens | {"dout": own.pop("dout", None)}).items():
            given[name], rows[name] = _rows(y)
            if y is not None:
                lying.append((y.itemsize, rows[name]))
        for name in ("out", "dgate", "dwrite"):
            y = own.get(name)
            step = 0 if y is None else D * y.itemsize
            rows[name] = NO_TOKENS if y is None else (y.data.ptr, self.T * step, step)
            if y is not None and self.is_made:
                lying.append((y.itemsize, rows[name]))
        cut = aligned(self.cut(is_back), D, lying)
        tiles, columns = self.tiles(cut), -(-D // cut.channels)
        blocks, per = tiles * columns, cut.tiles(self.longest)
        if blocks >= LARGEST:
            raise OverflowError(f"{blocks} blocks, a grid has at most {LARGEST - 1}")
        is_linked, words = per > 1, None
        dout = self.x if given["dout"] is None else given["dout"]
        of_x, of_gate, of_dout = (name_of(self.x.dtype if y is None else y.dtype) for y in (self.x, self.gate, dout))
        one = Pass(is_back, of_x, of_gate, of_dout, is_linked=is_linked, is_double=self.real.itemsize == 8,
                   is_complex=self.is_complex, mark=marked)  # fmt: skip
        parameters: list[Array | None] = []
        if isinstance(x, GatedInputs):
            parameters = [_rows(y)[0] for y in x.parameters]
            write, is_real = None if x.z is None else name_of(x.z.dtype), self.is_complex and not is_complex(x.x)
            one = one._replace(formula=1 + (*FORMULAS, AVERAGE).index(x.formula), write=write, is_real=is_real)
        else:
            one = one._replace(is_log=x.g is not None and not self.is_array_log, is_constant=x.is_constant)
        built = constants(cut, one, self.size)
        if is_linked:
            link = 8 + 4 * self.kind.itemsize if self.is_average else 2 * self.kind.itemsize  # bytes
            width = link // 8 * columns * cut.channels
            words = record.empty((1 + tiles * width,), np.dtype(np.float64))  # of 64 bits
            packed = CLEAR.pack(words=words.data.ptr, count=words.size)
            launch.launch(self.source, "clear", built, -(-words.size // THREADS), THREADS, 0, packed, (words,))
        table, offsets = self.table(cut, is_back)
        marks = self.cut(True)
        packed = SCAN.pack(
            **rows, start=address(own["start"]), end=own["end"].data.ptr, marks=address(own["marks"]),
            words=address(words), offsets=address(offsets), table=address(table), scale=float(self.plan.scale), D=D,
            columns=columns, sequences=self.N, T=self.T, tiles=per, marks_each=marks.tiles(self.T), blocks=blocks,
            parameters=[z for y in (*parameters, *(None,) * (3 - len(parameters))) for z in _parameter(y)],
            sums=address(own.get("sums")), **{n: address(own.get(n)) for n in ("start_n", "start_m", "last")},
        )  # fmt: skip
        arrays = tuple(y for y in (*given.values(), *own.values(), *parameters, words, offsets, table) if y is not None)
        launch.launch(self.source, self.entry, built, blocks, 32 * cut.warps, 0, packed, arrays)

    def table(self, cut: Cut, is_back: bool) -> tuple[Array | None, Array | None]:
        """(the tiles in the order in which they are taken, the offsets) of a ragged batch, on the device."""
        if self.offsets is None:
            return None, None
        xp, edges, back = self.plan.xp, self.offsets, self.cut(True)
        counts, marks = ([c.tiles(b - a) for a, b in pairwise(edges)] for c in (cut, back))
        firsts, first_marks = (np.cumsum([0, *each]) for each in (counts, marks))
        found = [(n, j, firsts[n], first_marks[n]) for n, count in enumerate(counts) for j in range(count)]
        table = np.array(sorted(found, key=lambda row: (row[1], row[0])), np.int32)
        return xp.asarray(table), xp.asarray(np.array(edges, np.int64))


def _parameter(y: Array | None) -> tuple[int, int]:
    """The PARAMETER struct of an array (D,)."""
    return (0, 0) if y is None else (y.data.ptr, KINDS[name_of(y.dtype)])


def _rows(y: Array | None) -> tuple[Array | None, tuple[int, int, int]]:
    """(an array (..., T, D) or (D,), copied unless its channels lie together, its TOKENS struct)."""
    if y is None:
        return None, NO_TOKENS
    if y.ndim == 1:
        y = y if y.shape[0] == 1 or y.strides[0] == y.itemsize else _dense(y)
        return y, (y.data.ptr, 0, 0)
    if (steps := _strides(y)) is None:
        y = _dense(y)
        steps = y.shape[-2] * y.shape[-1] * y.itemsize, y.shape[-1] * y.itemsize
    return y, (y.data.ptr, *steps)


def _strides(y: Array) -> tuple[int, int] | None:
    """(bytes from one sequence to the next, from one token to the next); None where they are several."""
    if 0 in y.shape:
        return 0, 0
    if y.shape[-1] > 1 and y.strides[-1] != y.itemsize:
        return None
    axes = [(n, t) for n, t in zip(y.shape[:-2], y.strides[:-2], strict=True) if n > 1]
    if any(t != n * u for (_, t), (n, u) in pairwise(axes)):
        return None
    return (axes[-1][1] if axes else 0), (y.strides[-2] if y.shape[-2] > 1 else 0)


def _dense(y: Array) -> Array:
    """A dense copy."""
    if is_complex(y):
        return y.copy()
    return formulas.compiled("copy", (y,), (tuple(y.shape), y.dtype), np.float64 if y.itemsize == 8 else np.float32)
