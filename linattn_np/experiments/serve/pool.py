"""States of a model for many sequences: row n of every array is that of sequence n."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from linattn_np.layers import Layer

State = dict[str, Any]  # of a layer, by path: arrays (B, ...), tuples of such arrays, positions


class Pool:
    """The memory of `rows` states.

    A position, which all rows of a call have in common, is a number of each row here: rows of one call have the same
    one. Raises ValueError for a model whose states grow with the tokens.
    """

    def __init__(self, logits: Layer, params: dict[str, Any], rows: int):
        one, two = (logits(params, np.zeros((1, T), np.int64), return_state=True).state for T in (1, 2))
        for name, a, b in zip(one, leaves(one), leaves(two), strict=False):
            if np.shape(a) != np.shape(b):
                raise ValueError(f"the state {name} grows with the tokens, expected a model without softmax attention")
        self._like = one
        arrays = [np.asarray(x) for x in leaves(one)]
        self._arrays = [np.zeros((rows, *x.shape[1:]), x.dtype) for x in arrays]
        self._positions = [n for n, x in enumerate(arrays) if x.ndim == 0]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._arrays)

    def take(self, rows: Sequence[int]) -> State:
        """A copy of the states of rows that `together` puts into one call."""
        each = [x[list(rows)] for x in self._arrays]
        return _filled(self._like, [int(x[0]) if n in self._positions else x for n, x in enumerate(each)])

    def put(self, rows: Sequence[int], state: State) -> None:
        """Store the states of rows."""
        for own, x in zip(self._arrays, leaves(state), strict=True):
            own[list(rows)] = x

    def together(self, rows: Sequence[int]) -> list[list[int]]:
        """Rows by their positions: those that one call can have."""
        found: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            found.setdefault(tuple(int(self._arrays[n][row]) for n in self._positions), []).append(row)
        return list(found.values())

    def packed(self, row: int) -> tuple[np.ndarray, ...]:
        """The state of a row as arrays alone, for a la.StateStore."""
        return tuple(x[row : row + 1].copy() for x in self._arrays)

    def unpack(self, row: int, packed: tuple[np.ndarray, ...]) -> None:
        """Store a state that `packed` returned."""
        for own, x in zip(self._arrays, packed, strict=True):
            own[row] = x[0]


def leaves(state: State) -> list[Any]:
    """The arrays of a model's state, and its positions."""
    return [y for x in state.values() for y in (x if isinstance(x, tuple) else (x,))]


def _filled(like: State, leaves: Sequence[Any]) -> State:
    """A state of this form with other leaves."""
    each = iter(leaves)
    return {n: type(x)(*(next(each) for _ in x)) if isinstance(x, tuple) else next(each) for n, x in like.items()}
