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


@pytest.mark.parametrize("T", [1, 64])
@pytest.mark.parametrize(("options", "most"), [("", 16), ("state", 16), ("state in place", 18), ("options", 17)])
def test_modules_that_a_call_enters(T, options, most):
    """A replayed call: 9 modules in all. A first one: `most` outside the loops; nothing else is left out."""
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
    assert len(outside(first)) <= most, sorted(outside(first))
    assert len(replayed) <= 9, sorted(replayed)
    assert not [name for name in first if "cuda" in name]


@pytest.mark.parametrize("T", [1, 64])
def test_modules_that_a_vjp_and_its_pullback_enter(T):
    """Outside the loops: 19 in a first call; 7 in a replayed one, whose pullback compares the inputs."""
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
    assert len(outside(first)) <= 19, sorted(outside(first))
    assert len(outside(replayed)) <= 7, sorted(outside(replayed))
