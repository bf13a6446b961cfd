"""The loss of a long text in pieces: the states of the model are carried from piece to piece, and kept in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..layers import Layer
from ..runtime import blas
from ..runtime.arrays import compat
from ..runtime.values import is_whole, shown
from . import safetensors
from .data import Tokens
from .flat import on_host

States = dict[str, Any]  # by path: an array, a named tuple of arrays, or a number of tokens


def score(loss: Layer, params: dict[str, Any], tokens: Tokens | Sequence[int] | np.ndarray, T: int = 4096,
          save: str | Path | None = None, every: int = 16) -> float:  # fmt: skip
    """The mean loss of every token given all tokens before it, T tokens at a time.

    loss     layer of (ids, labels) with states, such as the loss of la.layers.language_model
    tokens   one sequence; Tokens.open maps it into memory, so that only a piece is read at a time
    save     a file of position, sum and states, written every `every` pieces, at the end, and when an exception or
             ctrl-C ends the loop. If it exists the text goes on from there, and the result has the same bits

    Memory does not grow with the text if states do not. Model, parameters and tokens must be those that the file was
    written with. Raises ValueError for fewer than two tokens, and for a file of another T, another text, or no score.
    """
    if not is_whole(T):
        raise ValueError(f"score: T is {shown(T)}, expected a whole number from 1")
    if len(tokens) < 2:
        raise ValueError(f"score: there are {len(tokens)} tokens, expected two or more")
    count, place = len(tokens) - 1, {"T": int(T), "tokens": len(tokens)}
    position, total, state = 0, 0.0, None
    xp = compat.array_namespace(*params.values())

    def piece(ids: np.ndarray, before: States | None) -> tuple[float, States]:
        """(mean loss of all tokens but the first, the states after them)."""
        ids = ids[None]
        return loss(params, xp.asarray(ids[:, :-1]), xp.asarray(ids[:, 1:]), state=before, return_state=True)

    if save is not None and Path(save).exists():
        position, total, arrays = _load(save, place)
        if position == count:
            return total / count
        if position:
            state = _restored(xp, arrays, piece(np.zeros(2, np.int64), None)[1])
    pieces = 0
    try:
        with blas.one_thread():
            while position < count:
                stop = min(position + T, count)
                mean, after = piece(np.asarray(tokens[position : stop + 1]), state)
                position, total, state, pieces = stop, total + (stop - position) * float(mean), after, pieces + 1
                if save is not None and every and pieces % every == 0:
                    _save(save, place, position, total, state)
    finally:
        if save is not None:
            _save(save, place, position, total, state or {})
    return total / count


def _save(path: str | Path, place: dict[str, int], position: int, total: float, state: States) -> None:
    arrays = {f"states/{n}": on_host(x) for n, x in _flat(state).items()}
    arrays |= {"position": np.array(position), "sum": np.array(total)}
    safetensors.save(path, arrays, {"score": json.dumps(place)})


def _load(path: str | Path, place: dict[str, int]) -> tuple[int, float, dict[str, np.ndarray]]:
    """(position, sum, states by path) of a file.   Raises ValueError for one of another text."""
    arrays, about = safetensors.load(path)
    if "score" not in about:
        raise ValueError(f"{path} holds no score of a text")
    if (found := json.loads(about["score"])) != place:
        raise ValueError(f"score: {path} is of {found}, expected {place}")
    states = {n.removeprefix("states/"): x for n, x in arrays.items() if n.startswith("states/")}
    return int(arrays["position"]), float(arrays["sum"]), states


def _flat(state: States) -> dict[str, Any]:
    """The arrays of states by path; parts of named tuples have a path of their own, numbers are arrays."""
    found: dict[str, Any] = {}
    for n, x in state.items():
        if isinstance(x, tuple):
            fields: Any = x
            found |= {f"{n}.{part}": y for part, y in fields._asdict().items()}
        else:
            found[n] = np.asarray(x) if isinstance(x, int) else x
    return found


def _restored(xp: Any, arrays: Mapping[str, np.ndarray], like: States) -> States:
    """The inverse of _flat; like: states of the model, whose types are taken."""

    def one(name: str, x: Any) -> Any:
        if isinstance(x, tuple):
            return type(x)(*(one(f"{name}.{part}", y) for part, y in zip(type(x)._fields, x, strict=True)))  # type: ignore[attr-defined]
        if isinstance(x, int):
            return int(arrays[name])
        return xp.asarray(np.array(arrays[name]))

    if arrays.keys() != _flat(like).keys():
        raise ValueError(f"score: the file has states {sorted(arrays)}, expected {sorted(_flat(like))}")
    return {n: one(n, x) for n, x in like.items()}
