"""Read a state without writing to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..core import STATES, CallPlan, Core
from ..runtime import shapes
from ..runtime.arrays import Array, cast, compute_dtype, enter
from ..runtime.shapes import Sequence, flatten, unflatten
from ..runtime.unchanged import check_unchanged, mark
from ..runtime.values import is_word, shown
from .binding import scale_of
from .foreign import bridge_of


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
    given = {"q": q, "state": state, "scale": scale, "layout": layout}
    if (bridge := bridge_of((), given)) is not None:
        found = bridge.apply("read", read, _read, ("q", "state"), given)
        if found is not NotImplemented:
            return found
    return _read((), given, forward_only=True)[0]


def _read(
    arrays: tuple[Any, ...], keywords: Mapping[str, Any], forward_only: bool = False
) -> tuple[Any, Callable[..., ReadGradients]]:
    """(out, pullback); forward_only: the pullback is not used."""
    if not forward_only and (bridge := bridge_of(arrays, keywords)) is not None:
        found = bridge.run_vjp("read", None, _read, arrays, keywords)
        if found is not NotImplemented:
            return found
    core, q, state, scale, layout = _arguments(*arrays, **keywords)
    parts = flatten("state", state)
    library, entered = enter("read", {"q": q, **parts})
    xp, q, marks = library.xp, entered["q"], mark({} if forward_only else entered)
    _check(core, q, entered, layout)
    if layout == "heads_first":
        q = xp.moveaxis(q, -3, -2)
    dtype = compute_dtype(xp, q, *(entered[n] for n in parts))
    plan = CallPlan(xp, dtype, float(scale), sequences=(Sequence(None, 0, q.shape[-3]),))
    out, transpose = core.read(plan, q, unflatten(state, [cast(xp, entered[n], dtype) for n in parts]))
    result = cast(xp, out, q.dtype)
    shape = _swapped(layout, tuple(result.shape))
    if isinstance(state, tuple) and not forward_only:  # a pullback of a quotient reads it, and the caller may write
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
        dq, dstate = transpose(d)
        dq = cast(xp, dq, q.dtype)
        dq = library.give_back(xp.moveaxis(dq, -3, -2) if layout == "heads_first" else dq)
        each = zip(parts, flatten("state", dstate).values(), strict=True)
        return ReadGradients(dq, unflatten(state, [library.give_back(cast(xp, d, entered[n].dtype)) for n, d in each]))

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
    if not is_word(layout, ("time_first", "heads_first")):
        raise ValueError(f"read: layout is {shown(layout)}, expected 'time_first' or 'heads_first'")
    scale = scale_of("read", scale)
    core = STATES.get(type(state)) or STATES[None]
    return core, q, core.readable(state), 1.0 if scale is None else scale, layout


def _check(core: Core, q: Array, given: dict[str, Array], layout: str) -> None:
    """Check q and the parts of a state against each other; the first part fixes the sizes."""
    axes = {name: core.STATE_AXES[name.removeprefix("state.")] for name in given if name != "q"}
    name, letters = next((name, each.split()) for name, each in axes.items())
    S, rank = given[name], len(letters)
    if S.ndim < rank:
        raise ValueError(f"read: {name} has shape {tuple(S.shape)}, expected {shapes.state_shape(axes[name])}")
    own = map(int, S.shape[S.ndim - rank :])
    sizes = {"...": tuple(S.shape[: S.ndim - rank]), **dict(zip(letters, own, strict=True))}
    shapes.check_one("read", "q", q, "Hq T K" if layout == "heads_first" else "T Hq K", sizes)
    for part, each in axes.items():
        shapes.check_state("read", given[part], sizes, each, part)
