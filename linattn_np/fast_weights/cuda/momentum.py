"""The momentum delta rule on CuPy arrays: the states walk in kernels, token by token.

The forward walk (cuda_src/fast_weights/momentum.cu) has the outputs, and before every tile of tokens the states. The
walk of the adjoint has the gradients of the states after every tile. Between the two all tiles are alike: their
gradients are those of the chunk form (../array/chunks.py), of many tiles at once.
"""

from __future__ import annotations

import math
from typing import Any

from ...ops.cuda.arguments import address
from ...runtime.arrays import Array, Namespace, dtype_name
from ...runtime.cuda import launch, record
from ...runtime.cuda.elements import Constants
from ..array.chunks import TILE, Tile
from ..types import FastPlan, Inputs, Learner, State, Tokens, Tree, each_of, is_exact, joined
from .arguments import MOMENTUM, NO_TOKENS

SOURCE, THREADS, WIDEST = "fast_weights/momentum.cu", 128, 256
STEP = 8  # tokens that a block holds at once; it holds the next as well
COLUMN_LANES = 16  # of a block
TOGETHER = 2**26  # numbers of keys and values whose gradients are taken at once
NAMES = ("alpha", "mu", "beta")


def unsupported_reason(x: Inputs, plan: FastPlan) -> str | None:
    """Why the kernels do not compute a call; None if they do."""
    f, rates, weights = plan.learner, x.rates, x.weights
    if not is_exact(f, rates) or f.read != "after" or len(weights) != 1 or len(rates.eta) != 1:
        return "its kernels have a step of the squared error of a linear model at every token"
    if any(getattr(rates, name) is None for name in NAMES):
        return "its kernels have decay, momentum and a part of it that is written"
    K, V = weights[0].shape[-2:]
    if not 0 < K <= WIDEST or not V:
        return f"its kernels have keys of up to {WIDEST} channels"
    return launch.unusable()


