"""The compiled loops among threads, processes and read-only places."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("llvmlite")

from linattn_np.cores.matrix_state import numba_loops, numba_run
from linattn_np.ground import threads
from tests.core_cases import case


def run(code, **environment):
    """A Python of its own; its last line is what it printed."""
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


def test_errors_of_a_task_reach_the_caller():
    def task(first, last):
        raise FloatingPointError(f"{first}")

    with pytest.raises(FloatingPointError):
        threads.run(task, 8, 2)


def test_number_of_threads_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("LINATTN_NP_NUM_THREADS", "3")
    assert threads.num_threads() == 3
    monkeypatch.setenv("LINATTN_NP_NUM_THREADS", "many")
    with pytest.raises(ValueError, match="LINATTN_NP_NUM_THREADS is 'many'"):
        threads.num_threads()


def test_callers_at_once_get_what_each_gets_alone(monkeypatch):
    monkeypatch.setattr(numba_run, "FEW_OPERATIONS", 0)
    monkeypatch.setenv("LINATTN_NP_NUM_THREADS", "2")
    cases = [case("scalar", "delta", "after", T=40 + n, seed=n)[:3] for n in range(12)]
    alone = [numba_loops.forward(*c)[0] for c in cases]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda c: numba_loops.forward(*c)[0], cases))
    assert all((a == b).all() for a, b in zip(alone, together, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")  # of JAX, if another test imported it
def test_a_forked_child_makes_its_own_threads(monkeypatch):
    monkeypatch.setattr(numba_run, "FEW_OPERATIONS", 0)
    monkeypatch.setenv("LINATTN_NP_NUM_THREADS", "2")
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
        assert len(set(pool.map(lambda _: run(CALL, LINATTN_CACHE_DIR=str(tmp_path)), range(2)))) == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("vectors", ["avx2", "neon", "plain"])
def test_every_width_of_a_register_is_right(vectors):
    """On any processor: the compiler cuts vectors that are too wide for it."""
    code = """
        import numpy as np
        from linattn_np.cores.matrix_state import chunks, numba_loops
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
    assert float(run(code, LINATTN_NP_VECTORS=vectors)) < 1e-12


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
