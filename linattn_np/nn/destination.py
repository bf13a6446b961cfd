"""out=: the array that a call writes its result to. Kernels write there at once where they can, else it is copied.

It may overlap an input: kernels then write elsewhere first, but where each number depends on its own input alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..ops.host import write
from ..runtime.arrays import Array, Namespace, dtype_name, enter, is_mutable
from ..runtime.memory import overlap, overlaps_itself, place_of


def of_call(piece: Any, c: Any, given: Mapping[str, Any], arrays: Mapping[str, Any]) -> Array | None:
    """The checked array; None without. arrays: the call's, in the dtype of the computation.

    Raises TypeError for another library, dtype or byte order, ValueError for another shape and for memory that cannot
    be written to, or that elements share.
    """
    if (out := given.get("out")) is None:
        return None
    fn = c.fn
    if not hasattr(out, "shape") or not hasattr(out, "dtype") or isinstance(out, np.generic):
        raise TypeError(f"{fn}: out is a {type(out).__name__}, expected an array")
    if not is_mutable(c.xp):
        raise TypeError(f"{fn}: out is an array of {c.library.name}, which cannot be written to, expected None")
    if not getattr(out.dtype, "isnative", True):
        raise TypeError(f"{fn}: out is byte-swapped, expected this machine's byte order")
    own = enter(fn, {"out": out}, c.library)[1]["out"]
    (shape, _), *_ = piece.results({**given, **arrays})
    wanted = dtype_name(c.xp.empty(0, dtype=piece.kind_of(c)))
    if dtype_name(own) != wanted:
        raise TypeError(f"{fn}: out has dtype {dtype_name(own)}, expected {wanted}")
    if tuple(own.shape) != shape:
        raise ValueError(f"{fn}: out has shape {tuple(own.shape)}, expected {shape}")
    if getattr(getattr(own, "flags", None), "writeable", True) is False:
        raise ValueError(f"{fn}: out is read-only, expected an array that can be written to")
    if (place := place_of(own)) is not None and overlaps_itself(place):
        raise ValueError(f"{fn}: out has elements that share memory, expected memory of its own for each")
    return own


def filled(piece: Any, c: Any, to: Array | None, arrays: Mapping[str, Any]) -> Any:
    """A context in which kernels write their result to the array, where it is one block of memory.

    arrays: what the kernels read, in the dtype of the computation.
    """
    if to is None or not (c.compiled or c.on_device) or not to.flags.c_contiguous:
        return contextlib.nullcontext()
    place, of_numbers = place_of(to), {*piece.axes.values()} == {"..."}
    for n in piece.axes:
        other = None if arrays.get(n) is None else place_of(arrays[n])
        if overlap(place, other) and not (of_numbers and place == other):
            return contextlib.nullcontext()
    from ..runtime.pieces.memory import destinations

    return destinations.filled([to])


def put(xp: Namespace, to: Array, found: Array, theirs: Any) -> Any:
    """The caller's array, with the result."""
    if (place := place_of(found)) is None or place != place_of(to):
        write(xp, to, found)
    return theirs if isinstance(theirs, np.ndarray) else to
