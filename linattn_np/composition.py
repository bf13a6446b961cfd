"""The algebra of spans of tokens: what a span does to any state that enters it, and two spans as one.

    S_out = transfer(S_in) + offset

Log decays add and act on an axis of every part of a state, matrices multiply. Two kinds of state are no such sum, but
compose as well: a StabilisedState stands for e^m S, a BoundedState holds averages of weight N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .matrix_state.types import BoundedState, StabilisedState
from .runtime.arrays import Array, Namespace, conjugate, sum_to


class Summary(NamedTuple):
    """A span of tokens: the state after it is the transfer of the state before it, plus the offset.

    transfer  None, a log decay (..., H) or (..., H, K), AxisDecays, a matrix (..., H, K, K), Factors (..., D),
              Stacked, or LateWrite
    offset    the state after the span if nothing comes before it: (..., H, K, V), or the variant's named tuple
    """

    transfer: Any
    offset: Any


class AxisDecays(NamedTuple):
    """Log decays of the key axis (..., H, K) and of the value axis (..., H, V) of a state."""

    keys: Any
    values: Any


class Factors(NamedTuple):
    """Products of the factors of each channel (..., D), real or complex, of a state (..., D)."""

    factors: Any


class Stacked(NamedTuple):
    """A matrix (..., H, D, D) of the parts of a state below one another, D = 2 K; of a state (..., H, N), D = N."""

    matrix: Any


class LateWrite(NamedTuple):
    """S_out = matrix (S + weight k^T v) + U; k and v are those of the last token, which the next one writes once more.

    k_out = retained k + its offset, and v_out likewise: retained is 1 for a span without tokens, else 0. k and v may
    have several rows, (..., H, R, K) and (..., H, R, V): k^T v is their sum.
    """

    matrix: Any  # (..., H, K, K)
    weight: Any  # (..., H)
    retained: Any  # (..., H)


Vjp = Callable[[Any], Any]
LEAST = -1e30  # m of a StabilisedState before its first token: below every input gate, and finite


def has_beginning(kind: type[Any] | None) -> bool:
    """Whether the offsets of such states begin with another state than a call does."""
    return kind is StabilisedState


def beginning(xp: Namespace, zero: StabilisedState) -> StabilisedState:
    """The state that an offset begins with, from the variant's state before any token."""
    return zero._replace(m=xp.full_like(zero.m, LEAST))


def after(xp: Namespace, span: Summary, state: Any) -> tuple[Any, Vjp]:
    """(the state after a span, its gradient -> (gradients of the span, gradient of the state before it))."""
    if isinstance(state, StabilisedState):
        return _in_one_gauge(xp, span, state)
    if isinstance(state, BoundedState):
        return _averaged(xp, span, state)
    if isinstance(span.transfer, LateWrite):
        return _after_late_write(xp, span, state)
    out, carried_vjp = _carried(xp, span.transfer, state)

    def vjp(d: Any) -> tuple[Summary, Any]:
        dtransfer, dstate = carried_vjp(d)
        return Summary(dtransfer, d), dstate

    return mapped(lambda S, U: S + U, out, span.offset), vjp


def composed(xp: Namespace, left: Summary, right: Summary) -> tuple[Summary, Vjp]:
    """(two spans as one, its gradient -> (gradients of the left one, gradients of the right one))."""
    offset, offset_vjp = after(xp, right, left.offset)
    transfer, transfer_vjp = _product(xp, left, right)

    def vjp(d: Summary) -> tuple[Summary, Summary]:
        of_right, dleft = offset_vjp(d.offset)
        first, second = transfer_vjp(d.transfer)
        return Summary(first, dleft), Summary(added(second, of_right.transfer), of_right.offset)

    return Summary(transfer, offset), vjp


def folded(xp: Namespace, spans: Sequence[Summary], state: Any) -> tuple[tuple[Any, ...], Vjp]:
    """(the states before each span and after the last, their gradients -> (gradients of the spans, of the state))."""
    states, vjps = [state], []
    for span in spans:
        state, vjp = after(xp, span, state)
        states.append(state)
        vjps.append(vjp)

    def backward(d: Sequence[Any]) -> tuple[tuple[Summary, ...], Any]:
        dstate, dspans = d[-1], []
        for vjp, own in zip(reversed(vjps), reversed(d[:-1]), strict=True):
            dspan, dbefore = vjp(dstate)
            dspans.append(dspan)
            dstate = added(own, dbefore)
        return tuple(reversed(dspans)), dstate

    return tuple(states), backward


# parts of states


def parts(x: Any) -> list[Any]:
    """The arrays of a state; the first is S."""
    return list(x) if isinstance(x, tuple) else [x]


def mapped(f: Callable[..., Any], *each: Any) -> Any:
    """f of the parts of states of one kind."""
    return type(each[0])(*map(f, *each)) if isinstance(each[0], tuple) else f(*each)


def added(a: Any, b: Any) -> Any:
    """The sum of two gradients of one kind, of which either may be None."""
    if a is None or b is None:
        return b if a is None else a
    return mapped(lambda x, y: x + y, a, b)


