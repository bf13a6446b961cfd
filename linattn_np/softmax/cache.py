"""Caches of keys and values: token p is in slot p mod L, a ring of the last L tokens."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..runtime.arrays import Array, Namespace, cast, count_dtype, device, is_numpy
from ..runtime.constants import constant_array
from ..runtime.recorder import refuse
from .path import cache as path
from .types import GatedCache, Inputs, KeyValueCache, SoftmaxPlan

Cache = Any  # KeyValueCache or GatedCache
BY_ARRAY_CALLS = "array calls change a cache"  # why a call is not replayed whole


def refuse_array_calls(backend: str, plan: SoftmaxPlan, x: Inputs, state: Cache | None) -> None:
    """A call is not replayed as kernels if array calls compute it, map the keys of a cache, or join several."""
    maps = x.w is not None and (state is not None or plan.returns_state)
    if backend != "cuda" and (backend != "numba" or maps or plan.states_at is not None):
        refuse(BY_ARRAY_CALLS)


def slots_after(plan: SoftmaxPlan, state: Cache | None, T: int) -> int:
    """L of the final state: the slots given and the tokens of the longest sequence, of a window as many as it reads.

    A state that is overwritten keeps its slots: the oldest tokens are forgotten.
    """
    L = 0 if state is None else state.v.shape[-3]
    if plan.overwrite:
        return L
    longest = max((s.stop - s.start for s in plan.sequences), default=T)
    return L + longest if plan.window is None else max(min(L + longest, plan.window - 1), 1)


def shapes_after(plan: SoftmaxPlan, x: Inputs, state: Cache | None) -> Cache:
    """A final state that is not returned: zeros in the shapes of its cotangent, without memory."""
    xp, lead = plan.xp, (len(plan.sequences),) if plan.is_ragged else tuple(x.v.shape[:-3])
    L = slots_after(plan, state, x.v.shape[-3])
    parts = {"k": (L, *x.k.shape[-2:]), "v": (L, *x.v.shape[-2:]), "length": ()}
    if x.g is not None:
        parts["b"] = (L, x.g.shape[-1])
    kind = KeyValueCache if x.g is None else GatedCache
    found, where = {}, device(x.v)
    for n, shape in parts.items():
        make = functools.partial(xp.zeros, (), dtype=count_dtype(xp) if n == "length" else plan.dtype, device=where)
        zero = constant_array(xp, ("zeros", (), str(make.keywords["dtype"])), where, make)
        found[n] = xp.broadcast_to(zero, (*lead, *shape))
    return kind(**found)


def count(xp: Namespace, length: Array) -> Array:
    """Lengths as integers of 64 bits, an array also without axes; the call has checked that they are whole numbers."""
    return xp.asarray(cast(xp, length, count_dtype(xp)))


def positions(xp: Namespace, n: Array, L: int) -> Array:
    """(..., L): the position of the token in each slot after n (...) tokens; less than 0 where the slot is empty."""
    last = n[..., None] - 1
    return last - (last - xp.arange(L, dtype=n.dtype, device=device(n))) % max(L, 1)


def _taken(xp: Namespace, y: Array, index: Array, valid: Array) -> Array:
    """Rows of y (lead, T, ...) by number, zeros where `valid` is false: (lead, L, ...)."""
    lead, rest = index.ndim - 1, y.shape[index.ndim :]
    shape = (*index.shape, *rest)
    if 0 in y.shape or 0 in shape:
        return xp.zeros(shape, dtype=y.dtype, device=device(y))
    flat = xp.reshape(y, (*y.shape[: lead + 1], -1))
    at = xp.broadcast_to(xp.where(valid, index, xp.zeros_like(index))[..., None], (*index.shape, flat.shape[-1]))
    found = xp.take_along_axis(flat, at, axis=lead)
    return xp.reshape(xp.where(valid[..., None], found, xp.zeros_like(found)), shape)


def append(xp: Namespace, old: Array, new: Array, n: Array, L: int) -> Array:
    """L slots after `new` (..., T, ...) is appended to `old` (..., L0, ...), which has seen n tokens."""
    L0, T = old.shape[n.ndim], new.shape[n.ndim]
    if not L0 and T <= L:
        none = (*new.shape[: n.ndim], L - T, *new.shape[n.ndim + 1 :])
        return xp.concat([new, xp.zeros(none, dtype=new.dtype, device=device(new))], axis=n.ndim)
    p, first = positions(xp, n + T, L), n[..., None]
    index = xp.where(p >= first, L0 + p - first, p % max(L0, 1))
    return _taken(xp, xp.concat([old, new], axis=n.ndim), index, (p >= 0) & (p >= first - L0))


def append_vjp(xp: Namespace, d: Array, n: Array, L0: int, T: int) -> tuple[Array, Array]:
    """Gradients of `old` and `new` from that of the slots."""
    L, first = d.shape[n.ndim], n[..., None]
    old = positions(xp, n, L0)
    new = first + xp.arange(T, dtype=n.dtype, device=device(n))
    found = [_taken(xp, d, p % max(L, 1), (p >= 0) & (p >= first + T - L)) for p in (old, new)]
    return found[0], found[1]


def in_order(xp: Namespace, y: Array, n: Array, inverse: bool = False) -> Array:
    """The slots (..., L, ...) after n tokens from the oldest token to the newest, and back: its transpose."""
    L = y.shape[n.ndim]
    first = xp.where(n > L, n, xp.zeros_like(n))[..., None]
    r = xp.arange(L, dtype=n.dtype, device=device(n))
    index = (r - first if inverse else r + first) % max(L, 1)
    return _taken(xp, y, index, index >= 0)


def ordered(plan: SoftmaxPlan, state: Cache | None) -> Cache | None:
    """The cache from the oldest token to the newest: as if no token had been forgotten."""
    if state is None:
        return None
    xp, n, L = plan.xp, count(plan.xp, state.length), state.v.shape[-3]
    if is_numpy(xp):
        refuse(BY_ARRAY_CALLS)
        if not (n > L).any():
            return state
    return KeyValueCache(in_order(xp, state.k, n), in_order(xp, state.v, n), xp.where(n > L, xp.full_like(n, L), n))


def ordered_vjp(plan: SoftmaxPlan, state: Cache, d: Cache) -> Cache:
    """The gradient of the cache from that of the ordered one."""
    xp, n = plan.xp, count(plan.xp, state.length)
    return KeyValueCache(in_order(xp, d.k, n, inverse=True), in_order(xp, d.v, n, inverse=True), d.length)


# the final state of one sequence


def decay_to_end(xp: Namespace, g: Array) -> Array:
    """sum_{s > t} g_s along the tokens of (..., T, H), each by adding its own terms."""
    zero = xp.zeros_like(g[..., :1, :])
    shifted = xp.concat([g[..., 1:, :], zero], axis=-2)[..., : g.shape[-2], :]
    return xp.flip(xp.cumulative_sum(xp.flip(shifted, axis=-2), axis=-2), axis=-2)


def decay_to_end_vjp(xp: Namespace, d: Array) -> Array:
    """dg_s = sum_{t < s} d_t."""
    sums = xp.cumulative_sum(d, axis=-2)
    return xp.concat([xp.zeros_like(d[..., :1, :]), sums[..., :-1, :]], axis=-2)[..., : d.shape[-2], :]


def empty(xp: Namespace, x: Inputs, dtype: Any) -> Cache:
    """A cache without slots, for tokens x."""
    lead, where = x.v.shape[:-3], device(x.v)
    k, v = (xp.zeros((*lead, 0, *y.shape[-2:]), dtype=dtype, device=where) for y in (x.k, x.v))
    length = xp.zeros(lead, dtype=count_dtype(xp), device=where)
    if x.g is None:
        return KeyValueCache(k, v, length)
    return GatedCache(k, v, xp.zeros((*lead, 0, x.g.shape[-1]), dtype=dtype, device=where), length)


def after(plan: SoftmaxPlan, x: Inputs, cache: Cache, L: int) -> Cache:
    """The cache after the tokens x."""
    xp, n, T = plan.xp, count(plan.xp, cache.length), x.v.shape[-3]
    keys = (cache.k, x.k) if x.w is None else path.to_end(plan, x, cache.k)
    k, v = (append(xp, old, cast(xp, new, plan.dtype), n, L) for old, new in (keys, (cache.v, x.v)))
    if x.g is None:
        return KeyValueCache(k, v, xp.asarray(n + T))
    g = cast(xp, x.g, plan.dtype)
    b = append(xp, cache.b + xp.sum(g, axis=-2, keepdims=True), decay_to_end(xp, g), n, L)
    return GatedCache(k, v, b, xp.asarray(n + T))


def append_in_place(plan: SoftmaxPlan, x: Inputs, state: Cache) -> Cache:
    """The cache after the tokens x, written into its own NumPy arrays: a row for each sequence, or batch axes."""
    refuse(BY_ARRAY_CALLS)
    L, T = state.v.shape[-3], x.v.shape[-3]
    if x.w is not None:
        state.k[...], k = path.to_end(plan, x, state.k.astype(plan.dtype, copy=False))
        x = x._replace(k=k)
    if not state.length.ndim:
        owners = [((), x.k, x.v, None if x.g is None else x.g)]
    else:
        owners = [(at, x.k[at], x.v[at], None if x.g is None else x.g[at]) for at in np.ndindex(state.length.shape)]
    for at, k, v, g in owners:
        n = int(state.length[at])
        if g is not None:
            g = g.astype(plan.dtype)
            old = state.b[at].astype(plan.dtype) + g.sum(axis=-2, keepdims=True)
            state.b[at] = append(plan.xp, old, decay_to_end(plan.xp, g), np.asarray(n), L)
        slots = np.arange(max(n, n + T - L), n + T) % max(L, 1)
        for part, y in ((state.k[at], k), (state.v[at], v)):
            part[slots] = y[T - len(slots) :]
    state.length[...] += T
    return state


def after_vjp(plan: SoftmaxPlan, x: Inputs, cache: Cache, d: Cache) -> tuple[Inputs, Cache]:
    """(gradients of the tokens, gradient of the cache before them)."""
    xp, n, T, L0 = plan.xp, count(plan.xp, cache.length), x.v.shape[-3], cache.v.shape[cache.length.ndim]
    (k0, dk), (v0, dv) = (append_vjp(xp, y, n, L0, T) for y in (d.k, d.v))
    maps = {"k": dk}
    if x.w is not None:
        maps, k0 = path.to_end_vjp(plan, x, cache.k, (k0, dk))
    if x.g is None:
        return Inputs(None, v=dv, **maps), KeyValueCache(k0, v0, d.length)
    b0, b1 = append_vjp(xp, d.b, n, L0, T)
    dg = decay_to_end_vjp(xp, b1) + xp.sum(b0, axis=-2, keepdims=True)
    return Inputs(None, v=dv, g=dg, **maps), GatedCache(k0, v0, b0, d.length)
