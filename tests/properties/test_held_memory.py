"""What stays in memory after calls: plans hold no array, caches are bounded and emptied, errors leave nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import tracemalloc
import weakref

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from linattn_np.runtime import held, threads

pytest.importorskip("numba")

from linattn_np.runtime.pieces import memory
from linattn_np.runtime.pieces.memory import pool
from linattn_np.runtime.pieces.record import LaunchSequence

SIZES = {"B": (4,), "T": 80, "H": 16, "K": 16, "V": 16}
SMALLEST = 4 * 80 * 16 * 4  # bytes of a number for each token and head; tables of plans are smaller
WAYS = ("forward", "forward with states", "vjp", "vjp with states", "step", "step in place")
every_variant = pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch):
    monkeypatch.setenv("LINATTN_NUM_THREADS", "1")
    replay.clear()
    yield
    replay.clear()


def parts(x):
    """The arrays of results."""
    return [y for one in x for y in parts(one)] if isinstance(x, tuple) else [x] if isinstance(x, np.ndarray) else []


def float32(x):
    """Arrays of float64 in float32."""
    if isinstance(x, tuple):
        return type(x)(*map(float32, x))
    return x.astype(np.float32) if x.dtype == np.float64 else x


def call(fn, way, seed):
    """Weak references to every array that the caller gave or got."""
    rng, sizes = np.random.default_rng(seed), SIZES | ({"T": 1} if way.startswith("step") else {})
    x = {n: float32(y) for n, y in la.testing.sample(fn, rng, optional=False, **sizes).items()}
    more = {} if way in ("forward", "vjp") else {"return_state": True}
    if more and way != "forward with states":
        more["state"] = fn(**x, **more)[1]
    if way.startswith("vjp"):
        result, pullback = la.vjp(fn, **x, **more)
        out, state = result if more else (result, None)
        found = (result, pullback(np.cos(out), None if fn.spec.grows else state))
    elif way.startswith("step"):
        x = {n: y[:, 0] if "T" in fn.spec.arrays[n].axes.split() else y for n, y in x.items()}
        found = la.step(fn, **x, **more, overwrite_state=way.endswith("place"))
    else:
        found = fn(**x, **more)
    return [weakref.ref(y) for y in parts((*x.values(), more.get("state"), found))]


@pytest.fixture
def calls():
    """A forward and a backward of three variants, one of them with features."""
    for fn in (la.gated_delta_rule, la.performer, la.softmax_attention):
        call(fn, "vjp with states", 0)


def test_clear_cache_empties_every_cache(calls):
    caches = [one.__self__ for one in held.emptying if isinstance(getattr(one, "__self__", None), dict)]
    assert replay.count() > 0
    assert sum(map(len, caches)) >= 6
    assert memory.own.size > 0
    la.clear_cache()
    assert replay.count() == 0
    assert not any(caches)
    assert not memory.own.__dict__
    assert not any(replay.held)


def test_calls_give_the_same_after_clear_cache():
    x = {n: float32(y) for n, y in la.testing.sample(la.rfa, np.random.default_rng(0), **SIZES).items()}
    first = la.rfa(**x).tobytes()
    la.clear_cache()
    assert la.rfa(**x).tobytes() == first


def test_helpers_exit_at_clear_cache():
    threads.run(lambda first, last: time.sleep(0.001), 40, 3)
    la.clear_cache()
    for _ in range(1000):
        if not threads._helpers:
            break
        time.sleep(0.005)
    assert threads._helpers == 0
    done = []
    threads.run(lambda first, last: done.extend(range(first, last)), 40, 3)
    assert sorted(done) == [*range(40)]


def test_a_cache_keeps_the_latest_results_up_to_its_bytes(monkeypatch):
    monkeypatch.setattr(held, "MOST_BYTES", 100_000)
    made = []

    @held.cached
    def table(n):
        made.append(n)
        return np.zeros(n, np.uint8)

    del held.emptying[-2:]  # of this cache
    for n in (40_000, 40_001, 40_000, 40_002, 40_001, 40_000, 200_000, 200_000):
        assert table(n).shape == (n,)
    assert made == [40_000, 40_001, 40_002, 40_000, 200_000, 200_000]


LARGE = """
import resource, numpy as np, linattn_np as la
from linattn_np.call import replay
fn = getattr(la, {name!r})
def draw(**sizes):
    x = la.testing.sample(fn, np.random.default_rng(0), optional=False, B=(1,), **sizes)
    return {{n: y.astype(np.float32) for n, y in x.items()}}
small, large = draw(T=20, H=2, K=8, V=8), draw(T=20000, H=4, K=64, V=64)
expected = fn(**small).tobytes()
def check():
    for _ in range(3):
        assert fn(**small).tobytes() == expected
    out, pullback = la.vjp(fn, **small)
    assert out.tobytes() == expected
    pullback(out)
    la.clear_cache()
check()  # what is compiled and imported
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (8 << 20), -1))
for call in (lambda: fn(**large), lambda: la.vjp(fn, **large)):
    try:
        call()
    except MemoryError:
        pass
    else:
        raise AssertionError("there was enough memory")
    assert replay.count() == 0
    check()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of memory is Linux's")
@pytest.mark.parametrize("name", ["gated_delta_rule", "gla", "mlstm", "retnet", "hgrn2", "gsa"])
def test_the_next_call_works_after_a_memory_error(name):
    """In a process that may take 8 MiB more; nothing of the call that failed is recorded."""
    environment = os.environ | {"LINATTN_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LARGE.format(name=name)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr


def test_a_recorder_that_finds_no_memory_leaves_the_result(monkeypatch):
    def full(*arguments):
        raise MemoryError

    x = {n: float32(y) for n, y in la.testing.sample(la.hgrn2, np.random.default_rng(0), **SIZES).items()}
    expected = la.hgrn2(**x).tobytes()
    replay.clear()
    monkeypatch.setattr(LaunchSequence, "_prepare", full)
    assert la.hgrn2(**x).tobytes() == expected
    assert replay.count() == 0


@every_variant
def test_plans_hold_no_array_of_a_call(fn):
    """Of the first, the second and the third call: neither the caller's nor any other array of tokens or states."""
    for way in WAYS:  # imports, constants
        call(fn, way, 0)
    replay.clear()
    gc.collect()
    gc.freeze()  # the next collect() looks at what the calls below make
    memory.forget_scratch()
    tracemalloc.start()
    try:
        alive = [(way, one) for way in WAYS for seed in range(3) for one in call(fn, way, seed)]
        gc.collect()
        memory.forget_scratch()
        pool.clear()  # memory that kernels gave back
        snapshot = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    assert replay.count() >= len(WAYS)
    assert not [(way, one().shape) for way, one in alive if one() is not None]
    large = [(one.size, str(one.traceback)) for one in snapshot.traces if one.size >= SMALLEST]
    assert not large
