"""The causal short convolution in compiled loops: ops/short_conv.py has the equations.

Rows are the tokens of all sequences, one after the other; `place` is the number of a token within its sequence, `owner`
its sequence. Taps that reach before the first token read the last of the S inputs `past` of the sequence, or nothing.
Four tokens are computed together: their inputs and taps are loaded once. Tasks are blocks of tokens, forward. Backward,
they are blocks of channels times segments of tokens, which go from the last token to the first:

    dz_t = dy_t act'(z_t)      dx_t = sum_i taps_{W-1-i} dz_{t+i} (+ dy_t)      dtaps_{W-1-i} += dz_t x_{t-i}

Sums over segments have one order, whatever the number of threads.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ...runtime.doorway import WHOLE, expect, expect_one_dtype, expect_whole
from ...runtime.pieces.memory import address, empty
from ...runtime.pieces.piece import Whole, WholeVector, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import numbers_at, row, start_of
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from ..sequences import Sequences, table
from ..short_conv import ShortConv, ShortConvGrads
from ..short_conv import short_conv_vjp as array_vjp
from .conv_tiles import GROUP, convolution, slopes
from .loops import over
from .numbers import OPTIONS
from .row_norms import plus, rows_of

BLOCK = 2**15  # numbers of a task's tokens, forward
CHANNELS, TOKENS, NEAR = 512, 1024, 32  # of a task, backward; tokens whose dz lie in the second cache
FAR = 1 << 24  # bytes of a result that is written past the caches
SEGMENTS = 64  # at most: each has its own sums
CONV = Workspace(
    "short_conv", ("count", "D", "S", "each", "segment", "segments", "silu", "biased", "residual", "streamed"), (), (),
    {"given": {
        "x": Field("count", "D"), "dy": Field("count", "D"), "out": Field("count", "D"), "taps": Field("W", "D"),
        "past": Field("places", "D"), "bias": Field("one", "D"), "dtaps": Field("parts", "D"),
        "dbias": Field("segments", "D"), "dz": Field("slots", "each"), "waste": Field("wasted", "each"),
        "zeros": Field("one", "D"), "at": Field("tasks", "window", dtype="int64"),
        "place": Field("count", dtype="int64"), "owner": Field("count", dtype="int64"),
    }})  # fmt: skip
Work = workspace_kind(CONV)


@piece
def find(w: Work, t: Whole, at: WholeVector):
    """at_i = the address of x_{t - i}: a token, an input before the first one, or zeros."""
    place = w.place[t]
    reach = min(place, w.W - 1)
    for i in range(reach + 1):
        at[i] = start_of(w.x, t - i)
    for i in range(reach + 1, w.W):
        at[i] = start_of(w.past, w.owner[t] * w.S + w.S + place - i) if w.S else start_of(w.zeros, 0)


@piece
def together(w: Work, t: Whole, stop: Whole, at: WholeVector) -> Whole:
    """How many tokens R are computed together, 1 near a first token; at_m = the address of x_{t + R - 1 - m}."""
    last = t + GROUP - 1
    if last < stop and w.place[t] >= w.W - 1 and w.place[last] == w.place[t] + GROUP - 1:
        for m in range(GROUP + w.W - 1):
            at[m] = start_of(w.x, last - m)
        return GROUP
    find(w, t, at)
    return 1


@njit(**OPTIONS)
def same(x: Any, *_: Any) -> Any:
    return x


class Kernels(NamedTuple):
    """Forward and backward of one width."""

    forward: Any
    backward: Any


@functools.cache
def kernels(W: int) -> Kernels:
    """The loops of a width."""
    plain, silu = ([convolution(R, W, act) for R in (1, GROUP)] for act in (False, True))
    (plain_1, plain_4), (silu_1, silu_4) = plain, silu
    plain_far, silu_far = (convolution(GROUP, W, act, True) for act in (False, True))
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
            far, count = t + GROUP + W - 2, 1
            if t + GROUP <= stop and far < w.count and w.place[far] == w.place[t] + GROUP + W - 2:
                count = GROUP
            for m in range(count + W - 1):
                inside = t + m < w.count and w.place[min(t + m, w.count - 1)] == w.place[t] + m
                at[m] = start_of(w.dz, own + t + m) - shift if inside else none
            dx = numbers_at(w.zeros, start_of(w.out, t + count - 1) + shift, n)
            if count == 1:
                plain_1(at, w.taps, row(w.zeros, 0), first, False, dx, -step)
            elif w.streamed and not w.residual:
                plain_far(at, w.taps, row(w.zeros, 0), first, False, dx, -step)
            else:
                plain_4(at, w.taps, row(w.zeros, 0), first, False, dx, -step)
            t += count

    slope, back = named(gradients, W), named(inputs, W)

    def backward(w: Work, begin: Whole, end: Whole):
        """out = dx, dtaps and dbias, of tasks begin..end: `each` channels of a segment of tokens."""
        for task in range(begin, end):
            segment, first = task % w.segments, task // w.segments * w.each
            n, size, own = min(w.each, w.D - first), w.zeros.itemsize, task * (NEAR + W - 1)
            stop = min((segment + 1) * w.segment, w.count)
            base = stop - NEAR
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

    return Kernels(named(forward, W), named(backward, W))


def named(body: Any, W: int) -> Any:
    """The piece of a width."""
    body.__name__ = f"{body.__name__}_{W}"
    return piece(body)


def forward(sequences: Sequences, x: np.ndarray, conv: ShortConv, state: np.ndarray | None) -> np.ndarray:
    """As ops/short_conv.py, x not empty."""
    return _computed(x, *_told(sequences, x, conv, state))


def backward(
    sequences: Sequences, x: np.ndarray, conv: ShortConv, state: np.ndarray | None, dy: np.ndarray
) -> ShortConvGrads:
    """Likewise; only the first W - 1 tokens of a sequence have a part in the gradient of its state."""
    dx, dtaps, dbias = _gradients(x, *_told(sequences, x, conv, state), dy)
    dstate = None if state is None else _state_vjp(sequences, x, conv, state, dy)
    return ShortConvGrads(dx, np.ascontiguousarray(dtaps.T), dbias, dstate)


def _told(sequences: Sequences, x: np.ndarray, conv: ShortConv, state: np.ndarray | None) -> tuple[Taps, Tokens]:
    """The arguments of the loops."""
    *lead, T, D = x.shape
    if sequences.offsets is None:
        place = np.broadcast_to(np.arange(T), (*lead, T))
        owner = None if state is None else np.repeat(np.arange(x.size // (T * D)), T).reshape(place.shape)
    else:
        at = table(sequences.offsets)
        place, owner = (y.reshape(*lead, T) for y in (at.place, at.owner))
    past = None if state is None else state.reshape(prod(state.shape[:-2]), *state.shape[-2:])
    return Taps(conv.weight.T, conv.bias, conv.activation == "silu", conv.residual), Tokens(place, owner, past)


def _state_vjp(
    sequences: Sequences, x: np.ndarray, conv: ShortConv, state: np.ndarray, dy: np.ndarray
) -> np.ndarray | None:
    """dstate, by array calls on the first W - 1 tokens of each sequence."""
    reach = max(conv.weight.shape[-1] - 1, 1)
    if sequences.offsets is None:
        return array_vjp(sequences, x[..., :reach, :], conv, state, dy[..., :reach, :]).state
    at = table(sequences.offsets)
    rows = at.start[:, None] + np.arange(reach)[None]
    there = (np.arange(reach)[None] < at.length[:, None])[..., None]
    heads, d = (np.where(there, y.reshape(-1, y.shape[-1])[np.minimum(rows, y.shape[-2] - 1)], 0) for y in (x, dy))
    return array_vjp(Sequences(sequences.xp), heads.astype(x.dtype), conv, state, d.astype(x.dtype)).state


class Taps(NamedTuple):
    """Weights (W, D), the last one for the token itself; bias (D,) or None; silu; whether x is added."""

    taps: np.ndarray
    bias: np.ndarray | None = None
    silu: bool = False
    residual: bool = False


class Tokens(NamedTuple):
    """place, owner (..., T): a token's number in its sequence, its sequence; past (N, S, D), S >= W - 1."""

    place: np.ndarray
    owner: np.ndarray | None = None
    past: np.ndarray | None = None


