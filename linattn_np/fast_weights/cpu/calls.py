"""The compiled backend: linear models and MLPs with a step at every token, on NumPy arrays, tile by tile.

The coefficients of all tiles are array calls (masks.py); all else is in the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ...runtime import threads
from ...runtime.arrays import name_of
from ...runtime.held import cached
from ...runtime.pieces.memory import working
from ...runtime.pieces.run import conversions, launch_of, stored_array
from ...runtime.pieces.workspace import ARRAY, SHARED, Layout
from ..masks import coefficients, coefficients_vjp, names_of
from ..types import Learner, Rates, State, Tokens, Tree, filled, is_exact
from . import muon, recurrence
from .backward import backward as backward_kernel
from .forward import forward as forward_kernel
from .workspace import ARRAYS, LEARNER, TASK, TILE

MOST = 64  # tokens of a tile
FEW_OPERATIONS = 2e6  # of a call: below, threads cost more than they give


def groups() -> dict[str, tuple[tuple[Any, ...], str]]:
    """All kernels by purpose, without the words of a call; warmup compiles them."""
    return {
        "linear learners": ((forward_kernel,), ""),
        "linear learners, gradients": ((backward_kernel,), "adjoint"),
        "rates of learners": ((recurrence.forward, recurrence.backward), ""),
        "Newton-Schulz iterations": ((muon.forward,), "fresh"),
        "Newton-Schulz iterations, gradients": ((muon.backward,), "adjoint fresh"),
    }


def tiles(most: int, is_exact: bool, mini_batch: int, done: int, T: int) -> list[tuple[int, int, int]]:
    """(first token, tokens, whether the mini-batch ends) of the tiles of T tokens; done: those of its mini-batch."""
    if is_exact:
        return [(t, min(most, T - t), 1) for t in range(0, T, most)]
    each = -(-mini_batch // -(-mini_batch // most))
    found, t = [], 0
    while t < T:
        stop = min(T - t, mini_batch - done, each - done % each)
        found.append((t, stop, int(done + stop == mini_batch)))
        t, done = t + stop, (done + stop) % mini_batch
    return found


class Equal(NamedTuple):
    """Tiles of as many tokens."""

    n: int
    at: np.ndarray  # (tiles, 1): which tiles
    tokens: np.ndarray  # (tiles, n): their tokens


class Tiling(NamedTuple):
    """The tiles of a sequence. equal: by their numbers of tokens."""

    tiles: list[tuple[int, int, int]]
    spans: np.ndarray
    equal: list[Equal]


@cached
def tiling(*kind: int) -> Tiling:
    """The Tiling of `tiles(*kind)`."""
    found = tiles(*kind)
    spans, equal = np.array(found, np.int64), []
    for n in dict.fromkeys(n for _, n, _ in found):
        at = np.flatnonzero(spans[:, 1] == n)[:, None]
        equal.append(Equal(n, at, spans[at, 0] + np.arange(n)))
    return Tiling(found, spans, equal)


@cached
def tasks_of(N: int, H: int) -> np.ndarray:
    """(row, head, state) of each head."""
    return np.array([(b, h, b * H + h) for b in range(N) for h in range(H)], np.int64).reshape(-1, 3)


@cached
def places_of(rows: int, n: int, size: int, exact: int) -> np.ndarray:
    """Where the rows of coefficients of n tokens are among those of a tile of `size` tokens."""
    ends = rows - n - exact * n
    return np.concatenate([np.arange(n), size + np.arange(ends), size + 2 + np.arange(exact * n)])


class Marks(NamedTuple):
    """States, as rows of a matrix for each layer: at the ends of sequences, or before each tile."""

    W: Any
    S: Any
    A: Any


class Layer(NamedTuple):
    """The matrix of a layer, with the row of its bias; name: what its fields end in."""

    name: str
    rows: int
    columns: int


def forward(
    f: Learner, xp: Any, x: Tokens, begin: State, initial: Tree, slow: Tree, keep: bool, has_end: bool = True
) -> tuple[Any, list[Any]]:
    """(out, [Marks or None, the final state])."""
    call = Call(f, x, begin.n, initial, slow)
    out = None if x.q is None else working_like(x.v)
    marks = Marks(*(call.rows(len(call.tiles)) for _ in range(3))) if keep else None
    ends = call.run(forward_kernel, "", {"out": out}, call.packed(begin), marks)
    return out, [marks, call.unpacked(ends, begin.n + x.k.shape[-2], begin.slots)]


def backward(
    f: Learner, xp: Any, x: Tokens, states: list[Any], initial: Tree, slow: Tree, dout: Any, d: State,
    has_end: bool = True,
) -> tuple[Tokens, State, Tree, Tree]:  # fmt: skip
    """(dx, dstate, dinitial, dslow) from the gradients of out and of the final state."""
    marks, end = states
    call = Call(f, x, end.n - x.k.shape[-2], initial, slow)
    arrays = {"out_dq": None if dout is None else working_like(x.q), "out_dk": working_like(x.k),
              "out_dv": working_like(x.v), "in_dout": dout}  # fmt: skip
    each = [np.zeros_like(call.masks), np.zeros_like(call.c), np.zeros(max(call.places, 1), call.dtype)]
    given = dict(zip(("dmasks", "dc", "dgains"), each, strict=True))
    given |= {n: np.zeros((call.N * call.H, call.V), call.dtype) for n in ("dweights", "dshifts")}
    begins = call.run(backward_kernel, "adjoint", arrays, call.packed(d), marks, given)
    dslow = tuple(given[n].reshape(call.N, call.H, 1, call.V) for n in ("dweights", "dshifts")) if slow else ()
    dx = Tokens(arrays["out_dq"], arrays["out_dk"], arrays["out_dv"], call.rates_vjp(*each))
    begin = call.unpacked(begins, 0, d.slots)
    return filled(xp, dx, x), begin, tuple(np.zeros_like(w) for w in initial), dslow


def working_like(x: np.ndarray) -> np.ndarray:
    """Memory for tokens (N, H, T, D), tokens before heads."""
    N, H, T, D = x.shape
    return working((N, T, H, D), x.dtype).transpose(0, 2, 1, 3)


class Call:
    """The tiles of a call and their coefficients."""

    def __init__(self, f: Learner, x: Tokens, seen: int, initial: Tree, slow: Tree) -> None:
        (self.N, self.H, self.T, self.K), self.V = x.k.shape, x.v.shape[-1]
        self.f, self.x, self.slow, self.dtype = f, x, slow, x.k.dtype
        self.names, self.hidden = names_of(x.rates), int(f.model == "mlp")
        self.biased = len(initial) == 2 * (1 + self.hidden)
        M = initial[0].shape[-1] if self.hidden else self.K
        self.layers = [Layer("1", self.K + self.biased, M)] if self.hidden else []
        self.layers = [Layer("", M + self.biased, self.V), *self.layers]
        self.B, self.exact = len(self.names), is_exact(f, x.rates)
        most = min(f.tile or MOST, MOST)
        self.tiles, self.spans, self.equal = tiling(most, self.exact, f.mini_batch, seen % f.mini_batch, self.T)
        self.size = max((n for _, n, _ in self.tiles), default=1)
        self.places = self.N * self.H * len(self.tiles)
        self.block = self.size + 2 + self.exact * self.size  # rows of a tile: queries, W and S at its end, gradients
        shape = self.N, self.H, len(self.tiles), self.block
        self.masks, self.c = np.zeros((*shape, self.size), self.dtype), np.zeros((*shape, self.B), self.dtype)
        self.residuals: dict[int, Any] = {}
        for n, at, tokens in self.equal:
            own = self._rates(tokens)
            c, residuals = coefficients(np, f, own, n, x.k)
            self.residuals[n], to = (c, residuals), self._places(c, n)
            self.masks[:, :, at, to, :n] = -own.eta[0].swapaxes(-1, -2) * c[..., self.B :]
            self.c[:, :, at, to] = c[..., : self.B]

    def _places(self, c: np.ndarray, n: int) -> np.ndarray:
        """The rows of coefficients of n tokens among those of a tile."""
        return places_of(c.shape[-2], n, self.size, int(self.exact))

    def _rates(self, tokens: np.ndarray) -> Rates:
        """The rates of the tokens of some tiles, (N, H, tiles, n, 1)."""
        return Tokens(None, None, None, self.x.rates).each(lambda y: y[:, :, tokens]).rates

    def rates_vjp(self, dmasks: np.ndarray, dc: np.ndarray, dgains: np.ndarray) -> Rates:
        """Gradients of the rates."""
        rates, shape = self.x.rates, (self.N, self.H, self.T, 1)
        found = [None if y is None else np.zeros(shape, self.dtype) for y in (rates.eta[0], *rates[1:])]
        for n, at, tokens in self.equal:
            own, (c, residuals) = self._rates(tokens), self.residuals[n]
            places = at, self._places(c, n)
            dm, own_dc = dmasks[:, :, *places, :n], dc[:, :, *places]
            each = [-np.sum(dm * c[..., self.B :], axis=-2)[..., None]]
            d = np.concatenate([own_dc, -dm * own.eta[0].swapaxes(-1, -2)], axis=-1)
            each += coefficients_vjp(np, self.f, own, residuals, d)[1:]
            for y, more in zip(found, each, strict=True):
                if y is not None:
                    y[:, :, tokens] = more
        if rates.gain is not None:
            last = [start + n - 1 for start, n, _ in self.tiles]
            found[3][:, :, last] += dgains[: self.places].reshape(self.N, self.H, len(self.tiles), 1)
        return Rates((found[0],), *found[1:])

    # states as rows of matrices, a bias below its matrix

    def rows(self, count: int = 1) -> tuple[np.ndarray, ...]:
        """Memory for the matrix of each layer, `count` for each head."""
        heads = self.N * self.H * count
        return tuple(working((heads * layer.rows, layer.columns), self.dtype) for layer in self.layers)

    def packed(self, s: State) -> Marks:
        """W, S and A of a state."""
        joined = [self._packed(tree) for tree in (s.weights, *s.slots, s.anchor)]
        return Marks(joined[0], joined[1] if s.slots else None, joined[-1])

    def _packed(self, tree: Tree) -> tuple[np.ndarray, ...]:
        step = 1 + self.biased
        each = [np.concatenate(tree[n : n + step], axis=-2) for n in range(0, len(tree), step)]
        shapes = [(self.N * self.H * layer.rows, layer.columns) for layer in self.layers]
        both = zip((each[-1], *each[:-1]), shapes, strict=True)
        return tuple(np.ascontiguousarray(y).reshape(shape) for y, shape in both)

    def unpacked(self, rows: Marks, n: int, slots: Any) -> State:
        """The inverse."""

        def own(trees: tuple[np.ndarray, ...]) -> Tree:
            each = [y.reshape(self.N, self.H, layer.rows, layer.columns)
                    for y, layer in zip(trees, self.layers, strict=True)]  # fmt: skip
            each = [*each[1:], each[0]]
            if not self.biased:
                return tuple(each)
            return tuple(part for y in each for part in (y[..., :-1, :], y[..., -1:, :]))

        return State(n, own(rows.A), own(rows.W), (own(rows.S),) if slots else ())

    # kernels

    def run(
        self, kernel: Any, words: str, arrays: dict[str, Any], ends: Marks, marks: Marks | None,
        more: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> Marks:  # fmt: skip
        """A kernel for every head; ends: the states that it begins with, whose counterparts are returned."""
        x, found = self.x, Marks(*(self.rows() for _ in range(3)))
        if not self.places or not self.V or not all(layer.rows and layer.columns for layer in self.layers):
            for name, y in arrays.items():
                if y is not None and name != "in_dout":
                    y[...] = 0
            return Marks(*(y if y is None else tuple(z.copy() for z in y) for y in ends))
        has_momentum, is_back = x.rates.mu is not None, bool(words)
        first, last = (found, ends) if is_back else (ends, found)
        values: dict[str, Any] = {}
        for name, each in (("first", first), ("last", last), ("marks", marks)):
            values |= {f"{name}_{n}{layer.name}": y for n, trees in zip("WSA", each or (), strict=False)
                       for y, layer in zip(trees or (), self.layers, strict=False)}  # fmt: skip
        heads, dtype = tasks_of(self.N, self.H), name_of(self.dtype)
        gain = x.rates.gain
        if gain is not None:
            lasts = [start + n - 1 for start, n, _ in self.tiles]
            values["gains"] = np.ascontiguousarray(gain[:, :, lasts, 0]).reshape(-1)
        if self.slow:
            values |= {n: np.ascontiguousarray(y.reshape(self.H, self.V))
                       for n, y in zip(("weights", "shifts"), self.slow, strict=True)}  # fmt: skip
        values |= {"tasks": heads, "spans": self.spans,
                   "masks": self.masks.reshape(-1, self.size), "c": self.c.reshape(-1, self.B)}  # fmt: skip
        values |= {n: y.reshape(-1, y.shape[-1]) if y.ndim > 1 else y for n, y in more.items()}
        numbers = np.zeros((len(ARRAYS), ARRAY), np.int64)
        numbers[:, SHARED] = 1
        for name, y in ({"in_q": x.q, "in_k": x.k, "in_v": x.v} | arrays).items():
            if y is not None:
                y = y.transpose(0, 2, 1, 3)
                numbers[ARRAYS.index(name)] = stored_array(y, y.strides, 1)
        flags = {"biased": self.biased, "normed": self.f.normed, "squared": self.f.loss == "l2",
                 "has_q": x.q is not None, "has_dout": arrays.get("in_dout") is not None, "momentum": has_momentum,
                 "gain": gain is not None, "keep": marks is not None, "exact": self.exact,
                 "hidden": self.hidden}  # fmt: skip
        sizes = {"n": self.size, "N": self.size, "D": self.layers[0].rows, "K": self.K, "V": self.V,
                 "M": self.layers[0].rows - self.biased, "X_D": self.K + self.biased, "H": self.H, "B": self.B,
                 "tiles": len(self.tiles), "places": self.places, "states": self.N * self.H, "tasks_count": len(heads),
                 "mask_rows": len(values["masks"]), "block": self.block, "task_fields": len(TASK),
                 "tile_fields": len(TILE)}  # fmt: skip
        sizes |= {f"{name}{end}_rows": len(values.get(f"{name}_W{end}", ())) for name in ("first", "marks", "last")
                  for end in ("", "1")}  # fmt: skip
        operations = 8.0 * self.N * self.H * self.T * sum(layer.rows * layer.columns for layer in self.layers)
        share = 1 if operations < FEW_OPERATIONS else threads.num_threads()
        bounds, each = ([*range(len(heads) + 1)], 1) if share > 1 else ([0, len(heads)], len(heads))
        named = frozenset(words.split()) | frozenset(("hidden",) if self.hidden else ())
        launch = launch_of(kernel, LEARNER, dtype, layout(dtype, tuple(sizes.items()), named),
                           values | {n: int(y) for n, y in flags.items()} | {"eps": self.f.eps},
                           conversions(numbers, dtype) | named, bounds, each)  # fmt: skip
        launch.with_arrays(LEARNER, numbers, (values, arrays, x)).run()
        return Marks(found.W, found.S if has_momentum else None, found.A)


@cached
def layout(dtype: str, sizes: tuple[tuple[str, int], ...], words: frozenset[str]) -> Layout:
    """The table of a kind of call, with the matrices of a thread's own memory."""
    return LEARNER.layout(dict(sizes), dtype, words)
