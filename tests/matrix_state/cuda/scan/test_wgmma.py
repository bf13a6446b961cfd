"""CUDA passes by warpgroup products (compute capability 90), against NumPy in float64 on the same rounded inputs."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from linattn_np.matrix_state import policy
from tests.matrix_state.cuda.device_arrays import check_same_bits, error, same
from tests.matrix_state.cuda.scan.test_kernels import FORWARD, UNGATED, compare, draw

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
FIVE = {"H": 5, "Hq": 5, "Hk": 5}  # a head for each kind of gate


def reason(*arrays):
    return la.explain(la.simple_gla, *arrays).reason


@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (128, 64), (64, 128), (40, 120), (96, 72)])
def test_widths(cp, widths):
    arrays = draw("bfloat16", K=widths[0], V=widths[1], T=150, **FIVE)
    assert "wgmma" in reason(*map(cp.asarray, arrays[:4]))
    compare(cp, "bfloat16", arrays)


@pytest.mark.parametrize("T", [1, 16, 63, 64, 65, 257, 521])
def test_lengths(cp, T):
    compare(cp, "bfloat16", draw("bfloat16", T=T, K=64, V=128, seed=T, **FIVE))
    compare(cp, "bfloat16", draw("bfloat16", T=T, K=128, V=128, seed=T, **FIVE))


@pytest.mark.parametrize("heads", [(1, 1, 4), (4, 2, 2), (2, 1, 2), (2, 2, 4), (4, 1, 1)])
def test_grouped_heads(cp, heads):
    Hq, Hk, H = heads
    compare(cp, "bfloat16", draw("bfloat16", Hq=Hq, Hk=Hk, H=H, T=140, K=128, V=128))


@pytest.mark.parametrize("D", [64, 128])
def test_ragged(cp, D):
    offsets = [0, 5, 5, 70, 97, 300, 301]
    compare(cp, "bfloat16", draw("bfloat16", B=(1,), T=301, K=D, V=D, states=(6,), **FIVE), cu_seqlens=offsets)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("offsets", [None, [0, 3, 1100, 1100, 1700]])
def test_segments(cp, D, offsets):
    states = None if offsets is None else (4,)
    options = {} if offsets is None else {"cu_seqlens": offsets}
    compare(cp, "bfloat16", draw("bfloat16", B=(1,), T=1700, K=D, V=D, states=states, **FIVE), **options)


def test_no_decay(cp):
    q, k, v, *_, dout, _ = draw("bfloat16", T=150, K=64, V=64)
    for fn in UNGATED:
        out, pull = la.vjp(fn, *(x.astype(np.float64) for x in (q, k, v)))
        out2, pull2 = la.vjp(fn, *map(cp.asarray, (q, k, v)))
        expected, actual = pull(dout.astype(np.float64)), pull2(cp.asarray(dout))
        assert error(out2, out) <= FORWARD["bfloat16"]
        for name in ("q", "k", "v"):
            assert error(getattr(actual, name), getattr(expected, name)) <= FORWARD["bfloat16"], (fn, name)


def test_same_bits(cp):
    """Alone, in a batch, in a ragged batch, with the state handed over between chunks, and on ten runs."""
    *arrays, state, dout, dstate = draw("bfloat16", B=(3,), T=192, H=4, Hq=4, Hk=4, K=128, V=128)
    assert "wgmma" in reason(*map(cp.asarray, arrays))
    check_same_bits(cp, la.simple_gla, dict(zip("qkvg", arrays, strict=True)), state, dout, dstate, at=(64,))


def test_what_is_not_aligned_takes_the_portable_passes(cp, monkeypatch):
    q, k, v, g, _, dout, _ = draw("bfloat16", T=100, K=64, V=64)
    there = [cp.asarray(x) for x in (q, k, v, g)]
    plain, pull = la.vjp(la.simple_gla, *there)
    grads = pull(cp.asarray(dout))
    shifted = lambda x: cp.concatenate([x[..., :1], x], axis=-1)[..., 1:]  # noqa: E731
    odd = [*map(shifted, there[:3]), there[3]]
    assert "portable" in reason(*odd)
    expected = plain.astype(np.float64).get()
    assert error(la.simple_gla(*odd), expected) <= FORWARD["bfloat16"]
    more = pull(shifted(cp.asarray(dout)))  # of the same passes
    assert all(same(a, b) for a, b in zip(more, grads, strict=True) if a is not None)
    monkeypatch.setattr(policy, "PORTABLE", True)
    monkeypatch.setattr(replay, "by_key", {})
    assert "portable" in reason(*there)
    assert error(la.simple_gla(*there), expected) <= FORWARD["bfloat16"]
