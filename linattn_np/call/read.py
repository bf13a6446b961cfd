"""Read a state without writing to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..matrix_state.array.read import read_fwd, read_vjp
from ..matrix_state.types import PARTS, NormalisedState, Plan, SolvedState, StabilisedState
from ..runtime import shapes
from ..runtime.arrays import Array, cast, compute_dtype, enter
from ..runtime.shapes import Sequence
from ..runtime.unchanged import check_unchanged, mark
from ..runtime.values import is_word, shown
from .binding import scale_of


class ReadGradients(NamedTuple):
    q: Any
    state: Any


def read(q: Any, state: Any, *, scale: float = 1.0, layout: str = "time_first") -> Any:
    """Read a state without writing to it: out_t = scale q_t S, every query the same S.

    q      (..., T, Hq, K)   any number of queries (mapped already, where the variant maps them)
    state  (..., H, K, V)    a state that any matrix-state variant returned; a NormalisedState (S, z) is read as
                             scale q S / (scale q z^T), 0 where that sum is 0; a StabilisedState (S, n, m) of mlstm as
                             scale q S / max(|scale q n^T|, e^-m)

    A SolvedState is read by the function that made it: mesa_net with beta = 0 and g = 0 writes nothing.

    Returns out (..., T, max(Hq, H), V) in q's dtype. Raises ValueError or TypeError for shapes and dtypes that do
    not fit.
    """
    return _read((q, state), {"scale": scale, "layout": layout}, forward_only=True)[0]


def _read(
    arrays: tuple[Any, ...], keywords: Mapping[str, Any], forward_only: bool = False
) -> tuple[Any, Callable[..., ReadGradients]]:
    """(out, pullback); forward_only: the pullback is not used."""
    q, state, scale, layout = _arguments(*arrays, **keywords)
    normalised = isinstance(state, tuple)
    names = [f"state.{name}" for name in state._fields] if normalised else ["state"]
    library, entered = enter("read", {"q": q} | dict(zip(names, state if normalised else [state], strict=True)))
    xp, q, marks = library.xp, entered["q"], mark({} if forward_only else entered)
    _check(q, entered, layout)
    if layout == "heads_first":
        q = xp.moveaxis(q, -3, -2)
    dtype = compute_dtype(xp, q, *(entered[n] for n in names))
    S = cast(xp, entered[names[0]], dtype)
    if normalised:
        S = xp.concat([S, cast(xp, entered[names[1]], dtype)[..., None]], axis=-1)
    plan = Plan(xp, dtype, float(scale), sequences=(Sequence(None, 0, q.shape[-3]),))
    raw = read_fwd(plan, q, S)
    out = raw
    if normalised:
        weights = raw[..., -1:]
        m: Any = entered.get("state.m")
        least = None if m is None else _least_denominator(xp, cast(xp, m, dtype), raw.shape[-2])
        den = weights if least is None else xp.maximum(xp.abs(weights), least)
        safe = xp.where(den == 0, xp.ones_like(den), den)
        out = xp.where(den == 0, xp.zeros_like(raw[..., :-1]), raw[..., :-1] / safe)
    result = cast(xp, out, q.dtype)
    shape = _swapped(layout, tuple(result.shape))
    if normalised and not forward_only:  # the pullback divides again, and the caller may write to the result
        result = xp.asarray(result, copy=True)
    result = library.give_back(xp.moveaxis(result, -3, -2) if layout == "heads_first" else result)

    def pullback(dout: Any) -> ReadGradients:
        """Gradients of q and of the state."""
        if dout is None:
            raise TypeError("read: dout is None, expected an array")
        check_unchanged("read", marks)
        d = enter("read", {"dout": dout}, library)[1]["dout"]
        shapes.check_dtype("read", "dout", d)
        if tuple(d.shape) != shape:
            raise ValueError(f"read: dout has shape {tuple(d.shape)}, expected {shape}")
        d = cast(xp, xp.moveaxis(d, -3, -2) if layout == "heads_first" else d, dtype)
        if normalised:
            d = xp.where(den == 0, xp.zeros_like(d), d / safe)
            dden = -xp.sum(d * out, axis=-1, keepdims=True)
            if least is not None:
                above = xp.abs(weights) > least
                dm = _over_queries(xp, xp.where(above, xp.zeros_like(dden), -least * dden), m.shape)
                dden = xp.where(above, xp.sign(weights) * dden, xp.zeros_like(dden))
            d = xp.concat([d, dden], axis=-1)
        dq, dS = read_vjp(plan, q, S, d)
        dq = cast(xp, dq, q.dtype)
        dq = library.give_back(xp.moveaxis(dq, -3, -2) if layout == "heads_first" else dq)
        if normalised:
            each = [dS[..., :-1], dS[..., -1]] + ([] if least is None else [dm])
            return ReadGradients(dq, type(state)(*(library.give_back(cast(xp, d, entered[n].dtype))
                                                   for n, d in zip(names, each, strict=True))))  # fmt: skip
        return ReadGradients(dq, library.give_back(cast(xp, dS, entered["state"].dtype)))

    return result, pullback


read.vjp = _read  # type: ignore[attr-defined]


def _least_denominator(xp: Any, m: Array, heads: int) -> Array:
    """e^{-m} of every query head: (..., 1, heads, 1)."""
    m = xp.repeat(m, heads // max(m.shape[-1], 1), axis=-1) if heads != m.shape[-1] else m
    return xp.exp(-m)[..., None, :, None]


def _over_queries(xp: Any, d: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of broadcasting a number per state to every query: (..., T, heads, 1) -> (..., H)."""
    d = xp.sum(d[..., 0], axis=-2)
    return xp.sum(xp.reshape(d, (*shape, d.shape[-1] // max(shape[-1], 1))), axis=-1)


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
    if not is_word(layout, ("time_first", "heads_first")):
        raise ValueError(f"read: layout is {shown(layout)}, expected 'time_first' or 'heads_first'")
    scale = scale_of("read", scale)
    if isinstance(state, SolvedState):
        raise TypeError("read: state is a SolvedState, expected one that is read without a ridge: call mesa_net with "
                        "beta = 0 and g = 0")
    if isinstance(state, tuple):
        kind = {2: NormalisedState, 3: StabilisedState}.get(len(state))
        if kind is None or any(S is None for S in state):
            raise TypeError(f"read: state is a {type(state).__qualname__} of {len(state)}, "
                            "expected an array or two arrays (S, z) as a NormalisedState")
        state = kind(*state)
    return q, state, 1.0 if scale is None else scale, layout


def _check(q: Array, given: dict[str, Array], layout: str) -> None:
    name = "state" if "state" in given else "state.S"
    S = given[name]
    if S.ndim < 3:
        raise ValueError(f"read: {name} has shape {tuple(S.shape)}, expected (..., H, K, V)")
    sizes = shapes.Sizes(batch=tuple(S.shape[:-3]), letters=dict(zip("HKV", map(int, S.shape[-3:]), strict=True)))
    shapes.check_one("read", "q", q, "Hq T K" if layout == "heads_first" else "T Hq K", sizes)
    shapes.check_state("read", S, sizes, name=name)
    for part, x in given.items():
        if part.startswith("state.") and part != name:
            shapes.check_state("read", x, sizes, PARTS[part.removeprefix("state.")], part)
