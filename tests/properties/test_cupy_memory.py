"""Device memory: nothing stays of a call whose arrays are gone, nor of one for which there was not enough."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import linattn_np as la
from linattn_np import sampling
from linattn_np.call.replay import plans as replay
from linattn_np.runtime.cuda import constants
from tests.cases import cases_of, draw, in_dtype, parts, parts_like

pytestmark = pytest.mark.gpu
LENGTHS = (100, 130, 200, 257, 300)


@pytest.fixture
def pool(monkeypatch):
    """CuPy's memory pool; no plan, and no array that nobody refers to; log-linear states for the longest calls."""
    cupy = pytest.importorskip("cupy")
    monkeypatch.setitem(sampling.SIZES, "levels", 18)
    replay.clear()
    gc.collect()
    yield cupy.get_default_memory_pool()
    cupy.get_default_memory_pool().set_limit(size=0)
    replay.clear()


def given(case, T, dtype, B=1, K=64):
    """A call's arguments on the device, with a state."""
    cupy, kind = pytest.importorskip("cupy"), pytest.importorskip("ml_dtypes").bfloat16
    kind = kind if dtype == "bfloat16" else np.dtype(dtype)
    arrays, state = draw(case, B=(B,), T=T, H=4, K=K, V=K)
    there = {n: cupy.asarray(in_dtype(x, kind)) if isinstance(x, np.ndarray) else x for n, x in arrays.items()}
    return there | {"state": parts_like(state, [cupy.asarray(in_dtype(S, np.float32)) for S in parts(state)])}


def held(pool):
    """Bytes that are in use beside constants."""
    return pool.used_bytes() - sum(-(-x.nbytes // 512) * 512 for x in constants._cached.values())


def plain(fn, arguments):
    fn(**arguments)


def pulled(fn, arguments):
    result, pullback = la.vjp(fn, **arguments, return_state=True)
    pullback(*result)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_plans_hold_no_memory(pool, fn, dtype):
    """Of calls, of calls with gradients and of steps, for five shapes, each recorded and replayed."""
    case, before = cases_of(fn)[0], held(pool)
    for call, lengths in ((plain, LENGTHS), (pulled, LENGTHS), (plain, (1,) * len(LENGTHS))):
        for n, T in enumerate(lengths):
            arguments = given(case, T, dtype, 1 if T > 1 else n + 1) | case.options
            for _ in range(2):
                call(fn, arguments)
            explained = la.explain(fn, **arguments)
            del arguments
        gc.collect()
        assert bool(replay.count()) == (explained.replay != "what it computes cannot be recorded")
        assert held(pool) == before


@pytest.mark.parametrize("call", [plain, pulled])
@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_a_call_after_one_without_enough_memory(pool, fn, call):
    """It works, recorded plans too, and nothing of the failed call stays; in a pool without memory of other calls."""
    cupy, case = pytest.importorskip("cupy"), cases_of(fn)[0]
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        check_without_enough_memory(cupy, pool, case, call)


def check_without_enough_memory(cupy, pool, case, call):
    fn = case.fn
    longest = 40000 if "H" in case.given[case.spec.change.value] else 160000  # an output of 20 MB
    small, large = (given(case, T, "float32", K=32) | case.options for T in (20, longest))
    call(fn, small)
    gc.collect()
    before = held(pool)
    pool.free_all_blocks()
    pool.set_limit(size=pool.total_bytes() + (16 << 20))
    for _ in range(2):
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            call(fn, large)
    gc.collect()
    assert held(pool) == before
    call(fn, small)
