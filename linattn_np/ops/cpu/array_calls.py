"""Traced array calls (runtime/tracing.py), replayed by one compiled loop on other arrays of the same layout.

A NumPy function takes a microsecond for a few numbers, its inner loop a few nanoseconds. The loop here calls those
inner loops, C functions that NumPy's C API describes (PyUFuncObject), on recorded addresses and steps: the same
function on the same numbers gives the same bits. Casts and `where` are its own.

A program (programs.py) is a table of rows

    kind, function, its data, inner size, two outer sizes, item size, arrays;   of each array: source, offset, 3 steps

source: an index of the handles that a call passes, or ABSOLUTE. Results lie in one buffer, whose handle follows those
of the given arrays. A kernel has a launch (runtime/pieces/run.py), its tasks, and the source and offset of its memory.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ...runtime.pieces.memory import ALIGNED
from ...runtime.pieces.piece import JIT, Whole, piece
from ...runtime.pieces.run import HANDLES, LAUNCH, start
from ...runtime.pieces.tiles import copy_row
from ...runtime.pieces.vectors import I64, emitted, indirect_call
from ...runtime.pieces.views import words
from ...runtime.tracing import Untraceable
from .storage import from_bfloat16, from_float16

ABSOLUTE = -1
LOOP, SUM, EXTREME, WHERE, COPY, WIDEN, NARROW, HALF, BRAIN, KERNEL = range(10)
HEAD, EACH, MOST = 8, 5, 4  # words before the arrays, words of each, arrays of a row at most
ROW = HEAD + EACH * MOST
F4, F8, U1, U2, U4, U8 = np.float32(0), np.float64(0), np.uint8(0), np.uint16(0), np.uint32(0), np.uint64(0)


# inner loops of NumPy


class _Function(ctypes.Structure):
    """The head of a PyUFuncObject."""

    _fields_ = [
        ("object", ctypes.c_char * object.__basicsize__), ("nin", ctypes.c_int), ("nout", ctypes.c_int),
        ("nargs", ctypes.c_int), ("identity", ctypes.c_int), ("functions", ctypes.POINTER(ctypes.c_void_p)),
        ("data", ctypes.POINTER(ctypes.c_void_p)), ("ntypes", ctypes.c_int),
    ]  # fmt: skip


@functools.cache
def has_loops() -> bool:
    """Whether NumPy's functions can be read as its C API describes them."""
    if not JIT:
        return False
    for ufunc in (np.add, np.exp, np.greater, np.maximum):
        head = _Function.from_address(id(ufunc))
        if (head.nin, head.nout, head.nargs, head.ntypes) != (ufunc.nin, ufunc.nout, ufunc.nargs, ufunc.ntypes):
            return False
    return True


def inner_loop(ufunc: Any, dtypes: tuple[np.dtype, ...]) -> tuple[int, int]:
    """(address, data) of the inner loop for dtypes of inputs and output."""
    chars = [d.char for d in dtypes]
    code = "".join(chars[:-1]) + "->" + chars[-1]
    if code not in ufunc.types:
        raise Untraceable(f"{ufunc.__name__} of {code}")
    head, n = _Function.from_address(id(ufunc)), ufunc.types.index(code)
    return head.functions[n] or 0, head.data[n] or 0


def _compiled_only(*_: Any) -> Any:
    raise NotImplementedError("array calls are executed by compiled code only")


@emitted(lambda function, data, arguments: _compiled_only())
def call_loop(b: ir.IRBuilder, function: ir.Value, data: ir.Value, arguments: ir.Value) -> None:
    """function(pointers, size, steps, data): `arguments` has MOST pointers, the size, and MOST steps."""
    indirect_call(b, function, [arguments, b.add(arguments, I64(8 * MOST)), b.add(arguments, I64(8 * MOST + 8)), data])


@emitted(lambda at, count, like: _compiled_only(), lambda at, count, like: types.Array(like, 1, "C"))
def numbers(b: ir.IRBuilder, at: ir.Value, count: ir.Value, like: ir.Value) -> Any:
    """`count` numbers of the dtype of `like` at an address."""
    return at, [count], []


# the compiled loop


@piece
def select(own: Whole, n: Whole, size: Whole):
    """where: own has pointers (condition, x, y, out), n, and steps."""
    a = words(own, 2 * MOST + 1)
    step_x, step_y = a[MOST + 2], a[MOST + 3]
    if size == 4 and a[MOST + 1] == 1 and a[MOST + 4] == 4 and (
        (step_x == 4 and step_y == 4) or (step_x == 0 and step_y == 4) or (step_x == 4 and step_y == 0)):  # fmt: skip
        c, x, y, out = numbers(a[0], n, U1), numbers(a[1], n, U4), numbers(a[2], n, U4), numbers(a[3], n, U4)
        if step_x == step_y:
            for i in range(n):
                out[i] = y[i] ^ ((x[i] ^ y[i]) & -np.uint32(c[i]))  # c is 0 or 1: no branch, so that vectors are used
        elif step_x == 0:
            one = x[0]
            for i in range(n):
                out[i] = one if c[i] else y[i]
        else:
            other = y[0]
            for i in range(n):
                out[i] = x[i] if c[i] else other
    else:
        for i in range(n):
            chosen = 1 if numbers(a[0] + i * a[MOST + 1], 1, U1)[0] else 2
            at, to = a[chosen] + i * a[MOST + 1 + chosen], a[3] + i * a[MOST + 4]
            if size == 4:
                numbers(to, 1, U4)[0] = numbers(at, 1, U4)[0]
            else:
                numbers(to, 1, U8)[0] = numbers(at, 1, U8)[0]


