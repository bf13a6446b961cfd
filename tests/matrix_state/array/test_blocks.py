"""A call cut into blocks of heads and rows, on any number of threads, has the bits of the whole."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from linattn_np.matrix_state import blocks, policy
from linattn_np.matrix_state.array import chunks
from linattn_np.matrix_state.heads import split_all
from linattn_np.runtime import blas
from tests.core_cases import CELLS, case


def computed(args, states="loop"):
    x, plan, state, dout, dstate = args
    out, end, saved = chunks.forward(x, plan, state, states)
    grads, begin = chunks.backward(saved, dout, dstate)
    return [y for y in (out, end, begin, *grads) if y is not None]


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_blocks_and_threads_do_not_show(cell, monkeypatch):
    for heads, offsets in (((4, 4, 4), None), ((2, 2, 4), None), ((4, 2, 2), [0, 7, 7, 21])):
        args = case(*cell, heads=heads, B=1 if offsets else 3, offsets=offsets)
        whole = computed(args)
        for cached, threads in ((1, "1"), (1, "3"), (200, "2")):
            with monkeypatch.context() as patch:
                patch.setattr(policy, "BLOCK_ELEMENTS", cached)
                patch.setattr(policy, "THREADED_ELEMENTS", 0)
                patch.setenv("LINATTN_NUM_THREADS", threads)
                cut = computed(args)
            assert all((a == b).all() for a, b in zip(whole, cut, strict=True)), (heads, cached, threads)


def test_a_failure_in_a_thread_reaches_the_caller(monkeypatch):
    monkeypatch.setattr(policy, "THREADED_ELEMENTS", 0)
    monkeypatch.setenv("LINATTN_NUM_THREADS", "2")

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        blocks.run([fail, fail], 1)


def test_threads_see_the_callers_error_state(monkeypatch):
    monkeypatch.setattr(policy, "THREADED_ELEMENTS", 0)
    monkeypatch.setenv("LINATTN_NUM_THREADS", "2")
    seen = []
    with np.errstate(over="raise"):
        blocks.run([lambda: seen.append(np.geterr()["over"])] * 6, 1)
    assert seen == ["raise"] * 6


def test_blas_gets_its_threads_back_whoever_leaves_last(monkeypatch):
    class Limit:
        now = 8

        def limit(self, limits, user_api):
            Limit.now = limits
            return self

        def restore_original_limits(self):
            Limit.now = 8

    monkeypatch.setattr(blas, "_controller", Limit)
    left, first = threading.Event(), blas.one_thread()
    first.__enter__()

    def second():
        with blas.one_thread():
            left.wait(10)
            assert Limit.now == 1

    other = threading.Thread(target=second)
    other.start()
    while blas._inside < 2:
        pass
    first.__exit__(None, None, None)
    assert Limit.now == 1
    left.set()
    other.join()
    assert Limit.now == 8


@pytest.mark.parametrize("cell", [c for c in CELLS if c[1] == "none"], ids="-".join)
def test_a_gpu_computes_all_chunks_of_short_sequences_at_once_in_blocks_of_heads(cell, monkeypatch):
    """Array calls take the time there; with an erase term, or longer, one chunk follows the other."""
    args = case(*cell, heads=(4, 4, 4), B=3)
    x, plan = args[0], args[1]
    looped = computed(args)
    assert policy.chunk_states(x, plan, 21) == "loop"
    for module in (policy, blocks):
        monkeypatch.setattr(module, "is_cupy", lambda xp: True)
    assert policy.chunk_states(x, plan, 21) == "scan"
    assert policy.chunk_states(x, plan._replace(chunk_states="loop"), 21) == "loop"
    assert policy.chunk_states(x, plan, 10**7) == "loop"
    assert policy.chunk_states(x._replace(a=x.k), plan, 21) == "loop"
    monkeypatch.setattr(blocks, "is_numpy", lambda xp: False)
    for size, is_cut in ((1 << 30, False), (1, True)):
        monkeypatch.setattr(policy, "SCAN_BYTES", size)
        core = split_all(plan.xp, x, 4)
        assert (len(blocks.blocks_of(core, plan, 16)) > 1) == is_cut
        for a, b in zip(computed(args, None), looped, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
