"""Time blocks: every token of every head once, in order; no bit depends on them, nor on stored states."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

import linattn_np as la
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cpu import loops as numba_loops
from linattn_np.matrix_state.cpu.tasks import (
    BATCH,
    COLUMN,
    EARLIER,
    FIRST,
    FROM,
    HEAD,
    LATER,
    STATE,
    STOP,
    TO,
    WIDTH,
    checkpoint_block,
    time_blocks,
)
from linattn_np.matrix_state.cpu.workspace import TASK
from linattn_np.testing import relative_error
from tests.cases import with_arrays


def rows_of(lengths):
    """Sequences one after the other in one batch row."""
    rows = np.zeros((len(lengths), len(TASK)), np.int64)
    rows[:, STOP] = np.cumsum(lengths)
    rows[:, FIRST] = rows[:, STOP] - lengths
    rows[:, STATE] = np.arange(len(lengths))
    return rows


@settings(deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.integers(0, 900), min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 70),
    st.sampled_from([32, 64]), st.sampled_from([1, 8, 24, 32]), st.integers(1, 12), st.booleans(), st.booleans(),
)  # fmt: skip
def test_time_blocks_are_every_token_once_in_order(lengths, H, V, columns, C, group, stored, last_first):
    rows = rows_of(np.array(lengths))
    block = checkpoint_block(rows, (1, 10, 25), 4, C) if stored else 0
    tasks, bounds = time_blocks(rows, H, V, columns, C, group, block, last_first)
    assert bounds[0] == 0
    assert bounds[-1] == len(tasks)
    seen = set()
    for a, b in itertools.pairwise(bounds):
        bundle = tasks[a:b]
        assert len({tuple(t[[BATCH, STATE, COLUMN, WIDTH]]) for t in bundle}) == 1
        assert len(set(bundle[:, HEAD])) <= group
        for head in set(bundle[:, HEAD].tolist()):
            blocks = bundle[bundle[:, HEAD] == head]
            blocks = blocks[::-1] if last_first else blocks
            row = rows[blocks[0, STATE]]
            seen.add((int(blocks[0, STATE]), head, int(blocks[0, COLUMN]), int(blocks[0, WIDTH])))
            assert blocks[0, FIRST] == row[FIRST]
            assert blocks[-1, STOP] == row[STOP]
            assert (blocks[1:, FIRST] == blocks[:-1, STOP]).all()
            assert ((blocks[:-1, STOP] - blocks[:-1, FIRST]) % C == 0).all()
            assert blocks[:, EARLIER].tolist() == [0] + [1] * (len(blocks) - 1)
            assert blocks[:, LATER].tolist() == [1] * (len(blocks) - 1) + [0]
            assert (blocks[1:, FROM] == blocks[:-1, TO]).all()
    wanted = {(n, h, c, min(columns, V - c)) for n in range(len(rows)) for h in range(H) for c in range(0, V, columns)}
    assert seen == wanted


def test_places_of_kept_states_are_told_apart_and_bounded():
    rows, H = rows_of(np.array([600, 0, 256, 1000])), 16
    most = policy.STORED_BYTES // (H * 64 * 4)  # value columns of a state that takes all that is stored
    assert checkpoint_block(rows, (1, 10, 25), 4, 32) == 256
    assert rows[:, TO].tolist() == [0, 3, 4, 5]
    assert checkpoint_block(rows, (1, 10, 25), 4, 48) == 288  # whole chunks
    assert checkpoint_block(rows_of(np.array([256])), (1, 10, 25), 4, 32) == 0  # one time block has nothing between
    assert checkpoint_block(rows_of(np.array([4096])), (H, 64, most // 8), 4, 32) == 512
    assert checkpoint_block(rows_of(np.array([4096])), (H, 64, most // 2), 4, 32) == 2048
    assert checkpoint_block(rows_of(np.array([1 << 20])), (H, 64, most // 8), 4, 32) == policy.LONGEST_BLOCK
    assert checkpoint_block(rows_of(np.array([4096])), (H, 1024, 1024), 4, 32) == 256  # its chunks are large


def arrays(B, T, H, K, V, dtype=np.float32):
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((B, T, H, d)).astype(dtype) for d in (K, K, V, V))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = -rng.uniform(0, 0.1, (B, T, H)).astype(dtype), rng.uniform(0, 2, (B, T, H)).astype(dtype)
    return (q, k, v, g, beta), dout


def all_of(given, dout, **options):
    (out, state), pullback = la.vjp(la.gated_delta_rule, *given, return_state=True, backend="numba", **options)
    return [out, state, *(d for d in pullback(dout, state) if d is not None)]


def test_heads_that_take_turns_get_what_each_gets_alone():
    given, dout = arrays(2, 600, 6, 20, 40)
    together = all_of(given, dout)
    for h in range(6):
        alone = all_of([x[:, :, h : h + 1] for x in given], dout[:, :, h : h + 1])
        for x, y in zip(together, alone, strict=True):
            assert (np.take(x, [h], axis=1 if x.shape[1] == 6 else 2) == y).all()


@pytest.mark.parametrize("offsets", [None, [0, 700, 700, 720, 1500]])
def test_no_bit_depends_on_the_states_that_are_kept(monkeypatch, offsets):
    given, dout = arrays(1, 1500, 2, 24, 16)
    found = []
    for kept in (policy.STORED_BYTES, 4 * 2 * 24 * 16 * 4, 0):  # every 256 tokens, fewer, none
        monkeypatch.setattr(policy, "STORED_BYTES", kept)
        found.append(all_of(given, dout, cu_seqlens=offsets))
    for other in found[1:]:
        assert all((x == y).all() for x, y in zip(found[0], other, strict=True))


def test_time_blocks_and_kept_states_are_the_chunk_form():
    given, dout = arrays(1, 1300, 8, 16, 16, np.float64)
    (out, state), pullback = la.vjp(la.gated_delta_rule, *given, return_state=True, backend="chunks")
    expected = [out, state, *(d for d in pullback(dout, state) if d is not None)]
    for x, y in zip(all_of(given, dout), expected, strict=True):
        assert relative_error(x, y) < 1e-12


FEW = [with_arrays("q k v"), *(with_arrays("q k v g", decay=decay, erase="NONE") for decay in ("SCALAR", "VECTOR"))]


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("fn", FEW, ids=lambda fn: fn.__name__)
def test_few_heads_go_backward_by_time_blocks_at_once(monkeypatch, fn, queries):
    """Several threads and one head: time blocks at once, with the bits that one thread gives."""
    monkeypatch.setattr(policy, "APART_OPERATIONS", 0)
    found, calls = [], []
    find = numba_loops._find_ends
    monkeypatch.setattr(numba_loops, "_find_ends", lambda *given: calls.append(find(*given)))
    rng = np.random.default_rng(0)
    given = la.testing.sample(fn, rng, B=(1,), T=900, H=1, K=20, V=70, Hq=queries, optional=False)
    state, dout = rng.standard_normal((1, 1, 20, 70)), rng.standard_normal((1, 900, queries, 70))
    for count in (1, 3):
        (out, end), pullback = la.vjp(fn, **given, state=state, return_state=True, backend="numba", num_threads=count)
        found.append([out, end, *(d for d in pullback(dout, end) if d is not None)])
        assert len(calls) == (count > 1)
    assert all((x == y).all() for x, y in zip(*found, strict=True))
