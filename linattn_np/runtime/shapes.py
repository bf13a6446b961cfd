"""Axes such as "T H K": binds sizes, checks every array, formats the error messages.

Letters: T tokens, Tq tokens of the queries, H states (the heads of v), Hq and Hk heads of queries and keys,
K key width, V value width, D channels without heads, N states of a channel, n micro-steps of a token, R rows of a
token, P pairs of channels, L slots of a cache. Axes with T or Tq are preceded by the batch axes of the call, others
are not. "t" is no axis: one token, preceded by the batch axes. "|" separates alternatives.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Iterable, Mapping
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from .arrays import COMPLEX, NARROW, STORAGE, Array, dtype_name
from .values import is_whole, shown

TIME = ("T", "Tq")
HEADS = ("H", "Hq", "Hk")
MEMORIES = ("state", "state.S", "state.W", "state.k", "state.v")  # (parts of) states that may be stored in 16 bits


Sizes = dict[str, Any]  # of a call, by letter; "...": the batch axes; "sequences": their number, with cu_seqlens


def lead(sizes: Sizes) -> tuple[int, ...]:
    """The leading axes of states: those of the batch, or the sequences of a ragged batch."""
    return (sizes["sequences"],) if "sequences" in sizes else sizes["..."]


def has_time(axes: str) -> bool:
    """Whether an array has one entry per token."""
    return not {*TIME, "t"}.isdisjoint(axes.split())


def is_of_pairs(axes: str) -> bool:
    """Whether an array has one entry per pair of tokens."""
    return len([letter for letter in axes.split() if letter in (*TIME, "S")]) > 1


def with_state(axes: str) -> str:
    """The axes in a call with a state: its slots come before the second tokens of pairs, S = L + T of them."""
    return axes.removesuffix(" T") + " S" if is_of_pairs(axes) else axes


def letters_of(axes: str) -> list[str]:
    """The letters of one alternative."""
    return [letter for letter in axes.split() if letter != "t"]


def heads_first(axes: str) -> str:
    """The axes with the head axis in front of its token axis."""
    if not has_time(axes):
        return axes
    letters = axes.split()
    head = letters.pop(head_axis(axes))
    return " ".join((head, *letters))


def one_token(axes: str) -> str:
    """The axes of one token: without T and Tq."""
    return axes.replace("Tq ", "t ").replace("T ", "t ")


def time_axis(axes: str, ndim: int, batch: tuple[int, ...]) -> int | None:
    """Position of the token axis in an array with `ndim` axes; None for a constant of the heads."""
    count = ndim - len(batch)
    return len(batch) if any(on_tokens and len(letters) == count for letters, on_tokens in _choices(axes)) else None


def head_axis(axes: str) -> int:
    """Position of the head axis, counted from the token axis; 0 for an array without heads."""
    return next((n for n, letter in enumerate(axes.split("|")[0].split()) if letter in HEADS), 0)


def check_arrays(
    fn: str, arrays: Mapping[str, Array | None], axes: Mapping[str, str], value: str, complex: Container[str] = ()
) -> Sizes:
    """Sizes of the call; `value` names the array that fixes batch, T, H and V. complex: those that may be complex.

    Raises ValueError for a wrong rank or size and TypeError for a wrong dtype.
    """
    for name, x in arrays.items():
        if x is not None:
            check_dtype(fn, name, x, name in complex)
    anchor = arrays[value]
    if anchor is None:
        raise TypeError(f"{fn}: {value} is None, expected an array")
    letters = letters_of(axes[value])
    rank = len(letters)
    if anchor.ndim < rank:
        near = "; a sequence of one head is x[:, None, :]" if letters[:2] == ["T", "H"] and anchor.ndim == 2 else ""
        raise ValueError(f"{fn}: {value} has shape {tuple(anchor.shape)}, expected (..., {', '.join(letters)}){near}")
    sizes: Sizes = {"...": tuple(int(n) for n in anchor.shape[: anchor.ndim - rank])}
    given = {n: x for n in (value, *(n for n in axes if n != value)) if (x := arrays[n]) is not None}
    try:
        for name, x in given.items():
            _bind(fn, name, x, axes[name], sizes)
    except ValueError:
        if len(odd := [name for name in given if _agree(fn, given, axes, name) is not None]) == 1:
            _bind(fn, odd[0], given[odd[0]], axes[odd[0]], _agree(fn, given, axes, odd[0]) or sizes)
        raise
    _check_heads(fn, sizes)
    return sizes


def _agree(fn: str, arrays: Mapping[str, Array], axes: Mapping[str, str], without: str) -> Sizes | None:
    """The sizes of all arrays but one, for an error that names the one that differs; None if others differ too."""
    others = {name: x for name, x in arrays.items() if name != without}
    sizes: Sizes | None = None
    try:
        for name, x in others.items():
            if sizes is None:
                rank = x.ndim - len(letters_of(axes[name].split("|")[0]))
                sizes = {"...": tuple(map(int, x.shape[: max(rank, 0)])) if has_time(axes[name]) else ()}
            _bind(fn, name, x, axes[name], sizes)
    except ValueError:
        return None
    return sizes


def check_dtype(fn: str, name: str, x: Array, complex: bool = False) -> None:
    """Raise TypeError unless x has a supported dtype; complex: which may be a complex one."""
    kinds = STORAGE + COMPLEX if complex else STORAGE
    if (kind := dtype_name(x)) not in kinds:
        whole = "int" in kind or kind == "bool"
        hint = f": {name}.astype('float32') converts" if whole and hasattr(x, "astype") else ""
        raise TypeError(f"{fn}: {name} has dtype {kind}, expected one of {', '.join(kinds)}{hint}")


def check_one(fn: str, name: str, x: Array, axes: str, sizes: Sizes) -> None:
    """Check one array against known sizes."""
    check_dtype(fn, name, x)
    _bind(fn, name, x, axes, sizes)
    _check_heads(fn, sizes)


@functools.cache
def _choices(axes: str) -> tuple[tuple[tuple[str, ...], bool], ...]:
    """(letters, whether the batch axes come in front) of each alternative."""
    return tuple((tuple(letters_of(choice)), has_time(choice)) for choice in axes.split("|"))


def _bind(fn: str, name: str, x: Array, axes: str, sizes: Sizes) -> None:
    """Check x against its axes and bind new letters."""
    shape = tuple(map(int, x.shape))
    for letters, on_tokens in _choices(axes):
        batch = sizes["..."] if on_tokens else ()
        if len(shape) != len(batch) + len(letters) or shape[: len(batch)] != batch:
            continue
        tail = shape[len(batch) :]
        for letter, n in zip(letters, tail, strict=True):
            if sizes.get(letter, n) != n:
                break
        else:
            sizes.update(zip(letters, tail, strict=True))
            return
    from .hints import channels

    raise ValueError(
        f"{fn}: {name} has shape {shape}, expected {expected(axes, sizes)}"
        f"{channels(fn, name, shape, axes, len(sizes['...']))}"
    )


def expected(axes: str, sizes: Sizes) -> str:
    """'(B, T, H) = (2, 64, 4)', with unbound letters left as they are."""
    texts = []
    for choice in axes.split("|"):
        letters = letters_of(choice)
        batch = sizes["..."] if has_time(choice) else ()
        names = ["B"] if len(batch) == 1 else [f"B{i + 1}" for i in range(len(batch))]
        numbers = [str(n) for n in batch] + [str(sizes.get(letter, letter)) for letter in letters]
        texts.append(f"{_tuple(names + letters)} = {_tuple(numbers)}")
    return " or ".join(texts)


def _tuple(words: list[str]) -> str:
    return f"({words[0]},)" if len(words) == 1 else f"({', '.join(words)})"


def _check_heads(fn: str, sizes: Sizes) -> None:
    """Heads: H states; keys may be shared by groups of them; queries may be fewer or more."""
    H = sizes.get("H", 1)
    Hk, Hq = sizes.get("Hk", H), sizes.get("Hq", H)
    if Hk != H and (Hk == 0 or H % Hk):
        raise ValueError(f"{fn}: keys have Hk = {Hk} heads and values H = {H}, expected Hk to divide H")
    if Hq != H and (min(Hq, H) == 0 or max(Hq, H) % min(Hq, H)):
        raise ValueError(f"{fn}: queries have Hq = {Hq} heads and values H = {H}, expected one to divide the other")
    if len({H, Hk, Hq}) == 3:
        raise ValueError(
            f"{fn}: queries have {Hq} heads, keys {Hk} and values {H}, expected at most two different numbers of heads"
        )


def check_state(
    fn: str, state: Array, sizes: Sizes, axes: str = "H K V", name: str = "state", pool: bool = False,
    counts: bool = False, complex: bool = False,
) -> None:  # fmt: skip
    """Check a state: batch axes of the call, or one row per sequence of a ragged batch; a pool has any number of rows.

    Memories of values or slots (MEMORIES) may be stored in 16 bits; denominators, matrices of systems and exponents
    may not. counts: whole numbers, as integers or floats. complex: complex numbers are allowed.
    """
    if counts:
        check_counts(fn, name, state)
    elif name in MEMORIES:
        check_dtype(fn, name, state, complex)
    elif dtype_name(state) not in STORAGE or dtype_name(state) in NARROW:
        raise TypeError(f"{fn}: {name} has dtype {dtype_name(state)}, expected float32 or float64")
    letters = axes.split()
    for letter, n in zip(letters, state.shape[-len(letters) :], strict=False):
        sizes.setdefault(letter, int(n))
    own, names = lead(sizes), ["N"]
    if "sequences" not in sizes:
        names = ["B"] if len(own) == 1 else [f"B{i + 1}" for i in range(len(own))]
    if pool:
        own, names = (int(state.shape[0]),), ["P"]
    want = own + tuple(sizes.get(letter, letter) for letter in letters)  # a size that is not known is a letter
    if tuple(state.shape) != want:
        raise ValueError(
            f"{fn}: {name} has shape {tuple(state.shape)}, "
            f"expected {_tuple(names + letters)} = {_tuple([str(n) for n in want])}"
        )


def check_counts(fn: str, name: str, x: Array) -> None:
    """Check integers of 64 bits, or of 32 (JAX may have no others), or floats that are whole numbers."""
    kind = dtype_name(x)
    if kind not in ("int64", "int32", *STORAGE):
        raise TypeError(f"{fn}: {name} has dtype {kind}, expected int64")
    if kind in STORAGE:
        try:
            values = np.asarray(x.get() if hasattr(x, "get") else x).astype(np.float64)
        except TypeError:  # of a tracer
            raise TypeError(f"{fn}: {name} has dtype {kind}, expected integers where a call is traced") from None
        if found := values[(np.floor(values) != values) | np.isinf(values)].tolist():
            raise ValueError(f"{fn}: {name} holds {found[0]!r}, expected whole numbers, in int64")


def state_shape(axes: str, lead: str = "...") -> str:
    """'(..., H, K, V)', or with "P" in front for a pool."""
    return _tuple([lead, *axes.split()])


def flatten(name: str, state: Any) -> dict[str, Any]:
    """The arrays of a state by name: "state", or "state.S", "state.z", ..."""
    if not isinstance(state, tuple):
        return {name: state}
    fields: Any = state  # a named tuple
    return {f"{name}.{n}": S for n, S in fields._asdict().items()}


def unflatten(like: Any, each: list[Any]) -> Any:
    """The inverse of flatten."""
    return type(like)(*each) if isinstance(like, tuple) else each[0]


def check_plain(fn: str, name: str, x: Any) -> None:
    """Raise TypeError for a masked array."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{fn}: {name} is a {type(x).__module__}.{type(x).__qualname__}, expected a plain array of integers"
        )


