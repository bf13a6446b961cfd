"""The CUDA kernels of erase FREE, where they differ from those of other vector decays (test_vector.py has the rest)."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la

from .device_arrays import error, same
from .test_vector import OUT, draw, gates, run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


def test_no_decay(cp):
    """iplr, with states and ragged."""
    arrays, state = draw(la.rwkv7, B=1, T=200, N=3)
    del arrays["g"]
    options = {"cu_seqlens": [0, 70, 70, 200]}
    out, end = run(cp, la.iplr, arrays, state, **options)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    expected, last = la.iplr(**wide, state=state.astype(np.float64), return_state=True, **options)
    assert error(out, expected) < OUT
    assert error(end, last) < OUT


@pytest.mark.parametrize("rate", [0.5, 1.0, 1.9])
@pytest.mark.parametrize("kind", ["zero", "mild"])
def test_one_vector_at_every_token(cp, kind, rate):
    """a reads and b erases the same direction again and again: the triangular system has no small entry."""
    arrays, state = draw(la.rwkv7, B=1, T=300, heads=(2, 2, 2), kind=kind)
    arrays["a"][:] = arrays["a"][:, :1]
    arrays["b"] = (-rate * arrays["a"].astype(np.float32)).astype(arrays["a"].dtype)
    arrays["k"][:] = arrays["a"]
    out, end = run(cp, la.rwkv7, arrays, state)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    expected, last = la.rwkv7(**wide, state=state.astype(np.float64), return_state=True)
    assert error(out, expected) < 2 * OUT
    assert error(end, last) < 2 * OUT


@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
def test_channels_at_the_edge_of_quotients(cp, gate):
    """Channels that lose 61 or 63 nats in a chunk: quotients bear 62."""
    arrays, state = draw(la.rwkv7, B=1, T=300, heads=(2, 2, 2), gate=gate)
    rng = np.random.default_rng(0)
    g = rng.choice([-61 / 64, -63 / 64, 0.0], arrays["g"].shape[-2:])
    arrays["g"] = np.broadcast_to(g, arrays["g"].shape).astype(arrays["g"].dtype)
    out, end = run(cp, la.rwkv7, arrays, state)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    expected, last = la.rwkv7(**wide, state=state.astype(np.float64), return_state=True)
    assert error(out, expected) < OUT
    assert error(end, last) < OUT


def test_states_at_positions(cp):
    arrays, state = draw(la.dplr, T=300, kind="mild")
    out, end = run(cp, la.dplr, arrays, state)
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    found = la.dplr(**there, state=cp.asarray(state), return_states_at=(64, 128, 300))
    assert same(found[0], out)
    _, middle = run(cp, la.dplr, {n: x[:, :128] for n, x in arrays.items()}, state)
    assert same(found.states[:, 1], middle)
    assert same(found.states[:, 2], end)


def test_a_chunk_that_is_far_changes_no_bit_before_it(cp):
    """Rows of a chunk that the exact build makes again have the bits of the other build up to the first far row."""
    mild, state = draw(la.rwkv7, B=1, T=128, kind="mild")
    out, _ = run(cp, la.rwkv7, mild, state)
    for at in (70, 80, 100):
        there = {n: x.copy() for n, x in mild.items()}
        there["g"][:, at:] = gates(np.random.default_rng(1), there["g"][:, at:].shape, "mixed")
        found, _ = run(cp, la.rwkv7, there, state)
        assert same(found[:, :at], out[:, :at])
