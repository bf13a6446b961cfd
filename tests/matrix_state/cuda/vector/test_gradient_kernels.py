"""The backward kernels of a vector decay, against NumPy in float64 on the same rounded inputs."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state.cuda.vector import plan as vector_plan
from linattn_np.matrix_state.types import Erase
from linattn_np.runtime.cuda import launch
from tests.matrix_state.cuda.device_arrays import check_made_again, check_same_bits, error, same, typed
from tests.matrix_state.cuda.vector.test_kernels import (
    BY_ERASE,
    BY_READ,
    FUNCTIONS,
    GATES,
    draw,
    name_of,
    padded_and_cut,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
BOUND = {Erase.NONE: 6e-3, Erase.DELTA: 1e-2, Erase.FREE: 1e-2}  # of the norm of the result, of one head


def cotangents(arrays, state, seed=0):
    """(dout, dstate) of a call."""
    rng, v = np.random.default_rng(seed + 100), arrays["v"]
    heads = max(arrays["q"].shape[-2], v.shape[-2])
    dout = rng.standard_normal((*v.shape[:-2], heads, v.shape[-1])).astype(typed("bfloat16"))
    return dout, rng.standard_normal(state.shape).astype(np.float32)


def both(fn, arrays, state, dout, dstate, **options):
    """Gradients by name."""
    pull = la.vjp(fn, **arrays, state=state, return_state=True, **options)[1]
    return {n: y for n, y in pull(dout, dstate)._asdict().items() if y is not None}


def on_device(cp, fn, arrays, state, dout, dstate, **options):
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    return both(fn, there, *map(cp.asarray, (state, dout, dstate)), backend="cuda", chunk_size=64, **options)


def compare(cp, fn=la.gla, options=None, scale=1.0, each=True, **how):
    """each: the norm is that of one head."""
    arrays, state = draw(fn, **how)
    dout, dstate = cotangents(arrays, state)
    dout, dstate = (dout.astype(np.float64) * scale).astype(dout.dtype), (dstate * scale).astype(np.float32)
    options = options or {}
    found = on_device(cp, fn, arrays, state, dout, dstate, **options)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    expected = both(fn, wide, *(x.astype(np.float64) for x in (state, dout, dstate)), **options)
    for name, want in expected.items():
        axis = {"state": -3, "beta": -1}.get(name, -2)
        assert each or error(found[name], want) < BOUND[fn.spec.erase], name
        for head in range(want.shape[axis] * each):
            assert error(found[name].take(head, axis), want.take(head, axis)) < BOUND[fn.spec.erase], (name, head)


@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=name_of)
def test_gates(cp, fn, kind, gate):
    compare(cp, fn, kind=kind, gate=gate, T=200)


@pytest.mark.parametrize("kind", ["mild", "twenty"])
@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 127, 257])
@pytest.mark.parametrize("fn", BY_READ, ids=name_of)
def test_lengths(cp, fn, T, kind):
    """Also where few tokens follow a chunk: a gradient of the state that no decay has crossed drowns nothing.

    One token of the delta rule: dq and dbeta are a number a head, which may be near 0 by chance, of rounded values. So
    are db and the first state's gradient of a free term, where little but the first token reads and erases it.
    """
    each = fn.spec.erase is Erase.NONE or (T > 1 and fn.spec.erase is Erase.DELTA)
    compare(cp, fn, T=T, seed=T, kind=kind, B=2 if T > 1 else 8, each=each)


@pytest.mark.parametrize("kind", ["five", "twenty"])
@pytest.mark.parametrize("fn", BY_ERASE, ids=name_of)
def test_small_gradients_where_the_state_decays(cp, fn, kind):
    """Cotangents of 1e-6: nothing is rounded to zero on its way.

    The first state's gradient of a free term is q_1.b_1 a head here, near 0 by chance in one of them.
    """
    compare(cp, fn, kind=kind, T=130, scale=1e-6, each=fn.spec.erase is not Erase.FREE)


@pytest.mark.parametrize("widths", [(64, 64), (128, 64), (64, 128), (40, 120), (8, 16)])
@pytest.mark.parametrize("fn", BY_ERASE, ids=name_of)
def test_widths(cp, fn, widths):
    for gate in ("bfloat16", "float32"):
        compare(cp, fn, K=widths[0], V=widths[1], gate=gate)


@padded_and_cut
def test_widths_that_are_padded_and_cut(cp, fn, widths):
    compare(cp, fn, K=widths[0], V=widths[1], T=100)
    compare(cp, fn, {"cu_seqlens": [0, 5, 5, 100]}, K=widths[0], V=widths[1], T=100, B=1, N=3, heads=(2, 2, 4))


@pytest.mark.parametrize("heads", [(1, 1, 4), (4, 2, 2), (2, 1, 2), (2, 2, 4), (4, 1, 1)])
@pytest.mark.parametrize("fn", BY_READ, ids=name_of)
def test_grouped_heads(cp, fn, heads):
    compare(cp, fn, heads=heads)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=name_of)
def test_ragged(cp, fn):
    compare(cp, fn, {"cu_seqlens": [0, 5, 5, 70, 97, 300, 301]}, B=1, T=301, N=6)
    compare(cp, fn, {"cu_seqlens": [0, 64, 130]}, B=1, T=130, N=2, K=64, V=40, heads=(2, 2, 2), gate="bfloat16")


@pytest.mark.parametrize("kind", ["mild", "mixed", "resets"])
@pytest.mark.parametrize("offsets", [None, [0, 3, 1100, 1100, 1700]])
@pytest.mark.parametrize("fn", BY_READ, ids=name_of)
def test_segments(cp, fn, kind, offsets):
    assert vector_plan.segments(3, 27, launch.multiprocessors()) > 1
    options = {} if offsets is None else {"cu_seqlens": offsets}
    compare(cp, fn, options, B=1, T=1700, N=None if offsets is None else 4, kind=kind)


@pytest.mark.parametrize("fn", BY_READ, ids=name_of)
@pytest.mark.parametrize("T", [200, 1100])
def test_same_bits(cp, fn, T):
    arrays, state = draw(fn, T=T, gate="bfloat16")
    check_same_bits(cp, fn, arrays, state, *cotangents(arrays, state))


@pytest.mark.parametrize("fn", BY_ERASE, ids=name_of)
def test_residuals_made_again_have_the_same_bits(cp, monkeypatch, fn):
    arrays, state = draw(fn, T=300)
    kept = on_device(cp, fn, arrays, state, *cotangents(arrays, state))
    monkeypatch.setattr(la.config, "cuda_saved_mib", 0)
    made = on_device(cp, fn, arrays, state, *cotangents(arrays, state))
    assert all(same(kept[n], made[n]) for n in kept)


@pytest.mark.parametrize("fn", BY_READ, ids=name_of)
def test_vjp_made_again(cp, monkeypatch, fn):
    """Replayed on other numbers, into memory full of NaN, forward and pullback have the same bits."""

    def every(one):
        *arrays, state, dout = one
        out, pull = la.vjp(fn, *arrays, state=state, backend="cuda")
        return [out, *(y for y in pull(dout) if y is not None)]

    sets = []
    for seed in range(3):
        arrays, state = draw(fn, B=1, T=150, seed=seed)
        sets.append([cp.asarray(x) for x in (*arrays.values(), state, cotangents(arrays, state, seed)[0])])
    check_made_again(cp, monkeypatch, every, sets)


def test_nan_stays_in_its_head_and_sequence(cp):
    arrays, state = draw(B=2, T=200, kind="mild")
    given = cotangents(arrays, state)
    clean = on_device(cp, la.gla, arrays, state, *given)
    for name in ("q", "k", "v", "g"):
        there = {n: x.copy() for n, x in arrays.items()}
        there[name][1, 100, 2, 5] = np.nan
        found = on_device(cp, la.gla, there, state, *given)
        for n in clean:
            axis = 1 if n == "state" else 2
            assert same(found[n][0], clean[n][0])
            assert same(found[n][1].take(cp.arange(2), axis - 1), clean[n][1].take(cp.arange(2), axis - 1))
