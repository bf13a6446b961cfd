"""Forward: a task is one sequence, one head of the state and some of its value columns, walked chunk by chunk."""

from __future__ import annotations

from ...pieces.numba_jit import kernel, part
from ...pieces.numba_rows import clear
from ...pieces.numba_tiles import Mat, size_of
from .numba_chunk import (
    address,
    erase,
    load_state,
    load_tokens,
    load_writes,
    mat,
    padded,
    read,
    start,
    store_state,
    write,
)
from .numba_table import (
    ASKED,
    BLOCKS,
    CHANNEL,
    CHUNK,
    COLUMNS,
    HEADS,
    IN_Q,
    IN_STATE,
    N_K,
    N_V,
    OUT,
    OUT_STATE,
    QUERIES,
    STARTED,
    TOKEN,
    Q,
    S,
)


@part
def _walk(one, arrays, n, w, sequence, head, column):
    batch, first, stop, state = sequence[0], sequence[1], sequence[2], sequence[3]
    V = min(n[COLUMNS], n[N_V] - column)
    if n[STARTED]:
        load_state(one, arrays, IN_STATE, state, head, n[N_K], column, V, mat(w, S))
    else:
        clear(one, mat(w, S), 0, n[N_K], V)
    for t in range(first, stop, n[CHUNK]):
        c = min(n[CHUNK], stop - t)
        p = padded(c)
        load_writes(one, arrays, n, w, batch, head, t, c, p, column, V)
        erase(one, n, w, p, V)
        if n[ASKED]:
            for j in range(head * n[QUERIES], (head + 1) * n[QUERIES]):
                load_tokens(one, arrays, IN_Q, batch, j, t, c, p, 0, n[N_K], mat(w, Q))
                at = address(arrays, OUT, batch, t, j) + column * arrays[OUT, CHANNEL]
                read(one, arrays, n, w, head, c, p, V, Mat(at, arrays[OUT, TOKEN] // size_of(one), 1))
        write(one, n, w, p, V)
    store_state(one, arrays, OUT_STATE, state, head, n[N_K], column, V, mat(w, S))


@kernel
def forward_tasks(one, scale, arrays, n, sequences, w, first, last):
    """Tasks first..last of (sequence, head, column block), the last running fastest."""
    start(one, scale, n, w)
    for task in range(first, last):
        column = task % n[BLOCKS] * n[COLUMNS]
        head = task // n[BLOCKS] % n[HEADS]
        _walk(one, arrays, n, w, sequences[task // n[BLOCKS] // n[HEADS]], head, column)
