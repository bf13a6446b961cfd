"""The compiled loops among threads, processes and read-only places."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("numba")

import linattn_np as la
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cpu import loops as numba_loops
from linattn_np.runtime import threads
from linattn_np.runtime.pieces import record
from linattn_np.runtime.pieces import run as numba_run
from tests.core_cases import case


def run(code, **environment):
    """Runs code in another Python; returns the last line that it prints."""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_ranges_cover_every_task_once():
    seen = []
    threads.run(lambda a, b: seen.extend(range(a, b)), 37, 3)
    assert sorted(seen) == list(range(37))
    threads.run(lambda a, b: seen.append("none"), 0, 3)
    assert "none" not in seen


def failing_helper(begun):
    """What a thread does first: the caller waits until a helper has begun, which fails."""

    def first():
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            raise FloatingPointError("of a helper")
        assert begun.wait(60)

    return first


def test_an_error_of_a_helper_alone_reaches_the_caller():
    """Nobody takes another range after it; the next call finds threads that work."""
    begun, done = threading.Event(), []
    first = failing_helper(begun)

    def task(low, high):
        first()
        done.extend(range(low, high))

    for _ in range(3):
        with pytest.raises(FloatingPointError, match="of a helper"):
            threads.run(task, 40, 2)
        assert len(set(done)) == len(done) < 40
        begun.clear()
        done.clear()
    threads.run(lambda low, high: done.extend(range(low, high)), 40, 2)
    assert sorted(done) == list(range(40))


def test_an_error_of_the_caller_waits_for_helpers():
    """No thread writes to a call's memory after the call."""
    begun, ended = threading.Event(), threading.Event()

    def task(low, high):
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(60)
            raise FloatingPointError("of the caller")
        begun.set()
        time.sleep(0.05)
        ended.set()

    with pytest.raises(FloatingPointError, match="of the caller"):
        threads.run(task, 2, 2)
    assert ended.is_set()


@pytest.mark.parametrize("backward", [False, True])
def test_an_error_of_a_helper_is_raised_by_the_call(backward, monkeypatch):
    """Out of memory, in a thread of a public function or of its pullback."""
    monkeypatch.setattr(policy, "FEW_OPERATIONS", 0)
    monkeypatch.setenv("LINATTN_NUM_THREADS", "2")
    x = la.testing.sample(la.gated_delta_rule, np.random.default_rng(0), B=(2,), T=40, H=4, K=4, V=4, optional=False)
    out, pullback = la.vjp(la.gated_delta_rule, **x, backend="numba")
    right = pullback(out)
    first, real = failing_helper(threading.Event()), numba_run.scratch
    with monkeypatch.context() as broken:
        for module in (numba_run, record):  # of first and of repeated calls
            broken.setattr(module, "scratch", lambda count: first() or real(count))
        with pytest.raises(FloatingPointError, match="of a helper"):
            pullback(out) if backward else la.gated_delta_rule(**x, backend="numba")
    assert (la.gated_delta_rule(**x, backend="numba") == out).all()
    for a, b in zip(pullback(out), right, strict=True):
        assert a is b is None or (a == b).all()


def test_number_of_threads_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("LINATTN_NUM_THREADS", "3")
    assert threads.num_threads() == 3
    monkeypatch.setenv("LINATTN_NUM_THREADS", "many")
    with pytest.raises(ValueError, match="LINATTN_NUM_THREADS is 'many'"):
        threads.num_threads()


def test_callers_at_once_get_what_each_gets_alone(monkeypatch):
    monkeypatch.setattr(policy, "FEW_OPERATIONS", 0)
    monkeypatch.setenv("LINATTN_NUM_THREADS", "2")
    cases = [case("scalar", "delta", "after", T=40 + n, seed=n)[:3] for n in range(12)]
    alone = [numba_loops.forward(*c)[0] for c in cases]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda c: numba_loops.forward(*c)[0], cases))
    assert all((a == b).all() for a, b in zip(alone, together, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")  # of JAX, if another test imported it
def test_a_forked_child_makes_its_own_threads(monkeypatch):
    monkeypatch.setattr(policy, "FEW_OPERATIONS", 0)
    monkeypatch.setenv("LINATTN_NUM_THREADS", "2")
    x, plan, state, *_ = case("scalar", "delta", "after", T=40)
    expected = numba_loops.forward(x, plan, state)[0]
    child = os.fork()
    if child == 0:
        same = (numba_loops.forward(x, plan, state)[0] == expected).all()
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


CALL = """
    import numpy as np, linattn_np as la
    x = np.ones((1, 3, 2, 4), np.float32)
    out = la.linear_attention(x, x, x, normalize=False, backend="numba")
    print(out.sum())
"""


@pytest.mark.slow
def test_nothing_is_kept_where_nothing_can_be_written(tmp_path):
    sealed = tmp_path / "sealed"
    sealed.write_text("a file where a folder is expected")
    assert float(run(CALL, LINATTN_CACHE_DIR=str(sealed))) > 0
    assert sealed.read_text().startswith("a file")


@pytest.mark.slow
def test_processes_that_compile_at_once_agree(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(lambda _: run(CALL, LINATTN_CACHE_DIR=str(tmp_path / "two")), range(2)))) == 1
    run(CALL, LINATTN_CACHE_DIR=str(tmp_path / "one"))
    kept = [sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in ("one", "two")]
    assert kept[0]
    assert kept[1] == kept[0]  # no piece twice, and no unfinished file


@pytest.mark.slow
@pytest.mark.parametrize("vectors", ["avx2", "neon", "plain"])
def test_every_width_of_a_register_is_right(vectors):
    """On any processor: the compiler cuts vectors that are too wide for it."""
    code = """
        import numpy as np
        from linattn_np.matrix_state.array import chunks
        from linattn_np.matrix_state.cpu import loops as numba_loops
        from linattn_np.testing import relative_error
        from tests.core_cases import case
        worst = 0.0
        for cell in (("scalar", "delta", "after"), ("vector", "free", "after"), ("none", "none", "before")):
            for T, K, V in ((1, 3, 5), (40, 16, 33), (70, 33, 16)):
                x, plan, state, *_ = case(*cell, T=T, K=K, V=V)
                a, b = (module.forward(x, plan._replace(chunk_size=32), state) for module in (numba_loops, chunks))
                worst = max(worst, relative_error(a[0], b[0]), relative_error(a[1], b[1]))
        print(worst)
    """
    assert float(run(code, LINATTN_VECTORS=vectors)) < 1e-12


def test_the_compiler_is_imported_when_its_backend_is_used():
    code = """
        import sys, numpy as np, linattn_np as la
        x = np.ones((1, 3, 2, 4), np.float32)
        la.linear_attention(x, x, x, backend="chunks")
        before = "llvmlite" in sys.modules
        la.linear_attention(x, x, x, backend="numba")
        print(before, "llvmlite" in sys.modules)
    """
    assert run(code) == "False True"
