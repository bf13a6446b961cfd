"""One step of an optimiser on weights W, and its transpose. G is the gradient times the step size.

    descent   S' = mu S - G                                       W' = alpha W + beta S'
    Muon      S' = mu S - G                                       W' = alpha W + beta NS(S')
    Adam      m' = b1 m + (1 - b1) G, v' = b2 v + (1 - b2) G^2    W' = alpha W - lr m^ / (sqrt v^ + eps)

with m^ = m' / (1 - b1^n), v^ = v' / (1 - b2^n) at step n = 1, 2, ...
Without mu S' = -G; without alpha or beta they are 1.
"""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Array, Namespace
from .fused import combined
from .muon import newton_schulz_fwd, newton_schulz_vjp
from .types import Adam, Learner, Muon, Tree

Slots = tuple[Tree, ...]
Given = tuple[Tree, Slots, Tree, Any, Any, Any]  # W, slots, G, alpha, mu, beta


def slots_of(f: Learner, has_mu: bool) -> int:
    """The number of arrays that the optimiser keeps for each array."""
    return 2 if isinstance(f.optimiser, Adam) else int(has_mu)


def step(
    xp: Namespace, f: Learner, n: int, W: Tree, slots: Slots, G: Tree, alpha: Any, mu: Any, beta: Any = None
) -> tuple[Tree, Slots]:
    """(W', slots') of step n."""
    return step_fwd(xp, f, n, (W, slots, G, alpha, mu, beta), False)[:2]


def step_fwd(xp: Namespace, f: Learner, n: int, given: Given, keep: bool = True) -> tuple[Tree, Slots, Any]:
    """(W', slots', what the transpose may read; keep: also where that takes memory)."""
    W, slots, G, alpha, mu, beta = given
    residuals = None
    if isinstance(f.optimiser, Adam):
        new = tuple(zip(*(_moments(f.optimiser, m, v, g) for m, v, g in zip(*slots, G, strict=True)), strict=True))
        d = tuple(_adam(xp, f.optimiser, n, m, v) for m, v in zip(*new, strict=True))
    else:
        S = _momenta(xp, mu, slots, G)
        new, residuals = () if mu is None else (S,), directions(xp, f.optimiser, S, keep)
        d = residuals[0] if beta is None else tuple(beta * y for y in residuals[0])
    return tuple(combined(xp, (x, y), (alpha, None)) for x, y in zip(W, d, strict=True)), new, residuals


def _momenta(xp: Namespace, mu: Any, slots: Slots, G: Tree) -> Tree:
    """mu S - G."""
    if mu is None:
        return tuple(-g for g in G)
    return tuple(combined(xp, (s, g), (mu, None), 1.0, -1.0) for s, g in zip(slots[0], G, strict=True))


def step_vjp(
    xp: Namespace, f: Learner, n: int, given: Given, dW: Tree, dslots: Slots, residuals: Any = None
) -> tuple[Tree, Slots, Tree, Any, Any, Any]:
    """(dW, dslots, dG, dalpha, dmu, dbeta) of the given (W, slots, G, alpha, mu, beta)."""
    W, slots, G, alpha, mu, beta = given
    before = dW if alpha is None else tuple(alpha * d for d in dW)
    dalpha = None if alpha is None else _dots(xp, dW, W)
    if isinstance(f.optimiser, Adam):
        each = [_adam_vjp(xp, f.optimiser, n, *own) for own in zip(*slots, G, dW, *dslots, strict=True)]
        dm, dv, dG = (tuple(x) for x in zip(*each, strict=True))
        return before, (dm, dv), dG, dalpha, None, None
    S = _momenta(xp, mu, slots, G)
    steps, inner = directions(xp, f.optimiser, S, True) if residuals is None else residuals
    dbeta = None if beta is None else _dots(xp, dW, steps)
    dS = directions_vjp(xp, f.optimiser, S, dW if beta is None else tuple(beta * d for d in dW), inner)
    if mu is None:
        return before, (), tuple(-d for d in dS), dalpha, None, dbeta
    dS = tuple(x + y for x, y in zip(dS, dslots[0], strict=True))
    return before, (tuple(mu * d for d in dS),), tuple(-d for d in dS), dalpha, _dots(xp, dS, slots[0]), dbeta


def _dots(xp: Namespace, x: Tree, y: Tree) -> Array:
    """sum <x, y>, (..., H, 1, 1)."""
    total: Any = 0
    for a, b in zip(x, y, strict=True):
        total = total + xp.sum(a * b, axis=(-2, -1), keepdims=True)
    return total


# Muon


def directions(xp: Namespace, kind: Muon | None, S: Tree, keep: bool) -> tuple[Tree, Any]:
    """(S itself, or NS(S) of the matrices; what the transpose reads)."""
    if kind is None:
        return S, None
    each = [newton_schulz_fwd(xp, s, kind.coefficients, keep) for s in _joined(xp, kind, S)]
    return _split(xp, kind, S, [x for x, _ in each]), [residuals for _, residuals in each]


def directions_vjp(xp: Namespace, kind: Muon | None, S: Tree, d: Tree, residuals: Any) -> Tree:
    """dS."""
    if kind is None:
        return d
    each = zip(_joined(xp, kind, S), _joined(xp, kind, d), residuals, strict=True)
    return _split(xp, kind, S, [newton_schulz_vjp(xp, s, kind.coefficients, y, own) for s, y, own in each])


def _joined(xp: Namespace, kind: Muon, S: Tree) -> Tree:
    """The matrices, the first `stacked` ones side by side as one."""
    return S if kind.stacked <= 1 else (xp.concat(S[: kind.stacked], axis=-1), *S[kind.stacked :])


def _split(xp: Namespace, kind: Muon, S: Tree, found: list[Array]) -> Tree:
    """The inverse of _joined."""
    if kind.stacked <= 1:
        return tuple(found)
    each, at = [], 0
    for s in S[: kind.stacked]:
        each.append(found[0][..., at : at + s.shape[-1]])
        at += s.shape[-1]
    return (*each, *found[1:])


# Adam


def _moments(o: Adam, m: Array, v: Array, g: Array) -> tuple[Array, Array]:
    """(m', v')."""
    return o.b1 * m + (1 - o.b1) * g, o.b2 * v + (1 - o.b2) * g * g


def _adam(xp: Namespace, o: Adam, n: int, m: Array, v: Array) -> Array:
    """-lr m^ / (sqrt v^ + eps)."""
    return -o.lr / (1 - o.b1**n) * m / (xp.sqrt(v / (1 - o.b2**n)) + o.eps)


def _adam_vjp(
    xp: Namespace, o: Adam, n: int, m: Array, v: Array, g: Array, d: Array, dm1: Array, dv1: Array
) -> tuple[Array, Array, Array]:
    """(dm, dv, dg); where v' is 0, so is m', and its root has no slope."""
    m1, v1 = _moments(o, m, v, g)
    root = xp.sqrt(v1 / (1 - o.b2**n))
    dm1 = dm1 - d * (o.lr / (1 - o.b1**n)) / (root + o.eps)
    slope = xp.where(root > 0, 0.5 / (1 - o.b2**n) / xp.where(root > 0, root, xp.ones_like(root)), xp.zeros_like(root))
    dv1 = dv1 + d * (o.lr / (1 - o.b1**n)) * m1 / ((root + o.eps) ** 2) * slope
    return o.b1 * dm1, o.b2 * dv1, (1 - o.b1) * dm1 + 2 * (1 - o.b2) * g * dv1
