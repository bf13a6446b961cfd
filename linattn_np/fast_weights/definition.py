"""The definition, token by token in array calls, and its transpose.

With A the weights at which the mini-batch began, W and S those of the optimiser,

    G_t = eta_t dl(f_A(k_t), v_t) / dA
    W_t, S_t = step(W_{t-1}, S_{t-1}, G_t)            every token; else W_t = W_{t-1} - G_t
    out_t = f_R(q_t),   R = A + gain_t (W_t - A)      "before": W_{t-1}; a step per mini-batch: R = A

and at the end of a mini-batch A and W become the weights that `close` returns (batches.py).
"""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Namespace
from .batches import close, close_vjp, mixed, mixed_vjp
from .inner import functions_of
from .losses import loss_of
from .optimisers import step, step_vjp
from .types import Learner, Rates, State, Tokens, Tree, added, filled, joined, plus
from .types import more as more_of
from .window import Rows, rows_of, rows_vjp
from .window import after as later


def forward(
    f: Learner, xp: Namespace, x: Tokens, begin: State, initial: Tree, slow: Tree, keep: bool, has_end: bool = True
) -> tuple[Any, list[State]]:
    """(out, the final state; keep: the states before each token and after the last one)."""
    states, out = [begin], []
    for t in range(x.k.shape[-2]):
        y, after = token(f, xp, x.cut(t, t + 1), states[-1], initial, slow)
        out.append(y)
        states[len(states) if keep else 0 :] = [after]
    return None if x.q is None or not out else xp.concat(out, axis=-2), states


def token(f: Learner, xp: Namespace, x: Tokens, state: State, initial: Tree, slow: Tree) -> tuple[Any, State]:
    """(out_t, the state after the token)."""
    model = functions_of(f, xp, len(initial))
    rows = rows_of(xp, f, x, state)
    after, gain = _steps(f, xp, x, state, rows, gradient(f, model, rows, _anchor(f, x, state), slow)), x.rates.gain
    out = None if x.q is None else model.f((*_read(f, state, after, gain), *slow), x.q)
    return out, close(xp, f, after, gain, initial) if after.n % f.mini_batch == 0 else after


def _anchor(f: Learner, x: Tokens, state: State) -> Tree:
    """The weights of the gradient."""
    return tuple(x.rates.alpha * a for a in state.anchor) if f.decayed and x.rates.alpha is not None else state.anchor


def gradient(f: Learner, model: Any, rows: Rows, A: Tree, slow: Tree) -> Tree:
    """dl / dA."""
    w = (*A, *slow)
    e = loss_of(f.loss)[0](model.f(w, rows.k), rows.v)
    return model.f_vjp(w, rows.k, e if rows.share is None else rows.share * e)[0][: len(A)]


