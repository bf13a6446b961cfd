"""Threads when something goes wrong: interrupts, threads that cannot be started, forks, the end of the interpreter."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

pytest.importorskip("numba")

import linattn_np as la
from linattn_np.runtime import threads
from tests.runtime.test_threads import run

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and RLIMIT_AS")
posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="signals and forks of POSIX")

SETUP = """
    import _thread, os, signal, sys, threading, time
    import numpy as np, linattn_np as la
    def call(T, H=8, K=64, **options):
        q = np.ones((1, T, H, K), np.float32) / K**0.5
        g = -np.ones((1, T, H), np.float32)
        return la.gated_delta_rule(q, q, q, g, -g, **options)
"""


def in_a_process(code):
    """The last line that another Python prints, after SETUP."""
    return run(SETUP + code)


@posix
def test_interrupted_calls_leave_nothing_behind():
    """SIGINT at moments all over a call, twice; then memory is used again, which helpers would still write to."""
    found = in_a_process("""
    expected = call(4000, num_threads=4)
    began = time.perf_counter(); call(4000, num_threads=4); took = time.perf_counter() - began
    hits, armed = 0, False
    def interrupt(number, frame):
        if armed:
            raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, interrupt)
    for n in range(24):
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, max(took * (n + 1) / 26, 1e-4), took / 40)
            try:
                call(4000, num_threads=4)
            finally:
                armed = False
        except KeyboardInterrupt:
            armed = False
            hits += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        junk = [np.full(size, 7.0, np.float32) for size in (4000 * 8 * 64, 32 * 7 * 2, 64 * 64 * 8, 10000)]
        tables = [np.ones(32 * 7 + i, np.int64) for i in range(1000)]
        time.sleep(took / 4)
        assert all((x == 7).all() for x in junk) and all((x == 1).all() for x in tables)
    assert (call(4000, num_threads=4) == expected).all()
    print(hits)
    """)
    assert int(found) >= 1


@posix
@pytest.mark.parametrize("again", [0, 0.003])
def test_an_interrupted_caller_waits_for_its_helpers_and_they_take_no_more(again):
    """Also where signals go on while it waits."""
    found = in_a_process(f"""
    from linattn_np.runtime import threads
    lock, inside, done = threading.Lock(), 0, 0
    def task(first, last):
        global inside, done
        with lock: inside += 1
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.2 * (last - first))
        else:  # an interrupt finds it at work
            end = time.perf_counter() + 0.2 * (last - first)
            while time.perf_counter() < end: time.sleep(0.05)
        with lock: inside, done = inside - 1, done + last - first
    signals = 0
    def interrupt(number, frame):
        global signals
        signals += 1
        if signals <= 20:  # all of them while helpers are at work
            raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3, {again})
    try:
        threads.run(task, 400, 4)
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        left = inside
        time.sleep(0.5)
        print(left - 1, inside - 1, done < 100)  # the caller's own range did not end
    """)
    assert found == "0 0 True"


def test_calls_that_can_be_interrupted_have_the_same_bits(monkeypatch):
    """A call of many operations is cut where a signal may come in between."""
    from linattn_np.matrix_state import policy

    rng = np.random.default_rng(0)
    arrays = la.testing.sample(la.gated_delta_rule, rng, T=700, B=(2,), H=4)

    def both():
        out, pullback = la.vjp(la.gated_delta_rule, **arrays, num_threads=2)
        return [out, *(d for d in pullback(out) if d is not None)]

    expected = both()
    monkeypatch.setattr(policy, "MANY_OPERATIONS", 1.0)
    monkeypatch.setattr(threads, "LONG", 0.0)
    assert all((a == b).all() for a, b in zip(expected, both(), strict=True))


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_a_thread_that_cannot_be_started_is_no_error(allowed):
    """The call continues with the existing threads, also later, when threads can start again."""
    found = in_a_process(f"""
    expected = call(500, num_threads=1)
    start, tries = _thread.start_new_thread, 0
    def refused(*arguments):
        global tries
        tries += 1
        if tries > {allowed}: raise RuntimeError("can't start new thread")
        return start(*arguments)
    _thread.start_new_thread = threading._start_new_thread = refused
    same = [(call(500, num_threads=8) == expected).all() for _ in range(3)]
    _thread.start_new_thread = threading._start_new_thread = start
    print(tries > {allowed}, all(same), (call(500, num_threads=8) == expected).all())
    """)
    assert found == "True True True"


@linux
def test_no_room_for_the_stacks_of_threads():
    """300 threads where there is memory for about 20: no call fails for want of threads, and nothing is overwritten."""
    found = in_a_process("""
    import resource
    expected = call(300, 400, 16, num_threads=2)
    use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (use + (200 << 20), most))
    right = 0
    for n in range(10):
        try:
            right += (call(300, 400, 16, num_threads=300) == expected).all()
        except MemoryError:  # of an array: memory is short in earnest
            pass
        tables = [np.ones(32 * 7 + i, np.int64) for i in range(500)]
        assert all((x == 1).all() for x in tables)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    print(right > 0, (call(300, 400, 16, num_threads=3) == expected).all())
    """)
    assert found == "True True"


@linux
def test_one_pool_serves_every_number_of_threads():
    """It has as many helpers as one call took at most; they end when nothing is to do."""
    found = in_a_process("""
    from linattn_np.runtime import threads
    count = lambda: len(os.listdir("/proc/self/task"))
    threads.IDLE = 2.0
    call(700, 64, 16, num_threads=1)
    before = count()
    for n in range(2, 20):
        call(700, 64, 16, num_threads=n)
    most = count() - before
    until = time.monotonic() + 60
    while count() > before and time.monotonic() < until:
        time.sleep(0.1)
    print(most, count() - before)
    """)
    most, left = map(int, found.split())
    assert 1 <= most <= 18
    assert left == 0


def test_working_memory_above_16_mib_is_given_back():
    """Two threads may keep 32 MiB of a call of wide heads, which took more; memory of results is not counted."""
    found = in_a_process("""
    import tracemalloc
    from linattn_np.runtime.pieces.memory import pool
    def both(K):
        q = np.ones((1, 40, 4, K)) / K**0.5
        g = -np.ones((1, 40, 4))
        out, pullback = la.vjp(la.gated_delta_rule, q, q, q, g, -g, num_threads=2)
        pullback(out)
    both(16)
    tracemalloc.start()
    both(768)
    pool.clear()
    left, most = tracemalloc.get_traced_memory()
    assert most > 64 << 20
    print(left)
    """)
    assert int(found) <= 32 << 20


@posix
@pytest.mark.slow
def test_a_fork_while_another_thread_compiles(tmp_path):
    """The child computes the same; a hook in llvmlite signals that the other thread compiles."""
    code = """
    import llvmlite.binding
    x = np.ones((1, 64, 2, 16), np.float32) / 4; g = -x[..., 0]
    arrays = x, x, x, g, -g
    la.gated_delta_rule(*(y.astype(float) for y in arrays))  # everything is imported
    parse, compiling = llvmlite.binding.parse_assembly, threading.Event()
    def reported(*arguments, **options):
        compiling.set()
        return parse(*arguments, **options)
    llvmlite.binding.parse_assembly = reported
    results = []
    other = threading.Thread(target=lambda: results.append(la.gated_delta_rule(*arrays)))
    other.start()
    assert compiling.wait(60)
    time.sleep(0.2)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        mine = la.gated_delta_rule(*arrays)
        os._exit(0 if np.isfinite(mine).all() and mine.any() else 1)
    other.join()
    status = os.waitpid(child, 0)[1]
    print(os.waitstatus_to_exitcode(status), np.isfinite(results[0]).all())
    """
    assert run("import warnings; warnings.simplefilter('ignore')\n" + SETUP.replace("\n    ", "\n")
               + code.replace("\n    ", "\n"), LINATTN_CACHE_DIR=str(tmp_path)) == "0 True"  # fmt: skip


@pytest.mark.parametrize("before", ["", "call(2000, num_threads=4)"])
def test_a_call_at_exit(before):
    found = in_a_process(f"""
    import atexit
    {before}
    atexit.register(lambda: print(call(2000, num_threads=4).shape))
    """)
    assert found == "(1, 2000, 8, 64)"
