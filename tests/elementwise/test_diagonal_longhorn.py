"""diagonal_longhorn, a selective scan that erases along its keys: loops against the definition, bits, memory."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import check_vjp, relative_error
from tests.cases import peak_memory
from tests.elementwise.checks import packed_sequences_are_one_by_one
from tests.naive.elementwise.diagonal_longhorn import diagonal_longhorn as loop

FORMS = [{"backend": "reference"}, {"backend": "chunks", "chunk_size": 5}, {"chunk_size": 1}, {}]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def drawn(T=23, D=3, N=4, B=(2,), sequences=None, dtype=np.float64):
    """(arrays by name, state)"""
    rng = np.random.default_rng(0)
    arrays = la.testing.sample(la.diagonal_longhorn, rng, B=B, T=T, V=D, K=N)
    state = rng.standard_normal((*(B if sequences is None else (sequences,)), D, N))
    return {n: x.astype(dtype) for n, x in arrays.items()}, state.astype(dtype)


def pulled(arrays, state, **options):
    """(out, final state, gradients by name) with random cotangents."""
    (out, end), pull = la.vjp(la.diagonal_longhorn, **arrays, state=state, return_state=True, **options)
    rng = np.random.default_rng(1)
    grads = pull(*(rng.standard_normal(y.shape).astype(y.dtype) for y in (out, end)))
    return out, end, {n: d for n, d in grads._asdict().items() if d is not None}


@pytest.mark.parametrize("T", [0, 1, 2, 31, 33, 67])
@every_form
def test_it_is_the_loop(form, T):
    arrays, state = drawn(T, D=9)
    out, end = la.diagonal_longhorn(**arrays, state=state, return_state=True, scale=0.5, **form)
    expected, last = loop(**arrays, state=state, scale=0.5)
    assert relative_error(out, expected) <= 1e-12
    assert relative_error(end, last) <= 1e-12


@pytest.mark.parametrize("T", [1, 9, 34])
@every_form
def test_gradients_are_central_differences(form, T):
    """Of k through the input, the decay and the strength."""
    arrays, state = drawn(T)
    check_vjp(la.diagonal_longhorn, **arrays, state=state, scale=0.5, **form)
    check_vjp(la.diagonal_longhorn, **arrays, **form)


@pytest.mark.parametrize(("T", "D", "N"), [(5, 1, 1), (70, 17, 3), (33, 64, 16), (40, 300, 5), (65, 530, 2)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=lambda d: np.dtype(d).name)
def test_blocks_columns_and_segments_are_the_definition(dtype, T, D, N):
    """Channels that fill no vector, several blocks, tokens that fill no segment; no state at all."""
    arrays, state = drawn(T, D, N, dtype=dtype)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    for start in (state, None):
        found = pulled(arrays, start)
        exact = pulled(wide, None if start is None else start.astype(np.float64), backend="reference")
        bound = 64 * np.finfo(dtype).eps
        assert relative_error(found[0], exact[0]) <= bound
        assert relative_error(found[1], exact[1]) <= bound
        for name, d in exact[2].items():
            assert relative_error(found[2][name], d) <= 8 * bound, name


@every_form
def test_packed_sequences_are_one_by_one_to_the_bit(form):
    arrays, state = drawn(40, B=(1,), sequences=4)
    packed_sequences_are_one_by_one(la.diagonal_longhorn, arrays, list(arrays), state, **form)


def test_no_bit_depends_on_threads_batches_or_the_backward():
    arrays, state = drawn(50, 600, 3, B=(3,), dtype=np.float32)
    first = pulled(arrays, state, num_threads=1)
    for threads in (1, 2, 3):
        out, end, grads = pulled(arrays, state, num_threads=threads)
        np.testing.assert_array_equal(out, first[0])
        np.testing.assert_array_equal(end, first[1])
        for name, d in grads.items():
            np.testing.assert_array_equal(d, first[2][name], name)
    own = {n: x[1:2] for n, x in arrays.items()}
    np.testing.assert_array_equal(la.diagonal_longhorn(**own, state=state[1:2]), first[0][1:2])


def test_one_token_in_place():
    arrays, state = drawn(1, 9, 5)
    expected, end = la.diagonal_longhorn(**arrays, state=state, return_state=True)
    own = state.copy()
    out, same = la.diagonal_longhorn(**arrays, state=own, return_state=True, overwrite_state=True)
    assert same is own
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(own, end)


def test_no_array_has_a_state_for_every_token():
    """Forward and backward allocate less than half of T D N numbers."""
    T, D, N = 4096, 64, 32
    arrays, _ = drawn(T, D, N, B=(1,), dtype=np.float32)
    pulled(arrays, None)
    assert peak_memory(lambda: pulled(arrays, None)) < T * D * N * 4 / 2
