"""What stays in memory after calls: recorded plans, which hold no array of a call."""

from __future__ import annotations

import gc
import tracemalloc
import weakref

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import replay

pytest.importorskip("numba")

from linattn_np.runtime.pieces.run import scratch

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


@every_variant
def test_plans_hold_no_array_of_a_call(fn):
    """Of the first, the second and the third call: neither the caller's nor any other array of tokens or states."""
    for way in WAYS:  # imports, constants
        call(fn, way, 0)
    replay.clear()
    gc.collect()
    scratch.forget()
    tracemalloc.start()
    try:
        alive = [(way, one) for way in WAYS for seed in range(3) for one in call(fn, way, seed)]
        gc.collect()
        scratch.forget()
        held = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    assert replay.count() >= len(WAYS)
    assert not [(way, one().shape) for way, one in alive if one() is not None]
    large = [(one.size, str(one.traceback)) for one in held.traces if one.size >= SMALLEST]
    assert not large
