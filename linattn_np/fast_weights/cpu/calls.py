"""The compiled backend: linear models and MLPs with a step at every token, on NumPy arrays, tile by tile.

One kernel has the coefficients of all tiles (recurrence.py), another one their tokens; a call is kernels alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ...ops.cpu import formulas
from ...runtime import threads
from ...runtime.arrays import name_of
from ...runtime.held import cached
from ...runtime.pieces.memory import working
from ...runtime.pieces.run import conversions, launch_of, stored_array
from ...runtime.pieces.workspace import ARRAY, SHARED, Layout
from ...runtime.recorder import active, constant, refuse
from ..masks import names_of
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


@cached
def spans_of(*kind: int) -> np.ndarray:
    """`tiles(*kind)` as an array (tiles, 3)."""
    return np.array(tiles(*kind), np.int64).reshape(-1, 3)


@cached
def tasks_of(N: int, H: int) -> np.ndarray:
    """(row, head, state) of each head."""
    return np.array([(b, h, b * H + h) for b in range(N) for h in range(H)], np.int64).reshape(-1, 3)


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
    marks = Marks(*(call.rows(len(call.spans)) for _ in range(3))) if keep else None
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
    zeros = np.zeros if active.recorder is None else formulas.zeros
    norms = {n: zeros((call.N * call.H, call.V), call.dtype) for n in ("dweights", "dshifts") if slow}
    each = {f"d{n}": zeros(y.shape, call.dtype) for n, y in call.coefficients.items()}
    begins = call.run(backward_kernel, "adjoint", arrays, call.packed(d), marks, each | norms)
    dslow = tuple(y.reshape(call.N, call.H, 1, call.V) for y in norms.values())
    dx = Tokens(arrays["out_dq"], arrays["out_dk"], arrays["out_dv"], call.rates_vjp(each))
    begin = call.unpacked(begins, 0, d.slots)
    return filled(xp, dx, x), begin, (), dslow


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
        self.spans = constant(spans_of(most, self.exact, f.mini_batch, seen % f.mini_batch, self.T))
        self.size = int(self.spans[:, 1].max(initial=1))
        self.places = self.N * self.H * len(self.spans)
        self.block = self.size + 2 + self.exact * self.size  # rows of a tile: queries, W and S at its end, gradients
        self.sizes = {"size": self.size, "B": self.B, "tiles": len(self.spans), "T": self.T, "H": self.H,
                      "block": self.block, "has_masks": 1, "before": int(f.read == "before"),
                      "decayed": int(f.decayed), "exact": int(self.exact), "places": self.places}  # fmt: skip
        self.rates = recurrence.rates_in_order(x.rates) if self.places else {}
        self.coefficients, self.residuals = dict[str, np.ndarray](), dict[str, np.ndarray]()
        if self.places:
            self.coefficients, self.residuals = recurrence.coefficients(self.rates, self.spans, self.sizes)

    def rates_vjp(self, given: dict[str, np.ndarray]) -> Rates:
        """Gradients of the rates from those of the coefficients."""
        if not self.places:
            return Rates((None,))
        found = recurrence.coefficients_vjp(self.rates, self.residuals, self.spans, self.sizes, given)
        each = {n: y.reshape(self.N, self.T, self.H, 1).transpose(0, 2, 1, 3) for n, y in found.items()}
        return Rates((each.pop("eta"),), **each)

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
        each = [tree[n : n + step] for n in range(0, len(tree), step)]
        return tuple(self._below(layer, *ys) for layer, ys in zip(self.layers, (each[-1], *each[:-1]), strict=True))

    def _below(self, layer: Layer, W: np.ndarray, *bias: np.ndarray) -> np.ndarray:
        """A matrix of each head with its bias below it, as rows."""
        shape = self.N * self.H * layer.rows, layer.columns
        if active.recorder is None:
            return np.ascontiguousarray(np.concatenate((W, *bias), axis=-2) if bias else W).reshape(shape)
        if not bias:
            return formulas.dense(W, self.dtype).reshape(shape)
        to = working((self.N, self.H, layer.rows, layer.columns), self.dtype)
        formulas.put(to[..., :-1, :], W)
        formulas.put(to[..., -1:, :], *bias)
        return to.reshape(shape)

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
            refuse("there is nothing to compute")
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
        if self.slow:
            values |= {n: formulas.dense(y, self.dtype).reshape(self.H, self.V)
                       for n, y in zip(("weights", "shifts"), self.slow, strict=True)}  # fmt: skip
        values |= self.coefficients | dict(more)
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
                 "tiles": len(self.spans), "places": self.places, "states": self.N * self.H, "tasks_count": len(heads),
                 "mask_rows": len(values["masks"]), "block": self.block, "task_fields": len(TASK),
                 "tile_fields": len(TILE)}  # fmt: skip
        sizes |= {f"{name}{end}_rows": len(values.get(f"{name}_W{end}", ())) for name in ("first", "marks", "last")
                  for end in ("", "1")}  # fmt: skip
        operations = 8.0 * self.N * self.H * self.T * sum(layer.rows * layer.columns for layer in self.layers)
        share = 1 if operations < FEW_OPERATIONS else threads.num_threads()
        bounds, each = ([*range(len(heads) + 1)], 1) if share > 1 else ([0, len(heads)], len(heads))
        named = frozenset(words.split()) | frozenset(("hidden",) if self.hidden else ())
        fixed = {"tasks": heads, "spans": self.spans, "eps": self.f.eps} | {n: int(y) for n, y in flags.items()}
        launch = launch_of(kernel, LEARNER, dtype, layout(dtype, tuple(sizes.items()), named), fixed,
                           conversions(numbers, dtype) | named, bounds, each)  # fmt: skip
        launch.with_arrays(LEARNER, numbers, (values, arrays, x), values).run()
        return Marks(found.W, found.S if has_momentum else None, found.A)


@cached
def layout(dtype: str, sizes: tuple[tuple[str, int], ...], words: frozenset[str]) -> Layout:
    """The table of a kind of call, with the matrices of a thread's own memory."""
    return LEARNER.layout(dict(sizes), dtype, words)