def constants(dtype: str, K: int, tile: int, decayed: bool, align: int) -> Constants:
    """Of the compiler. align: bytes of a piece of a row that is copied at once."""
    size, padded = 8 if dtype == "float64" else 4, -(-K // 32) * 32
    columns = COLUMN_LANES * (2 if padded * size <= 512 else 1)
    found = {"LA_ALIGN": align, "LA_BLOCKS": 4 if padded * size <= 512 and size == 4 else 2, "LA_COLUMNS": columns,
             "LA_DECAYED": int(decayed), "LA_DOUBLE": int(size == 8), "LA_K": K,
             "LA_SHARED": 2 * STEP * (2 * padded + columns + 4) * size, "LA_TILE": tile}  # fmt: skip
    return tuple(sorted(found.items()))


def forward(
    f: Learner, xp: Namespace, x: Tokens, begin: State, initial: Tree, slow: Tree, keep: bool, has_end: bool = True
) -> tuple[Any, list[Any]]:
    """(out, [keep: the states before every tile, the final state])."""
    out = None if x.q is None else record.empty(tuple(x.v.shape), x.v.dtype)
    (S,), ((M,),) = begin.weights, begin.slots
    ends, tiles = _walk("forward", f, xp, x, x.q, x.v, (S, M), out, keep)
    end = State(begin.n + x.k.shape[-2], (ends[0],), (ends[0],), ((ends[1],),))
    return out, [tiles, end] if keep else [end]


def backward(
    f: Learner, xp: Namespace, x: Tokens, states: list[Any], initial: Tree, slow: Tree, dout: Any, d: State,
    has_end: bool = True,
) -> tuple[Tokens, State, Tree, Tree]:  # fmt: skip
    """(dx, dstate, dinitial, dslow) from the gradients of out and of the final state."""
    (dS,), (dA,), ((dM,),), T = d.weights, d.anchor, d.slots, x.k.shape[-2]
    (S, M), q = states[0], None if dout is None else x.q
    (R, N), (R_tiles, N_tiles) = _walk("backward", f, xp, x, q, dout, (dS + dA, dM), None, True)
    C, count = f.tile or TILE, S.shape[2]
    whole = T // C
    rows = math.prod(x.k.shape[:2]) * C * (x.k.shape[-1] + x.v.shape[-1])
    each = max(TOGETHER // rows, 1)
    parts = [(a, min(a + each, whole), C) for a in range(0, whole, each)]
    parts += [(whole, count, T - whole * C)] if count > whole else []
    found = []
    for a, b, n in parts:

        def cut(y: Array, a: int = a, b: int = b, n: int = n) -> Array:
            """Tokens of tiles a to b, of n tokens each: (N, H, tiles, n, D)."""
            y = y[:, :, a * C : a * C + (b - a) * n, :]
            return xp.reshape(y, (*y.shape[:2], b - a, n, y.shape[-1]))

        begin = State(0, (S[:, :, a:b],), (S[:, :, a:b],), ((M[:, :, a:b],),))
        zero = xp.zeros((1, 1), dtype=S.dtype)
        end = State(n, (zero,), (R_tiles[:, :, a:b],), ((N_tiles[:, :, a:b],),))
        tile = Tile(f, xp, x.each(cut), begin, ())
        tile.closing = begin, None
        dx, *_ = tile.vjp((), None if dout is None else cut(dout), end, True)
        found.append(dx.each(lambda y: xp.reshape(y, (*y.shape[:2], -1, y.shape[-1]))))
    dx = each_of(lambda y, own: xp.zeros_like(own) if y is None else y, joined(xp, found, x), x)
    end = State(d.n - T, (0 * R,), (R,), ((N,),))
    return dx, end, tuple(0 * w for w in initial), tuple(0 * w for w in slow)


def _walk(
    entry: str, f: Learner, xp: Namespace, x: Tokens, q: Any, v: Any, states: tuple[Array, Array], out: Any, keep: bool
) -> tuple[tuple[Array, Array], Any]:
    """((S, M) where the walk ends, those of every tile)."""
    rows, T = x.k.shape[:2], x.k.shape[-2]
    K, V, C, dtype = x.k.shape[-1], states[0].shape[-1], f.tile or TILE, x.k.dtype
    q, k, v = (None if y is None else _dense_rows(xp, y) for y in (q, x.k, v))
    rates = [getattr(x.rates, name) for name in NAMES] + [x.rates.eta[0]]
    start = tuple(xp.ascontiguousarray(xp.broadcast_to(y, (*rows, K, V))) for y in states)
    ends = tuple(record.empty((*rows, K, V), dtype) for _ in states)
    count = -(-T // C)
    tiles = tuple(record.empty((*rows, count, K, V), dtype) for _ in states) if keep else (None, None)
    align = 16
    for y in (q, k):
        if y is not None:
            align = math.gcd(align, y.data.ptr, K * dtype.itemsize, *(n for n in y.strides[:-1]))
    made = constants(dtype_name(k), K, C, f.decayed, max(align, dtype.itemsize))
    sizes = dict(made)
    parts = -(-V // sizes["LA_COLUMNS"])
    packed = MOMENTUM.pack(
        q=_rows(q), k=_rows(k), v=_rows(v), **{n: _rows(y) for n, y in zip((*NAMES, "eta"), rates, strict=True)},
        S=address(start[0]), M=address(start[1]), out=address(out), S_end=address(ends[0]), M_end=address(ends[1]),
        S_tiles=address(tiles[0]), M_tiles=address(tiles[1]), T=T, V=V, heads=rows[1], parts=parts,
        tiles=count)  # fmt: skip
    arrays = tuple(y for y in (q, k, v, *rates, *start, out, *ends, *tiles) if y is not None)
    launch.launch(SOURCE, entry, made, math.prod(rows) * parts, THREADS, sizes["LA_SHARED"], packed, arrays)
    return ends, tiles


def _dense_rows(xp: Namespace, y: Array) -> Array:
    """y, or a copy, whose rows have their numbers side by side."""
    return y if y.strides[-1] == y.dtype.itemsize else xp.ascontiguousarray(y)


def _rows(y: Array | None) -> tuple[int, ...]:
    return NO_TOKENS if y is None else (y.data.ptr, *y.strides[:3])
