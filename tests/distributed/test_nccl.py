"""The communicator of GPUs, as far as one GPU shows it; `python -m bench distributed` compares the bits of several."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.distributed import NCCL, RankError, nccl, run
from linattn_np.testing import relative_error, sample

pytestmark = pytest.mark.gpu


@pytest.fixture
def cp():
    cupy = pytest.importorskip("cupy")
    try:
        nccl.unique_id()
    except ImportError:
        pytest.skip("needs NCCL")
    return cupy


def test_one_gpu_gathers_what_it_gave(cp):
    comm = NCCL(0, 1, nccl.unique_id())
    for dtype in (np.uint8, np.float32, np.float64):
        x = cp.arange(7, dtype=dtype)
        assert cp.array_equal(comm.all_gather(x), x[None])


def test_a_rank_that_never_comes_is_an_error_after_the_time_limit(cp):
    with pytest.raises(RankError, match=r"rank 0 waited 0\.2 s for the other ranks"):
        NCCL(0, 2, nccl.unique_id(), timeout=0.2)


@pytest.mark.parametrize("fn", [la.simple_gla, la.gated_delta_rule, la.kda, la.rwkv7], ids=lambda fn: fn.__name__)
def test_segments_on_a_gpu_are_the_plain_call(cp, fn):
    rng = np.random.default_rng(1)
    arrays = {n: cp.asarray(x, np.float32) for n, x in sample(fn, rng, T=96, K=16, V=16, optional=False).items()}
    wanted, plain = la.vjp(fn, **arrays)
    out, pullback = la.vjp(run, fn, **arrays, comm=NCCL(0, 1, nccl.unique_id()), segment=32)
    assert relative_error(out, wanted) < 1e-5
    for a, b in zip(pullback(wanted), plain(wanted), strict=True):
        assert (a is None and b is None) or relative_error(a, b) < 1e-4