def check_offsets(fn: str, cu_seqlens: Any, sizes: Sizes) -> list[int] | None:
    """cu_seqlens as plain integers: first 0, last T, never decreasing, over one packed batch row."""
    if cu_seqlens is None:
        return None
    T = sizes["T"]
    check_plain(fn, "cu_seqlens", cu_seqlens)
    kind = str(getattr(cu_seqlens, "dtype", "int")).rsplit(".", 1)[-1]
    if "int" not in kind:
        raise TypeError(f"{fn}: cu_seqlens has dtype {kind}, expected integers")
    if getattr(cu_seqlens, "ndim", 1) != 1:
        raise ValueError(f"{fn}: cu_seqlens has shape {tuple(cu_seqlens.shape)}, expected (N + 1,)")
    values = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens
    whole = isinstance(values, list | tuple) and all(isinstance(n, Integral) for n in values)
    if not whole or any(isinstance(n, bool) for n in values):
        raise TypeError(f"{fn}: cu_seqlens is {shown(values)}, expected integers")
    values = [int(n) for n in values]
    if any(n != 1 for n in sizes["..."]):
        raise ValueError(f"{fn}: cu_seqlens needs one packed batch row, got batch axes {sizes['...']}")
    if len(values) < 2:
        raise ValueError(f"{fn}: cu_seqlens is {values!r}, expected at least two offsets: 0 and T = {T}")
    if values[0] != 0:
        raise ValueError(f"{fn}: cu_seqlens starts at {values[0]}, expected 0")
    for n, (a, b) in enumerate(itertools.pairwise(values)):
        if b < a:
            raise ValueError(f"{fn}: cu_seqlens decreases from {a} to {b} at {n + 1}, expected offsets in order")
    if values[-1] != T:
        raise ValueError(f"{fn}: cu_seqlens ends at {values[-1]}, expected T = {T}")
    sizes["sequences"] = len(values) - 1
    return values


