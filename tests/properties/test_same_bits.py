"""The same call has the same bits the first time, in every later call, and wherever its arrays lie."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay

SIZES = {"B": (2,), "T": 33, "H": 2, "K": 5, "V": 7, "M": 3}
CALLS = 100
every_variant = pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)


@pytest.fixture(autouse=True)
def nothing_recorded():
    replay.clear()
    yield
    replay.clear()


def moved(x, offset):
    """A copy that begins `offset` bytes after a multiple of 64."""
    if not isinstance(x, np.ndarray):
        return type(x)(*(moved(y, offset) for y in x)) if isinstance(x, tuple) else x
    memory = np.zeros(x.nbytes + 128, np.uint8)
    found = np.ndarray(x.shape, x.dtype, memory, -memory.ctypes.data % 64 + offset)
    found[...] = x
    return found


def bits(x):
    """The bytes of results."""
    return [one for part in x for one in bits(part)] if isinstance(x, tuple) else [None if x is None else x.tobytes()]


def drawn(fn, dtype, seed=1, **sizes):
    x = la.testing.sample(fn, np.random.default_rng(seed), **{**SIZES, **sizes})
    return {n: y.astype(dtype) if getattr(y, "dtype", None) == np.float64 else y for n, y in x.items()}


def pulled(fn, x, options, offset=0):
    (out, state), pullback = la.vjp(fn, **x, **options, return_state=True)
    return bits((out, state, pullback(moved(np.cos(out), offset))))


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@every_variant
def test_at_other_addresses(fn, dtype):
    """Also the second to the eighth call: every offset is another call of one signature."""
    for options, T in [({}, 33), *((options, 1) for options in fn.samples.options)]:
        x = drawn(fn, dtype, T=T)
        out, gradients = [], []
        for offset in (0, 8, 16, 24, 32, 40, 48, 56):
            y = {n: moved(z, offset) for n, z in x.items()}
            out.append(bits(fn(**y, **options, return_state=True)))
            gradients.append(pulled(fn, y, options, offset))
        assert all(one == out[0] for one in out)
        assert all(one == gradients[0] for one in gradients)
        assert gradients[0][: len(out[0])] == out[0]


@every_variant
def test_the_first_four_times(fn):
    """Gradients that are sums over tokens and batch too."""
    for options in fn.samples.options:
        for seed in range(8):
            x = drawn(fn, np.float32, seed, B=(1 + seed % 2,), T=39, H=1, V=16)
            gradients = [pulled(fn, x, options) for _ in range(4)]
            assert all(one == gradients[0] for one in gradients)


@every_variant
def test_the_first_and_the_hundredth_time(fn):
    x = drawn(fn, np.float32, T=6)
    first, gradients = bits(fn(**x)), pulled(fn, x, {})
    for _ in range(CALLS - 1):
        assert bits(fn(**x)) == first
        assert pulled(fn, x, {}) == gradients
