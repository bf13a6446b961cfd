"""The states of the core: their axes, reading one without writing, and random ones for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..core import CallPlan
from ..runtime.arrays import Array, Namespace
from .array.read import read_fwd, read_vjp
from .types import (
    PARTS,
    LevelState,
    Mamba3State,
    NormalisedState,
    Plan,
    PreconditionedState,
    SolvedState,
    StabilisedState,
)

STATE_AXES: Mapping[str, str] = {"state": PARTS["S"], **PARTS}
STATE_LIMITS: Mapping[str, tuple[float, float]] = {}
SINGLE = (Mamba3State, PreconditionedState)  # states whose first part alone is read
STATE_COUNTS: tuple[str, ...] = ("position",)


def end_shape(plan: Plan, state: Any, part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a part of a final state: that of the initial state."""
    return shape


def readable(state: Any) -> Any:
    """A state for `la.read`: an array, (S, z), (S, n, m), or one of SINGLE.   Raises TypeError for others."""
    if isinstance(state, SolvedState):
        raise TypeError(
            "read: state is a SolvedState, expected one that is read without a ridge: call mesa_net with "
            "beta = 0 and g = 0"
        )
    if not isinstance(state, tuple) or isinstance(state, SINGLE):
        return state
    kind = {2: NormalisedState, 3: StabilisedState}.get(len(state))
    if kind is None or any(S is None for S in state):
        raise TypeError(
            f"read: state is a {type(state).__qualname__} of {len(state)}, "
            "expected an array or two arrays (S, z) as a NormalisedState"
        )
    return kind(*state)


def read(plan: CallPlan, q: Array, state: Any) -> tuple[Array, Callable[[Array], tuple[Array, Any]]]:
    """scale q S, over the sum of weights if the state has one; and the pullback dout -> (dq, dstate)."""
    if isinstance(state, SINGLE):
        zero, kind = [plan.xp.zeros_like(y) for y in state[1:]], type(state)
        read_S_vjp = lambda dout: read_vjp(plan, q, state.S, dout)  # noqa: E731
        return read_fwd(plan, q, state.S), lambda dout: ((d := read_S_vjp(dout))[0], kind(d[1], *zero))
    if isinstance(state, tuple):
        return _read_average(plan, q, state)
    return read_fwd(plan, q, state), lambda dout: read_vjp(plan, q, state, dout)


def _read_average(plan: CallPlan, q: Array, state: Any) -> tuple[Array, Callable[[Array], tuple[Array, Any]]]:
    """q S / q z^T, 0 where that sum is 0; with m: q S / max(|q n^T|, e^-m)."""
    xp = plan.xp
    m: Any = state[2] if len(state) == 3 else None
    S = xp.concat([state[0], state[1][..., None]], axis=-1)
    raw = read_fwd(plan, q, S)
    den = weights = raw[..., -1:]
    least = None if m is None else _least_denominator(xp, m, raw.shape[-2])
    if least is not None:
        den = xp.maximum(xp.abs(weights), least)
    safe = xp.where(den == 0, xp.ones_like(den), den)
    out = xp.where(den == 0, xp.zeros_like(raw[..., :-1]), raw[..., :-1] / safe)

    def pullback(dout: Array) -> tuple[Array, Any]:
        """d num = dout / den, d den = -<dout, out> / den."""
        d = xp.where(den == 0, xp.zeros_like(dout), dout / safe)
        dden = -xp.sum(d * out, axis=-1, keepdims=True)
        more = []
        if least is not None:
            above = xp.abs(weights) > least
            more = [_over_queries(xp, xp.where(above, xp.zeros_like(dden), -least * dden), m.shape)]
            dden = xp.where(above, xp.sign(weights) * dden, xp.zeros_like(dden))
        dq, dS = read_vjp(plan, q, S, xp.concat([d, dden], axis=-1))
        return dq, type(state)(dS[..., :-1], dS[..., -1], *more)

    return out, pullback


def _least_denominator(xp: Namespace, m: Array, heads: int) -> Array:
    """e^{-m} of every query head: (..., 1, heads, 1)."""
    m = xp.repeat(m, heads // max(m.shape[-1], 1), axis=-1) if heads != m.shape[-1] else m
    return xp.exp(-m)[..., None, :, None]


def _over_queries(xp: Namespace, d: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of broadcasting a number per state to every query: (..., T, heads, 1) -> (..., H)."""
    d = xp.sum(d[..., 0], axis=-2)
    return xp.sum(xp.reshape(d, (*shape, d.shape[-1] // max(shape[-1], 1))), axis=-1)


def draw_state(rng: Any, kind: type[Any] | None, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """A random state: S normal, Z positive semidefinite, other parts positive; levels that a position has."""
    each = iter(shapes.values())
    S = rng.standard_normal(next(each))
    if kind is None:
        return S
    if kind is LevelState:
        levels = np.arange(S.shape[-3])
        position = rng.integers(1 << (len(levels) - 2), size=next(each))
        is_live = ((position[..., None] >> levels) & 1)[..., None, :, None, None] == 1
        return kind(np.where(is_live, S, 0.0), position)
    if kind is SolvedState:  # Z is a sum of outer products: positive semidefinite
        *lead, K = next(each)[:-1]
        keys = rng.standard_normal((*lead, K + 2, K))
        return kind(S, np.swapaxes(keys, -1, -2) @ keys / (K + 2))
    return kind(S, *(rng.uniform(0.5, 2.0, shape) for shape in each))
