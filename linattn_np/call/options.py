"""The options of every public function, and their defaults; binding.py checks them."""

from __future__ import annotations

from typing import Any, TypedDict


class Options(TypedDict, total=False):
    """Options of every variant.

    scale: factor on the queries; None means what the paper uses (the docstring says which).
    state: the state before the first token; None means zeros. bfloat16 and float16 are storage formats.
    return_state: return (out, state) instead of out; the state has the compute dtype, float32 or float64.
    overwrite_state: write the final state into `state` if its library allows it, rounded once if it is 16-bit.
    state_rows: `state` is a pool (P, H, K, V); these unique integers, one per sequence, are the rows of the initial
        states. With overwrite_state the final states are written back to them. Not in vjp. Row numbers on a CUDA
        device are not checked: a row outside the pool reads as zeros and is not written.
    cu_seqlens: N + 1 offsets of N sequences packed in one batch row; states are then (N, H, K, V).
    chunk_size: 1 for the recurrent form, "parallel" for the parallel form, C for the chunk form; None chooses.
    precision: "tf32" lets the CUDA kernels round the factors of products of float32 arrays to tf32 (10 bits after the
        point, as float16's); None: float32 is float32.
    num_threads: CPU threads; None means LINATTN_NP_NUM_THREADS, else all processors. Results do not depend on it.
    layout: "time_first" (..., T, H, K) or "heads_first" (..., H, T, K).
    backend: None chooses; "reference", "chunks", "numba" or "cuda" forces one.
    """

    scale: float | None
    state: Any
    return_state: bool
    overwrite_state: bool
    state_rows: Any
    cu_seqlens: Any
    chunk_size: int | str | None
    precision: str | None
    num_threads: int | None
    layout: str
    backend: str | None


COMMON: dict[str, Any] = {
    "scale": None,
    "state": None,
    "return_state": False,
    "overwrite_state": False,
    "state_rows": None,
    "cu_seqlens": None,
    "chunk_size": None,
    "precision": None,
    "num_threads": None,
    "layout": "time_first",
    "backend": None,
}
