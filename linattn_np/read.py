"""Read a state without writing to it."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .cores.kinds import NormalisedState
from .cores.matrix_state.inputs import Plan
from .cores.matrix_state.read import read_fwd, read_vjp
from .ground import shapes
from .ground.chunk_table import Sequence
from .ground.namespace import Array, cast, compute_dtype, enter


class ReadGradients(NamedTuple):
    q: Any
    state: Any


def read(q: Any, state: Any, *, scale: float = 1.0, layout: str = "time_first") -> Any:
    """Read a state without writing to it: out_t = scale q_t S, every query the same S.

    q      (..., T, Hq, K)   any number of queries (mapped already, where the variant maps them)
    state  (..., H, K, V)    a state that any matrix-state variant returned; a NormalisedState (S, z) is read as
                             scale q S / (scale q z^T), 0 where that sum is 0

    Returns out (..., T, max(Hq, H), V) in q's dtype. Raises ValueError or TypeError for shapes and dtypes that do
    not fit.
    """
    return _read((q, state), {"scale": scale, "layout": layout})[0]


def _read(arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, Callable[..., ReadGradients]]:
    q, state, scale, layout = _arguments(*arrays, **keywords)
    normalised = isinstance(state, NormalisedState)
    parts = {"state.S": state.S, "state.z": state.z} if normalised else {"state": state}
    library, entered = enter("read", {"q": q, **parts})
    xp, q = library.xp, entered["q"]
    _check(q, entered, layout)
    if layout == "heads_first":
        q = xp.moveaxis(q, -3, -2)
    S = xp.concat([entered["state.S"], entered["state.z"][..., None]], axis=-1) if normalised else entered["state"]
    dtype = compute_dtype(xp, q, S)
    plan = Plan(xp, dtype, float(scale), sequences=(Sequence(None, 0, q.shape[-3]),))
    raw = read_fwd(plan, q, cast(xp, S, dtype))
    out = raw
    if normalised:
        den = raw[..., -1:]
        safe = xp.where(den == 0, xp.ones_like(den), den)
        out = xp.where(den == 0, xp.zeros_like(raw[..., :-1]), raw[..., :-1] / safe)
    result = cast(xp, out, q.dtype)
    shape = _swapped(layout, tuple(result.shape))
    result = library.give_back(xp.moveaxis(result, -3, -2) if layout == "heads_first" else result)

    def pullback(dout: Any) -> ReadGradients:
        """Gradients of q and of the state."""
        if dout is None:
            raise TypeError("read: dout is None, expected an array")
        d = enter("read", {"dout": dout}, library)[1]["dout"]
        shapes.check_dtype("read", "dout", d)
        if tuple(d.shape) != shape:
            raise ValueError(f"read: dout has shape {tuple(d.shape)}, expected {shape}")
        d = cast(xp, xp.moveaxis(d, -3, -2) if layout == "heads_first" else d, dtype)
        if normalised:
            d = xp.where(den == 0, xp.zeros_like(d), d / safe)
            d = xp.concat([d, -xp.sum(d * out, axis=-1, keepdims=True)], axis=-1)
        dq, dS = read_vjp(plan, q, cast(xp, S, dtype), d)
        dq = cast(xp, dq, q.dtype)
        dq = library.give_back(xp.moveaxis(dq, -3, -2) if layout == "heads_first" else dq)
        if normalised:
            return ReadGradients(dq, NormalisedState(library.give_back(dS[..., :-1]), library.give_back(dS[..., -1])))
        return ReadGradients(dq, library.give_back(cast(xp, dS, entered["state"].dtype)))

    return result, pullback


read.vjp = _read  # type: ignore[attr-defined]


def _swapped(layout: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape (..., T, H, V) in the caller's layout."""
    *batch, T, H, V = shape
    return (*batch, H, T, V) if layout == "heads_first" else shape


def _arguments(
    q: Any = None, state: Any = None, scale: Any = 1.0, layout: str = "time_first", **unknown: Any
) -> tuple[Any, ...]:
    if unknown:
        raise TypeError(f"read: unknown option {next(iter(unknown))!r}, expected one of scale, layout")
    if q is None or state is None:
        raise TypeError(f"read: {'q' if q is None else 'state'} is None, expected an array")
    if layout not in ("time_first", "heads_first"):
        raise ValueError(f"read: layout is {layout!r}, expected 'time_first' or 'heads_first'")
    if scale is not None and (not isinstance(scale, numbers.Real) or isinstance(scale, bool)):
        raise TypeError(f"read: scale is {scale!r}, expected None or a real number")
    if isinstance(state, tuple):
        if len(state) != 2 or any(S is None for S in state):
            raise TypeError(f"read: state is a {type(state).__qualname__} of {len(state)}, "
                            "expected an array or two arrays (S, z) as a NormalisedState")
        state = NormalisedState(*state)
    return q, state, 1.0 if scale is None else scale, layout


def _check(q: Array, given: dict[str, Array], layout: str) -> None:
    name = "state" if "state" in given else "state.S"
    S, z = given[name], given.get("state.z")
    if S.ndim < 3:
        raise ValueError(f"read: {name} has shape {tuple(S.shape)}, expected (..., H, K, V)")
    sizes = shapes.Sizes(batch=tuple(S.shape[:-3]), letters=dict(zip("HKV", map(int, S.shape[-3:]), strict=True)))
    shapes.check_one("read", "q", q, "Hq T K" if layout == "heads_first" else "T Hq K", sizes)
    shapes.check_state("read", S, sizes, name=name)
    if z is not None:
        shapes.check_state("read", z, sizes, "H K", "state.z")
