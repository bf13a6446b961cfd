"""Communicators: all ranks get the same, and none waits for one that is gone."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import linattn_np as la
from linattn_np.distributed import RankError, Threads, in_threads


def test_all_ranks_get_what_all_ranks_gave():
    every = in_threads(3, lambda comm: [comm.all_gather(np.full(2, 10 * n + comm.rank)) for n in range(5)])
    for each in every:
        assert [x.tolist() for x in each] == [[[10 * n + rank] * 2 for rank in range(3)] for n in range(5)]


def test_a_rank_that_fails_is_an_error_on_the_others_at_once():
    seen = []

    def work(comm):
        if comm.rank == 1:
            raise KeyError("mine")
        try:
            comm.all_gather(np.ones(2))
        except RankError as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError, match="mine"):  # the cause, not what followed from it
        in_threads(3, work, timeout=1000.0)
    assert len(seen) == 2


def test_a_rank_that_is_silent_is_an_error_after_the_time_limit():
    one, _ = Threads.of(2, timeout=0.05)
    with pytest.raises(RankError, match=r"rank 0 waited 0\.05 s for the other ranks"):
        one.all_gather(np.ones(2))
    with pytest.raises(RankError):  # it stays an error
        one.all_gather(np.ones(2))


def test_a_rank_that_fails_inside_a_call_is_an_error_on_the_others():
    def work(comm):
        x = np.ones((4, 1, 2)) if comm.rank else np.ones((4, 1, 3))
        return la.distributed.run(la.linear_attention, x, np.ones((4, 1, 2)), np.ones((4, 1, 2)), comm=comm)

    before = threading.active_count()
    with pytest.raises(ValueError, match="linear_attention: k has shape"):
        in_threads(2, work, timeout=1000.0)
    assert threading.active_count() <= before + 1
