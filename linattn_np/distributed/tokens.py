"""A rank's arrays as calls on pieces of its tokens: one packed row, with one state a piece.

States are kept one a piece, in the form of a call without cu_seqlens, (..., H, K, V); in a ragged batch (1, H, K, V).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from array_api_compat import array_namespace

from ..call.foreign import mapped
from ..runtime.shapes import time_axis
from .pieces import Piece


class Tokens:
    """The arrays of a call by name, of which those in `axes` may have an axis of tokens. value: one that has.

    is_packed: whether the call has cu_seqlens.
    """

    def __init__(self, arrays: dict[str, Any], axes: Mapping[str, str], value: str, is_packed: bool):
        x = arrays[value]
        self.batch: tuple[int, ...] = tuple(x.shape[: x.ndim - len(axes[value].split())])
        self.arrays, self.axes, self.is_packed = arrays, axes, is_packed
        self.T, self.xp = int(x.shape[len(self.batch)]), array_namespace(x)

    def has_time(self, name: str, x: Any) -> bool:
        """Whether an array of this name has an axis of tokens."""
        return hasattr(x, "ndim") and time_axis(self.axes[name], x.ndim, self.batch) is not None

    def call(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The arrays on these pieces, as keywords of a call with a sequence for each."""
        if self._is_plain(pieces):
            return self.arrays
        cuts, rows = _runs(pieces), 1 if self.is_packed else math.prod(self.batch)
        lengths = ([piece.stop - piece.start for piece in pieces] or [0]) * rows
        return {n: self._packed(x, cuts) if self.has_time(n, x) else x for n, x in self.arrays.items()} | {
            "cu_seqlens": list(itertools.accumulate(lengths, initial=0))
        }

    def joined(self, states: Sequence[Any]) -> Any:
        """The states of pieces as those of a call on them; None without pieces."""
        if not states:
            return None
        if len(states) == 1 and not self.is_packed:
            return states[0]
        xp, at = self.xp, 0 if self.is_packed else len(self.batch)

        def join(*each: Any) -> Any:
            if self.is_packed:
                return xp.concat(each, axis=0)
            return xp.reshape(xp.stack(each, axis=at), (math.prod(self.batch) * len(each), *each[0].shape[at:]))

        first: Any = states[0]
        if not isinstance(first, tuple):
            return join(*states)
        return type(first)(*(join(*parts) for parts in zip(*states, strict=True)))

    def split(self, x: Any, pieces: Sequence[Piece]) -> list[Any]:
        """The states, or summaries, of a call on pieces, one for each."""
        if self._is_plain(pieces):
            return [x]
        at = () if self.is_packed else self.batch

        def one(n: int) -> Callable[[Any], Any]:
            if self.is_packed:
                return lambda y: y if y is None else y[n : n + 1, ...]
            index = (slice(None),) * len(at) + (n, ...)
            return lambda y: y if y is None else self.xp.reshape(y, (*at, len(pieces), *y.shape[1:]))[index]

        return [mapped(one(n), x) for n in range(len(pieces))]

    def rows(self, y: Any, pieces: Sequence[Piece]) -> Any:
        """An array with a row a token, of a call on all pieces, in the caller's shape."""
        if y is None or self._is_plain(pieces) or self.is_packed:
            return y
        return self.xp.reshape(y, (*self.batch, self.T, *y.shape[2:]))

    def packed_rows(self, y: Any, pieces: Sequence[Piece]) -> Any:
        """The inverse of `rows`."""
        if y is None or self._is_plain(pieces) or self.is_packed:
            return y
        at = len(self.batch) + 1
        return self.xp.reshape(y, (1, math.prod(y.shape[:at]), *y.shape[at:]))

    def _is_plain(self, pieces: Sequence[Piece]) -> bool:
        """Whether a call on the pieces is that of the caller."""
        return len(pieces) == 1 and not self.is_packed and (pieces[0].start, pieces[0].stop) == (0, self.T)

    def _packed(self, x: Any, cuts: list[tuple[int, int]]) -> Any:
        at = len(self.batch)
        each = [x[(slice(None),) * at + (slice(start, stop), ...)] for start, stop in cuts]
        x = each[0] if len(each) == 1 else self.xp.concat(each, axis=at)
        return x if self.is_packed else self.xp.reshape(x, (1, math.prod(x.shape[: at + 1]), *x.shape[at + 1 :]))


def _runs(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """The tokens of pieces, those that follow each other together; nothing without pieces."""
    runs: list[tuple[int, int]] = []
    for piece in pieces:
        if runs and runs[-1][1] == piece.start:
            runs[-1] = runs[-1][0], piece.stop
        else:
            runs.append((piece.start, piece.stop))
    return runs or [(0, 0)]
