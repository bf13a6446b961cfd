"""The momentum delta rule on CuPy arrays: the states walk in kernels.

The forward walk has the outputs, the errors, and before every tile of tokens the states. The walk of the adjoint has
the gradients of the values, and those of the states after every tile. Both go tile by tile (cuda_src/fast_weights/
momentum_walk.cu) with what momentum_systems.cu has of each tile; in float64, with wider keys, longer tiles or
mini-batches of several tokens, and where a block has too little shared memory, token by token (momentum.cu). Between
the two no tile waits for another: momentum_vjp.cu has the gradients of the tokens of a tile; else they are those of
the chunk form (../array/chunks.py).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ...ops.cuda.arguments import address
from ...runtime.arrays import Array, Namespace, cast, dtype_name
from ...runtime.cuda import launch, record
from ...runtime.cuda.elements import Constants
from ...runtime.cuda.structs import Struct
from ...runtime.recorder import refuse
from ..array import chunks
from ..array.chunks import TILE, Tile
from ..recorded import added, zeros_like
from ..types import FastPlan, Inputs, Learner, Rates, State, Tokens, Tree, each_of, is_exact, joined
from . import rates
from .arguments import MOMENTUM, MOMENTUM_SYSTEMS, MOMENTUM_VJP, NO_TOKENS
from .plan import before

SOURCE, THREADS, WIDEST = "fast_weights/momentum.cu", 128, 256
WALK, WALK_COLUMNS, WIDEST_TILES = "fast_weights/momentum_walk.cu", 128, 128  # columns of a block; keys
SYSTEMS, SYSTEMS_THREADS = "fast_weights/momentum_systems.cu", 128
VJP, VJP_THREADS = "fast_weights/momentum_vjp.cu", 256
MOST, SYSTEM = 64, 2 * 64 * 64 + 6 * 64 + 4  # tokens of a tile of these three; numbers of its memory
SHARED = {SYSTEMS: 4 * (4 * MOST * 24 + 2 * MOST * (MOST + 4)),  # bytes of a block
          VJP: 4 * (2 * 320 * 24 + 2 * MOST * (MOST + 8) + 22 * MOST + 32)}  # fmt: skip
STEP = 8  # tokens that a block holds at once; it holds the next as well
COLUMN_LANES = 16  # of a block
TOGETHER = 2**26  # numbers of keys and values whose gradients are taken at once
NAMES = ("alpha", "mu", "beta")


def unsupported_reason(x: Inputs, plan: FastPlan) -> str | None:
    """Why the kernels do not compute a call; None if they do."""
    f, rates, weights = plan.learner, x.rates, x.weights
    if not is_exact(f._replace(mini_batch=1), rates) or f.read != "after" or len(weights) != 1 or len(rates.eta) != 1:
        return "its kernels have a step of the squared error of a linear model at every token"
    if rates.alpha is None or rates.mu is None:
        return "its kernels have decay and momentum"
    if f.mini_batch > TILE or plan.chunk_size == 1 or (f.mini_batch > 1 and f.decayed):
        return f"its kernels take mini-batches of up to {TILE} tokens at once"
    K, V = weights[0].shape[-2:]
    if not 0 < K <= WIDEST or not V:
        return f"its kernels have keys of up to {WIDEST} channels"
    return launch.unusable()


def constants(dtype: str, K: int, tile: int, decayed: bool, align: int, batch: int = 1) -> Constants:
    """Of the compiler. align: bytes of a piece of a row that is copied at once."""
    size, padded = 8 if dtype == "float64" else 4, -(-K // 32) * 32
    columns = COLUMN_LANES * (2 if padded * size <= 512 else 1)
    blocks = 2 if padded * size > 512 or size == 8 else 3 if batch > 1 and padded > 64 else 4
    found = {"LA_ALIGN": align, "LA_BATCH": batch, "LA_BLOCKS": blocks, "LA_COLUMNS": columns,
             "LA_DECAYED": int(decayed), "LA_DOUBLE": int(size == 8), "LA_K": K,
             "LA_SHARED": 2 * STEP * (2 * padded + columns + 4) * size, "LA_TILE": tile}  # fmt: skip
    return tuple(sorted(found.items()))


def tile_constants(decayed: bool, exact: bool, align: int) -> dict[str, Constants]:
    """Of the compiler, by source, for what a tile is to the walks and for its gradients.

    exact: products of float32, not of tf32.
    """
    found = {}
    for source, size in SHARED.items():
        own = {"LA_ALIGN": align, "LA_DECAYED": int(decayed), "LA_EXACT": int(exact), "LA_SHARED": size}
        found[source] = tuple((own | ({"LA_BLOCKS": 1 if exact else 2} if source == VJP else {})).items())
    return found


def walk_constants(K: int, V: int, exact: bool, align: int) -> Constants:
    """Of the compiler, for walks tile by tile."""
    columns = min(-(-V // 16) * 16, WALK_COLUMNS)
    found = {"LA_ALIGN": align, "LA_COLUMNS": columns, "LA_EXACT": int(exact), "LA_K": K, "LA_SHARED": _walk_shared(K)}
    return tuple(found.items())


def _walk_shared(K: int) -> int:
    """Bytes of a block."""
    padded = -(-K // 16) * 16
    return 8 * (2 * MOST * (padded + 8) + 2 * MOST * (MOST + 8) + 6 * MOST + 4)


def fits(K: int, limit: int) -> tuple[bool, bool]:
    """Whether tiles have kernels, and whether states walk tile by tile; limit: bytes of shared memory of a block."""
    has_kernels = max(SHARED.values()) <= limit
    return has_kernels, has_kernels and K <= WIDEST_TILES and _walk_shared(K) <= limit


class Systems(NamedTuple):
    """What tiles are to the walks: the coefficients (N, H, tiles, n + 1, n + 2), the memory of momentum_systems.cu."""

    w: Array
    s: Array
    systems: Array


class Kept(NamedTuple):
    """What a walk leaves: the states of every tile, the errors of all tokens, what tiles are."""

    S: Array
    M: Array
    errors: Array
    systems: Systems | None


def forward(
    f: Learner, xp: Namespace, x: Tokens, begin: State, initial: Tree, slow: Tree, keep: bool, has_end: bool = True
) -> tuple[Any, list[Any]]:
    """(out, [keep: (tokens before the kernel's, their states, what the walk leaves), the final state])."""
    T, own, kept, found = x.k.shape[-2], None, None, list[Array]()
    if first := before(f, begin, T):
        dtype = begin.weights[0].dtype
        y, own = chunks.forward(f, xp, x.cut(0, first).each(lambda y: cast(xp, y, dtype)), begin, initial, slow, keep)
        begin = own[-1]
        found.append(y)
    if first < T or not T:
        (S,), ((M,),) = begin.weights, begin.slots
        walk = Walk(f, xp, x.cut(first, T), S.dtype)
        out, systems = None if x.q is None else walk.rows(S.shape[-1]), walk.systems() if walk.by_tiles else None
        kept = walk.kept(S, systems) if keep else None
        ends = walk.run("forward", walk.x.q, walk.x.v, (S, M), out, kept, systems)
        begin = State(begin.n + walk.T, (ends[0 if walk.rest == walk.T else 2],), (ends[0],), ((ends[1],),))
        found.append(out)
    y = None if x.q is None else found[0] if len(found) == 1 else xp.concat(found, axis=-2)
    return y, [(first, own, kept), begin] if keep else [begin]


def backward(
    f: Learner, xp: Namespace, x: Tokens, states: list[Any], initial: Tree, slow: Tree, dout: Any, d: State,
    has_end: bool = True,
) -> tuple[Tokens, State, Tree, Tree]:  # fmt: skip
    """(dx, dstate, dinitial, dslow) from the gradients of out and of the final state."""
    first, own, kept = states[0]
    T, each = x.k.shape[-2], list[Tokens]()
    dinitial = Tree()
    if first < T or not T:
        dx, d = _backward(f, xp, x.cut(first, T), kept, None if dout is None else dout[..., first:, :], d)
        each = [dx]
    if first:
        dtype = d.weights[0].dtype
        wide = x.cut(0, first).each(lambda y: cast(xp, y, dtype))
        back = None if dout is None else cast(xp, dout[..., :first, :], dtype)
        dx, d, dinitial, _ = chunks.backward(f, xp, wide, own, initial, slow, back, d, True)
        each.insert(0, dx)
    return each[0] if len(each) == 1 else joined(xp, each, x), d, dinitial, ()


def _backward(f: Learner, xp: Namespace, x: Tokens, kept: Kept, dout: Any, d: State) -> tuple[Tokens, State]:
    """(dx, dstate) of tokens that begin with a mini-batch."""
    (dS,), (dA,), ((dM,),) = d.weights, d.anchor, d.slots
    walk = Walk(f, xp, x, dS.dtype)
    q, dout = None if dout is None else walk.x.q, walk.dense(dout)
    systems = walk.systems() if kept.systems is None and walk.has_kernels else kept.systems
    back, given = walk.kept(dS, systems), (added(xp, dS, dA), dM) if walk.rest == walk.T else (dS, dM, dA)
    R, N, *_ = walk.run("backward", q, dout, given, None, back, systems if walk.by_tiles else None)
    dx = _tiles_vjp(walk, kept, back, dout) if systems is None else walk.tiles_vjp(kept, back, systems, q, dout)
    dx = dx._replace(rates=dx.rates._replace(beta=None)) if x.rates.beta is None else dx
    return dx, State(d.n - walk.T, (zeros_like(xp, R),), (R,), ((N,),))


def _tiles_vjp(walk: Walk, kept: Kept, back: Kept, dout: Any) -> Tokens:
    """Gradients of the tokens by array calls, of many tiles at once."""
    refuse("array calls compute gradients of mini-batches, of float64 and of wide keys")
    f, xp, C, x = walk.f, walk.xp, walk.C, walk.x.each(walk.wide)
    S, M, R, N, T, rest = kept.S, kept.M, back.S, back.M, walk.T, walk.rest
    whole = rest // C
    rows = math.prod(x.k.shape[:2]) * C * (x.k.shape[-1] + x.v.shape[-1])
    each = max(TOGETHER // rows, 1)
    parts = [(a, min(a + each, whole), a * C, C) for a in range(0, whole, each)]  # tiles, the first token, their tokens
    parts += [(whole, whole + 1, whole * C, rest - whole * C)] if rest > whole * C else []
    parts += [(walk.count - 1, walk.count, rest, T - rest)] if rest < T else []
    one, found = f._replace(mini_batch=1, shared=f.mini_batch), []
    for a, b, start, n in parts:

        def cut(y: Array, a: int = a, b: int = b, start: int = start, n: int = n) -> Array:
            """Tokens of tiles a to b, of n tokens each: (N, H, tiles, n, D)."""
            y = y[:, :, start : start + (b - a) * n, :]
            return xp.reshape(y, (*y.shape[:2], b - a, n, y.shape[-1]))

        begin = State(0, (S[:, :, a:b],), (S[:, :, a:b],), ((M[:, :, a:b],),))
        zero = xp.zeros((1, 1), dtype=S.dtype)
        end = State(n, (zero,), (R[:, :, a:b],), ((N[:, :, a:b],),))
        tile = Tile(one, xp, x.each(cut), begin, ())
        tile.closing = begin, None
        own, *_ = tile.vjp((), None if dout is None else cut(dout), end, True)
        found.append(tile.finished(own).each(lambda y: xp.reshape(y, (*y.shape[:2], -1, y.shape[-1]))))
    return each_of(lambda y, own: xp.zeros_like(own) if y is None else y, joined(xp, found, x), x)


class Walk:
    """Tokens (N, H, T, D) of a call, computed in `dtype`."""

    def __init__(self, f: Learner, xp: Namespace, x: Tokens, dtype: Any) -> None:
        if x.rates.beta is None:  # all of the momentum is written
            x = x._replace(rates=x.rates._replace(beta=xp.ones_like(x.rates.mu)))
        self.f, self.xp, self.dtype = f, xp, dtype
        self.N, self.H, self.T, self.K = x.k.shape
        self.C, self.rest = max((f.tile or TILE) // f.mini_batch, 1) * f.mini_batch, self.T - self.T % f.mini_batch
        self.count = -(-self.rest // self.C) + (self.rest < self.T)
        self.rates = {n: getattr(x.rates, n) for n in NAMES} | {"eta": x.rates.eta[0]}
        self.exact = any(dtype_name(y) != "bfloat16" for y in x[:3] if y is not None)  # tf32 has 8 times its precision
        by_kernels = self.C <= MOST and self.dtype.itemsize == 4 and f.mini_batch == 1
        self.has_kernels, self.by_tiles = fits(self.K, launch.shared_limit()) if by_kernels else (False, False)
        self.x = x._replace(q=self.dense(x.q), k=self.dense(x.k))

    def wide(self, y: Array) -> Array:
        """y in the dtype of the states."""
        return cast(self.xp, y, self.dtype)

    def rows(self, D: int) -> Array:
        """Memory for tokens."""
        return record.empty((self.N, self.H, self.T, D), self.dtype)

    def tokens(self, D: int) -> Array:
        """The same, tokens before heads."""
        return record.empty((self.N, self.T, self.H, D), self.dtype).transpose(0, 2, 1, 3)

    def kept(self, like: Array, systems: Systems | None) -> Kept:
        """Memory for what a walk keeps; like: a state."""
        shape = (self.N, self.H, self.count, *like.shape[-2:])
        S, M = (record.empty(shape, self.dtype) for _ in range(2))
        return Kept(S, M, self.rows(like.shape[-1]), systems)

    def dense(self, y: Array | None) -> Array | None:
        """y in the dtype of the states, or a copy, whose rows have their numbers side by side."""
        if y is None:
            return None
        y = self.wide(y)
        return y if y.strides[-1] == y.dtype.itemsize else self.xp.ascontiguousarray(y)

    def align(self, *given: Array | None) -> int:
        """Bytes of the pieces in which rows are read."""
        found, size = 16, self.dtype.itemsize
        for y in given:
            if y is not None:
                found = math.gcd(found, y.data.ptr, y.shape[-1] * size, *(n for n in y.strides[:-1]))
        return max(found, size)

    def run(
        self, entry: str, q: Any, v: Any, states: tuple[Array, ...], out: Any, kept: Kept | None,
        systems: Systems | None,
    ) -> tuple[Array, ...]:  # fmt: skip
        """(S, M, forward of mini-batches A) where a walk ends. systems: tile by tile."""
        xp, V, rows = self.xp, states[0].shape[-1], self.N * self.H
        k, v = self.x.k, self.dense(v)
        align = self.align(q, k)
        start = tuple(xp.ascontiguousarray(xp.broadcast_to(y, (self.N, self.H, self.K, V))) for y in states)
        names = ("S_end", "M_end", "A_end")[: 3 if entry == "forward" and self.f.mini_batch > 1 else 2]
        ends = {name: record.empty((self.N, self.H, self.K, V), self.dtype) for name in names}
        if systems is None:
            file, name = SOURCE, dtype_name(start[0])
            made = constants(name, self.K, self.C, self.f.decayed, align, self.f.mini_batch)
        else:
            file, made = WALK, walk_constants(self.K, V, self.exact, align)
        sizes = dict(made)
        parts, threads = -(-V // sizes["LA_COLUMNS"]), THREADS if systems is None else 2 * sizes["LA_COLUMNS"]
        more = ends | {"out": out} | dict(zip(("S", "M", "A"), start, strict=False))
        more |= {} if kept is None else {"errors": kept.errors, "S_tiles": kept.S, "M_tiles": kept.M}
        more |= {} if systems is None else {"systems": systems.systems}
        strided = {"q": q, "k": k, "v": v, **self.rates}
        names = ("S", "M", "A", "out", "errors", "S_end", "M_end", "A_end", "S_tiles", "M_tiles", "systems")
        sizes |= {"T": self.T, "V": V, "heads": self.H, "parts": parts, "tiles": self.count, "n": self.C,
                  "rest": self.rest}  # fmt: skip
        self._launch(file, entry, made, rows * parts, threads, MOMENTUM, strided, names, more, sizes)
        return tuple(ends.values())

    def systems(self) -> Systems:
        """Of all tiles: the coefficients, and what follows from them, keys and queries."""
        x, n, count = self.x, self.C, (self.N, self.H, self.count)
        w, s = rates.coefficients({name: self.rates[name] for name in NAMES}, n, (*count, n + 1, n + 2))
        found = record.empty((*count, SYSTEM), self.dtype)
        made = tile_constants(self.f.decayed, self.exact, self.align(x.q, x.k))[SYSTEMS]
        strided, more = {"q": x.q, "k": x.k} | self._pair(), {"w": w, "s": s, "systems": found}
        self._launch(SYSTEMS, "momentum_systems", made, math.prod(count), SYSTEMS_THREADS, MOMENTUM_SYSTEMS, strided,
                     tuple(more), more, self._sizes())  # fmt: skip
        return Systems(w, s, found)

    def tiles_vjp(self, kept: Kept, back: Kept, systems: Systems, q: Any, dout: Any) -> Tokens:
        """Gradients of the tokens from the states and errors of both walks."""
        x, V, n, count = self.x, back.errors.shape[-1], self.C, (self.N, self.H, self.count)
        align = self.align(q, x.k, dout)
        dq, dk = None if q is None else self.tokens(self.K), self.tokens(self.K)
        d, deta = record.empty((*count, 2 * n + 2, n + 2), self.dtype), self.rows(1)
        made = tile_constants(self.f.decayed, self.exact, math.gcd(align, V * self.dtype.itemsize))[VJP]
        more = {"errors": kept.errors, "dv": back.errors, "S": kept.S, "M": kept.M, "R": back.S, "N": back.M}
        more |= systems._asdict() | {"d": d, "deta": deta}
        strided = {"q": q, "k": x.k, "dout": dout, "dq": dq, "dk": dk} | self._pair()
        self._launch(VJP, "momentum_vjp", made, math.prod(count), VJP_THREADS, MOMENTUM_VJP, strided, tuple(more), more,
                     self._sizes() | {"V": V})  # fmt: skip
        given = {name: self.rates[name] for name in NAMES}
        found = rates.coefficients_vjp(given, n, (systems.w, systems.s), d, self.f.decayed)
        dq = self.xp.zeros_like(x.q) if dq is None and x.q is not None else dq
        return Tokens(dq, dk, back.errors, Rates((deta,), **found))

    def _pair(self) -> dict[str, Array]:
        return {name: self.rates[name] for name in ("alpha", "eta")}

    def _sizes(self) -> dict[str, int]:
        return {"T": self.T, "K": self.K, "heads": self.H, "tiles": self.count, "n": self.C}

    def _launch(
        self, file: str, entry: str, made: Constants, blocks: int, threads: int, kind: Struct,
        strided: dict[str, Any], names: tuple[str, ...], arrays: dict[str, Any], sizes: dict[str, int],
    ) -> None:  # fmt: skip
        """names: of all dense arrays of the struct."""
        packed = kind.pack(**{n: _rows(y) for n, y in strided.items()}, **{n: address(arrays.get(n)) for n in names},
                           **{n: m for n, m in sizes.items() if not n.startswith("LA_")})  # fmt: skip
        held = tuple(y for y in (*strided.values(), *arrays.values()) if y is not None)
        launch.launch(file, entry, made, blocks, threads, dict(made)["LA_SHARED"], packed, held)


def _rows(y: Array | None) -> tuple[int, ...]:
    return NO_TOKENS if y is None else (y.data.ptr, *y.strides[:3])
