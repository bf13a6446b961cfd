"""Which modules of the package a call enters: few, and none of other backends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay

ROOT = Path(la.__file__).parent


def entered(call: Callable[[], object]) -> set[str]:
    """The modules of this package whose functions a call enters, in any thread."""
    found = set()

    def hook(frame: Any, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            found.add(Path(frame.f_code.co_filename).relative_to(ROOT).as_posix())

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


LOOPS = ("matrix_state/cpu/", "ops/cpu/", "runtime/pieces/", "runtime/code_cache.py")  # the compiled loops


def outside(entered: set[str], folders: tuple[str, ...] = LOOPS) -> set[str]:
    """The modules but those of a backend."""
    return {name for name in entered if not name.startswith(folders)}


CALLS = [("", 1, 16, 4), ("", 64, 17, 6), ("state", 1, 16, 4), ("state", 64, 17, 6), ("state in place", 1, 18, 4),
         ("state in place", 64, 19, 6), ("options", 1, 18, 7), ("options", 64, 18, 7)]  # fmt: skip


@pytest.mark.parametrize(("options", "T", "most", "again"), CALLS)
def test_modules_that_a_call_enters(options, T, most, again):
    """A first call at most `most`, and a replayed one `again`: all folders are counted."""
    pytest.importorskip("numba")
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, T, 4, 32)).astype(np.float32)
    g, beta = -rng.uniform(0, 1, (2, 2, T, 4)).astype(np.float32)
    keywords: dict[str, Any] = {"backend": "numba", "num_threads": 1, "scale": 0.5} if options == "options" else {}
    if "state" in options:
        keywords = {"state": np.zeros((2, 4, 32, 32), np.float32), "return_state": True,
                    "overwrite_state": "place" in options}  # fmt: skip

    def call() -> None:
        la.gated_delta_rule(q, k, v, g, -beta, **keywords)

    call()  # compiles
    replay.clear()
    first, replayed = entered(call), entered(call)
    assert len(first) <= most, sorted(first)
    assert len(replayed) <= again, sorted(replayed)
    assert not [name for name in first if "cuda" in name]


@pytest.mark.parametrize("T", [1, 64])
def test_modules_that_a_vjp_and_its_pullback_enter(T):
    """All folders are counted; the replayed pullback compares the inputs."""
    pytest.importorskip("numba")
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, T, 4, 32)).astype(np.float32)
    g, beta = -rng.uniform(0, 1, (2, 2, T, 4)).astype(np.float32)
    dout = np.ones_like(v)

    def call() -> None:
        la.vjp(la.gated_delta_rule, q, k, v, g, -beta)[1](dout)

    call()
    replay.clear()
    first, replayed = entered(call), entered(call)
    assert len(first) <= 24, sorted(first)
    assert len(replayed) <= 9, sorted(replayed)


@pytest.mark.parametrize("T", [1, 64])
def test_modules_that_a_call_which_autograd_follows_enters(T):
    """Outside the loops: 22 in a first call, which records it; 10 in a replayed one, 8 in its backward."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("numba")
    q, k, v = (torch.ones(2, T, 4, 32, requires_grad=True) for _ in range(3))
    g, beta = (torch.ones(2, T, 4) / 2 for _ in range(2))
    results = []

    def call() -> None:
        results[:] = [la.gated_delta_rule(q, k, v, -g, beta)]

    def back() -> None:
        results[0].backward(torch.ones_like(v))

    call()
    back()
    replay.clear()
    first, of_first = entered(call), entered(back)
    replayed, of_replayed = entered(call), entered(back)
    for found, most in ((first, 22), (of_first, 20), (replayed, 10), (of_replayed, 8)):
        assert len(outside(found)) <= most, sorted(outside(found))
