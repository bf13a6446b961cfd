"""The causal short convolution in compiled loops: ops/short_conv.py has the equations.

Rows are the tokens of all sequences, one after the other: `length` of each; in a ragged batch `place` is the number of
a token within its sequence, and `owner` its sequence. Taps that reach before the first token read the last of the S
inputs `past` of the sequence, of its row of a pool, or nothing.
Four tokens are computed together: their inputs and taps are loaded once. Tasks are blocks of tokens, forward. Backward,
they are blocks of channels times segments of tokens, which go from the last token to the first:

    dz_t = dy_t act'(z_t)      dx_t = sum_i taps_{W-1-i} dz_{t+i} (+ dy_t)      dtaps_{W-1-i} += dz_t x_{t-i}

Sums over segments have one order, whatever the number of threads. dz of the first W - 1 tokens of a sequence is
computed again for the gradient of `past`. All that a call computes is kernels: it can be recorded.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ...runtime.constants import constant_zeros
from ...runtime.pieces.memory import address, empty, working
from ...runtime.pieces.piece import Whole, WholeVector, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import numbers_at, row, start_of
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from ...runtime.recorder import constant
from ..sequences import Sequences, table
from ..short_conv import ShortConv, ShortConvGrads
from .conv_tiles import GROUP, convolution, slopes
from .formulas import dense
from .loops import over
from .numbers import OPTIONS
from .row_norms import plus, rows_of
from .rows import fill
from .sums import over_first

BLOCK = 2**15  # numbers of a task's tokens, forward
CHANNELS, TOKENS, NEAR = 2048, 512, 16  # of a task, backward; tokens whose dz lie in the second cache
FAR = 1 << 24  # bytes of a result that is written past the caches
SEGMENTS = 64  # at most: each has its own sums
CONV = Workspace(
    "short_conv", ("count", "D", "S", "each", "few", "segment", "segments", "silu", "biased", "residual", "streamed",
                   "length", "pooled"), (), (), {"given": {
        "x": Field("count", "D"), "dy": Field("count", "D"), "out": Field("count", "D"), "taps": Field("W", "D"),
        "past": Field("places", "D"), "bias": Field("one", "D"), "dtaps": Field("parts", "D"),
        "dbias": Field("segments", "D"), "dz": Field("slots", "each"), "waste": Field("wasted", "each"),
        "zeros": Field("one", "D"), "at": Field("tasks", "window", dtype="int64"),
        "place": Field("count", dtype="int64"), "owner": Field("count", dtype="int64"),
        "start": Field("N", dtype="int64"), "size": Field("N", dtype="int64"), "rows": Field("N", dtype="int64"),
        "dpast": Field("slots_of_past", "D")}})  # fmt: skip
Work = workspace_kind(CONV)


@piece
def place_of(w: Work, t: Whole) -> Whole:
    """The number of a token within its sequence."""
    return t % w.length if w.length else w.place[t]


@piece
def before(w: Work, t: Whole, i: Whole) -> Whole:
    """The address of the input i >= 1 before the first token of the sequence of t, or of zeros."""
    if w.S == 0:
        return start_of(w.zeros, 0)
    n = t // w.length if w.length else w.owner[t]
    n = w.rows[n] if w.pooled else n
    return start_of(w.zeros, 0) if n < 0 else start_of(w.past, n * w.S + w.S - i)


@piece
def find(w: Work, t: Whole, at: WholeVector):
    """at_i = the address of x_{t - i}: a token, an input before the first one, or zeros."""
    place = place_of(w, t)
    reach = min(place, w.W - 1)
    for i in range(reach + 1):
        at[i] = start_of(w.x, t - i)
    for i in range(reach + 1, w.W):
        at[i] = before(w, t, i - place)


@piece
def together(w: Work, t: Whole, stop: Whole, at: WholeVector) -> Whole:
    """How many tokens R are computed together, 1 near a first token; at_m = the address of x_{t + R - 1 - m}."""
    last, place = t + GROUP - 1, place_of(w, t)
    if last < stop and place >= w.W - 1 and place_of(w, last) == place + GROUP - 1:
        for m in range(GROUP + w.W - 1):
            at[m] = start_of(w.x, last - m)
        return GROUP
    find(w, t, at)
    return 1


@njit(**OPTIONS)
def same(x: Any, *_: Any) -> Any:
    return x


@njit(**OPTIONS)
def plus_product(x: Any, y: Any, z: Any, _: Any) -> Any:
    return x + y * z


class Kernels(NamedTuple):
    """Forward and backward of one width, and the gradient of the inputs before."""

    forward: Any
    backward: Any
    past: Any


@functools.cache
def kernels(W: int) -> Kernels:
    """The loops of a width."""
    plain_1, silu_1 = (convolution(1, W, act) for act in (False, True))
    plain_4, silu_4 = (convolution(GROUP, W, act, ahead=True) for act in (False, True))
    plain_far, silu_far = (convolution(GROUP, W, act, streamed=True, ahead=True) for act in (False, True))
    back_4, back_far = (convolution(GROUP, W, False, streamed=far) for far in (False, True))
    (slopes_1, slopes_4), (copies_1, copies_4) = ([slopes(R, W, act) for R in (1, GROUP)] for act in (True, False))

    def forward(w: Work, begin: Whole, end: Whole):
        """out = act(z) of tasks begin..end of `each` tokens."""
        step, bias, x_too = start_of(w.out, 1) - start_of(w.out, 0), row(w.bias, 0), w.residual != 0
        for task in range(begin, end):
            at, t, stop = row(w.at, task), task * w.each, min((task + 1) * w.each, w.count)
            while t < stop:
                count, out = together(w, t, stop, at), row(w.out, t)
                if count == 1:
                    if w.silu:
                        silu_1(at, w.taps, bias, 0, x_too, out, step)
                    else:
                        plain_1(at, w.taps, bias, 0, x_too, out, step)
                elif w.streamed and w.silu:
                    silu_far(at, w.taps, bias, 0, x_too, out, step)
                elif w.streamed:
                    plain_far(at, w.taps, bias, 0, x_too, out, step)
                elif w.silu:
                    silu_4(at, w.taps, bias, 0, x_too, out, step)
                else:
                    plain_4(at, w.taps, bias, 0, x_too, out, step)
                t += count

    def gradients(w: Work, task: Whole, t: Whole, stop: Whole, base: Whole, waste: Whole):
        """dz of tokens t..stop, in rows t - base of the task, and their part of dtaps and dbias; waste: of nothing."""
        segment, first, at = task % w.segments, task // w.segments * w.each, row(w.at, task)
        n, shift = min(w.each, w.D - first), first * w.zeros.itemsize
        step, own = start_of(w.dz, 1) - start_of(w.dz, 0), task * (NEAR + W - 1) - base
        sums, bias = start_of(w.dtaps, segment * W) + shift, start_of(w.dbias, segment) + shift
        apart = start_of(w.dtaps, 1) - start_of(w.dtaps, 0)
        if waste:
            sums = start_of(w.waste, task * (W + 1))
            bias, apart = sums + W * step, step
        while t < stop:
            count, dz = together(w, t, stop, at), numbers_at(w.zeros, start_of(w.dz, own + t), n)
            dy = start_of(w.dy, t) + shift
            rows = (dy, start_of(w.dy, 1) - start_of(w.dy, 0), step, sums, apart, bias)
            if count == 1:
                if w.silu:
                    slopes_1(at, w.taps, row(w.bias, 0), first, rows, dz)
                else:
                    copies_1(at, w.taps, row(w.bias, 0), first, rows, dz)
            elif w.silu:
                slopes_4(at, w.taps, row(w.bias, 0), first, rows, dz)
            else:
                copies_4(at, w.taps, row(w.bias, 0), first, rows, dz)
            t += count

    def inputs(w: Work, task: Whole, t: Whole, stop: Whole, base: Whole):
        """dx of tokens t..stop from dz in rows t - base of the task."""
        first, at = task // w.segments * w.each, row(w.at, task)
        n, shift, own = min(w.each, w.D - first), first * w.zeros.itemsize, task * (NEAR + W - 1) - base
        step, none = start_of(w.out, 1) - start_of(w.out, 0), start_of(w.zeros, 0)
        while t < stop:
            far, count, place = t + GROUP + W - 2, 1, place_of(w, t)
            if t + GROUP <= stop and far < w.count and place_of(w, far) == place + GROUP + W - 2:
                count = GROUP
            for m in range(count + W - 1):
                inside = count > 1 or (t + m < w.count and place_of(w, min(t + m, w.count - 1)) == place + m)
                at[m] = start_of(w.dz, own + t + m) - shift if inside else none
            dx = numbers_at(w.zeros, start_of(w.out, t + count - 1) + shift, n)
            if count == 1:
                plain_1(at, w.taps, row(w.zeros, 0), first, False, dx, -step)
            elif w.streamed and not w.residual:
                back_far(at, w.taps, row(w.zeros, 0), first, False, dx, -step)
            else:
                back_4(at, w.taps, row(w.zeros, 0), first, False, dx, -step)
            t += count

    slope, back = named(gradients, W), named(inputs, W)

    def backward(w: Work, begin: Whole, end: Whole):
        """out = dx, dtaps and dbias, of tasks begin..end: `each` channels of a segment of tokens."""
        for task in range(begin, end):
            segment, first = task % w.segments, task // w.segments * w.each
            n, size, own = min(w.each, w.D - first), w.zeros.itemsize, task * (NEAR + W - 1)
            stop = min((segment + 1) * w.segment, w.count)
            base = stop - NEAR
            for i in range(W + 1):
                to = start_of(w.dtaps, segment * W + i) if i < W else start_of(w.dbias, segment)
                fill(numbers_at(w.zeros, to + first * size, n), 0.0)
            slope(w, task, stop, min(stop + W - 1, w.count), base, 1)
            while stop > segment * w.segment:
                t = max(stop - NEAR, segment * w.segment)
                slope(w, task, t, stop, base, 0)
                back(w, task, t, stop, base)
                for m in range(W - 1):  # the dz behind the tokens before
                    dz = numbers_at(w.zeros, start_of(w.dz, own + t - base + m), n)
                    over(same, dz, dz, dz, 0, numbers_at(dz, start_of(w.dz, own + NEAR + m), n))
                for r in range(t, stop if w.residual else t):
                    dx = numbers_at(w.zeros, start_of(w.out, r) + first * size, n)
                    over(plus, dx, numbers_at(dx, start_of(w.dy, r) + first * size, n), dx, 0, dx)
                stop, base = t, t - NEAR

    def past(w: Work, begin: Whole, end: Whole):
        """dpast_j = sum_i taps_{W-1-i-j} dz_i of the tokens i < W - j of a sequence, j before its first one."""
        for task in range(begin, end):
            at, dz, step = row(w.at, task), row(w.dz, task), start_of(w.waste, 1) - start_of(w.waste, 0)
            for n in range(task * w.few, min((task + 1) * w.few, w.N)):
                first, count = (n * w.length, w.length) if w.length else (w.start[n], w.size[n])
                for s in range(n * w.S, (n + 1) * w.S):
                    fill(row(w.dpast, s), 0.0)
                for i in range(min(count, W - 1)):
                    find(w, first + i, at)
                    none = start_of(w.waste, task * (W + 1))
                    sums = (start_of(w.dy, first + i), 0, 0, none, step, none + W * step)
                    if w.silu:
                        slopes_1(at, w.taps, row(w.bias, 0), 0, sums, dz)
                    else:
                        copies_1(at, w.taps, row(w.bias, 0), 0, sums, dz)
                    for j in range(1, W - i):
                        d = row(w.dpast, n * w.S + w.S - j)
                        over(plus_product, d, dz, row(w.taps, W - 1 - i - j), 0, d)

    return Kernels(named(forward, W), named(backward, W), named(past, W))


def named(body: Any, W: int) -> Any:
    """The piece of a width."""
    body.__name__ = f"{body.__name__}_{W}"
    return piece(body)


def forward(
    sequences: Sequences, x: np.ndarray, conv: ShortConv, state: np.ndarray | None, rows: np.ndarray | None = None
) -> np.ndarray:
    """As ops/short_conv.py, x not empty; rows (N,): where `state` is a pool (P, S, D), -1: none."""
    out, each = empty(x.shape, x.dtype), max(BLOCK // x.shape[-1], 1)
    held, sizes = _arguments(sequences, x, conv, state, rows)
    tasks = -(-sizes["count"] // each)
    held |= {"out": rows_of(out, x.shape[-1]), "at": _windows(tasks, sizes)}
    sizes |= {"each": each, "tasks": tasks, "streamed": int(_is_streamed(out))}
    over_matrices(kernels(sizes["W"]).forward, CONV, sizes | held, tasks, x.dtype.name)
    return out


def backward(
    sequences: Sequences, x: np.ndarray, conv: ShortConv, state: np.ndarray | None, dy: np.ndarray
) -> ShortConvGrads:
    """Likewise, but dtaps (W, D) in the place of dweight."""
    held, sizes = _arguments(sequences, x, conv, state)
    held |= {"dy": rows_of(dy, x.shape[-1])}
    dx, dtaps, dbias = _gradients(x, dict(held), dict(sizes))
    dstate = None if state is None else _past_vjp(state, held, sizes)
    return ShortConvGrads(dx, dtaps, None if conv.bias is None else dbias, dstate)


def _gradients(
    x: np.ndarray, held: dict[str, np.ndarray], sizes: dict[str, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dx, dtaps, dbias)"""
    dx, W, D, dtype = empty(x.shape, x.dtype), sizes["W"], sizes["D"], x.dtype
    segment, each = _segment(x), min(CHANNELS, D)
    segments = -(-sizes["count"] // segment)
    tasks = -(-D // each) * segments
    dtaps, dbias = working((segments * W, D), dtype), working((segments, D), dtype)
    held |= {
        "out": rows_of(dx, D),
        "dtaps": dtaps,
        "dbias": dbias,
        "at": _windows(tasks, sizes),
        "dz": working((tasks * (NEAR + W - 1), each), dtype),
        "waste": working((tasks * (W + 1), each), dtype),
    }
    sizes |= {"each": each, "segment": segment, "segments": segments, "tasks": tasks, "parts": segments * W,
              "slots": tasks * (NEAR + W - 1), "wasted": tasks * (W + 1),
              "streamed": int(_is_streamed(dx))}  # fmt: skip
    over_matrices(kernels(W).backward, CONV, sizes | held, tasks, dtype.name)
    sums = [over_first(y.reshape(1, segments, -1))[0] for y in (dtaps, dbias)]
    return dx, sums[0].reshape(W, D), sums[1]


def _past_vjp(state: np.ndarray, held: dict[str, np.ndarray], sizes: dict[str, int]) -> np.ndarray:
    """The gradient of the inputs before the first tokens, in the shape of `state`."""
    dpast, D, dtype = empty(state.shape, state.dtype), sizes["D"], state.dtype
    if not state.size:
        return dpast
    W, N = sizes["W"], dpast.size // (sizes["S"] * D)
    each = max(BLOCK // (D * W), 1)
    tasks = -(-N // each)
    held = held | {"dpast": dpast.reshape(-1, D), "at": _windows(tasks, sizes), "dz": working((tasks, D), dtype),
                   "waste": working((tasks * (W + 1), D), dtype)}  # fmt: skip
    sizes = sizes | {"each": D, "N": N, "tasks": tasks, "slots": tasks, "wasted": tasks * (W + 1),
                     "slots_of_past": N * sizes["S"]}  # fmt: skip
    over_matrices(kernels(W).past, CONV, sizes | {"few": each} | held, tasks, dtype.name)
    return dpast


def _windows(tasks: int, sizes: dict[str, int]) -> np.ndarray:
    """Of each task the addresses of the inputs of a few tokens."""
    return working((tasks, sizes["window"]), np.dtype(np.int64))


def _arguments(
    sequences: Sequences, x: np.ndarray, conv: ShortConv, state: np.ndarray | None, rows: np.ndarray | None = None
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """(arrays, sizes) of all kernels."""
    (W, D), dtype, S = conv.weight.shape[::-1], x.dtype, 0 if state is None else state.shape[-2]
    none = constant_zeros(np, (1, D), dtype, "cpu")
    held = {"x": rows_of(x, D), "taps": dense(conv.weight.T, dtype), "zeros": none,
            "bias": none if conv.bias is None else dense(conv.bias, dtype)[None],
            "past": none if state is None or not state.size else dense(state, dtype).reshape(-1, D)}  # fmt: skip
    sizes = {"count": x.size // D, "D": D, "W": W, "S": S, "silu": int(conv.activation == "silu"),
             "biased": int(conv.bias is not None), "residual": int(conv.residual), "pooled": int(rows is not None),
             "places": len(held["past"]), "one": 1, "window": W + GROUP}  # fmt: skip
    if sequences.offsets is None:
        sizes |= {"length": x.shape[-2], "N": sizes["count"] // x.shape[-2]}
    else:
        held |= dict(zip(("place", "owner", "start", "size"), map(constant, table(sequences.offsets)), strict=True))
        sizes |= {"length": 0, "N": len(held["start"])}
    if rows is not None:
        held["rows"] = constant(np.ascontiguousarray(rows, np.int64))
    return held, sizes


def _segment(x: np.ndarray) -> int:
    """Tokens of a segment: at most SEGMENTS of them, of whole blocks of NEAR tokens."""
    count = x.size // max(x.shape[-1], 1)
    return max(TOKENS, -(-count // SEGMENTS // NEAR) * NEAR)


def _is_streamed(out: np.ndarray) -> bool:
    """Whether a result is written past the caches: it is larger than they are, and its rows are aligned."""
    return out.nbytes >= FAR and out.flags.c_contiguous and not (address(out) % BYTES or out.strides[-2] % BYTES)