def _etas(x: Tokens, g: Tree) -> Tree:
    """The step size of each array."""
    return tuple(x.rates.eta[n * len(x.rates.eta) // len(g)] for n in range(len(g)))


def _steps(f: Learner, xp: Namespace, x: Tokens, state: State, rows: Rows, g: Tree) -> State:
    """The state after the token, before the end of its mini-batch."""
    n, A, W, slots, sums, past = state
    past = later(f, rows, past)
    G = tuple(eta * d for eta, d in zip(_etas(x, g), g, strict=True))
    if f.every == "token":
        return State(n + 1, A, *step(xp, f, n + 1, W, slots, G, x.rates.alpha, x.rates.mu, x.rates.beta), past=past)
    sums = None if sums is None else sums + x.rates.mu
    return State(n + 1, A, tuple(w - d for w, d in zip(W, G, strict=True)), slots, sums, past)


def _read(f: Learner, before: State, after: State, gain: Any) -> Tree:
    """The weights that the query reads."""
    if f.every != "token":
        return before.anchor
    return mixed(before.anchor, (after if f.read == "after" else before).weights, gain)


def backward(
    f: Learner, xp: Namespace, x: Tokens, states: list[State], initial: Tree, slow: Tree, dout: Any, d: State,
    has_end: bool = True,
) -> tuple[Tokens, State, Tree, Tree]:  # fmt: skip
    """(dx, dstate, dinitial, dslow) from the gradients of out and of the final state."""
    each, dinitial, dslow = [], tuple(0 * w for w in initial), tuple(0 * w for w in slow)
    for t in reversed(range(x.k.shape[-2])):
        own = None if dout is None else dout[..., t : t + 1, :]
        dx, d, more, more_slow = token_vjp(f, xp, x.cut(t, t + 1), states[t], initial, slow, own, d)
        each.append(dx)
        dinitial, dslow = added(dinitial, more), plus(dslow, more_slow)
    return joined(xp, each[::-1], x), d, dinitial, dslow


def token_vjp(
    f: Learner, xp: Namespace, x: Tokens, state: State, initial: Tree, slow: Tree, dout: Any, d: State
) -> tuple[Tokens, State, Tree, Tree]:
    """(dx, dstate before the token, dinitial, dslow)."""
    model, gain, P = functions_of(f, xp, len(initial)), x.rates.gain, len(initial)
    if model.f_vjp_vjp is None:
        raise TypeError("la.vjp needs the third function of a model, f_vjp_vjp, expected three functions")
    rows = rows_of(xp, f, x, state)
    point = _anchor(f, x, state)
    g = gradient(f, model, rows, point, slow)
    after, dgain, dq, dinitial = _steps(f, xp, x, state, rows, g), None, None, tuple[Any, ...]()
    dslow: Tree = tuple(0 * w for w in slow)
    if after.n % f.mini_batch == 0:
        d, dgain, dinitial = close_vjp(xp, f, after, gain, initial, d)
    dA, dW, dbefore = d.anchor, d.weights, None
    if dout is not None:
        R = _read(f, state, after, gain)
        dR, dq = model.f_vjp((*R, *slow), x.q, dout)
        dslow = dR[P:]
        if f.every != "token":
            dA = plus(dA, dR[:P])
        else:
            more, dR, more_gain = mixed_vjp(
                xp, state.anchor, (after if f.read == "after" else state).weights, gain, dR[:P]
            )
            dA, dgain = plus(dA, more), more_of(dgain, more_gain)
            dW, dbefore = (plus(dW, dR), None) if f.read == "after" else (dW, dR)
    # the step
    G = tuple(eta * y for eta, y in zip(_etas(x, g), g, strict=True))
    if f.every == "token":
        given = state.weights, state.slots, G, x.rates.alpha, x.rates.mu, x.rates.beta
        dW, dslots, dG, dalpha, dmu, dbeta = step_vjp(xp, f, after.n, given, dW, d.slots)
    else:
        dslots, dG, dalpha, dmu, dbeta = d.slots, tuple(-y for y in dW), None, d.sums, None
    if dbefore is not None:
        dW = plus(dW, dbefore)
    etas = _etas(x, g)
    deta: list[Any] = [0] * len(x.rates.eta)
    for n, (y, dy) in enumerate(zip(g, dG, strict=True)):
        deta[n * len(deta) // P] = deta[n * len(deta) // P] + xp.sum(y * dy, axis=(-2, -1), keepdims=True)
    # the gradient
    w, c = (*point, *slow), tuple(eta * y for eta, y in zip(etas, dG, strict=True))
    (e, e_vjp), y = loss_of(f.loss), model.f(w, rows.k)
    error, dshare = e(y, rows.v), None
    dw, dk, de = model.f_vjp_vjp(w, rows.k, error if rows.share is None else rows.share * error, c)
    if rows.share is not None:
        dshare, de = xp.sum(error * de, axis=-1, keepdims=True), rows.share * de
    dy, dv = e_vjp(y, rows.v, de)
    if dy is not None:
        more, more_k = model.f_vjp(w, rows.k, dy)
        dw, dk = tuple(more_of(a, b) for a, b in zip(dw, more, strict=True)), dk + more_k
    own, dpast = rows_vjp(xp, f, Rows(dk, dv, dshare), d.past)
    dpoint = tuple(0 * a if b is None else b for a, b in zip(state.anchor, dw[:P], strict=True))
    if f.decayed and x.rates.alpha is not None:  # of alpha A
        both = zip(dpoint, state.anchor, strict=True)
        dalpha = dalpha + sum(xp.sum(y * a, axis=(-2, -1), keepdims=True) for y, a in both)
        dpoint = tuple(x.rates.alpha * y for y in dpoint)
    dA = plus(dA, dpoint)
    dslow = tuple(a if b is None else a + b for a, b in zip(dslow, dw[P:], strict=True))
    rates = Rates(tuple(deta), dalpha, dmu, dgain if gain is not None else None, dbeta, own.share)
    dx = filled(xp, Tokens(dq, own.k, own.v, rates), x)
    return dx, State(state.n, dA, dW, dslots, d.sums, dpast), dinitial, dslow
