"""The options of every public function, and their defaults; binding.py checks them."""

from __future__ import annotations

from typing import Any, TypedDict


class Options(TypedDict, total=False):
    """Options of every variant.

    scale: factor on the queries; None means what the paper uses (the docstring says which).
    state: the state before the first token; None means zeros. bfloat16 and float16 are storage formats.
    return_state: return (out, state) instead of out; the state has the compute dtype, float32 or float64.
    return_states_at: return (out, state, states) with the states at these positions, increasing from 0 to T (in the
        packed row of a ragged batch), or after every so many tokens if it is a number: states (..., n, H, K, V),
        ragged (n, H, K, V). state is None without return_state. The pullback takes dstates as a third argument.
    overwrite_state: write the final state into `state` if its library allows it, rounded once if it is 16-bit.
    state_rows: `state` is a pool (P, H, K, V); these unique integers, one per sequence, are the rows of the initial
        states. With overwrite_state the final states are written back to them. -1, which any number of sequences may
        have: the sequence begins as without a state, and no row is read or written for it. Not in vjp. Row numbers on
        a CUDA device are not checked: one outside the pool is as -1.
    fresh: which sequences begin as without a state, whatever `state` holds for them: booleans, one per sequence, on the
        host or the arrays' device. None: no sequence. Not in vjp.
    reverse: the recurrence goes from the last token of each sequence to the first, where the final state is. The state
        at a position p of return_states_at is that of tokens p to the last; fewer queries are those of the first ones.
    cu_seqlens: N + 1 offsets of N sequences packed in one batch row; states are then (N, H, K, V).
    chunk_size: 1 for the recurrent form, "parallel" for the parallel form, C for the chunk form; None chooses. With 1
        bits do not depend on how tokens come in calls, of array calls and loops; a backward keeps every token's state.
    chunk_states: how array calls propagate the state between chunks: "loop" (None) from one to the next, "scan" by
        composing the transfers of chunks, which needs more operations and fewer steps. Kernels and compiled loops
        do not use it.
    precision: "tf32" lets the CUDA kernels round the factors of products of float32 arrays to tf32 (10 bits after the
        point, as float16's); None: float32 is float32.
    num_threads: CPU threads; None means LINATTN_NUM_THREADS, else all processors. Results do not depend on it.
    layout: "time_first" (..., T, H, K) or "heads_first" (..., H, T, K). la.step has arrays without T.
    backend: None chooses; "reference", "chunks", "numba" or "cuda" forces one.
    check: True looks at the numbers before computing, as la.check does: a ValueError for what cannot be meant, a
        UserWarning for what is doubtful. It reads all arrays once and keeps a call from being replayed.
    """

    scale: float | None
    state: Any
    return_state: bool
    return_states_at: Any
    overwrite_state: bool
    state_rows: Any
    fresh: Any
    reverse: bool
    cu_seqlens: Any
    chunk_size: int | str | None
    chunk_states: str | None
    precision: str | None
    num_threads: int | None
    layout: str
    backend: str | None
    check: bool


PLAIN = frozenset((bool, int, float, str))  # types of values of which a copy is the same


def is_plain_tuple(x: Any) -> bool:
    """Whether an option is a tuple of plain values, such as limits, or of such tuples, such as triples of numbers."""
    return type(x) is tuple and all(type(y) in PLAIN or is_plain_tuple(y) for y in x)


def types_in(x: tuple[Any, ...]) -> tuple[Any, ...]:
    """The types of the values in such a tuple: 1 and 1.0 are equal, but different options."""
    return tuple(types_in(y) if type(y) is tuple else type(y) for y in x)


COMMON: dict[str, Any] = {
    "scale": None,
    "state": None,
    "return_state": False,
    "return_states_at": None,
    "overwrite_state": False,
    "state_rows": None,
    "fresh": None,
    "reverse": False,
    "cu_seqlens": None,
    "chunk_size": None,
    "chunk_states": None,
    "precision": None,
    "num_threads": None,
    "layout": "time_first",
    "backend": None,
    "check": False,
}