# transfers


def is_matrix(transfer: Any, state: Any) -> bool:
    """Whether a transfer of these states is a matrix."""
    if transfer is None or isinstance(transfer, tuple) or isinstance(state, StabilisedState):
        return False
    return transfer.ndim == parts(state)[0].ndim


def _product(xp: Namespace, left: Summary, right: Summary) -> tuple[Any, Vjp]:
    """(the transfer of the left span and then of the right one, its gradient -> both gradients)."""
    first, second, T = left.transfer, right.transfer, xp.matrix_transpose
    if isinstance(first, Factors):
        (a,), (b,) = first, second

        def vjp(d: Any) -> tuple[Any, Any]:
            if d is None:
                return None, None
            return Factors(d.factors * conjugate(xp, b)), Factors(d.factors * conjugate(xp, a))

        return Factors(b * a), vjp
    if isinstance(first, Stacked):
        (one,), (two,), H = first, second, lambda x: T(conjugate(xp, x))
        return Stacked(two @ one), lambda d: (d, d) if d is None else (
            Stacked(H(two) @ d.matrix), Stacked(d.matrix @ H(one)))  # fmt: skip
    if isinstance(first, LateWrite):
        return _late_product(xp, first, second)
    if not is_matrix(first, left.offset):
        return added(first, second), lambda d: (d, d)
    return second @ first, lambda d: (None, None) if d is None else (T(second) @ d, d @ T(first))


def _carried(xp: Namespace, transfer: Any, state: Any) -> tuple[Any, Vjp]:
    """(the transfer of a state, its gradient -> (gradient of the transfer, gradient of the state))."""
    T = xp.matrix_transpose
    if transfer is None:
        return state, lambda d: (None, d)
    if isinstance(transfer, Factors):
        a = transfer.factors
        return a * state, lambda d: (Factors(d * conjugate(xp, state)), conjugate(xp, a) * d)
    if isinstance(transfer, Stacked):
        return _mixed(xp, transfer.matrix, state)
    if is_matrix(transfer, state):
        return transfer @ state, lambda d: (d @ T(state), T(transfer) @ d)
    logs, shapes = parts(transfer), _shapes(transfer, parts(state))
    decays = [math.prod(xp.exp(xp.reshape(g, shape)) for g, shape in zip(logs, each, strict=True)) for each in shapes]
    out = _like(state, [e * S for e, S in zip(decays, parts(state), strict=True)])

    def vjp(d: Any) -> tuple[Any, Any]:
        dlogs: list[Any] = [None] * len(logs)
        for dS, S, each in zip(parts(d), parts(out), shapes, strict=True):  # d e^g S / dg = e^g S
            for n, (g, shape) in enumerate(zip(logs, each, strict=True)):
                dlogs[n] = added(dlogs[n], xp.reshape(sum_to(xp, dS * S, shape), g.shape))
        return _like(transfer, dlogs), _like(state, [e * dS for e, dS in zip(decays, parts(d), strict=True)])

    return out, vjp


def stacked(xp: Namespace, state: Any) -> Array:
    """The parts of a state below one another; numbers of a head (..., H, N) are one column."""
    return xp.concat(list(state), axis=-2) if isinstance(state, tuple) else state[..., None]


def unstacked(X: Array, like: Any) -> Any:
    """The inverse, of any number of columns."""
    if not isinstance(like, tuple):
        return X[..., 0]
    K = X.shape[-2] // len(like)
    return type(like)(*(X[..., n * K : (n + 1) * K, :] for n in range(len(like))))


def _mixed(xp: Namespace, matrix: Array, state: Any) -> tuple[Any, Vjp]:
    """(a matrix times the stacked state, its gradient -> (gradient of the transfer, gradient of the state))."""
    X, H = stacked(xp, state), lambda x: xp.matrix_transpose(conjugate(xp, x))

    def vjp(d: Any) -> tuple[Stacked, Any]:
        D = stacked(xp, d)
        return Stacked(D @ H(X)), unstacked(H(matrix) @ D, state)

    return unstacked(matrix @ X, state), vjp


def _like(x: Any, each: list[Any]) -> Any:
    return type(x)(*each) if isinstance(x, tuple) else each[0]


def _shapes(transfer: Any, state: list[Array]) -> list[list[tuple[int, ...]]]:
    """The shapes in which log decays multiply the parts of a state: of S rows, of other parts the last axis."""
    if isinstance(transfer, AxisDecays):
        *lead, V = transfer.values.shape
        return [[(*transfer.keys.shape, 1), (*lead, 1, V)]]
    *lead, K = transfer.shape
    if state[0].ndim == transfer.ndim + 2:  # of the head
        return [[(*lead, K, *(1,) * (S.ndim - transfer.ndim))] for S in state]
    others = [[(*lead, *(1,) * (S.ndim - transfer.ndim), K)] for S in state[1:]]
    return [[(*lead, K, 1)], *others]


