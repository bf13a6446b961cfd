"""return_lse: (out, lse) of a call whose core computes both as one array (..., V + 1), and the transpose.

The array y has the dtype of the sums; what passes it on (layouts, bridges, states, pieces) sees an output of V + 1
channels. Only here it becomes

    out = y[..., :-1] in the dtype of the values,   lse = y[..., -1];   dy = [dout, dlse]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import array_api_compat as compat
import numpy as np

from ..runtime.arrays import cast, device, enter
from ..runtime.shapes import check_dtype
from .results import Result, StatesResult


class Attended(NamedTuple):
    """out, and the logs of the sums of its weights; unpacks as a pair."""

    out: Any
    lse: Any


class AttendedState(NamedTuple):
    """The same with the state after the last token."""

    out: Any
    lse: Any
    state: Any


class AttendedStates(NamedTuple):
    """The same with the states at the positions."""

    out: Any
    lse: Any
    state: Any
    states: Any


def split(found: Any, like: Any) -> Any:
    """The public result of a call; like: an array of the dtype of out."""
    states = found[1:] if isinstance(found, Result | StatesResult) else ()
    out, lse = _parts(found[0] if states else found, like)
    kind: Any = (Attended, AttendedState, AttendedStates)[len(states)]
    return kind(out, lse, *states)


def split_vjp(fn: str, found: tuple[Any, Callable[..., Any]], like: Any) -> tuple[Any, Callable[..., Any]]:
    """(public result, pullback(dout, dlse, dstate, dstates)) from those of a call."""
    result, pull = found
    y = result[0] if isinstance(result, Result | StatesResult) else result

    def pullback(dout: Any = None, dlse: Any = None, *dstates: Any, **named: Any) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        dy = None if dout is None and dlse is None else _joined(fn, y, dout, dlse)
        return pull(dy, *dstates, **named)

    return split(result, like), pullback


def _parts(y: Any, like: Any) -> tuple[Any, Any]:
    """(out, lse), in operations of the caller's library: its autograd follows them."""
    if y is None:
        return None, None
    if not hasattr(y, "__getitem__"):  # it knows no more of arrays than DLPack
        library, entered = enter("return_lse", {"y": y, "like": like})
        out, lse = _parts(entered["y"], entered["like"])
        return library.give_back(out), library.give_back(lse)
    out, lse = y[..., :-1], y[..., -1]
    if type(y) is np.ndarray:
        return out.astype(like.dtype.newbyteorder("=")), np.array(lse)
    if hasattr(y, "to"):  # PyTorch
        return out.to(like.dtype).contiguous(), lse.contiguous()
    return compat.array_namespace(y).astype(out, like.dtype), lse


def _joined(fn: str, y: Any, dout: Any, dlse: Any) -> Any:
    """dy from its parts, of which one may be None."""
    library, entered = enter(fn, {"y": y, "dout": dout, "dlse": dlse})
    xp, own, parts = library.xp, entered["y"], []
    for name, shape in (("dout", (*own.shape[:-1], own.shape[-1] - 1)), ("dlse", tuple(own.shape[:-1]))):
        d = entered[name]
        if d is None:
            d = xp.zeros(shape, dtype=own.dtype, device=device(own))
        check_dtype(fn, name, d)
        if tuple(d.shape) != shape:
            raise ValueError(f"{fn}: {name} has shape {tuple(d.shape)}, expected {shape}")
        parts.append(cast(xp, d, own.dtype))
    return library.give_back(xp.concat([parts[0], parts[1][..., None]], axis=-1))