def short_conv(x: np.ndarray, conv: Taps, tokens: Tokens) -> np.ndarray:
    """Of x (..., T, D), float32 or float64.

    Raises TypeError or ValueError for arrays that do not fit, W = 0, a place before the first token or after t.
    """
    _check(x, conv, tokens)
    return _computed(x, conv, tokens)


def _computed(x: np.ndarray, conv: Taps, tokens: Tokens) -> np.ndarray:
    """The same of arrays that fit."""
    out = empty(x.shape, x.dtype)
    each = max(BLOCK // max(x.shape[-1], 1), 1)
    _run(kernels(len(conv.taps)).forward, {"x": x, "out": out}, conv, tokens, (each, 1))
    return out


def short_conv_vjp(
    x: np.ndarray, conv: Taps, tokens: Tokens, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(dx, dtaps, dbias). Raises as short_conv, and where dy does not have the shape of x."""
    _check(x, conv, tokens, dy)
    return _gradients(x, conv, tokens, dy)


def _gradients(
    x: np.ndarray, conv: Taps, tokens: Tokens, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The same of arrays that fit."""
    dx, (W, D) = empty(x.shape, x.dtype), conv.taps.shape
    segments = max(-(-x.size // max(D, 1) // _segment(x)), 1)
    dtaps, dbias = np.zeros((segments, W, D), x.dtype), np.zeros((segments, D), x.dtype)
    _run(kernels(W).backward, {"x": x, "dy": dy, "out": dx, "dtaps": dtaps.reshape(segments * W, D), "dbias": dbias},
         conv, tokens, (CHANNELS, segments))  # fmt: skip
    return dx, dtaps.sum(axis=0), None if conv.bias is None else dbias.sum(axis=0)


def _segment(x: np.ndarray) -> int:
    """Tokens of a segment: at most SEGMENTS of them, of whole blocks of NEAR tokens."""
    count = x.size // max(x.shape[-1], 1)
    return max(TOKENS, -(-count // SEGMENTS // NEAR) * NEAR)


def _check(x: np.ndarray, conv: Taps, tokens: Tokens, dy: np.ndarray | None = None) -> None:
    """Raise unless everything that the loops read or write lies in the arrays."""
    fn, kinds = "short_conv", ("float32", "float64")
    (taps, bias, *_), (place, owner, past) = conv, tokens
    sizes = expect(fn, None, kinds, x=(x, "... T D"), taps=(taps, "W D"), bias=(bias, "D?"), dy=(dy, "... T D?"))
    expect(fn, {"D": sizes["D"]}, kinds, past=(past, "N S D?"))
    expect_one_dtype(fn, x=x, taps=taps, bias=bias, dy=dy, past=past)
    expect(fn, sizes, WHOLE, place=(place, "... T"), owner=(owner, "... T?"))
    expect_whole(fn, "W of taps", sizes["W"])
    if place.size and (place.min() < 0 or (place > np.arange(sizes["T"])).any()):
        raise ValueError(f"{fn}: place has numbers outside 0..t, expected the number of each token t in its sequence")
    if past is not None and (owner is None or past.shape[1] < sizes["W"] - 1):
        raise ValueError(f"{fn}: past has shape {past.shape}, expected (N, S, D) with S >= {sizes['W'] - 1}, and owner")
    if past is not None and owner.size and not 0 <= owner.min() <= owner.max() < len(past):
        raise ValueError(f"{fn}: owner has numbers outside 0..{len(past) - 1}, expected sequences of past")


def _is_streamed(out: np.ndarray) -> bool:
    """Whether a result is written past the caches: it is larger than they are, and its rows are aligned."""
    return out.nbytes >= FAR and out.flags.c_contiguous and not (address(out) % BYTES or out.strides[-2] % BYTES)


def _run(kernel: Any, arrays: dict[str, Any], conv: Taps, tokens: Tokens, blocks: tuple[int, int]) -> None:
    """A kernel over all its tasks, in threads; blocks: (each, segments)."""
    x, (W, D), (each, segments), past = arrays["x"], conv.taps.shape, blocks, tokens.past
    if not x.size:
        return
    count, dtype, is_forward = x.size // D, x.dtype, "dy" not in arrays
    tasks = -(-count // each) if is_forward else -(-D // each) * segments
    none = np.zeros((1, D), dtype)
    held = {n: rows_of(y, D) for n, y in arrays.items()} | {
        "taps": np.ascontiguousarray(conv.taps), "zeros": none, "at": np.empty((tasks, W + GROUP), np.int64),
        "bias": none if conv.bias is None else np.ascontiguousarray(conv.bias)[None],
        "past": none if past is None else np.ascontiguousarray(past).reshape(-1, D),
        "place": np.ascontiguousarray(tokens.place, np.int64).reshape(-1)}  # fmt: skip
    held["owner"] = held["place"] if past is None else np.ascontiguousarray(tokens.owner, np.int64).reshape(-1)
    if not is_forward:
        held |= {
            "dz": np.empty((tasks * (NEAR + W - 1), each), dtype),
            "waste": np.empty((tasks * (W + 1), each), dtype),
        }
    sizes = {"count": count, "D": D, "W": W, "S": 0 if past is None else past.shape[1], "each": each,
             "segment": _segment(x), "segments": segments, "silu": int(conv.silu), "biased": int(conv.bias is not None),
             "residual": int(conv.residual), "streamed": int(_is_streamed(arrays["out"])),
             "parts": segments * W, "places": len(held["past"]), "one": 1,
             "slots": tasks * (NEAR + W - 1), "wasted": tasks * (W + 1), "tasks": tasks,
             "window": W + GROUP}  # fmt: skip
    over_matrices(kernel, CONV, sizes | held, tasks, dtype.name)
