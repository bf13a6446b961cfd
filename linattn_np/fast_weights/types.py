"""Types of the fast-weights core: what a learner is, its rates, its state, plan and inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from ..ops.host import zeros_like
from ..runtime.arrays import Array, Namespace
from ..runtime.pools import StateRows
from ..runtime.recorder import active
from ..runtime.shapes import Sequence
from .fused import appended
from .muon import COEFFICIENTS as COEFFICIENTS
from .states import LinearMomentum as LinearMomentum
from .states import LinearState as LinearState
from .states import MLPMomentum as MLPMomentum
from .states import MLPState as MLPState
from .states import MomentumState as MomentumState
from .states import SwiGLUMomentum as SwiGLUMomentum
from .states import WindowState as WindowState

Tree = tuple[Any, ...]  # the arrays of a model: matrices (..., H, K, M), rows (..., H, 1, M)


class Functions(NamedTuple):
    """A model as functions of arrays with any axes in front; the caller's own may be one.

    f(w, x) -> y maps rows x (..., n, K) to y (..., n, V) by the arrays w.
    f_vjp(w, x, dy) -> (dw, dx) is its transpose, summed over the n rows.
    f_vjp_vjp(w, x, dy, c) -> (dw, dx, ddy) is the transpose of (w, x, dy) -> dw at the cotangents c of dw, one for each
    array that learns. None: there is no backward.
    """

    f: Callable[..., Array]
    f_vjp: Callable[..., tuple[Tree, Array]]
    f_vjp_vjp: Callable[..., tuple[Tree, Array, Array]] | None = None


class Muon(NamedTuple):
    """Steps of (nearly) orthogonal matrices: Newton-Schulz on the momentum.

    coefficients: a name in muon.COEFFICIENTS, or (a, b, c) of each iteration. stacked: so many of
    the first matrices are one, side by side.
    """

    coefficients: Any = "lact"
    stacked: int = 1


class Adam(NamedTuple):
    """Steps lr m / (sqrt(v) + eps) of the running means m, v of the gradient and its square, each over 1 - b^n."""

    lr: float = 1e-3
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8


class Learner(NamedTuple):
    """What is learnt, from which loss, how.

    model: a name in models.BODIES, or Functions. loss: a name in losses.LOSSES, or a pair (e, e_vjp).
    optimiser: None for gradient descent with momentum and decay, or Muon, or Adam.
    mini_batch: the tokens whose gradients are taken at the same weights, those before the first of them.
    every: whether the optimiser steps at every "token", or once per "mini_batch" with the sum of its gradients.
    read: whether a query reads the weights "before" or "after" the step of its token; once per mini-batch, those
    before it. normed: the model ends in y = x + LN(z), whose weight and shift do not learn.
    renormed: after a step, the columns of matrices get their initial lengths.
    """

    model: str | Functions = "linear"
    loss: Any = "l2"
    optimiser: Muon | Adam | None = None
    mini_batch: int = 1
    every: str = "token"
    read: str = "after"
    normed: bool = False
    renormed: bool = False
    eps: float = 1e-6  # of the norm
    window: int = 1  # tokens of a loss
    tile: int | None = None  # tokens that are computed at once, at most; None: the backend's
    decayed: bool = False  # gradients are those of alpha_t A; with mini_batch 1
    shared: int = 1  # tokens whose gradients are taken at the same weights, where a tile of more solves one system

    @property
    def is_linear(self) -> bool:
        """Whether weights are sums of gradients with coefficients that only depend on the rates."""
        return (self.optimiser is None or self.every == "mini_batch") and self.window == 1


class Rates(NamedTuple):
    """Numbers of each token (..., T, H, 1), or inside the core (..., H, T, 1); None: not there."""

    eta: Any  # step sizes, one for each matrix (and its bias), or one for all
    alpha: Any = None  # what remains of the weights
    mu: Any = None  # what remains of the momentum
    gain: Any = None  # the part of the steps since the mini-batch began that is read, and stays at its end
    beta: Any = None  # the part of the momentum that a step adds
    share: Any = None  # of the token in the losses of its window


class Tokens(NamedTuple):
    """Tokens of rows, heads before tokens, or their gradients."""

    q: Any  # (..., H, n, K), or None
    k: Any  # (..., H, n, K)
    v: Any  # (..., H, n, V)
    rates: Rates  # (..., H, n, 1)

    def each(self, f: Callable[[Any], Any]) -> Tokens:
        """f of every array that is there."""
        q, k, v, (eta, *more) = self
        rates = Rates(tuple(map(f, eta)), *(None if y is None else f(y) for y in more))
        return Tokens(None if q is None else f(q), None if k is None else f(k), None if v is None else f(v), rates)

    def cut(self, a: int, b: int) -> Tokens:
        """Tokens a to b."""
        return self.each(lambda x: x[..., a:b, :])


def each_of(f: Callable[..., Any], *tokens: Tokens) -> Tokens:
    """f of every array that is there, of several Tokens in step."""

    def own(*x: Any) -> Any:
        return None if x[0] is None else f(*x)

    eta = tuple(own(*x) for x in zip(*(t.rates.eta for t in tokens), strict=True))
    rates = (own(*x) for x in zip(*(t.rates[1:] for t in tokens), strict=True))
    return Tokens(*(own(*x) for x in zip(*(t[:3] for t in tokens), strict=True)), Rates(eta, *rates))  # type: ignore[call-arg]


def filled(xp: Namespace, d: Tokens, x: Tokens) -> Tokens:
    """Gradients, with zeros for arrays of x that have none."""
    zeros = xp.zeros_like if active.recorder is None else functools.partial(zeros_like, xp)
    return each_of(lambda y, own: zeros(y) if own is None else own, x, d)


def joined(xp: Namespace, each: list[Tokens], x: Tokens) -> Tokens:
    """Gradients of x from those of its tokens, one after the other."""
    return each_of(lambda *y: appended(xp, y), *each) if each else x.each(xp.zeros_like)


def plus(x: Any, y: Any) -> Tree:
    """x + y, array by array."""
    return tuple(a + b for a, b in zip(x, y, strict=True))


def more(x: Any, y: Any) -> Any:
    """x + y, where None is 0."""
    return y if x is None else x if y is None else x + y


def added(x: Tree, more: Tree) -> Tree:
    """x + more, where () is 0."""
    return plus(x, more) if more else x


class Inputs(NamedTuple):
    """Arrays of a call, or their gradients; tokens before heads."""

    q: Any  # (..., T, H, K)
    k: Any  # (..., T, H, K)
    v: Any  # (..., T, H, V)
    rates: Rates
    weights: Tree  # initial arrays that learn: matrices (H, K, M), rows (H, M)
    slow: Tree = ()  # arrays of the model that do not learn


def is_exact(f: Learner, rates: Rates) -> bool:
    """Whether the gradients of a tile, each at the weights before its token, solve one triangular system."""
    plain = f.model == "linear" and f.loss == "l2" and not f.normed and not f.renormed and f.optimiser is None
    return plain and f.every == "token" and f.mini_batch == 1 and f.window == 1 and rates.gain is None


class State(NamedTuple):
    """Weights of one sequence, or of a batch in step.

    n tokens have been seen. The mini-batch began with `anchor`; `weights` are those now. slots: the optimiser's memory,
    each like the weights. sums (..., H, 1, 1): those of mu in the mini-batch, where it steps once.
    past: keys, values and shares of the tokens before, where losses have a window.
    """

    n: int
    anchor: Tree
    weights: Tree
    slots: tuple[Tree, ...] = ()
    sums: Any = None
    past: Tree = ()


class FastPlan(NamedTuple):
    """How a call is computed: the fields of `linattn_np/core.py:CallPlan`, the learner and its states."""

    xp: Namespace
    dtype: Any
    scale: float
    causal: bool = True
    chunk_size: int | str | None = None
    sequences: tuple[Sequence, ...] = ()
    gradients: bool = False
    gate_gradient: bool = True
    precision: str | None = None
    overwrite: bool = False
    pool_rows: StateRows | None = None
    states_at: tuple[int, ...] | None = None
    returns_state: bool = True
    has_state: bool = False
    learner: Learner = Learner()
    kind: Any = None
    axes: tuple[str, ...] = ()  # of the parts of a state