def check_positions(fn: str, given: Any, T: int) -> list[int]:
    """return_states_at as increasing positions in 0..T: as given, or the multiples of a number."""
    if is_whole(given):
        return list(range(int(given), T + 1, int(given)))
    check_plain(fn, "return_states_at", given)
    values = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(values, list | tuple) or not all(is_whole(n, 0) for n in values):
        raise TypeError(f"{fn}: return_states_at is {shown(values)}, expected a whole number from 1, or positions")
    values = [int(n) for n in values]
    if any(n > T for n in values) or any(b <= a for a, b in itertools.pairwise(values)):
        raise ValueError(
            f"{fn}: return_states_at is {shown(values)}, expected positions from 0 to T = {T} in increasing order"
        )
    return values


# equal and ragged batches share one table: rows (sequence, start, stop)


class Sequence(NamedTuple):
    """Tokens start..stop of the packed row; `row` is the row of the state, None where the batch is not ragged."""

    row: int | None
    start: int
    stop: int


class Chunk(NamedTuple):
    """Tokens start..stop."""

    start: int
    stop: int


def sequences(T: int, offsets: list[int] | None) -> list[Sequence]:
    """One sequence per pair of neighbouring offsets (equal ones: an empty sequence); one sequence without offsets."""
    if offsets is None:
        return [Sequence(None, 0, T)]
    return [Sequence(n, a, b) for n, (a, b) in enumerate(itertools.pairwise(offsets))]


def segments(sequence: Sequence, positions: Iterable[int]) -> list[tuple[Sequence, int]]:
    """A sequence, cut at the positions in it, each part with the index of the position at its end, -1 without one.

    A position at the start of the sequence belongs to the sequence before.
    """
    at = {p: n for n, p in enumerate(positions) if sequence.start < p <= sequence.stop}
    ends = [*(p for p in at if p < sequence.stop), sequence.stop]
    return [(sequence._replace(start=a, stop=b), at.get(b, -1) if a < b else -1)
            for a, b in itertools.pairwise([sequence.start, *ends])]  # fmt: skip


def prefixes(every: Iterable[Sequence], positions: Iterable[int]) -> list[Sequence]:
    """Of each position the tokens of its sequence up to it; position 0 is at the start of the first sequence."""
    every = list(every)
    owners = [next((s for s in every if s.start < p <= s.stop), every[0]) for p in positions]
    return [s._replace(stop=p) for s, p in zip(owners, positions, strict=True)]


def chunks(sequence: Sequence, C: int) -> list[Chunk]:
    """The chunks of C tokens of a sequence; the last one may be shorter."""
    return [Chunk(s, min(s + C, sequence.stop)) for s in range(sequence.start, sequence.stop, C)]
