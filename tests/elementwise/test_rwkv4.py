"""RWKV-4: all backends against the loop, gradients, also of the maximum m, and long calls in float32."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import check_vjp, relative_error
from tests.naive.elementwise.rwkv4 import rwkv4 as loop

FORMS = [{"backend": "reference"}, {"backend": "chunks"}, {"backend": "numba"}, {"chunk_size": 1}, {}]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def drawn(T=23, D=3, B=(2,), dtype=np.float64):
    """(arrays by name, the state after another call)"""
    rng = np.random.default_rng(0)
    arrays, earlier = (la.testing.sample(la.rwkv4, rng, B=B, T=n, V=D) for n in (T, 5))
    arrays = {n: x.astype(dtype) for n, x in arrays.items()}
    return arrays, la.rwkv4(**{n: x.astype(dtype) for n, x in earlier.items()}, return_state=True).state


def pulled(arrays, state, **options):
    """out, the parts of the final state, and gradients with random cotangents."""
    (out, end), pull = la.vjp(la.rwkv4, **arrays, state=state, return_state=True, **options)
    rng = np.random.default_rng(1)
    dout, *dend = (rng.standard_normal(y.shape).astype(y.dtype) for y in (out, *end))
    grads = pull(dout, type(end)(*dend))
    return [out, *end, *grads[:4], *grads.state]


@pytest.mark.parametrize("T", [0, 1, 2, 31, 33, 67])
@every_form
def test_it_is_the_loop(form, T):
    arrays, state = drawn(T)
    for own in (state, None):
        out, end = la.rwkv4(**arrays, state=own, return_state=True, scale=0.5, **form)
        expected, last = loop(**arrays, state=own, scale=0.5)
        assert relative_error(out, expected) <= 1e-13
        for S, same in zip(end, last, strict=True):
            assert relative_error(S, same) <= 1e-13


@pytest.mark.parametrize("T", [0, 1, 9, 37])
@every_form
def test_gradients_are_central_differences(form, T):
    arrays, state = drawn(T)
    check_vjp(la.rwkv4, **arrays, state=state, scale=0.5, **form)
    check_vjp(la.rwkv4, **arrays, **form)


@pytest.mark.parametrize(("T", "D"), [(5, 1), (70, 17), (33, 64), (40, 300), (65, 530)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=lambda d: np.dtype(d).name)
def test_blocks_columns_and_segments_are_the_definition(dtype, T, D):
    arrays, state = drawn(T, D, dtype=dtype)
    exact = pulled({n: x.astype(float) for n, x in arrays.items()}, type(state)(*(S.astype(float) for S in state)),
                   backend="reference")  # fmt: skip
    for y, expected in zip(pulled(arrays, state), exact, strict=True):
        assert relative_error(y, expected) <= 512 * np.finfo(dtype).eps


@pytest.mark.parametrize("start", [-90.0, 0.0, 90.0])
def test_a_weight_of_long_ago_is_exact_in_float32(start):
    """The rounding of m in every token is made up for: 3000 tokens that add next to nothing."""
    T, w = 3000, 0.01
    k = np.full((1, T, 1), start - 80, np.float32)
    k[:, 0] = start
    v = np.zeros_like(k)
    v[:, 0] = 1
    u = np.full(1, -1e4, np.float32)  # a token hardly counts itself
    _, end = la.rwkv4(k, v, np.full(1, w, np.float32), u, return_state=True)
    last = loop(*(x.astype(float) for x in (k, v)), np.full(1, w, np.float32).astype(float), u.astype(float))[1]
    total = float(np.log(np.float64(end.S[0, 0])) + np.float64(end.m[0, 0]))
    expected = float(np.log(last[0][0, 0]) + last[2][0, 0])
    assert abs(total - expected) <= 2 * T * np.finfo(np.float32).eps


@every_form
def test_packed_sequences_are_one_by_one_to_the_bit(form):
    arrays, _ = drawn(40, B=(1,))
    _, state = drawn(0, B=(4,))
    offsets = [0, 0, 1, 35, 40]
    out, end = la.rwkv4(**arrays, state=state, cu_seqlens=offsets, return_state=True, **form)
    for n, (start, stop) in enumerate(itertools.pairwise(offsets)):
        own = arrays | {name: arrays[name][:, start:stop] for name in "kv"}
        one, last = la.rwkv4(**own, state=type(state)(*(S[n : n + 1] for S in state)), return_state=True, **form)
        np.testing.assert_array_equal(out[:, start:stop], one)
        for S, same in zip(end, last, strict=True):
            np.testing.assert_array_equal(S[n : n + 1], same)
    check_vjp(la.rwkv4, **arrays, state=state, cu_seqlens=offsets, **form)


def test_no_bit_depends_on_threads_batches_or_runs():
    arrays, state = drawn(50, 600, B=(3,), dtype=np.float32)
    first = pulled(arrays, state, num_threads=1)
    for threads in (1, 2, 3):
        for y, same in zip(pulled(arrays, state, num_threads=threads), first, strict=True):
            np.testing.assert_array_equal(y, same)
    own = arrays | {n: arrays[n][1:2] for n in "kv"}
    np.testing.assert_array_equal(la.rwkv4(**own, state=type(state)(*(S[1:2] for S in state))), first[0][1:2])