@piece
def copied(own: Whole, n: Whole, size: Whole):
    """out = x: own has pointers (x, out), n, and steps."""
    a = words(own, 2 * MOST + 1)
    if size == 4 and a[MOST + 1] == 4 and a[MOST + 2] == 4:
        copy_row(numbers(a[0], n, F4), numbers(a[1], n, F4), n)
    elif size == 8 and a[MOST + 1] == 8 and a[MOST + 2] == 8:
        copy_row(numbers(a[0], n, F8), numbers(a[1], n, F8), n)
    else:
        for i in range(n):
            at, to = a[0] + i * a[MOST + 1], a[1] + i * a[MOST + 2]
            if size == 4:
                numbers(to, 1, U4)[0] = numbers(at, 1, U4)[0]
            else:
                numbers(to, 1, U8)[0] = numbers(at, 1, U8)[0]


@piece
def widen(own: Whole, n: Whole, size: Whole, kind: Whole):
    """out = x in the dtype of `size` bytes: own has pointers (x, out), n, and steps."""
    a = words(own, 2 * MOST + 1)
    step, to_step = a[MOST + 1], a[MOST + 2]
    for i in range(n):
        at, to = a[0] + i * step, a[1] + i * to_step
        if kind == WIDEN:
            numbers(to, 1, F8)[0] = numbers(at, 1, F4)[0]
        elif kind == NARROW:
            numbers(to, 1, F4)[0] = numbers(at, 1, F8)[0]
        else:
            bits = numbers(at, 1, U2)[0]
            y = from_float16(bits) if kind == HALF else from_bfloat16(bits)
            if size == 4:
                numbers(to, 1, F4)[0] = y
            else:
                numbers(to, 1, F8)[0] = y


@piece
def clear_or_copy(own: Whole, kind: Whole, size: Whole):
    """The first value of a reduction: 0 of a sum; of an extreme the first number, which is then left out."""
    a = words(own, 2 * MOST + 1)
    if size == 4:
        numbers(a[0], 1, U4)[0] = 0
    else:
        numbers(a[0], 1, U8)[0] = 0
    if kind == EXTREME:  # apart from the 0: Numba makes numbers of 64 bits and 0 a float64, which has 53
        if size == 4:
            numbers(a[0], 1, U4)[0] = numbers(a[1], 1, U4)[0]
        else:
            numbers(a[0], 1, U8)[0] = numbers(a[1], 1, U8)[0]
        a[1] += a[MOST + 2]
        a[MOST] -= 1


@piece
def run_row(at: Whole, told: Whole, own: Whole):
    """One array call: over the outer axes, the inner loop."""
    r, a = words(at, ROW), words(own, 2 * MOST + 1)
    kind, size, count = r[0], r[6], r[7]
    for i in range(r[5]):
        for k in range(r[4]):
            for j in range(count):
                n = HEAD + EACH * j
                base = 0
                if r[n] >= 0:
                    base = words(words(told, r[n] + 1)[r[n]], 1)[0]
                a[j] = base + r[n + 1] + i * r[n + 4] + k * r[n + 3]
                a[MOST + 1 + j] = r[n + 2]
            a[MOST] = r[3]
            if kind == WHERE:
                select(own, r[3], size)
            elif kind == COPY:
                copied(own, r[3], size)
            elif kind >= WIDEN:
                widen(own, r[3], size, kind)
            else:
                if kind != LOOP:
                    clear_or_copy(own, kind, size)
                call_loop(r[1], r[2], own)


@piece
def array_calls(program: Whole, count: Whole, told: Whole, buffer: Whole):
    """All calls of a program; buffer: the index of the handle of its results."""
    own = words(words(told, buffer + 1)[buffer], 1)[0]
    for n in range(count):
        at = program + 8 * ROW * n
        if words(at, 1)[0] == KERNEL:
            more = words(at + 8 + 8 * LAUNCH, 3)
            base = words(words(told, more[1] + 1)[more[1]], 1)[0] + more[2]
            start(at + 8, told, (base + ALIGNED - 1) & -ALIGNED, 0, more[0])
        else:
            run_row(at, told, own)


@piece
def calls_around(whole: Whole, told: Whole, base: Whole):
    """All tasks of a launch between two programs; none after it if nothing was done.

    whole: the launch, its tasks, the index of the handle of results, and table and rows of each program.
    """
    w = words(whole, 7)
    flag = words(w[0], LAUNCH)[HANDLES]
    array_calls(w[3], w[4], told, w[2])
    start(w[0], told, base, 0, w[1])
    if not words(told, flag + 1)[flag]:
        array_calls(w[5], w[6], told, w[2])