# a token that is written once more


def _after_late_write(xp: Namespace, span: Summary, state: Any) -> tuple[Any, Vjp]:
    """S = M (S_0 + h k_0^T v_0) + U; k and v of the last token."""
    (M, h, retained), U, T = span.transfer, span.offset, xp.matrix_transpose
    one = state.k.ndim < state.S.ndim  # row
    k, v = (x[..., None, :] if one else x for x in (state.k, state.v))
    pair = T(k) @ v
    P = state.S + h[..., None, None] * pair
    keep = retained[..., None] if one else retained[..., None, None]
    out = type(state)(M @ P + U.S, keep * state.k + U.k, keep * state.v + U.v)

    def vjp(d: Any) -> tuple[Summary, Any]:
        dP = T(M) @ d.S
        dpair = h[..., None, None] * dP
        dk, dv = v @ T(dpair), k @ dpair
        dk, dv = (y[..., 0, :] if one else y for y in (dk, dv))
        dretained = sum_to(xp, d.k * state.k, keep.shape) + sum_to(xp, d.v * state.v, keep.shape)
        dtransfer = LateWrite(d.S @ T(P), xp.sum(dP * pair, axis=(-2, -1)), xp.reshape(dretained, retained.shape))
        return Summary(dtransfer, d), type(state)(dP, keep * d.k + dk, keep * d.v + dv)

    return out, vjp


def _late_product(xp: Namespace, one: LateWrite, two: LateWrite) -> tuple[LateWrite, Vjp]:
    """Of the left span and then of the right one; a left span without tokens leaves its write to the right one."""
    T = xp.matrix_transpose

    def vjp(d: Any) -> tuple[Any, Any]:
        if d is None:
            return None, None
        first = LateWrite(T(two.matrix) @ d.matrix, d.weight, d.weight * two.weight + d.retained * two.retained)
        return first, LateWrite(d.matrix @ T(one.matrix), one.retained * d.weight, one.retained * d.retained)

    return LateWrite(two.matrix @ one.matrix, one.weight + one.retained * two.weight, one.retained * two.retained), vjp


# states that are no sums


def _in_one_gauge(xp: Namespace, span: Summary, state: Any) -> tuple[Any, Vjp]:
    """e^m S = e^F e^{m_1} S_1 + e^{m_2} S_2 with m = max(F + m_1, m_2), so that no factor is above 1."""
    one, two = state, span.offset
    before = span.transfer + one.m
    is_before = before >= two.m
    m = xp.where(is_before, before, two.m)
    a, b = xp.exp(before - m), xp.exp(two.m - m)
    S, n = (_over(a, x) * x + _over(b, y) * y for x, y in ((one.S, two.S), (one.n, two.n)))

    def vjp(d: Any) -> tuple[Summary, Any]:
        da, db = (weight * (_sum_over(xp, d.S * x.S, weight) + _sum_over(xp, d.n * x.n, weight))
                  for weight, x in ((a, one), (b, two)))  # fmt: skip
        dm = d.m - da - db
        dbefore = da + xp.where(is_before, dm, xp.zeros_like(dm))
        dtwo = db + xp.where(is_before, xp.zeros_like(dm), dm)
        first, second = (StabilisedState(_over(weight, d.S) * d.S, _over(weight, d.n) * d.n, dweight)
                         for weight, dweight in ((a, dbefore), (b, dtwo)))  # fmt: skip
        return Summary(dbefore, second), first

    return StabilisedState(S, n, m), vjp


def _over(weight: Array, x: Array) -> Array:
    """A weight of heads, or of channels, as it multiplies x."""
    return weight[(..., *(None,) * (x.ndim - weight.ndim))]


def _sum_over(xp: Namespace, x: Array, weight: Array) -> Array:
    """The transpose of _over: the sum over the axes that share a weight."""
    return xp.sum(x, axis=tuple(range(weight.ndim, x.ndim))) if x.ndim > weight.ndim else x


def _averaged(xp: Namespace, span: Summary, state: Any) -> tuple[Any, Vjp]:
    """N = N_1 + N_2, and averages S = (N_1 S_1 + N_2 S_2) / N; 0 where nothing has a weight."""
    one, two = state, span.offset
    N = one.N + two.N
    some = xp.where(N == 0, xp.ones_like(N), N)
    a, b = one.N / some, two.N / some
    S = a[..., :, None] * one.S + b[..., :, None] * two.S
    W = a[..., None, :] * one.W + b[..., None, :] * two.W

    def vjp(d: Any) -> tuple[Summary, Any]:
        da, db = (xp.sum(d.S * x.S, axis=-1) + xp.sum(d.W * x.W, axis=-2) for x in (one, two))
        mean = a * da + b * db
        first, second = (BoundedState(w[..., :, None] * d.S, w[..., None, :] * d.W, d.N + (dw - mean) / some)
                         for w, dw in ((a, da), (b, db)))  # fmt: skip
        return Summary(None, second), first

    return BoundedState(S, W, N), vjp
