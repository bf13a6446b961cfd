"""What stays in memory after calls: recorded plans, which hold no array of a call, and what `la.clear_cache` frees."""

from __future__ import annotations

import gc
import tracemalloc
import weakref

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import replay
from linattn_np.runtime.pieces.run import scratch
from tests.cases import CASES, draw

SIZES = {"B": (8,), "T": 128, "H": 16, "K": 16, "V": 16}  # an array of tokens or a state has from 64 KiB on
SMALLEST = 60 << 10
WAYS = ("forward", "forward with states", "vjp", "vjp with states", "step", "step in place")


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch):
    monkeypatch.setenv("LINATTN_NUM_THREADS", "1")
    replay.clear()
    yield
    replay.clear()


def parts(x):
    """The arrays of results."""
    return [y for one in x for y in parts(one)] if isinstance(x, tuple) else [] if x is None else [x]


def call(case, way, seed):
    """Weak references to every array that the caller gave or got."""
    sizes = SIZES | ({"T": 1} if way.startswith("step") else {})
    x, S = draw(case, sizes["B"], seed=seed, dtype=np.float32, **{n: m for n, m in sizes.items() if n != "B"})
    more = dict(case.options)
    if way != "forward" and way != "vjp":
        more |= {"state": S, "return_state": True}
    if way.startswith("vjp"):
        result, pullback = la.vjp(case.fn, **x, **more)
        out, state = result if isinstance(result, tuple) else (result, None)
        found = (result, pullback(np.cos(out), state))
    elif way.startswith("step"):
        x = {n: y[:, 0] if "T" in case.given.get(n, "").split() else y for n, y in x.items()}
        found = la.step(case.fn, **x, **more, overwrite_state=way.endswith("place"))
    else:
        found = case.fn(**x, **more)
    return [weakref.ref(y) for y in parts((*x.values(), S, found)) if isinstance(y, np.ndarray)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_plan_holds_no_array_of_a_call(case, way):
    """Of the first, the second and the third call: neither the caller's nor any other array of tokens or state."""
    call(case, way, 0)  # imports, constants
    replay.clear()
    gc.collect()
    scratch.forget()
    tracemalloc.start(8)
    try:
        alive = [one for seed in range(3) for one in call(case, way, seed)]
        gc.collect()
        scratch.forget()
        held = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    assert not [one().shape for one in alive if one() is not None]
    large = [(one.size, str(one.traceback)) for one in held.traces if one.size >= SMALLEST]
    assert not large, large
