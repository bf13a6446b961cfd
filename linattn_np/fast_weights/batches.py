"""The end of a mini-batch: what its steps become, and the transpose.

    every token        A' = W' = A + gain (W - A)
    every mini-batch   A', slots' = step(A, slots, A - W, mean mu);  W' = A'
    renormed           each column of a matrix gets the length that it had at first, |x| + 1e-5 being its own

A is the anchor, at which the gradients were taken, and W the weights after the last token.
"""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Array, Namespace
from .fused import fused_of
from .optimisers import step_fwd, step_vjp
from .types import Learner, State, Tree, plus

SMALL = 1e-5  # added to lengths


def close(xp: Namespace, f: Learner, state: State, gain: Any, initial: Tree) -> State:
    """The state that the next mini-batch begins with; gain (..., H, 1, 1): of the last token."""
    return close_fwd(xp, f, state, gain, initial, False)[0]


def close_fwd(
    xp: Namespace, f: Learner, state: State, gain: Any, initial: Tree, keep: bool = True
) -> tuple[State, Any]:
    """(that state, what the transpose may read; keep: also where that takes memory)."""
    W, slots, residuals = _stepped(xp, f, state, gain, keep)
    new = tuple(_renorm(xp, w, w0) for w, w0 in zip(W, initial, strict=True)) if f.renormed else W
    return State(state.n, new, new, slots, None if state.sums is None else 0 * state.sums, state.past), (W, residuals)


def _stepped(xp: Namespace, f: Learner, state: State, gain: Any, keep: bool) -> tuple[Tree, Any, Any]:
    """(W, slots, what the transpose of the optimiser may read) before lengths return."""
    if f.every == "token":
        return mixed(state.anchor, state.weights, gain), state.slots, None
    return step_fwd(xp, f, state.n // f.mini_batch, (state.anchor, state.slots, *_summed(f, state), None), keep)


def close_vjp(
    xp: Namespace, f: Learner, state: State, gain: Any, initial: Tree, d: State, residuals: Any = None
) -> tuple[State, Any, Tree]:
    """(dstate, dgain, dinitial) from the gradient d of what `close` returns; no dinitial: 0."""
    A, W, slots = state.anchor, state.weights, state.slots
    dW, dinitial = plus(d.anchor, d.weights), tuple[Any, ...]()
    if residuals is None and f.renormed:
        residuals = close_fwd(xp, f, state, gain, initial)[1]
    new, inner = ((), None) if residuals is None else residuals
    if f.renormed:
        both = [_renorm_vjp(xp, w, w0, own) for w, w0, own in zip(new, initial, dW, strict=True)]
        dW, dinitial = (tuple(x) for x in zip(*both, strict=True))
    if f.every == "token":
        dA, dW, dgain = mixed_vjp(xp, A, W, gain, dW)
        return State(state.n, dA, dW, d.slots, d.sums, d.past), dgain, dinitial
    given = A, slots, *_summed(f, state), None
    dA, dslots, dG, _, dmu, _ = step_vjp(xp, f, state.n // f.mini_batch, given, dW, d.slots, inner)
    dsums = None if state.sums is None else dmu / f.mini_batch
    return State(state.n, plus(dA, dG), tuple(-x for x in dG), dslots, dsums, d.past), None, dinitial


def _summed(f: Learner, state: State) -> tuple[Tree, Any, Any]:
    """(sum of the gradients, no decay, mean of mu)."""
    G = tuple(a - w for a, w in zip(state.anchor, state.weights, strict=True))
    return G, None, None if state.sums is None else state.sums / f.mini_batch


def mixed(A: Tree, W: Tree, gain: Any) -> Tree:
    """A + gain (W - A)."""
    return W if gain is None else tuple(a + gain * (w - a) for a, w in zip(A, W, strict=True))


def mixed_vjp(xp: Namespace, A: Tree, W: Tree, gain: Any, d: Tree) -> tuple[Tree, Tree, Any]:
    """(dA, dW, dgain)."""
    if gain is None:
        return tuple(0 * x for x in d), d, None
    dgain: Any = 0
    for a, w, own in zip(A, W, d, strict=True):
        dgain = dgain + xp.sum(own * (w - a), axis=(-2, -1), keepdims=True)
    return tuple((1 - gain) * x for x in d), tuple(gain * x for x in d), dgain


def _lengths(xp: Namespace, w: Array) -> Array:
    return xp.sqrt(xp.sum(w * w, axis=-2, keepdims=True))


def _fused(xp: Namespace, *matrices: Array) -> Any:
    """The kernels of columns of matrices of one shape."""
    return fused_of(xp, *matrices) if len({y.shape for y in matrices}) == 1 else None


def _renorm(xp: Namespace, w: Array, initial: Array) -> Array:
    """w |w0| / (|w| + 1e-5)."""
    if (fused := _fused(xp, w, initial)) is not None:
        return fused.columns("renormed", 1, (w, initial), SMALL)[0]
    return w * (_lengths(xp, initial) / (_lengths(xp, w) + SMALL))


def _renorm_vjp(xp: Namespace, w: Array, initial: Array, d: Array) -> tuple[Array, Array]:
    """(dw, dw0)."""
    if (fused := _fused(xp, w, initial, d)) is not None:
        return fused.columns("renormed_vjp", 2, (w, initial, d), SMALL)
    n, n0 = _lengths(xp, w), _lengths(xp, initial)
    along = xp.sum(w * d, axis=-2, keepdims=True)
    size = n + SMALL
    return d * (n0 / size) - _unit(xp, w, n) * (n0 * along / (size * size)), _unit(xp, initial, n0) * (along / size)


def _unit(xp: Namespace, w: Array, n: Array) -> Array:
    """w / |w|, 0 for 0."""
    return w / xp.where(n > 0, n, xp.ones_like(n))
