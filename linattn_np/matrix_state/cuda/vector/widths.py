"""Vector decays of widths that the kernels do not have: padded to multiples of 8 channels, and cut into blocks.

Value columns are independent of each other; without an erase term key channels are too, and outputs are sums over
their blocks. Every pair of a block of keys and one of values is a head of its own, so that a call of H heads becomes
one of H times as many heads of at most 128 x 128:

    q, k, g, u  (..., H, K)      ->  (..., H k, K / k)
    v, out      (..., H, V)      ->  (..., H k v, V / v)       values repeated for each block of keys
    S           (..., H, K, V)   ->  (..., H k v, K / k, V / v)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....runtime.arrays import Array, cast, shared_heads
from ...types import Erase, Inputs, Plan, Saved
from ..operands import sum_shared_heads
from . import calls as vector
from . import delta as vector_delta
from . import plan as cuts


class Widths(NamedTuple):
    """Blocks of the keys and of the values, and the channels of each."""

    keys: int
    K: int
    values: int
    V: int


def widths_of(x: Inputs) -> Widths:
    """How the widths of a call are cut."""
    return Widths(*_blocks(x.k.shape[-1]), *_blocks(x.v.shape[-1]))


def _blocks(width: int) -> tuple[int, int]:
    count = -(-width // cuts.WIDEST)
    return count, -(-width // (count * cuts.ALIGN)) * cuts.ALIGN


def needed(x: Inputs) -> bool:
    """Whether the kernels need other widths than the call has."""
    return widths_of(x) != (1, x.k.shape[-1], 1, x.v.shape[-1])


def unsupported_reason(x: Inputs, plan: Plan) -> str | None:
    """Why a call is not computed by narrower heads; None where it is."""
    w = widths_of(x)
    if not needed(x):
        return _inner(x).unsupported_reason(x, plan)
    if x.erase is Erase.DELTA and w.keys > 1:
        return f"an erase term couples the channels of keys, the kernels have up to {cuts.WIDEST} of them"
    if x.q is not None and x.q.shape[-2] > x.v.shape[-2]:
        return "queries of several heads read one state, which is wider than the kernels' states"
    return _inner(x).unsupported_reason(x, plan, (w.K, w.V))


unsupported_gradients = unsupported_reason


def how(x: Inputs, plan: Plan) -> str:
    """The kernels of a call that is covered, in words."""
    w = widths_of(x)
    return f"{_inner(x).how(x, plan)}; in {w.keys} x {w.values} blocks of {w.K} x {w.V} channels"


def handles(x: Inputs, plan: Plan) -> frozenset[str]:
    """The preprocessing steps that the kernels include."""
    return frozenset({"wide_keys"})


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved)."""
    xp, w = plan.xp, widths_of(x)
    out, end, inner = _inner(x).forward(_narrower(xp, x, w), plan, _narrower_state(xp, state, w))
    return (_wider_values(xp, out, w, x.v.shape), _wider_state(xp, end, w, x),
            Saved(x, plan, state, inner))  # fmt: skip


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state."""
    x, plan, _, inner = saved
    xp, w = plan.xp, widths_of(x)
    dout = None if dout is None else _narrower_values(xp, cast(xp, dout, x.v.dtype), w)
    inner = _saved(saved, w) if inner is None else inner
    d, dstate = _inner(x).backward(inner, dout, _narrower_state(xp, dstate, w))
    grads: dict[str, Array | None] = {"beta": d.beta, "v": _wider_values(xp, d.v, w, x.v.shape)}
    for name in ("q", "k", "g", "u"):
        y, dy = getattr(x, name), getattr(d, name)
        if dy is not None:
            heads = dy.shape[-2] // w.keys
            wide = dy.reshape(*dy.shape[:-2], heads, w.keys * w.K)
            wide = sum_shared_heads(xp, wide, (*wide.shape[:-2], y.shape[-2], w.keys * w.K))
            grads[name] = cast(xp, wide, dy.dtype)[..., : y.shape[-1]]
    return Inputs(**{n: grads.get(n) for n in Inputs._fields}), _wider_state(xp, dstate, w, x)


def _saved(saved: Saved, w: Widths) -> Saved:
    """The call of narrower heads without residuals, of a forward that went token by token."""
    xp = saved.plan.xp
    return Saved(_narrower(xp, saved.x, w), saved.plan, _narrower_state(xp, saved.state, w), None)


def _inner(x: Inputs) -> Any:
    return vector_delta if x.erase is Erase.DELTA else vector


def _narrower(xp: Any, x: Inputs, w: Widths) -> Inputs:
    """The call of narrower heads."""
    heads, found = x.v.shape[-2], {}
    for name in ("q", "k", "g", "u"):
        y = getattr(x, name)
        if y is not None:
            y = shared_heads(xp, y, heads) if w.keys > 1 else y  # else they remain shared
            found[name] = _padded(xp, y, -1, w.keys * w.K).reshape(*y.shape[:-2], y.shape[-2] * w.keys, w.K)
    found |= {"v": _narrower_values(xp, x.v, w), "beta": x.beta, "r": found["k"] if x.r is not None else None}
    if w.keys > 1 and x.beta is not None:
        raise ValueError("an erase term couples the channels of keys")
    return Inputs(**{n: found.get(n) for n in Inputs._fields})


def _narrower_values(xp: Any, v: Array, w: Widths) -> Array:
    v = _padded(xp, v, -1, w.values * w.V)
    *lead, heads, _ = v.shape
    if w.keys > 1:
        v = xp.broadcast_to(v[..., None, :], (*lead, heads, w.keys, w.values * w.V))
    return v.reshape(*lead, heads * w.keys * w.values, w.V)


def _wider_values(xp: Any, y: Array, w: Widths, shape: tuple[int, ...]) -> Array:
    """Summed over the blocks of keys."""
    *lead, heads, V = shape
    y = y.reshape(*lead, heads * w.keys, w.values * w.V)
    if w.keys > 1:
        y = cast(xp, sum_shared_heads(xp, y, (*lead, heads, w.values * w.V)), y.dtype)
    return y if y.shape[-1] == V else xp.ascontiguousarray(y[..., :V])


def _narrower_state(xp: Any, state: Array | None, w: Widths) -> Array | None:
    if state is None:
        return None
    *lead, heads, _, _ = state.shape
    wide = _padded(xp, _padded(xp, state, -1, w.values * w.V), -2, w.keys * w.K)
    each = xp.moveaxis(wide.reshape(*lead, heads, w.keys, w.K, w.values, w.V), -2, -3)
    return xp.ascontiguousarray(each).reshape(*lead, heads * w.keys * w.values, w.K, w.V)


def _wider_state(xp: Any, state: Array, w: Widths, x: Inputs) -> Array:
    *lead, heads, _, _ = state.shape
    heads //= w.keys * w.values
    each = xp.moveaxis(state.reshape(*lead, heads, w.keys, w.values, w.K, w.V), -3, -2)
    wide = each.reshape(*lead, heads, w.keys * w.K, w.values * w.V)
    return xp.ascontiguousarray(wide[..., : x.k.shape[-1], : x.v.shape[-1]])


def _padded(xp: Any, y: Array, axis: int, width: int) -> Array:
    """With zeros up to a width."""
    if y.shape[axis] == width:
        return y
    shape = list(y.shape)
    shape[axis] = width - y.shape[axis]
    return xp.concat([y, xp.zeros(tuple(shape), dtype=y.dtype)], axis=axis)
